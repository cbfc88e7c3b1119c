"""The callback that records and logs what the pipeline does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

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
    ) -> None:
        if path is None and picture is None and not log_metrics:
            raise ValueError("RoundPipeTimeline has nothing to do: pass path, picture or log_metrics=True")
        self._writer = TraceWriter(path, picture, first_step=first_step, num_steps=num_steps)
        self._records = path is not None or picture is not None
        self._logs = log_metrics

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
        if self._records:
            strategy.trace_with(self._writer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Logs the figures of the step."""
        if not self._logs or trainer.fit_loop._should_accumulate() or not trainer._logger_connector.should_update_logs:
            return
        result = _strategy_of(trainer).last_step
        if result is None:
            return
        figures = step_figures(result)
        for logger in trainer.loggers:
            prefix = f"roundpipe{logger.group_separator}"
            metrics = {prefix + name: value for name, value in figures.items()}
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def _strategy_of(trainer: pl.Trainer) -> Traced:
    if not isinstance(trainer.strategy, Traced):
        raise MisconfigurationException(
            f"RoundPipeTimeline shows runs of strategy='roundpipe', but the Trainer uses "
            f"{type(trainer.strategy).__name__}: change the strategy, or remove the callback"
        )
    return trainer.strategy
