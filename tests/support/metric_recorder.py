"""What callbacks can read of logged values, for comparisons."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch


class Recorder(L.Callback):
    """Keeps what callbacks can read, at every batch end and epoch end."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def _record(self, trainer: L.Trainer, where: str) -> None:
        kinds = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
        metrics = {
            kind: {name: torch.as_tensor(value).clone() for name, value in sorted(getattr(trainer, kind).items())}
            for kind in kinds
        }
        self.seen.append({"where": where, **metrics})

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._record(trainer, "train batch")

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._record(trainer, "train epoch")

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._record(trainer, "validation batch")

    def on_validation_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._record(trainer, "validation epoch")

    def on_fit_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._record(trainer, "end")
