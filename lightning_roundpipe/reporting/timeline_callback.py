"""The callback that records and logs what the pipeline does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import override

from ..lightning_packages import Callback, MisconfigurationException, pl
from .summary import Summary
from .tracing import Traced, TraceWriter, step_figures


class RoundPipeTimeline(Callback):
    """Records some training steps as a trace and as a picture, and logs figures of all of them.

    Args:
        path: file for the trace: JSON for chrome://tracing and https://ui.perfetto.dev, with compute, transfers and
            waits of every device. ``None`` writes none.
        picture: file for Gantt charts of the same steps, of four at most, ``.png``, ``.svg`` or ``.pdf``; needs
            matplotlib (``pip install lightning-roundpipe[plot]``). ``None`` draws none.
        first_step: the first batch of a fit that is recorded, counted from 0. The first ones are still being planned.
        num_steps: how many batches are recorded. Memory and files grow with it.
        log_metrics: log ``roundpipe/bubble`` and ``roundpipe/busy`` (shares of the devices' time, 0 to 1),
            ``roundpipe/step_ms``, ``roundpipe/h2d_bytes`` and ``roundpipe/d2h_bytes`` (all devices together),
            ``roundpipe/peak_memory_bytes`` (of the fullest device, where known), ``roundpipe/host_activation_bytes``
            (activations that were put on the host), ``roundpipe/num_stages`` and ``roundpipe/num_microbatches`` to the
            loggers of the Trainer, every ``log_every_n_steps``.
        summary: when ``fit`` has ended, print a table of speed, memory and bubble, and where the files are.
        tokens_of: how many tokens a batch has, for a row ``tokens/s`` in that table, for instance
            ``lambda batch: batch["input_ids"].numel()``.

    Raises:
        ValueError, TypeError: for options out of range, and for files that cannot be written.
        ModuleNotFoundError: if ``picture`` is given and matplotlib is not installed.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        picture: str | Path | None = None,
        first_step: int = 2,
        num_steps: int = 3,
        log_metrics: bool = False,
        summary: bool = False,
        tokens_of: Callable[[Any], int] | None = None,
    ) -> None:
        if path is None and picture is None and not log_metrics and not summary:
            raise ValueError(
                "RoundPipeTimeline has nothing to do: pass path, picture, log_metrics=True or summary=True"
            )
        if tokens_of is not None and not (summary and callable(tokens_of)):
            raise ValueError(f"tokens_of={tokens_of!r}: pass a function, together with summary=True")
        self._writer = TraceWriter(path, picture, first_step=first_step, num_steps=num_steps)
        self._logs = log_metrics
        self._summary = Summary() if summary else None
        self._tokens_of = tokens_of

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hands the writer to the strategy.

        Raises:
            MisconfigurationException: if the strategy is another one, or there is no logger to log to.
        """
        strategy = _strategy_of(trainer)
        if stage != "fit":
            return
        if self._logs and not trainer.loggers:
            raise MisconfigurationException(
                "RoundPipeTimeline(log_metrics=True) needs a logger, but the Trainer has none: give it one"
            )
        writer = self._writer if self._writer.files else None
        strategy.trace_with(writer, times_steps=self._logs or self._summary is not None)
        if self._summary is not None:
            self._summary = Summary()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes and logs the figures of the step."""
        if self._summary is None and not self._logs:
            return
        strategy = _strategy_of(trainer)
        result = strategy.last_step
        if result is None:
            return
        if self._summary is not None:
            num_tokens = None if self._tokens_of is None else self._tokens_of(batch)
            self._summary.note(result, num_tokens, strategy.host_memory)
        if not self._logs or trainer.fit_loop._should_accumulate() or not trainer._logger_connector.should_update_logs:
            return
        figures = step_figures(result)
        for logger in trainer.loggers:
            prefix = f"roundpipe{logger.group_separator}"
            metrics = {prefix + name: value for name, value in figures.items()}
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the summary, on rank 0."""
        if self._summary is None or not trainer.is_global_zero:
            return
        strategy = _strategy_of(trainer)
        files = ", ".join(os.path.relpath(file) for file in sorted(self._writer.files))
        print("\nWhat the steps took" + (f" (some of them are drawn in {files})" if files else "") + ":")
        print(self._summary.format(len(strategy.pool), strategy.pool.is_virtual, trainer.world_size))


def _strategy_of(trainer: pl.Trainer) -> Traced:
    if not isinstance(trainer.strategy, Traced):
        raise MisconfigurationException(
            f"RoundPipeTimeline shows runs of strategy='roundpipe', but the Trainer uses "
            f"{type(trainer.strategy).__name__}: change the strategy, or remove the callback"
        )
    return trainer.strategy
