"""ROUGE-L on sequences of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


def longest_common_subsequence(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest sequence that both contain in order, gaps allowed."""
    row = [0] * (len(right) + 1)
    for a in left:
        diagonal = 0
        for index, b in enumerate(right, start=1):
            above = row[index]
            row[index] = diagonal + 1 if a == b else max(above, row[index - 1])
            diagonal = above
    return row[-1]


class RougeL(Metric):
    """Mean F1 score of the longest common subsequences of predictions and targets.

    Args:
        ignored: ids of tokens that do not count (padding, the end of a sequence, the index of ignored labels).
    """

    full_state_update = False
    higher_is_better = True
    total: Tensor
    count: Tensor

    def __init__(self, ignored: Sequence[int] = (-100,)) -> None:
        super().__init__()
        self.ignored = frozenset(ignored)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Take in a batch: token ids of shape ``[rows, length]``, the lengths may differ."""
        for predicted, target in zip(predictions.tolist(), targets.tolist(), strict=True):
            left = [token for token in predicted if token not in self.ignored]
            right = [token for token in target if token not in self.ignored]
            common = longest_common_subsequence(left, right)
            self.total += 2 * common / max(1, len(left) + len(right))
            self.count += 1

    def compute(self) -> Tensor:
        return self.total / self.count
