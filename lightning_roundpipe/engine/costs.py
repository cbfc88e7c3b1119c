"""Costs of unit calls, for the planner: guessed first, measured while training.

[Note: measured costs]
Every run of a unit is noted with stamps of its device (see [Note: stamps] in :mod:`devices.device`), taken inside the
compute lane: waiting is not in it. After a step the runs of each call position are reduced to one time per direction,
their median, and the estimate is the median over the last steps, so that neither a slow micro-batch nor a slow step
counts.

- Of a step, only micro-batches count that gave the call as many bytes as any other did.
- A run that learned facts (see [Note: facts] in :mod:`autograd.recompute`) is the first one of its kind: it may have
  compiled or allocated. It counts as long as there is no other.
- What runs in a B stage is the forward again and the backward; the forward is taken off.
- A call that gets no gradient, although its micro-batch ran a backward, has a backward of no time, from the first plan
  on: a frozen reference, frozen layers at the beginning. A backward that has run took some time.
- Calls that were never measured keep their guesses, scaled by what measured calls took over their guesses.
- Sizes are known after the first run.

[Note: speeds of devices]
Where devices may differ, each run is also noted by its device. The time of a call on a device is taken for the product
of what the call costs and how slow the device is: both are found in turns, as medians over the other, from calls that
have run on several devices. Plans split stages, and devices take turns from step to step, so that they do. Times count
at speed 1, which is that of the median device; within 10 % of it a device has that speed, so that noise does not tell
devices apart that are alike.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from ..common.sizes import num_bytes_of
from ..devices.device import Run
from ..planning.costs import CallCost, CostProfile, Machine
from ..weights.units import Unit

# Backward without recomputation over forward, of matrix products: two products instead of one.
_BACKWARD_RATIO = 2.0
_MS_PER_WEIGHT = 1e-6
# Steps that an estimate looks back on.
_WINDOW = 15
# Devices whose speeds differ by less are taken for alike.
_ALIKE = 0.1
_NUM_TURNS = 8
_LEAST_MS = 1e-6
# Steps whose stamps have not all been reached; older ones are given up.
_MAX_PENDING = 4


# A call: its unit, and how many calls of it come before.
Key = tuple[Unit, int]


class _RunningMedian:
    """The median of the last values. Those of first runs give way to others."""

    __slots__ = ("_learned", "_values")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._learned = True

    def add(self, value: float, learned: bool) -> None:
        if learned and not self._learned:
            return
        if self._learned and not learned:
            self._values.clear()
            self._learned = False
        self._values.append(value)

    @property
    def value(self) -> float | None:
        return statistics.median(self._values) if self._values else None


class DeviceSpeeds:
    """How fast the devices of a pool compute; see [Note: speeds of devices].

    Args:
        num_devices: how many there are.
    """

    def __init__(self, num_devices: int) -> None:
        self._times: dict[Hashable, list[_RunningMedian | None]] = {}
        self._num_devices = num_devices
        self.known = (1.0,) * num_devices

    def note(self, call: Hashable, device: int, ms: float, learned: bool) -> None:
        """A call, in one direction, has taken this time on a device."""
        row = self._times.setdefault(call, [None] * self._num_devices)
        median = row[device]
        if median is None:
            median = row[device] = _RunningMedian()
        median.add(ms, learned)

    def clear(self) -> None:
        """Forgets the calls; what is known of the devices stays."""
        self._times.clear()

    def changed(self, machine: Machine) -> tuple[float, ...] | None:
        """The speeds of all devices, if they are others than those of ``machine``."""
        if self._times:
            self.known = self._measured()
        believed = [traits.speed for traits in machine.traits]
        pairs = zip(self.known, believed, strict=True)
        return self.known if any(abs(speed / old - 1) > _ALIKE for speed, old in pairs) else None

    def _measured(self) -> tuple[float, ...]:
        rows = []
        for row in self._times.values():
            found = {device: math.log(m.value) for device, m in enumerate(row) if m is not None and m.value}
            if len(found) > 1:
                rows.append(found)
        slowness = [0.0] * self._num_devices
        for _ in range(_NUM_TURNS):
            costs = [statistics.median(ms - slowness[device] for device, ms in row.items()) for row in rows]
            for device in range(self._num_devices):
                over = [row[device] - cost for row, cost in zip(rows, costs, strict=True) if device in row]
                if over:
                    slowness[device] = statistics.median(over)
        middle = statistics.median_high(slowness)
        speeds = (math.exp(middle - own) for own in slowness)
        return tuple(1.0 if abs(speed - 1) <= _ALIKE else speed for speed in speeds)


@dataclass(slots=True)
class _Estimate:
    """What is known about one call; times in ms, sizes are the largest of the last steps.

    Attributes:
        is_skipped: whether it had no backward when it was recorded.
    """

    forward_ms: _RunningMedian = field(default_factory=_RunningMedian)
    backward_ms: _RunningMedian = field(default_factory=_RunningMedian)
    # (input, output, graph) per step
    sizes: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    is_skipped: bool = False


class CallEstimates:
    """Running estimates of the calls of one kind of step; see [Note: measured costs].

    Args:
        sequence: the calls, in order.
        is_training: whether there is a backward.
        speeds: are told of every run; None where all devices are alike.
    """

    def __init__(self, sequence: Sequence[Unit], is_training: bool, speeds: DeviceSpeeds | None = None) -> None:
        self._is_training = is_training
        self._speeds = speeds
        self._calls: dict[Key, _Estimate] = {}
        self._preset: dict[Key, CallCost] = {}
        self._pending: deque[_Measured] = deque(maxlen=_MAX_PENDING)
        self.rearrange(sequence)

    def rearrange(self, sequence: Sequence[Unit]) -> None:
        """Another sequence of calls from now on. The n-th call of a unit stays the n-th call of it."""
        self._sequence = tuple(sequence)
        self._keys = list(_keys_of(sequence))
        for key in self._keys:
            self._calls.setdefault(key, _Estimate())

    def preset(self, profile: CostProfile) -> None:
        """These costs from now on, instead of measured ones.

        Raises:
            ValueError: if they are not those of the calls; the message names both counts and the first difference.
        """
        names = [unit.name for unit in self._sequence]
        given = [call.name for call in profile.calls]
        if names != given:
            pairs = zip([*names, "nothing"], [*given, "nothing"], strict=False)
            at, (has, wants) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
            raise ValueError(
                f"the cost profile has {len(given)} calls and a micro-batch made {len(names)}: call {at} is {has!r}, "
                f"the profile has {wants!r} there: measure the costs again, with this model."
            )
        self._preset = dict(zip(self._keys, profile.calls, strict=True))

    def add_recorded(self, runs: Sequence[Run]) -> None:
        """Takes what is the same in every run from those of one micro-batch: sizes, and which calls have a backward."""
        returned = {run.position for run in runs if run.kind == "B"}
        for run in runs:
            if run.position is not None:
                estimate = self._calls[self._keys[run.position]]
                estimate.sizes.append((run.input_bytes, run.output_bytes, run.graph_bytes))
                estimate.is_skipped = self._is_training and bool(returned) and run.position not in returned

    def add(self, runs: Sequence[Sequence[Run]]) -> None:
        """Takes the runs of one step, micro-batch by micro-batch, or keeps them until their stamps are reached."""
        self._pending.append(_Measured(self._keys, runs, self._is_training))
        for measured in list(self._pending):
            if measured.is_complete():
                self._pending.remove(measured)
                self._take(measured)

    def _take(self, measured: _Measured) -> None:
        for key, samples in measured.by_call().items():
            estimate = self._calls[key]
            if self._speeds is not None:
                samples.tell(self._speeds, key)
            estimate.sizes.append(samples.sizes)
            if (forward := samples.reduced("F")) is not None:
                estimate.forward_ms.add(*forward)
            if (backward := samples.reduced("B")) is not None:
                again_ms = estimate.forward_ms.value or 0.0
                ms, learned = backward
                estimate.backward_ms.add(max(_LEAST_MS, ms if samples.kept else ms - again_ms), learned)
            elif samples.num_skipped:
                estimate.backward_ms.add(0.0, False)

    @property
    def profile(self) -> CostProfile:
        """The costs as they are known now."""
        guesses = guess_costs(self._sequence, is_training=self._is_training).calls
        estimates = [self._calls[key] for key in self._keys]
        pairs = [(e.forward_ms.value, guess.forward_ms) for e, guess in zip(estimates, guesses, strict=True)]
        guessed_ms = sum(guess for measured, guess in pairs if measured is not None)
        scale = sum(measured for measured, _ in pairs if measured is not None) / guessed_ms if guessed_ms else 1.0
        calls = []
        for key, estimate, guess in zip(self._keys, estimates, guesses, strict=True):
            calls.append(self._preset.get(key) or _cost_of(estimate, guess, scale))
        return CostProfile(tuple(calls))


def _cost_of(estimate: _Estimate, guess: CallCost, scale: float) -> CallCost:
    forward_ms, backward_ms = estimate.forward_ms.value, estimate.backward_ms.value
    if forward_ms is None:
        forward_ms = scale * guess.forward_ms
    if backward_ms is None:
        backward_ms = 0.0 if estimate.is_skipped else forward_ms * guess.backward_ms / guess.forward_ms
    sizes = [max(column) for column in zip(*estimate.sizes, strict=True)] or [0, 0, 0]
    return CallCost(guess.name, forward_ms, backward_ms, guess.weight_bytes, guess.gradient_bytes, *sizes)


def _keys_of(sequence: Sequence[Unit]) -> Iterator[Key]:
    counts: dict[Unit, int] = {}
    for unit in sequence:
        counts[unit] = counts.get(unit, -1) + 1
        yield unit, counts[unit]


class _Samples:
    """The runs of one call in one step."""

    def __init__(self) -> None:
        self._runs: list[tuple[Run, float]] = []
        self.num_skipped = 0  # backwards

    def add(self, run: Run, ms: float) -> None:
        self._runs.append((run, ms))

    def tell(self, speeds: DeviceSpeeds, key: Key) -> None:
        """Tells the times of the largest micro-batches on each device, and takes them at speed 1 from now on."""
        size = max(run.input_bytes for run, _ in self._runs)
        for run, ms in self._runs:
            if run.input_bytes == size:
                speeds.note((*key, run.kind, run.kept), run.device.index, ms, run.learned)
        self._runs = [(run, ms * speeds.known[run.device.index]) for run, ms in self._runs]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(input, output, graph) bytes of the largest micro-batches."""
        runs = [run for run, _ in self._runs]
        return max(r.input_bytes for r in runs), max(r.output_bytes for r in runs), max(r.graph_bytes for r in runs)

    @property
    def kept(self) -> bool:
        return self._runs[0][0].kept

    def reduced(self, kind: str) -> tuple[float, bool] | None:
        """(ms, whether only first runs are in it); None if there was no run of this kind."""
        size = max(run.input_bytes for run, _ in self._runs)
        found = [(ms, run.learned) for run, ms in self._runs if run.kind == kind and run.input_bytes == size]
        if not found:
            return None
        others = [ms for ms, learned in found if not learned]
        return statistics.median(others or [ms for ms, _ in found]), not others


class _Measured:
    """The runs of one step. Stamps that have not been reached are asked again."""

    def __init__(self, keys: Sequence[Key], runs: Sequence[Sequence[Run]], is_training: bool) -> None:
        self._keys = keys
        self._runs = [[run for run in row if run.position is not None] for row in runs]
        self._has_backward = [is_training and any(run.kind == "B" for run in row) for row in runs]
        self._ms: list[float] = []

    def is_complete(self) -> bool:
        """Whether all stamps have been reached."""
        for run in itertools.islice(itertools.chain.from_iterable(self._runs), len(self._ms), None):
            ms = run.device.elapsed_ms(run.start, run.end)
            if ms is None:
                return False
            self._ms.append(ms)
        return True

    def by_call(self) -> dict[Key, _Samples]:
        """The runs of each call."""
        calls: dict[Key, _Samples] = defaultdict(_Samples)
        times = iter(self._ms)
        for row, has_backward in zip(self._runs, self._has_backward, strict=True):
            without: set[Key] = set()
            for run in row:
                assert run.position is not None
                key = self._keys[run.position]
                calls[key].add(run, next(times))
                without.add(key) if run.kind == "F" else without.discard(key)
            if has_backward:
                for key in without:
                    calls[key].num_skipped += 1
        return calls


def guess_costs(sequence: Iterable[Unit], *, is_training: bool = True) -> CostProfile:
    """Costs of calls of which only the unit is known; only ratios of the times mean anything.

    A call's time follows the sizes of its weights, which is what dense layers of one model have in common, and is the
    same on every machine and in every run. Weights of matrix products (two or more dimensions) count, tables that are
    looked up do not; a floor of one percent of the mean keeps calls without weights from being free.

    Args:
        sequence: the calls, in order.
        is_training: whether there is a backward.
    """
    sequence = tuple(sequence)
    known: dict[Unit, tuple[int, int, int]] = {}
    for unit in sequence:
        if unit not in known:
            known[unit] = (_multiplied_weights(unit.module), unit.weight_bytes(), _gradient_bytes(unit.module))
    mean = sum(known[unit][0] for unit in sequence) / max(1, len(sequence))
    ratio = _BACKWARD_RATIO if is_training else 0.0
    calls = []
    for unit in sequence:
        weights, weight_bytes, gradient_bytes = known[unit]
        forward_ms = (max(weights, 0.01 * mean) + 1.0) * _MS_PER_WEIGHT
        gradient_bytes = gradient_bytes if is_training else 0
        calls.append(CallCost(unit.name, forward_ms, ratio * forward_ms, weight_bytes, gradient_bytes))
    return CostProfile(tuple(calls))


def _multiplied_weights(module: nn.Module) -> int:
    tables = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    return sum(p.numel() for p in module.parameters() if p.dim() >= 2 and id(p) not in tables)


def _gradient_bytes(module: nn.Module) -> int:
    return num_bytes_of(p for p in module.parameters() if p.requires_grad)
