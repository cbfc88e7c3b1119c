"""What can be read of logged values, kept at the end of every batch, epoch and fit."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def metrics_of(trainer: L.Trainer) -> dict[str, Any]:
    """By kind and name, as they are now."""
    return {
        kind: {name: torch.as_tensor(value).clone() for name, value in sorted(getattr(trainer, kind).items())}
        for kind in METRICS
    }


def _recording(where: str) -> Any:
    def hook(self: MetricsRecorder, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append({"where": where, **metrics_of(trainer)})

    return hook


class MetricsRecorder(L.Callback):
    """Keeps what is readable, and where it was."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    on_train_batch_end = _recording("train batch")
    on_train_epoch_end = _recording("train epoch")
    on_validation_batch_end = _recording("validation batch")
    on_validation_epoch_end = _recording("validation epoch")
    on_test_batch_end = _recording("test batch")
    on_fit_end = _recording("end")
