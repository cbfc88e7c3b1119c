"""Schedules: for each device, the ordered list of what it runs.

```
schedule stages=4 microbatches=2 devices=2
device 0: 0:0 0:1 2:0 2:1
device 1: 1:0 1:1 3:0 3:1          cell = stage:microbatch
```

A `Schedule` is pure data. ``builders`` makes those of the literature, but the engine and the simulator interpret any
valid schedule, also one that splits a stage's micro-batches over several devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Action(NamedTuple):
    """One stage run on one micro-batch: a cell of a schedule. A tuple, because the gate looks them up all the time."""

    stage_index: int
    microbatch_index: int

    def format(self) -> str:
        """Return the cell's text, ``"stage:microbatch"``."""
        return f"{self.stage_index}:{self.microbatch_index}"


class ScheduleError(ValueError):
    """A schedule that cannot be run. The message names the offending cell."""


@dataclass(frozen=True)
class Schedule:
    """Ordered lists of actions, one per device.

    Every action (stage, micro-batch) occurs exactly once, and the lists together with the chain of each micro-batch,
    stage 0, 1, 2, ..., have a common order, so that the schedule cannot deadlock. A device may have nothing to do.

    Args:
        num_stages: Number of stages, at least 1.
        num_microbatches: Number of micro-batches, at least 1.
        devices: For each device, its actions in order; at least one device.

    Raises:
        ScheduleError: If a count is below 1, or an action is out of range, repeated, missing, or part of a deadlock.
    """

    num_stages: int
    num_microbatches: int
    devices: tuple[tuple[Action, ...], ...]
    _device_of: dict[Action, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(tuple(actions) for actions in self.devices))
        for name, value in (
            ("num_stages", self.num_stages),
            ("num_microbatches", self.num_microbatches),
            ("num_devices", len(self.devices)),
        ):
            if value < 1:
                raise ScheduleError(f"{name} of a schedule must be >= 1, got {value}: add at least one.")
        object.__setattr__(self, "_device_of", self._validate_cells())
        self._validate_order()

    @property
    def num_devices(self) -> int:
        """Number of devices, idle ones included."""
        return len(self.devices)

    def device_of(self, action: Action) -> int:
        """Return the device that runs the action.

        Raises:
            KeyError: If the schedule has no such action.
        """
        return self._device_of[action]

    def format(self) -> str:
        """Return the schedule as a text table, one row per device."""
        width = max(len(action.format()) for actions in self.devices for action in actions)
        label = len(f"device {self.num_devices - 1}:")
        lines = [
            f"schedule stages={self.num_stages} microbatches={self.num_microbatches} devices={self.num_devices}",
        ]
        for device, actions in enumerate(self.devices):
            cells = " ".join(action.format().rjust(width) for action in actions)
            lines.append(f"{f'device {device}:'.ljust(label)} {cells}".rstrip())
        return "\n".join(lines) + "\n"

    def _validate_cells(self) -> dict[Action, int]:
        """Check that every action occurs exactly once, and return the device of each."""
        found: dict[Action, int] = {}
        for device, actions in enumerate(self.devices):
            for column, action in enumerate(actions):
                for name, index, count in (
                    ("stage", action.stage_index, self.num_stages),
                    ("micro-batch", action.microbatch_index, self.num_microbatches),
                ):
                    if not 0 <= index < count:
                        raise self._error(
                            device, column, f"{name} {index} is out of range, the schedule has {count}: remove the cell"
                        )
                if action in found:
                    where = f"device {found[action]}, column {self.devices[found[action]].index(action)}"
                    raise self._error(device, column, f"the action is already at {where}: remove one of the two")
                found[action] = device
        num_missing = self.num_stages * self.num_microbatches - len(found)
        if num_missing:
            all_actions = (Action(s, m) for s in range(self.num_stages) for m in range(self.num_microbatches))
            missing = next(action for action in all_actions if action not in found)
            raise ScheduleError(
                f"Action {missing.format()} (stage {missing.stage_index}, micro-batch {missing.microbatch_index}) is "
                f"missing, {num_missing} in all: add it to a device."
            )
        return found

    def _validate_order(self) -> None:
        """Run the schedule without time: whatever cannot be reached is blocked by a cycle."""
        columns, next_stage, _ = self._run_without_time(0)
        blocked = []
        for device, column in enumerate(columns):
            if column < len(self.devices[device]):
                head = self.devices[device][column]
                needed = Action(next_stage[head.microbatch_index], head.microbatch_index)
                blocked.append(f"device {device}, column {column}: {head.format()} waits for {needed.format()}")
        if blocked:
            problem = "The order is cyclic, the devices would wait for ever: reorder them."
            raise ScheduleError("\n  ".join([problem, *blocked]))

    def _run_without_time(self, num_ordered: int) -> tuple[list[int], list[int], list[Action]]:
        """Go as far as possible, through the first `num_ordered` stages in micro-batch order only.

        Returns the column that each device has reached, the stage that each micro-batch has reached, and the actions in
        an order in which they can run.
        """
        columns = [0] * self.num_devices
        next_stage = [0] * self.num_microbatches
        order: list[Action] = []
        pending = list(range(self.num_devices))
        while pending:
            device = pending.pop()
            actions = self.devices[device]
            while columns[device] < len(actions):
                action = actions[columns[device]]
                stage, microbatch = action.stage_index, action.microbatch_index
                if stage != next_stage[microbatch]:
                    break
                if stage < num_ordered and microbatch > 0 and next_stage[microbatch - 1] <= stage:
                    break
                columns[device] += 1
                next_stage[microbatch] += 1
                order.append(action)
                # Only devices where this micro-batch goes on, or the next one follows, can have become free to go on.
                for freed in (Action(stage + 1, microbatch), Action(stage, microbatch + 1)):
                    if self._device_of.get(freed, device) != device:
                        pending.append(self._device_of[freed])
        return columns, next_stage, order

    def stage_orders(self, num_stages: int) -> tuple[tuple[int, ...], ...]:
        """Return an order of the micro-batches for each of the first stages, in which they can pass it one by one.

        It is 0, 1, 2, ... for all of them if the lists of the devices allow it, else one that the lists have in common.

        Args:
            num_stages: For how many stages.
        """
        order = self._run_without_time(num_stages)[2]
        if len(order) < len(self._device_of):
            order = self._run_without_time(0)[2]
        orders: list[list[int]] = [[] for _ in range(self.num_stages)]
        for action in order:
            orders[action.stage_index].append(action.microbatch_index)
        return tuple(map(tuple, orders[:num_stages]))

    def _error(self, device: int, column: int, problem: str) -> ScheduleError:
        action = self.devices[device][column]
        return ScheduleError(f"Device {device}, column {column}, action {action.format()}: {problem}.")
