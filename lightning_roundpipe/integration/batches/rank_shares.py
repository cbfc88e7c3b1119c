"""What the batch of one rank weighs beside those of the others: each knows its own, and they tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Facts(NamedTuple):
    """What a rank knows about the weight of its batch.

    Attributes:
        rows: of the batch.
        items: that the loss is a mean over, if the rule is clear: labels with it, or what the user counts.
        causal_items: labels without the first of each row; this and the rest are for ``"auto"`` with labels.
        is_causal: whether those count.
        has_ignored: whether some are -100.
        width: labels of a row; 0 where there are no labels.
        is_sum: whether the loss is a sum.
    """

    rows: float
    items: float = 0.0
    causal_items: float = 0.0
    is_causal: float = 0.0
    has_ignored: float = 0.0
    width: float = 0.0
    is_sum: float = 0.0


NUM_FACTS = len(Facts._fields)


def share_of(rank: int, facts: Sequence[Sequence[float]]) -> float:
    """The share of a rank's batch in the mean over the batches of all ranks; 1 where losses are sums.

    With ``"auto"``, labels weigh if some are -100 on any rank, or rows of labels have different lengths on ranks: in a
    batch of all ranks they would be filled up.
    """
    known = [Facts(*row) for row in facts]
    if any(one.is_sum for one in known):
        return 1.0
    counts = [one.items for one in known]
    if any(one.width for one in known):
        is_ragged = len({one.width for one in known if one.width}) > 1
        deciding = [one for one in known if one.has_ignored] or (known if is_ragged else [])
        if not deciding:
            counts = []
        elif any(one.is_causal for one in deciding):
            counts = [one.causal_items for one in known]
    if not sum(counts) > 0.0:
        counts = [one.rows for one in known]
    return counts[rank] / sum(counts) if sum(counts) > 0.0 else 0.0
