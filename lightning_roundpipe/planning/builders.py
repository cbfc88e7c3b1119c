"""Builders: RoundPipe's schedule, and for comparison those that bind stages to devices.

```
round_robin(6, 4, 2)    device 0: stages 0 2 4             one chain of stages, any stage on any device
                        device 1: stages 1 3 5

looped_bfs(4, 3, 2)     device 0: stages 0 2 and 5 7       4 model stages make a chain of 8: 0-3 forward, 4-7 backward;
                        device 1: stages 1 3 and 4 6       stage 7 - i is the backward of stage i, on the same device
```

All of them are plain `Schedule` data, so that one simulator compares them. In the schedules that bind stages
(`gpipe`, `one_f_one_b`, `interleaved_one_f_one_b`, `looped_bfs`), a device keeps the weights of its model stages, and
the backward of a model stage runs where its forward ran. With S model stages the chain of a micro-batch has 2 S stages:
stage i < S is the forward of model stage i, and stage 2 S - 1 - i its backward.

Whether the optimizer is synchronous is no matter of order: a step that waits for the optimizer is one schedule, and
steps that overlap are one schedule of several steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from .schedule import Action, Schedule


def round_robin(
    num_stages: int,
    num_microbatches: int,
    num_devices: int,
    *,
    round_size: int | None = None,
    splits: int | Sequence[int] = 1,
    first_device: int = 0,
    num_steps: int = 1,
) -> Schedule:
    """Build the schedule of the RoundPipe paper, arXiv 2604.27085, section on the round-robin schedule.

    The micro-batches are worked off in rounds. The stage runs, counted over all rounds and within a round over the
    stages, go to the devices in turn: number i is on device ``(first_device + i) % num_devices``, which runs all
    its micro-batches before it turns to its next stage run. The ring keeps rotating from one round to the
    next, and from one step to the next.

    With ``splits=r`` the micro-batches of a round are r neighbouring groups, as equal as they can be, and each group
    has stage runs of its own: r rings of ``num_devices / r`` devices, if r divides the number of devices.

    Args:
        num_stages: Number of stages, at least 1.
        num_microbatches: Number of micro-batches of a step, at least 1.
        num_devices: Number of devices, at least 1.
        round_size: Micro-batches per round, at least 1; the last round of a step may be smaller. None for one round
            with all. Each round uploads the weights of each stage once more, and evens out the load where the number of
            stages is not a multiple of the number of devices. Below `num_devices` a device is back at its turn before
            the micro-batches have left the stage before, and waits: allowed, but less efficient.
        splits: Stage runs of a stage in a round, at least 1; for all stages, or one number for each. No more than there
            are micro-batches in the round.
        first_device: Device of the first stage run.
        num_steps: Steps one after the other, at least 1. Micro-batch i of step t has the index
            ``t * num_microbatches + i``; the schedule has ``num_steps * num_microbatches`` micro-batches.

    Raises:
        ValueError: If a count is below 1, `first_device` is not one of the devices, or `splits` has not one entry per
            stage.
    """
    row = _row_of(splits, num_stages)
    size = num_microbatches if round_size is None else round_size
    _check_counts(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_devices=num_devices,
        round_size=size,
        num_steps=num_steps,
    )
    if not 0 <= first_device < num_devices:
        raise ValueError(f"first_device must be one of the {num_devices} devices, got {first_device}: take it modulo.")
    steps = (range(step * num_microbatches, (step + 1) * num_microbatches) for step in range(num_steps))
    devices: list[list[Action]] = [[] for _ in range(num_devices)]
    device = first_device
    for microbatches in chain.from_iterable(rounds_of(step, size) for step in steps):
        for stage, most in enumerate(row):
            count = min(most, len(microbatches))
            for index in range(count):
                devices[device].extend(Action(stage, m) for m in neighbours(microbatches, count, index))
                device = (device + 1) % num_devices
    return Schedule(num_stages, num_steps * num_microbatches, tuple(map(tuple, devices)))


def rounds_of(microbatches: range, round_size: int | None) -> list[range]:
    """Cut the micro-batches of a step into rounds; None for one round with all."""
    size = round_size or len(microbatches)
    return [microbatches[start : start + size] for start in range(0, len(microbatches), size)]


def neighbours(microbatches: range, num_groups: int, index: int) -> range:
    """Return one of the groups of neighbouring micro-batches, as equal as they can be, of a round."""
    count = len(microbatches)
    return microbatches[count * index // num_groups : count * (index + 1) // num_groups]


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Build the schedule of GPipe, arXiv 1811.06965: all forwards, then all backwards; one model stage per device.

    It is `looped_bfs` with one model stage per device. The backwards take the micro-batches in ascending order. GPipe's
    own figure takes the last one first; since they begin only when all forwards have passed, the times are the same.

    Args:
        num_stages: Number of model stages and of devices, at least 1.
        num_microbatches: Number of micro-batches, at least 1. Up to all of them are in flight on a device.

    Raises:
        ValueError: If a count is below 1.
    """
    return looped_bfs(num_stages, num_microbatches, num_stages)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Build the 1F1B schedule with a flush, one model stage per device.

    PipeDream-Flush of "Memory-Efficient Pipeline-Parallel DNN Training", arXiv 2006.09503: a device runs as many
    forwards ahead as there are stages behind it, then one forward and one backward in turn, then the backwards that are
    left. At most ``num_stages - i`` micro-batches are in flight on device i, however many there are.

    Args:
        num_stages: Number of model stages and of devices, at least 1.
        num_microbatches: Number of micro-batches, at least 1.

    Raises:
        ValueError: If a count is below 1.
    """
    _check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    devices = []
    for stage in range(num_stages):
        forward, backward = _bound_actions(num_stages, (stage,), (range(num_microbatches),))
        devices.append(_alternate(forward, backward, num_stages - 1 - stage))
    return Schedule(2 * num_stages, num_microbatches, tuple(devices))


def interleaved_one_f_one_b(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Build the interleaved 1F1B schedule of Megatron-LM (Narayanan et al. 2021), arXiv 2104.04473, section 2.2.

    Device d of N holds the model stages d, N + d, 2 N + d, ..., its v chunks. Micro-batches go in groups of N: a device
    runs the group through its first chunk, then through the next; backwards likewise, last chunk first. Device d runs
    ``2 (N - 1 - d) + (v - 1) N`` forwards ahead, then one forward and one backward in turn, then the backwards that are
    left. With one chunk per device the order is that of `one_f_one_b` with more forwards ahead, as fast, but with more
    in flight.

    Args:
        num_stages: Number of model stages, v N, a multiple of `num_devices`.
        num_microbatches: Number of micro-batches, a multiple of `num_devices`: Megatron-LM defines no order for a group
            that is not full.
        num_devices: N, at least 1.

    Raises:
        ValueError: If a count is below 1 or not such a multiple.
    """
    chunks = _chunks(num_stages, num_microbatches, num_devices)
    if num_microbatches % num_devices:
        raise ValueError(
            f"num_microbatches of interleaved 1F1B must be a multiple of num_devices={num_devices}, got "
            f"{num_microbatches}: pass {_multiples_around(num_microbatches, num_devices)}, or take looped_bfs."
        )
    groups = [range(start, start + num_devices) for start in range(0, num_microbatches, num_devices)]
    devices = []
    for device, stages in enumerate(chunks):
        forward, backward = _bound_actions(num_stages, stages, groups)
        num_ahead = 2 * (num_devices - 1 - device) + (len(stages) - 1) * num_devices
        devices.append(_alternate(forward, backward, num_ahead))
    return Schedule(2 * num_stages, num_microbatches, tuple(devices))


def looped_bfs(num_stages: int, num_microbatches: int, num_devices: int) -> Schedule:
    """Build the schedule of "Breadth-First Pipeline Parallelism", arXiv 2211.05953.

    Device d of N holds the model stages d, N + d, 2 N + d, ... It runs all micro-batches through the first of them,
    then all through the next; then the backwards likewise, last stage first.

    Args:
        num_stages: Number of model stages, a multiple of `num_devices`.
        num_microbatches: Number of micro-batches, at least 1. Below `num_devices` the loop comes round before the first
            micro-batch does, and the devices wait.
        num_devices: N, at least 1.

    Raises:
        ValueError: If a count is below 1, or `num_stages` is no multiple of `num_devices`.
    """
    devices = []
    for stages in _chunks(num_stages, num_microbatches, num_devices):
        forward, backward = _bound_actions(num_stages, stages, (range(num_microbatches),))
        devices.append((*forward, *backward))
    return Schedule(2 * num_stages, num_microbatches, tuple(devices))


def _row_of(splits: int | Sequence[int], num_stages: int) -> list[int]:
    """Check `splits` and return one number per stage."""
    row = [splits] * num_stages if isinstance(splits, int) else list(splits)
    if len(row) != num_stages:
        raise ValueError(f"splits has {len(row)} entries and there are {num_stages} stages: pass one for each.")
    _check_counts(splits=min(row, default=1))
    return row


def _chunks(num_stages: int, num_microbatches: int, num_devices: int) -> list[range]:
    """Check the arguments of a looped schedule and return the model stages of each device."""
    _check_counts(num_stages=num_stages, num_microbatches=num_microbatches, num_devices=num_devices)
    if num_stages % num_devices:
        raise ValueError(
            f"num_stages of a looped schedule must be a multiple of num_devices={num_devices}, got {num_stages}: cut "
            f"the model into {_multiples_around(num_stages, num_devices)} stages."
        )
    return [range(device, num_stages, num_devices) for device in range(num_devices)]


def _bound_actions(
    num_stages: int, stages: Sequence[int], groups: Sequence[range]
) -> tuple[list[Action], list[Action]]:
    """Forwards and backwards of a device's model stages: one group of micro-batches after the other through them."""
    last = 2 * num_stages - 1
    forward = [Action(stage, m) for group in groups for stage in stages for m in group]
    backward = [Action(last - stage, m) for group in groups for stage in reversed(stages) for m in group]
    return forward, backward


def _alternate(forward: list[Action], backward: list[Action], num_ahead: int) -> tuple[Action, ...]:
    """`num_ahead` forwards first, then one forward and one backward in turn, then the backwards that are left."""
    ahead, rest = forward[:num_ahead], forward[num_ahead:]
    pairs = zip(rest, backward, strict=False)
    return (*ahead, *chain.from_iterable(pairs), *backward[len(rest) :])


def _multiples_around(value: int, factor: int) -> str:
    below = value // factor * factor
    return f"{below} or {below + factor}" if below else f"{factor}"


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}: pass at least 1.")
