"""``self.log`` in every hook: allowed, refused and reduced as in plain Lightning."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.compatibility.loggers.metrics import METRICS, MetricsRecorder, metrics_of
from tests.support.parity import both, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small

LEVELS = ((True, False), (False, True), (True, True))
# Two hooks for one thing exclude each other, and the older one is on its way out.
LEFT_OUT = {"configure_sharded_model"}
# Lightning's table names them, but its Trainer calls them only with loaders, or checkpoints, that come from the module.
NOT_CALLED = {"train_dataloader", "val_dataloader", "test_dataloader", "clip_gradients", "on_load_checkpoint"}

Refusals = dict[tuple[str, str, bool, bool], str]


def log_at_all_levels(owner: Any, where: str, hook: str, value: float, refusals: Refusals) -> None:
    """Logs as every level; what Lightning refuses is noted with its message."""
    for on_step, on_epoch in LEVELS:
        name = f"{where}.{hook}.{int(on_step)}{int(on_epoch)}"
        try:
            owner.log(name, value, on_step=on_step, on_epoch=on_epoch, batch_size=2, prog_bar=on_step)
        except MisconfigurationException as error:
            refusals[where, hook, on_step, on_epoch] = str(error)


def with_logging(base: type, where: str, called: set[str], refusals: Refusals) -> type:
    """A class whose hooks log before they do what those of ``base`` do."""

    def logging_hook(hook: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(hook)
            module = self if isinstance(self, L.LightningModule) else args[1]
            with torch.no_grad():
                value = float(module.head.weight.abs().sum())
            log_at_all_levels(self, where, hook, value, refusals)
            return original(self, *args, **kwargs)

        run.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        return run

    hooks = [name for name in _FxValidator.functions if name in dir(base) and name not in LEFT_OUT]
    if base is L.Callback:  # their first arguments are the trainer and the module
        hooks = [name for name in hooks if name not in ("state_dict", "load_state_dict")]
    return type("Logs", (base,), {name: logging_hook(name, getattr(base, name)) for name in hooks})


class Whole(Small):
    """Has steps of all kinds, and a scheduler."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@compat(
    "LightningModule method",
    "log (in every hook of the module); log (in every hook of a callback); log (refused where Lightning refuses it)",
)
@pytest.mark.filterwarnings("ignore:.*Found .* as the only argument")
def test_every_hook(tmp_path: Path) -> None:
    """Fits with validation, tests, predicts and saves, with a module and a callback that log in all of their hooks."""

    def act(kind: str) -> Any:
        called: set[str] = set()
        refusals: Refusals = {}
        module = with_logging(Whole, "module", called, refusals)()
        callback = with_logging(L.Callback, "callback", called, refusals)()
        recorder = MetricsRecorder()
        trainer = make_trainer(kind, callbacks=[callback, recorder], num_sanity_val_steps=1)
        trainer.fit(module, make_loader(12, 6), make_loader(6, 3))
        kept = {"fit": metrics_of(trainer)}
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        kept["test"] = trainer.test(module, make_loader(6, 3), verbose=False)[0]
        trainer.predict(module, make_loader(6, 3), return_predictions=False)
        return {**kept, "batches": recorder.seen}, called, refusals

    kept, called, refusals = both(act)
    expected = {name for name in _FxValidator.functions if name in dir(L.LightningModule)} - LEFT_OUT - NOT_CALLED
    assert expected - called <= {"load_state_dict"}
    assert {"on_train_start", "predict_step", "configure_optimizers", "on_fit_end"} <= {key[1] for key in refusals}
    logged = {name for entry in kept["batches"] for kind in METRICS for name in entry[kind]}
    logged |= {*kept["fit"]["callback_metrics"], *kept["test"]}
    for hook, levels in _FxValidator.functions.items():
        if levels is not None and hook in called:
            assert any(f".{hook}." in name for name in logged), hook
