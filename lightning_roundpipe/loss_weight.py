"""What weighs a micro-batch in the loss of the batch.

A loss that is a mean over the whole batch is the mean of the losses of its micro-batches, each weighted by how many of
the things it has that the mean is over: samples, or tokens with a label. Which of the two cannot be seen in the loss.
But labels can tell: -100 marks positions that ``cross_entropy`` and all losses of Hugging Face leave out of their mean,
so where integer labels have some, ``"auto"`` counts the others. Without any -100 all rows have equally many, and both
weights are the same.

A model that predicts the next token compares position ``i`` with label ``i + 1``: the first label of a row counts for
nothing. The class of a Hugging Face model tells whether it does so; else labels of the shape of ``input_ids`` do, as in
the convention of Hugging Face.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

IGNORED_LABEL = -100

_PREDICT_NEXT = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel", "ForConditionalGeneration", "ForImageTextToText")


class LossWeights:
    """Weights of the micro-batches of one run.

    Args:
        module: the user's module.
        loss_weight: the option of :class:`RoundPipeStrategy`.
    """

    def __init__(self, module: nn.Module, loss_weight: str | Callable[[Any], float]) -> None:
        self._module = module
        self._loss_weight = loss_weight
        self._is_announced = False

    def of(self, microbatches: Sequence[Any], sizes: Sequence[int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The share of each micro-batch in means over the batch, which sum to 1, and the factor of its loss.

        Args:
            microbatches: of one batch.
            sizes: rows of each.

        Raises:
            ValueError: if labels that are asked for are missing, or the user's function gives no weights.
        """
        if len(microbatches) == 1:
            return (1.0,), (1.0,)
        rule = self._loss_weight
        if rule == "auto":
            rule = self._rule_for(microbatches)
        if callable(rule):
            counts = [_given_weight(rule, microbatch) for microbatch in microbatches]
            if not sum(counts) > 0.0:
                raise ValueError(
                    f"loss_weight={_name(rule)} gave 0 for all {len(counts)} micro-batches of a batch, so that none "
                    "would count: return the number of things that the loss is a mean over, such as labels"
                )
        elif rule in ("label_tokens", "causal_label_tokens"):
            counts = [_num_labels(microbatch, rule) for microbatch in microbatches]
        else:
            counts = [float(size) for size in sizes]
        if not sum(counts) > 0.0:  # no label at all: the loss is what it is, every micro-batch counts by its rows
            counts = [float(size) for size in sizes]
        total = sum(counts)
        weights = tuple(count / total for count in counts)
        return weights, (1.0,) * len(weights) if rule == "sum" else weights

    def _rule_for(self, microbatches: Sequence[Any]) -> str:
        """What ``"auto"`` means for these micro-batches."""
        if any(_entry(microbatch, "num_items_in_batch") is not None for microbatch in microbatches):
            self._announce("sums: every micro-batch counts fully", "the batch has 'num_items_in_batch'", "sum")
            return "sum"
        labels = [_entry(microbatch, "labels") for microbatch in microbatches]
        if not all(isinstance(entry, Tensor) and _is_integer(entry) for entry in labels):
            return "samples"
        if not any(bool((entry == IGNORED_LABEL).any()) for entry in labels):
            return "samples"
        predicts_next, why = predicts_next_token(self._module, microbatches[0])
        rule = "causal_label_tokens" if predicts_next else "label_tokens"
        first = ", without the first of each row" if predicts_next else ""
        self._announce(f"means over the labels that are not -100{first}", f"some are -100, and {why}", rule)
        return rule

    def _announce(self, what: str, why: str, rule: str) -> None:
        if not self._is_announced:
            self._is_announced = True
            rank_zero_info(
                f"loss_weight='auto' takes losses for {what} (loss_weight={rule!r}), because {why}. If the loss is a "
                "mean over samples, use loss_weight='samples'"
            )


def predicts_next_token(module: nn.Module, batch: Any) -> tuple[bool, str]:
    """Whether the loss compares a position with the label of the next one, and what tells so, in words."""
    labels, tokens = _entry(batch, "labels"), _entry(batch, "input_ids")
    if not isinstance(labels, Tensor) or not isinstance(tokens, Tensor) or labels.shape != tokens.shape:
        return False, "labels have another shape than input_ids"
    transformers = sys.modules.get("transformers")
    model_class = getattr(transformers, "PreTrainedModel", ())
    for part in module.modules():
        name = type(part).__name__
        if not isinstance(part, model_class) or not ("For" in name or name.endswith(_PREDICT_NEXT)):
            continue
        if name.endswith(_PREDICT_NEXT) and not getattr(part.config, "is_encoder_decoder", False):
            return True, f"{name} compares a position with the label of the next one"
        return False, f"{name} compares a position with its own label"
    return True, "labels have the shape of input_ids"


def _entry(batch: Any, name: str) -> Any:
    return batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _given_weight(function: Callable[[Any], float], microbatch: Any) -> float:
    weight = float(function(microbatch))
    if not 0.0 <= weight < float("inf"):
        raise ValueError(f"loss_weight={_name(function)} gave {weight} for a micro-batch: weights must be numbers >= 0")
    return weight


def _num_labels(microbatch: Any, rule: str) -> float:
    labels = _entry(microbatch, "labels")
    if not isinstance(labels, Tensor):
        raise ValueError(
            f"loss_weight={rule!r} needs a tensor 'labels' in the batch, which is a {type(microbatch).__name__} "
            "without one: use loss_weight='samples', or a function from a micro-batch to its weight"
        )
    counted = labels[..., 1:] if rule == "causal_label_tokens" else labels
    return float((counted != IGNORED_LABEL).sum())


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
