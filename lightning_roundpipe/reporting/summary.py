"""The table at the end of a training: how fast its steps were, what they took, and how idle the devices stood.

```
step ends ---- note(result, tokens) ----> the last hundred steps ---- format() ----> medians, as rows of text
```
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

from ..engine.requests import StepResult
from ..planning.quantities import format_bytes, format_ms, format_share
from .host_memory import HostMemory

_NUM_STEPS = 100
_UNKNOWN = "not known yet: train for longer"


@dataclass(frozen=True)
class _Step:
    """What is kept of a step: when it had ended, and its shares of the devices' time, if it ran by a plan."""

    ended_at: float
    num_tokens: int | None
    bubble: dict[str, float] | None


class Summary:
    """Figures of the last hundred steps of a training; all methods run on the thread of the Trainer."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=_NUM_STEPS + 1)
        self._planned: StepResult | None = None
        self._peaks: list[int] = []
        self._host: HostMemory | None = None

    def note(self, result: StepResult, num_tokens: int | None, host: HostMemory | None) -> None:
        """Takes a training step that has just ended, with everything that follows it, such as the update.

        Args:
            num_tokens: of its batch; None if they are not counted.
            host: what the training needs on the host; None if it is not known.
        """
        self._host = host
        self._peaks = [peak for peak in result.peak_memory_bytes if peak is not None]
        bubble = None
        if result.schedule is not None:  # otherwise it has only recorded the model's calls
            self._planned, bubble = result, {"bubble": result.timeline.bubble_ratio, **result.timeline.bubble_parts}
        self._steps.append(_Step(perf_counter(), num_tokens, bubble))

    def format(self, num_devices: int, are_virtual: bool, num_ranks: int = 1) -> str:
        """The table, where each of ``num_ranks`` processes has these devices, and batches of the same size."""
        rows = {
            "devices": f"{num_devices} {'virtual' if are_virtual else 'GPUs'}"
            + (f" in each of {num_ranks} ranks" if num_ranks > 1 else ""),
            **self._plan(),
            **self._speed(num_ranks),
            "bubble": self._bubble(),
            "device memory": self._device_memory(are_virtual),
            "host memory": "not known" if self._host is None else self._host.describe(),
        }
        width = max(map(len, rows))
        return "\n".join(f"  {name:>{width}}  {value}" for name, value in rows.items())

    def _plan(self) -> dict[str, str]:
        if self._planned is None or self._planned.partition is None:
            return {"stages": _UNKNOWN}
        stages = self._planned.partition
        return {
            "stages": f"{stages.num_stages}: {stages.format()}",
            "micro-batches": f"{self._planned.num_microbatches} per step",
        }

    def _speed(self, num_ranks: int) -> dict[str, str]:
        steps = list(self._steps)
        if len(steps) < 2:
            return {"step": _UNKNOWN}
        seconds = [after.ended_at - before.ended_at for before, after in pairwise(steps)]
        rows = {"step": f"{format_ms(1e3 * statistics.median(seconds))}, the median of the last {len(seconds)}"}
        if steps[-1].num_tokens is not None:
            speeds = [(step.num_tokens or 0) / time for step, time in zip(steps[1:], seconds, strict=True)]
            rows["tokens/s"] = f"{num_ranks * statistics.median(speeds):,.0f}"
        return rows

    def _bubble(self) -> str:
        shares = [step.bubble for step in self._steps if step.bubble is not None]
        if not shares:
            return _UNKNOWN
        medians = {name: format_share(statistics.median(share[name] for share in shares)) for name in shares[0]}
        total = medians.pop("bubble")
        return f"{total} of the devices' time ({', '.join(f'{name} {share}' for name, share in medians.items())})"

    def _device_memory(self, are_virtual: bool) -> str:
        if self._peaks:
            return f"{format_bytes(max(self._peaks))} at most on the fullest device"
        return "that of the host: virtual devices compute in it" if are_virtual else "not known"
