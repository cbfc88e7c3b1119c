"""The proof on the first batch: splitting changes nothing.

[Note: the proof]
Whether the rows of a batch can be split into micro-batches depends on the user's step, which no program can read. So it
is tried, on the user's own batch, before the first training step and before the first of each kind of evaluation step::

    rows of two micro-batches --- as one micro-batch ---> loss, logs, outputs, what is left on modules    compared,
                              '-- as two -------------->  the same, weighed and merged as in a step        then undone

Three small forwards ([Note: trials] in :mod:`trial`) with the same random numbers ([Note: same draws] in :mod:`draws`).
The two are neighbours that differ most in what they have of labels, masks and padding. What one batch hides the next
may show: training steps 10, 100, 1000, ... are proved again, and the first with another layout of the batch.

*What follows.* If the loss differs, or the step does what would happen once per micro-batch (changes weights, steps a
scheduler) or fails with fewer rows, ``num_microbatches="auto"`` means that batches run whole from now on: exact, one
device after the other. If that does not fit on the devices they are split all the same. With a number of micro-batches
that the user gave they are split. In either case there is one warning, which says what differs, why, and the ways out.
A logged value, an output or something left on a module that differs alone is a warning and changes nothing.

*What is left on modules.* Numbers on the LightningModule, lists and dicts and buffers are compared. Of other attributes
the last micro-batch's stay, which mostly no code reads: so if any differ, both trials are made again, each twice in a
row. If the second step gives something else, the first has left a state that it goes on with.

*Several ranks.* Each proves on rows of its own, in the same steps, and they agree: if one must run whole, all do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ...common.seeds import derive_seed
from ...common.trees import children_of, mapped
from ...lightning_packages import MisconfigurationException, rank_zero_info
from ...options import RoundPipeOptions
from ...ranks.group import RankGroup
from ..batches.loss_weight import RULES, Rule
from ..batches.microbatches import MicrobatchSplit
from ..batches.splitting import Batches, BatchSplitter
from ..steps.modules import ModuleScan
from ..steps.notices import Notices
from ..steps.retry import Retry
from .comparison import rounding_of
from .finding import NOT_OF_THE_USER, Comparison, Finding, Pair, TrialError, fits
from .trial import Outcome, Trials

_log = logging.getLogger("lightning_roundpipe")
_SHOWN_FROM_S = 2.0
_TF32_ROUNDING = 1e-3
# Entries of a list in a batch that is looked into; longer ones hold samples.
_MOST_ENTRIES = 8


# Rows, and what the trials of them have given, or the error in which they have ended.
_Tried = tuple[Pair, tuple[Outcome, Outcome] | TrialError]


@dataclass
class _Kind:
    """What is known of one kind of step."""

    num_steps: int = 0
    proved: set[Any] = field(default_factory=set)  # layouts of batches


class Proof:
    """See [Note: the proof].

    Args:
        options: of them, ``check_split`` and ``num_microbatches``.
        is_trial: whether Lightning is trying a batch size at the moment.
        look_at_rows: compares the gradients of a micro-batch with plain autograd.
    """

    def __init__(
        self,
        trials: Trials,
        scan: ModuleScan,
        splitter: BatchSplitter,
        retry: Retry,
        notices: Notices,
        options: RoundPipeOptions,
        group: RankGroup,
        autocast_device: str,
        is_trial: Callable[[], bool],
        look_at_rows: Callable[[Trials, Callable[[Any], Any], Batches, float], None],
    ) -> None:
        self._scan = scan
        self._splitter = splitter
        self._trials = trials
        self._retry = retry
        self._notices = notices
        self._check = options.check_split
        self._is_auto = options.num_microbatches == "auto"
        # Whether batches that cannot be split exactly are not split.
        self.may_run_whole = self._is_auto and self._check == "exact"
        self._group = group
        self._autocast_device = autocast_device
        self._is_trial = is_trial
        self._look_at_rows = look_at_rows
        self._kinds: dict[str, _Kind] = {}
        self._untold: tuple[str, str] | None = None

    def before(self, kind: str, call: Callable[[Any], Any], batch: Any, rest: Sequence[Any]) -> None:
        """A step is about to run on ``batch``; its batches may run whole from now on.

        Args:
            call: the user's step on a micro-batch.
            rest: what Lightning gives it besides.

        Raises:
            MisconfigurationException: if splitting changes anything, with ``check_split="error"``.
        """
        known = self._kinds.setdefault(kind, _Kind())
        step, is_training = known.num_steps, kind == "training_step"
        known.num_steps += 1
        if self._check == "off" or self._is_trial() or isinstance(batch, Iterator):
            return
        layout = _layout_of(batch)
        is_due = step == 0 or (is_training and step >= 10 and math.log10(step).is_integer())
        has_others = is_training and self._group.size > 1
        if has_others:
            if not is_due:
                return  # all ranks prove it in the same steps, whatever they know
        elif self._retry.wanted(kind) < 2 or (
            not is_due and (layout in known.proved or (known.proved and not is_training))
        ):
            return
        started = perf_counter()
        tried = self._tried(kind, call, batch, rest, len(known.proved))
        if tried is not None:
            known.proved.add(layout)
        if is_training:
            self._settle(tried, f"training step {step}" if has_others else None)
        finding = self._finding_of(tried)
        if is_training and step == 0 and tried is not None and isinstance(tried[1], tuple):
            self._look_at_rows(self._trials, call, tried[0].whole, tried[1][0].taken_s)
        if has_others:
            finding = self._agreed(finding, f"training step {step}")
        taken = perf_counter() - started
        if taken > _SHOWN_FROM_S:
            rank_zero_info(f"to prove that splitting batches changes nothing in {kind} took {taken:.1f} s")
        if finding is not None and (finding.decisive or finding.others):
            self._act(kind, finding)

    def after(self) -> None:
        """The step has succeeded: if it might have failed by itself, it is told only now why it was not split."""
        if self._untold is not None:
            (name, text), self._untold = self._untold, None
            self._notices.warn(name, text)

    # --- what is found -----------------------------------------------------------------------------------------------

    def _pair(
        self, kind: str, call: Callable[[Any], Any], batch: Any, rest: Sequence[Any], wanted: int, index: int
    ) -> Pair | None:
        """The rows to prove it on, of so many micro-batches two; None if the batch has no two."""
        try:
            two = self._splitter.two_of(kind, mapped(batch, anew=object), rest, wanted)
            if two is None:
                return None
            together, split = two
            parts = self._splitter.weighed(split)
        except Exception:  # the step will meet it, and say it
            return None
        whole = Batches((together,), (sum(split.sizes),), (1.0,), (1.0,), split.batch_size)
        return Pair(kind, call, together, whole, parts, derive_seed(torch.initial_seed(), index))

    def _tried(
        self, kind: str, call: Callable[[Any], Any], batch: Any, rest: Sequence[Any], index: int
    ) -> _Tried | None:
        """Two trials; None if they cannot be made."""
        wanted = self._retry.wanted(kind)
        for num_microbatches in (wanted, 2 * wanted):  # what does not fit as one may as half as many rows
            pair = self._pair(kind, call, batch, rest, num_microbatches, index)
            if pair is None:
                return None
            try:
                return pair, pair.tried(self._trials)
            except TrialError as error:
                return pair, error
            except NOT_OF_THE_USER as error:
                _log.debug("%s is not proved on %d rows: %s", kind, pair.rows, error)
        return None

    def _settle(self, tried: _Tried | None, step: str | None) -> None:
        """Finds out what weighs micro-batches, where ``loss_weight="auto"`` has a choice.

        Args:
            step: that other ranks make as well; None if there are none.
        """
        weights, fitting = self._splitter.weights, dict.fromkeys(RULES, True)
        pair, outcomes = tried or (None, None)
        rules: tuple[Rule, ...] = ()
        if pair is not None and isinstance(outcomes, tuple):
            parts = pair.parts
            rules = weights.candidates(parts.microbatches, parts.sizes)
            if len(rules) > 1 and not outcomes[1].are_draws_lost:
                for rule in RULES:
                    _, loss_weights = weights.of(parts.microbatches, parts.sizes, rule) if rule in rules else ((), ())
                    fitting[rule] = rule in rules and fits(*outcomes, loss_weights, self._rounding())
        if step is not None:
            told = self._group.exchange([float(fit) for fit in fitting.values()], f"what weighs before {step}")
            fitting = {rule: all(row) for rule, row in zip(RULES, zip(*told, strict=True), strict=True)}
        found = [rule for rule in RULES if fitting[rule]]
        if step is not None:
            is_new = "samples" not in found or len(found) == 1  # all ranks come to the same
        else:
            is_new = bool(rules) and (rules[0] not in found or (weights.is_guess and len(found) == 1))
        if found and is_new:
            weights.settle(found[0], "that gives the loss of rows of the first batch as one micro-batch")
            if pair is not None and isinstance(outcomes, tuple):
                split = MicrobatchSplit(pair.parts.microbatches, pair.parts.sizes, pair.rows)
                pair.parts = self._splitter.weighed(split)

    def _finding_of(self, tried: _Tried | None) -> Finding | None:
        """What two trials have shown; None if nothing."""
        if tried is None:
            return None
        pair, outcomes = tried
        if isinstance(outcomes, tuple):
            return Comparison(self._scan, self._trials, pair, *outcomes, self._rounding()).finding()
        if pair.kind != "training_step":
            return None
        how = "as two, but not as one micro-batch" if outcomes.is_of_parts else "as one micro-batch"
        text = f"{pair.kind} fails on {pair.rows} rows of a batch {how} ({outcomes.__cause__!r})"
        return Finding([text], is_certain=outcomes.is_of_parts)

    def _rounding(self) -> float:
        dtypes = {p.dtype for _, p in self._scan.parameters() if p.is_floating_point()}
        if torch.is_autocast_enabled(self._autocast_device):
            dtypes.add(torch.get_autocast_dtype(self._autocast_device))
        rounding = rounding_of(dtypes)
        is_tf32 = self._autocast_device != "cpu" and torch.get_float32_matmul_precision() != "highest"
        return max(rounding, _TF32_ROUNDING) if is_tf32 else rounding

    def _agreed(self, finding: Finding | None, step: str) -> Finding | None:
        """What all ranks have found."""
        mine = 0.0 if finding is None or not finding.decisive else 1.0
        told = self._group.exchange([mine], f"the proof before {step}")
        others = [rank for rank, (value,) in enumerate(told) if value]
        if others and not mine:
            return Finding([f"splitting the batch of rank {others[0]} changes what is trained"])
        return finding

    # --- what follows ------------------------------------------------------------------------------------------------

    def _act(self, kind: str, finding: Finding) -> None:
        text, ways = "; ".join([*finding.decisive, *finding.others]), [finding.way] if finding.way else []
        is_training = kind == "training_step"
        is_whole = bool(finding.decisive) and is_training and self.may_run_whole
        if self._check == "error" and finding.is_certain:
            ways += ["num_microbatches=1 runs batches whole", "check_split='warn' splits them all the same"]
            raise MisconfigurationException(f"{text}. Ways out: {'; '.join(ways)}")
        if is_training and not (is_whole or finding.can_be_split):
            return  # the step is about to be refused, with what to do
        if is_whole:
            self._retry.run_whole(kind)
            text += ". So batches are not split: each is one micro-batch, exact, on one device after the other"
            if finding.can_be_split:
                ways.append("a number of your own as num_microbatches splits batches all the same")
        elif finding.decisive and is_training:
            text += ". Batches are split all the same, so that what is trained differs from plain Lightning"
            ways.append("num_microbatches=1, or 'auto' with check_split='exact', runs them whole")
        text += f". Ways out: {'; '.join(ways)}" if ways else ""
        if finding.is_certain:
            self._notices.warn(f"proof of {kind}", text)
        elif is_whole:
            self._untold = f"proof of {kind}", text


def _layout_of(batch: Any) -> Any:
    """What a batch is made of: containers, dtypes and dimensions, without sizes."""
    if isinstance(batch, Tensor):
        return batch.dtype, batch.ndim
    children = children_of(batch)
    if children is None or (isinstance(batch, list) and len(children) > _MOST_ENTRIES):
        return type(batch)
    return type(batch), tuple((name, _layout_of(entry)) for name, entry in children)
