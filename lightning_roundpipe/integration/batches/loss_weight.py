"""What weighs a micro-batch in the loss of the batch.

A loss that is a mean over the whole batch is the mean of the losses of its micro-batches, each weighted by how many of
the things it has that the mean is over: samples, or tokens with a label. Which of the two cannot be seen in the loss.
But labels can tell: -100 marks positions that ``cross_entropy`` and all losses of Hugging Face leave out of their mean,
so where integer labels have some, ``"auto"`` counts the others. Without any -100 all rows have equally many, and both
weights are the same.

A model that predicts the next token compares position ``i`` with label ``i + 1``: the first label of a row counts for
nothing. The class of a Hugging Face model tells whether it does so; else labels that are ``input_ids`` but for -100 are
taken for such, as in the convention of Hugging Face. Their shape alone would not do: labels of a target sequence, which
are filled up by themselves, have it in some batches only.

[Note: certain weights]
That a batch has labels does not say that the loss is a mean over them: the step may take a mean over rows beside them.
So the rule is certain only if the model was seen to take the labels, in the first step of its kind. Otherwise it is a
guess, which is said as a warning when that step has ended, unless something has shown by then which of the
:meth:`~LossWeights.candidates` gives the loss of the batch, and has settled it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...common.trees import tensors_in
from ..steps.notices import Notices
from .microbatches import Sizes
from .rank_shares import Facts

IGNORED_LABEL = -100

Rule = str | Callable[[Any], float]
_MEANINGS = {
    "samples": "means over samples",
    "label_tokens": "means over the labels that are not -100",
    "causal_label_tokens": "means over the labels that are not -100, without the first of each row",
    "nodes": "means over nodes, or what else samples have numbers of their own of",
    "sum": "sums: every micro-batch counts fully, and a logged loss is best logged with reduce_fx='sum'",
}
RULES = tuple(_MEANINGS)
_LABEL_RULES = ("label_tokens", "causal_label_tokens")


class Decision(NamedTuple):
    """What ``"auto"`` has chosen, and why; see [Note: certain weights].

    Attributes:
        sign: the argument that makes it certain, if the model takes it; none where nothing would.
    """

    rule: str
    why: str
    sign: str = ""
    is_certain: bool = False


class LossWeights:
    """Weights of the micro-batches of one run.

    Args:
        has_others: whether there are other ranks, whose batches may count if that of this one does not.
    """

    def __init__(self, module: nn.Module, loss_weight: Rule, notices: Notices, *, has_others: bool = False) -> None:
        self._module = module
        self._loss_weight = loss_weight
        self._notices = notices
        self._has_others = has_others
        self._settled: Decision | None = None
        self._untold: Decision | str | None = None  # a choice, or a warning
        self._taken: set[str] = set()  # arguments that the model was given in the first step of this kind
        self._taken_in: dict[str, set[str]] = {}

    def of(
        self, microbatches: Sequence[Any], sizes: Sequence[int], rule: Rule | None = None
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The share of each micro-batch in means over the batch, which sum to 1, and the factor of its loss.

        Args:
            rule: one of the :meth:`candidates`; None is the first of them.

        Raises:
            ValueError: if labels that are asked for are missing, or the user's function gives no weights.
        """
        if len(microbatches) == 1:
            return (1.0,), (1.0,)
        rule = self._rule_for(microbatches, sizes) if rule is None else rule
        counts = _counts(rule, microbatches, sizes)
        if callable(rule) and not (sum(counts) > 0.0 or self._has_others):
            raise ValueError(
                f"loss_weight={name_of(rule)} gave 0 for all {len(counts)} micro-batches of a batch, so that none "
                "would count: return the number of things that the loss is a mean over, such as labels"
            )
        if not sum(counts) > 0.0:  # no label at all: the loss is what it is, every micro-batch counts by its rows
            counts = [float(size) for size in sizes]
        total = sum(counts)
        weights = tuple(count / total for count in counts)
        return weights, (1.0,) * len(weights) if rule == "sum" else weights

    # --- what "auto" means -----------------------------------------------------------------------------------------

    def candidates(self, microbatches: Sequence[Any], sizes: Sequence[int] = ()) -> tuple[Rule, ...]:
        """What may weigh these micro-batches: what does now, which is the likeliest, then what else could."""
        chosen = self._rule_for(microbatches, sizes)
        if self._loss_weight != "auto":
            return (chosen,)
        return tuple(dict.fromkeys((chosen, "samples", *_label_rules(microbatches), *_node_rule(sizes), "sum")))

    @property
    def is_guess(self) -> bool:
        """Whether what weighs in the step that is under way is only the likeliest."""
        untold = self._untold
        return untold is not None and not (isinstance(untold, Decision) and untold.sign in self._taken)

    def settle(self, rule: str, why: str) -> None:
        """Makes ``rule`` what ``"auto"`` means from now on, as far as batches have what it counts; the log says so.
        On all ranks it is the same one.

        Args:
            why: goes on the sentence "takes losses for means over ..., because".
        """
        self._settled = Decision(rule, why, is_certain=True)
        if rule != "samples" or self._untold is not None:  # else it is what users expect
            self._notices.warn(f"loss weight {rule}", _announced(self._settled), is_note=True)
        self._untold = None

    @contextlib.contextmanager
    def watching(self, kind: str, *, warns: bool = True) -> Iterator[None]:
        """Around a step, and the splitting of its batch; see [Note: certain weights].

        Args:
            warns: whether a guess is to be told of, if it is one.
        """
        is_first = kind not in self._taken_in
        self._taken, self._untold = self._taken_in.setdefault(kind, set()), None
        noting = functools.partial(_note_arguments, self._taken)
        heads = self._heads if is_first and self._loss_weight == "auto" else []
        handles = [head.register_forward_pre_hook(noting, with_kwargs=True) for head in heads]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        is_certain = not self.is_guess
        untold, self._untold = self._untold, None
        name = "loss weight" if is_certain else "guessed loss weight"
        if untold is None or name in self._notices.given or not (is_certain or warns):
            return
        if isinstance(untold, Decision):
            missing = f" (but {kind} gives no {untold.sign!r} to the model)" if untold.sign and not is_certain else ""
            untold = _announced(untold._replace(why=untold.why + missing))
        self._notices.warn(name, untold, is_note=is_certain)

    def _rule_for(self, microbatches: Sequence[Any], sizes: Sequence[int]) -> Rule:
        """What weighs these micro-batches."""
        if self._loss_weight != "auto":
            return self._loss_weight
        if (settled := self._settled_for(microbatches, sizes)) is not None:
            return settled.rule
        if any(_entry(microbatch, "num_items_in_batch") is not None for microbatch in microbatches):
            why = "the batch has 'num_items_in_batch', by which the loss is divided"
            self._untold = Decision("sum", why, "num_items_in_batch")
        elif any(map(_has_ignored_labels, microbatches)):
            self._untold = self.decision(microbatches)
        else:
            if "guessed loss weight" not in self._notices.given:
                self._untold = _ignored_elsewhere(microbatches[0])
            return "samples"
        return self._untold.rule

    def _settled_for(self, microbatches: Sequence[Any], sizes: Sequence[int] = ()) -> Decision | None:
        rules = ("samples", "sum", *_label_rules(microbatches), *_node_rule(sizes))
        return self._settled if self._settled is not None and self._settled.rule in rules else None

    def decision(self, microbatches: Sequence[Any]) -> Decision:
        """What weighs micro-batches with labels of which some are -100."""
        if (settled := self._settled_for(microbatches)) is not None:
            return settled
        if self._by_class is not None:
            return self._by_class._replace(is_certain=self._by_class.sign in self._taken)
        labels, tokens = _entry(microbatches[0], "labels"), _entry(microbatches[0], "input_ids")
        if tokens is None or labels.shape != tokens.shape:
            return Decision("label_tokens", "labels have another shape than input_ids, and some are -100")
        if not all(map(_labels_are_tokens, microbatches)):
            why = "labels are others than input_ids, some are -100; with loss_weight='causal_label_tokens' the first"
            return Decision("label_tokens", f"{why} of each row would not count")
        why = "labels are those of input_ids, and some are -100; with loss_weight='label_tokens' the first of each row"
        return Decision("causal_label_tokens", f"{why} would count as well")

    @property
    def predicts_next(self) -> bool:
        """Whether the loss compares a position with the label of the next one, as far as is known."""
        known = self._settled if self._settled is not None and self._settled.rule in _LABEL_RULES else self._by_class
        return known is None or known.rule == "causal_label_tokens"

    @functools.cached_property
    def _heads(self) -> list[nn.Module]:
        """The Hugging Face models in the module that have a loss: those that are trained, or all."""
        model_class = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
        heads: list[nn.Module] = []
        inside: set[nn.Module] = set()
        for part in self._module.modules():
            if part not in inside and isinstance(part, model_class) and _has_loss(part):
                heads.append(part)
                inside.update(part.modules())
        return [head for head in heads if any(weight.requires_grad for weight in head.parameters())] or heads

    @functools.cached_property
    def _by_class(self) -> Decision | None:
        """What the Hugging Face model in the module computes, None if there is none with a loss."""
        has_prompts = any(map(_puts_tokens_in_front, self._module.modules()))
        decisions = [_decided_by_head(head, has_prompts=has_prompts) for head in self._heads]
        if len({decision.rule for decision in decisions}) > 1:
            return Decision(decisions[0].rule, "; but ".join(decision.why for decision in decisions))
        return decisions[0] if decisions else None

    # --- over ranks ----------------------------------------------------------------------------------------------

    def facts(self, microbatches: Sequence[Any], sizes: Sequence[int]) -> list[float]:
        """What other ranks have to know of the batch of this one, to weigh it; see :func:`share_of`."""
        rule, settled = self._loss_weight, self._settled
        if rule == "auto" and settled is not None and settled.rule not in _LABEL_RULES:
            rule = settled.rule if settled.rule != "nodes" or _node_rule(sizes) else "samples"
        if rule != "auto":
            return [*Facts(sum(sizes), sum(_counts(rule, microbatches, sizes)), is_sum=float(rule == "sum"))]
        items = _entry(microbatches[0], "num_items_in_batch") if settled is None else None
        if items is not None:  # the loss is divided by it
            return [*Facts(sum(sizes), float(torch.as_tensor(items).reshape(-1)[0]))]
        if not _label_rules(microbatches):
            return [*Facts(sum(sizes))]
        rule = self.decision(microbatches).rule
        if rule not in _LABEL_RULES:
            return [*Facts(sum(sizes), is_sum=float(rule == "sum"))]
        labels = [_entry(part, "labels") for part in microbatches]
        return [
            *Facts(
                sum(sizes),
                sum(_counts("label_tokens", microbatches, sizes)),
                sum(_counts("causal_label_tokens", microbatches, sizes)),
                float(rule == "causal_label_tokens"),
                float(any(map(_has_ignored_labels, microbatches))),
                float(max(one.shape[-1] if one.dim() > 1 else 1 for one in labels)),
            )
        ]


def _note_arguments(taken: set[str], head: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook that runs before the forward of a model with a loss."""
    taken.update(name for name in ("labels", "num_items_in_batch") if kwargs.get(name) is not None)


def _announced(decision: Decision) -> str:
    return (
        f"loss_weight='auto' takes losses for {_MEANINGS[decision.rule]} (loss_weight={decision.rule!r}), because "
        f"{decision.why}. If they are something else, say so: {', '.join(map(repr, _MEANINGS))}"
    )


def _ignored_elsewhere(microbatch: Any) -> str | None:
    """The warning that something else than ``labels`` has -100 in it."""
    for path, tensor in tensors_in(microbatch, "batch"):
        if _is_integer(tensor) and tensor.dtype is not torch.bool and bool((tensor == IGNORED_LABEL).any()):
            return (
                f"{path} holds -100, as labels do that a loss leaves out, but loss_weight='auto' counts samples, "
                "because it looks at an entry 'labels' of the batch only. If the loss is a mean over the others, "
                "use loss_weight= a function from a micro-batch to their number; else loss_weight='samples'"
            )
    return None


def _has_loss(model: Any) -> bool:
    name = type(model).__name__
    return "For" in name or "LMHead" in name or getattr(model.config, "is_encoder_decoder", False)


def _puts_tokens_in_front(part: nn.Module) -> bool:
    """Whether PEFT puts virtual tokens in front of each row, so that also its first label is compared with something.
    The other methods leave rows as they are."""
    peft_class = getattr(sys.modules.get("peft"), "PeftModelForCausalLM", ())
    config: Any = part.active_peft_config if isinstance(part, peft_class) else None
    return config is not None and config.is_prompt_learning and config.peft_type not in ("PREFIX_TUNING", "CARTRIDGE")


def _decided_by_head(model: Any, *, has_prompts: bool = False) -> Decision:
    """What the loss of a Hugging Face model with a head is a mean over."""
    name = type(model).__name__
    if name.endswith("ForCTC"):
        reduction = getattr(model.config, "ctc_loss_reduction", "mean")
        rule = "sum" if reduction == "sum" else "samples"
        return Decision(rule, f"{name} has ctc_loss_reduction={reduction!r}", "labels")
    if name.endswith("ForPreTraining"):
        return Decision("label_tokens", f"{name} adds up means over different things")
    rule, why = "label_tokens", f"{name} compares a position with its own label"
    if _shifts_labels(model) and has_prompts:
        why = f"virtual tokens are in front of the rows of {name}"
    elif _shifts_labels(model):
        rule, why = "causal_label_tokens", f"{name} compares a position with the next label"
    return Decision(rule, f"some are -100, and {why}", "labels")


def _shifts_labels(model: Any) -> bool:
    """Whether the forward compares a position with the label of the next one: by what it calls, or names."""
    if getattr(model.config, "is_encoder_decoder", False):
        return False
    code = inspect.unwrap(type(model).forward).__code__
    if "loss_function" in code.co_names:
        return getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"
    return any(name.startswith("shift") for name in code.co_varnames)


def _has_ignored_labels(microbatch: Any) -> bool:
    labels = _entry(microbatch, "labels")
    return isinstance(labels, Tensor) and _is_integer(labels) and bool((labels == IGNORED_LABEL).any())


def _label_rules(microbatches: Sequence[Any]) -> tuple[str, ...]:
    """The rules that could count the labels of these micro-batches."""
    labels = [_entry(microbatch, "labels") for microbatch in microbatches]
    if not all(isinstance(one, Tensor) and _is_integer(one) and one.dim() for one in labels):
        return ()
    return _LABEL_RULES if all(one.dim() > 1 for one in labels) else _LABEL_RULES[:1]


def _node_rule(sizes: Sequence[int]) -> tuple[str, ...]:
    return ("nodes",) if isinstance(sizes, Sizes) and sizes.counts else ()


def _labels_are_tokens(microbatch: Any) -> bool:
    """Whether labels that are not left out are the tokens of the input themselves."""
    labels, tokens = _entry(microbatch, "labels"), _entry(microbatch, "input_ids")
    return bool(((labels == tokens) | (labels == IGNORED_LABEL)).all())


def _entry(batch: Any, name: str) -> Any:
    return batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _counts(rule: Rule, microbatches: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """What the loss of each micro-batch is a mean over, by a rule other than ``"auto"``."""
    if callable(rule):
        return [_given_weight(rule, microbatch) for microbatch in microbatches]
    if rule in _LABEL_RULES:
        return [_num_labels(microbatch, rule) for microbatch in microbatches]
    if rule == "nodes":
        if not _node_rule(sizes):
            raise ValueError(
                "loss_weight='nodes' needs graphs in the batch, or what else samples have numbers of their own of; it "
                f"is a {type(microbatches[0]).__name__} without: use loss_weight='samples', or a function from a "
                "micro-batch to its weight"
            )
        sizes = sizes.counts[0] if isinstance(sizes, Sizes) else sizes
    return [float(size) for size in sizes]


def _given_weight(function: Callable[[Any], float], microbatch: Any) -> float:
    weight = float(function(microbatch))
    if not 0.0 <= weight < float("inf"):
        raise ValueError(
            f"loss_weight={name_of(function)} gave {weight} for a micro-batch: weights must be numbers >= 0"
        )
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


def name_of(function: Callable[..., Any]) -> str:
    """How messages call a function of the user."""
    return getattr(function, "__qualname__", None) or repr(function)
