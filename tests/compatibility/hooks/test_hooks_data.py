"""Hooks about data, models, callbacks and checkpoints have the effect that they have with plain Lightning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.support.parity import KINDS, both, compare, fit, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small

# --- batches on their way ----------------------------------------------------------------------------------------


@dataclass
class Packed:
    """A batch of a kind that neither Lightning nor RoundPipe can take apart."""

    content: tuple[Tensor, Tensor]


class Transfers:
    """Unpacks batches on the way, and changes them with random numbers and by training or evaluation."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert isinstance(batch, Packed)
        x, y = batch.content
        return Packed((x + 0.1 * torch.randn_like(x), y))

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        assert device == torch.device("cpu")
        return [tensor.to(device) for tensor in batch.content]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        rows = len(x) if self.trainer.training else len(x) - 1 - dataloader_idx
        return [x[:rows] * 2, y[:rows]]


class Evaluates(Small):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self(batch[0]).square().mean(), batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Data(Transfers):
    """Makes the loaders in ``setup``, packs the batches, and unpacks them on the way."""

    stages: tuple[str, ...] = ()

    def prepare_data(self) -> None:
        self.stages += ("prepare",)

    def setup(self, stage: str) -> None:
        self.stages += (stage,)
        default = torch.utils.data.default_collate
        self.make = lambda rows: make_loader(rows, collate_fn=lambda batch: Packed(tuple(default(batch))))

    def train_dataloader(self) -> Any:
        return self.make(20)

    def val_dataloader(self) -> Any:
        return [self.make(11), self.make(8)]

    def predict_dataloader(self) -> Any:
        return self.make(13)

    def teardown(self, stage: str) -> None:
        self.stages += (f"end of {getattr(stage, 'value', stage)}",)


@compat(
    "LightningModule hook",
    "transfer_batch_to_device; on_before_batch_transfer; on_after_batch_transfer; train_dataloader; val_dataloader; "
    "predict_dataloader; prepare_data",
)
@compat(
    "LightningDataModule",
    "transfer_batch_to_device; on_before_batch_transfer; on_after_batch_transfer; train_dataloader; val_dataloader; "
    "predict_dataloader; prepare_data; setup; teardown",
)
@pytest.mark.parametrize("owner", ["module", "datamodule"])
def test_batches_from_loaders_to_steps(owner: str) -> None:
    def act(kind: str) -> Any:
        has_data = owner == "datamodule"
        make = Evaluates if has_data else type("Both", (Data, Evaluates), {})
        data: Any = type("DataOf", (Data, L.LightningDataModule), {})() if has_data else None
        run = fit(kind, make, fit_options={"datamodule": data}, seed=1)
        predictions = run.trainer.predict(run.module, datamodule=data)
        return run.results, predictions, (data or run.module).stages

    assert both(act)[2] == ("prepare", "fit", "end of fit", "prepare", "predict", "end of predict")


# --- models and callbacks that hooks make ------------------------------------------------------------------------


@compat("LightningModule hook", "configure_model; setup")
def test_models_made_in_hooks() -> None:
    """The head in ``setup``, more blocks in ``configure_model``, a part that is frozen when ``fit`` starts."""

    class Late(Small):
        def __init__(self) -> None:
            super().__init__()
            del self.head
            self.more: Any = None

        def setup(self, stage: str) -> None:
            torch.manual_seed(5)
            self.head = nn.Linear(6, 3)

        def configure_model(self) -> None:
            if self.more is None:
                self.more = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))

        def on_fit_start(self) -> None:
            self.more[0].requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            for block in self.more:
                x = x + block(x)
            return self.head(x)

    _, ours = compare(Late, max_epochs=2)
    assert ours.module.more[1][0].weight.grad is not None
    assert ours.module.more[0][0].weight.grad is None


@compat("LightningModule hook", "configure_sharded_model")
def test_the_old_name_of_configure_model() -> None:
    class Late(Small):
        def configure_sharded_model(self) -> None:
            torch.nn.init.constant_(self.head.bias, 0.5)

    with pytest.warns(DeprecationWarning, match="configure_sharded_model"):
        compare(Late)


# --- hooks that are no methods of the class ----------------------------------------------------------------------


@compat("LightningModule hook", "hooks set on the instance")
def test_hooks_set_on_the_instance() -> None:
    def make() -> Any:
        module = Small()
        module.calls = calls = []
        for name in ("on_fit_start", "on_train_start", "on_train_epoch_end", "on_after_backward", "teardown"):
            setattr(module, name, lambda *args, _name=name, **kwargs: calls.append(_name))
        module.on_before_optimizer_step = lambda optimizer: module.head.weight.grad.mul_(3)
        module.on_train_batch_start = lambda batch, batch_idx: (
            -1 if batch_idx == 2 and module.current_epoch == 0 else None
        )
        module.optimizer_step = lambda epoch, batch_idx, optimizer, closure: optimizer.step(closure=closure)
        module.configure_gradient_clipping = lambda optimizer, *args, **kwargs: module.clip_gradients(optimizer, 0.5)
        module.configure_optimizers = lambda: torch.optim.Adagrad(module.parameters(), lr=0.05, eps=1e-4)
        module.on_after_batch_transfer = lambda batch, dataloader_idx: [batch[0] * 2, batch[1]]
        module.validation_step = lambda batch, batch_idx: module.log("val", module.loss(batch))
        module.train_dataloader = make_loader
        module.val_dataloader = lambda: make_loader(10)
        return module

    def act(kind: str) -> Any:
        run = fit(kind, make, max_epochs=2)
        run.assert_moved()
        return run.results, run.module.calls

    results, calls = both(act)
    assert calls.count("on_after_backward") == 5, "an epoch was cut short"
    assert "val" in results["metrics"]


# --- checkpoints -------------------------------------------------------------------------------------------------


class Counts(L.Callback):
    """A callback with a state, and hooks that add to the checkpoint."""

    def __init__(self) -> None:
        self.num_batches = 0

    @property
    def state_key(self) -> str:
        return "counts"

    def on_train_batch_end(self, *args: Any) -> None:
        self.num_batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict["num_batches"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["norm"] = pl_module.head.weight.norm().item()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.norm = checkpoint["norm"]


class Position(L.LightningDataModule):
    """Has a state in checkpoints."""

    position = 0

    def train_dataloader(self) -> Any:
        self.position += 1
        return make_loader()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = 100 + state_dict["position"]


@compat("LightningModule hook", "on_save_checkpoint; on_load_checkpoint")
@compat("Callback hook", "on_save_checkpoint; on_load_checkpoint; state_dict; load_state_dict; state_key")
@compat("LightningDataModule", "state_dict; load_state_dict")
def test_what_hooks_put_into_checkpoints(tmp_path: Path) -> None:
    """Written here and read by plain Lightning, and the other way round: the same file, and the same run after it."""
    reader_of = dict(zip(KINDS, reversed(KINDS), strict=True))

    class Saves(Small):
        seen: Any = None

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"epoch": self.current_epoch, "bias": self.head.bias.detach().clone()}
            checkpoint["state_dict"]["head.bias"] = torch.zeros(3)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint["mine"]
            checkpoint["state_dict"]["head.bias"] = checkpoint["mine"]["bias"]

    def act(writer: str) -> Any:
        path, first = tmp_path / f"{writer}.ckpt", make_trainer(writer, callbacks=[Counts()])
        first.fit(Saves(), datamodule=Position())
        first.save_checkpoint(path)
        counts, data = Counts(), Position()
        options = {"datamodule": data, "ckpt_path": path}
        run = fit(reader_of[writer], Saves, callbacks=[counts], fit_options=options, max_epochs=2)
        saved = {**torch.load(path, weights_only=False), "pytorch-lightning_version": None}
        return counts.num_batches, data.position, counts.norm, run.module.seen, run.results, saved

    assert both(act)[:2] == (6, 102)
