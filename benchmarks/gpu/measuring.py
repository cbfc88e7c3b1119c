"""A training that is measured: ``python -m benchmarks.gpu.measuring JOB RESULT``, a process of its own.

```
 steps of the optimizer    first | warm-up ... | the last of it | measured ...            | one more
 what is noted             time  |             | ours: timeline | time, threads, lock     | torch's profiler
```

RESULT is written after every step, so that a process that is killed leaves what it has measured.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks._report import rounded

from .models import Size
from .probes import LockSampler, device_figures, thread_seconds
from .results import FAILED, MEASURED, NOT_RUN, NotRunError, write_json

WARMUP = 3


@dataclass(frozen=True)
class Job:
    """What a process is to train, and how.

    Attributes:
        contender: a name in :data:`contenders.CONTENDERS`.
        is_tiny: on the CPU.
        cap_bytes: limit of torch's allocator, None for none.
        steps: to measure, at most.
        ends_at_s: no measured step begins that would not end before; of time.monotonic, which all processes share.
        options: of the strategy.
    """

    contender: str
    size: Size
    is_tiny: bool = False
    cap_bytes: int | None = None
    steps: int = 5
    ends_at_s: float = float("inf")
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """On which others than ours train."""
        return torch.device("cpu") if self.is_tiny else torch.device("cuda", 0)

    def dump(self) -> str:
        """As text, for :meth:`load`."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Job:
        """What :meth:`dump` has written."""
        found = json.loads(text)
        return cls(**{**found, "size": Size(**found["size"])})


class Meter:
    """What a training tells: before each step of its optimizer, and after it."""

    def __init__(self, job: Job, path: Path, started_s: float) -> None:
        self.job = job
        self.figures: dict[str, Any] = {}
        self.num_steps = 0
        self._path = path
        self._started_s = started_s
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._calls_us: list[float] = []
        self._cpu_shares: list[float] = []
        self._sampler: LockSampler | None = LockSampler()
        self._profiler: Any = None
        self._is_over = False
        self._step_s = self._cpu_s = 0.0
        self._threads: dict[str, float] = {}

    @property
    def goes_on(self) -> bool:
        """Whether there is another step to train."""
        return not self._is_over

    @property
    def is_last_of_warmup(self) -> bool:
        """Whether the step that runs, or has just ended, is the one before those that are measured."""
        return self.num_steps == WARMUP - 1

    def begin_step(self) -> None:
        """Right before a step."""
        if self.num_steps == 0:
            self.figures["setup_s"] = rounded(time.perf_counter() - self._started_s)
        if self.num_steps == WARMUP and self._sampler is not None:
            self._sampler.start()
        if self._is_enough and not self.job.is_tiny:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.__enter__()
        self._threads, self._cpu_s, self._step_s = thread_seconds(), time.process_time(), time.perf_counter()

    def end_step(self, loss: float) -> None:
        """Right after it; nothing of it is under way on the GPU."""
        seconds, cpu_s = time.perf_counter() - self._step_s, time.process_time() - self._cpu_s
        self._losses.append(loss)
        if self.num_steps == 0:
            self.figures["first_step_s"] = rounded(seconds)
        elif self._is_enough:
            self._end_profile()
            self._is_over = True
        elif self.num_steps >= WARMUP:
            self._note(seconds, cpu_s)
        self.num_steps += 1
        if self._is_enough and self._sampler is not None:
            self.figures["interpreter_lock"] = self._sampler.stop()
            self._sampler = None
        self._save()

    @property
    def _is_enough(self) -> bool:
        """Whether all steps that count have been measured: one more is profiled."""
        num_measured = len(self._seconds)
        return num_measured >= self.job.steps or (num_measured > 0 and self._is_out_of_time)

    @property
    def _is_out_of_time(self) -> bool:
        """Whether two more steps, the last one profiled, would take too long."""
        return time.monotonic() + 2 * self._seconds[-1] > self.job.ends_at_s

    def _note(self, seconds: float, cpu_s: float) -> None:
        self._seconds.append(seconds)
        self._cpu_shares.append(cpu_s / seconds)
        after = thread_seconds()
        if "host" in after:
            host_s = after["host"] - self._threads.get("host", 0.0)
            self._calls_us.append(host_s / self.job.size.unit_calls * 1e6)

    def _end_profile(self) -> None:
        """Figures of the GPU; what goes wrong here costs nothing else."""
        if self._profiler is None:
            return
        try:
            self._profiler.__exit__(None, None, None)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(path))
                self.figures["device"] = device_figures(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
        except Exception as error:
            self.figures["device"] = {"reason": f"{type(error).__name__}: {error}"[:300]}

    def _save(self) -> None:
        size = self.job.size
        self.figures |= {
            "tokens_per_second": middle([size.tokens / seconds for seconds in self._seconds]),
            "seconds_per_step": middle(self._seconds),
            "model_tflops": middle([size.flops / seconds / 1e12 for seconds in self._seconds]),
            "host_us_per_call": middle(self._calls_us),
            "cpu_share": middle(self._cpu_shares),
            "losses": self._losses,
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        if not self.job.is_tiny:
            self.figures["peak_device_bytes"] = {
                "allocated": torch.cuda.max_memory_allocated(self.job.device),
                "reserved": torch.cuda.max_memory_reserved(self.job.device),
            }
        # What comes after the last step may be cut off: all has been measured.
        write_json(self._path, {"figures": self.figures, **({"state": MEASURED} if self._is_over else {})})


def middle(values: list[float]) -> dict[str, float] | None:
    """Median and extremes of however many there are; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    found = {"median": torch.tensor(ordered, dtype=torch.float64).quantile(0.5).item(), "least": ordered[0]}
    return {**{name: rounded(value) for name, value in found.items()}, "most": rounded(ordered[-1]), "num": len(values)}


def run(job: Job, path: Path, contenders: Mapping[str, Callable[[Job, Meter], None]], started_s: float) -> None:
    """Trains; what it finds, or why it could not, is in the file."""
    meter = Meter(job, path, started_s)
    ended: dict[str, Any] = {"state": MEASURED}
    try:
        if job.cap_bytes is not None and not job.is_tiny:
            total = torch.cuda.get_device_properties(job.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, job.cap_bytes / total), job.device)
        contenders[job.contender](job, meter)
    except NotRunError as error:
        ended = {"state": NOT_RUN, "reason": str(error)}
    except Exception as error:  # for the report
        traceback.print_exc()
        ended = {"state": FAILED, "reason": f"{type(error).__name__}: {error}"}
    finally:
        write_json(path, {"figures": meter.figures, **ended})


def main() -> None:
    """The process."""
    started_s = time.perf_counter()
    from .contenders import CONTENDERS

    warnings.filterwarnings("ignore")
    job = Job.load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with suppress(KeyboardInterrupt):
        run(job, Path(sys.argv[2]), CONTENDERS, started_s)


if __name__ == "__main__":
    main()
