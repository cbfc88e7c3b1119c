"""Arguments of the Trainer around the loops: what it is made of, what it writes and shows, switches, errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_roundpipe import RoundPipeStrategy
from tests.support.rows import compat


@pytest.fixture
def learner(small: Any) -> Callable[..., Any]:
    """Makes a module with hyperparameters that logs and validates."""

    class Learner(small):
        def __init__(self, width: int = 6) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.seen: set[Any] = set()

        def look(self) -> None:
            """What a subclass looks at in its step."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.look()
            loss = self.loss(batch)
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.look()
            self.log("val", self.loss(batch), prog_bar=True)

    return Learner


# --- accelerator, devices, strategy, nodes --------------------------------------------------------------------------


@compat("Trainer argument", "accelerator")
@compat("Trainer argument", "strategy")
@compat("Trainer argument", "devices")
@pytest.mark.parametrize(
    ("accelerator", "devices"), [("cpu", 1), ("roundpipe", 3), ("auto", "2"), ("roundpipe", [0, 1])]
)
def test_every_way_to_name_devices_trains(
    small: Any, make_loader: Any, make_trainer: Any, assert_alike: Any, accelerator: str, devices: Any
) -> None:
    if accelerator != "cpu" and torch.cuda.is_available():
        pytest.skip("about machines without a GPU: these accelerators mean GPUs where there are some")
    trainers = [
        make_trainer("roundpipe", strategy="roundpipe", accelerator=accelerator, devices=devices),
        make_trainer("plain"),
    ]
    weights = []
    for trainer in trainers:
        module = small()
        trainer.fit(module, make_loader())
        weights.append(dict(module.state_dict()))
        assert (trainer.world_size, trainer.num_nodes, trainer.global_rank) == (1, 1, 0)
    assert isinstance(trainers[0].strategy, RoundPipeStrategy)
    assert len(trainers[0].strategy.pool) == (len(devices) if isinstance(devices, list) else int(devices))
    assert_alike(*weights)


@compat("Trainer argument", "num_nodes", "refused", "An error when the Trainer is made, for more than one node.")
@compat("Misuse", "several nodes", "refused", "An error when the Trainer is made: use num_nodes=1.")
def test_several_nodes_are_refused(make_trainer: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"one node, but num_nodes=2: use num_nodes=1"):
        make_trainer(num_nodes=2)
    assert make_trainer(num_nodes=1).num_nodes == 1


@compat("Misuse", "accelerators that are not there", "refused", "Lightning's own error when the Trainer is made.")
@pytest.mark.parametrize("accelerator", ["tpu", "mps", "hpu", "cuda"])
def test_accelerators_that_are_not_there(make_trainer: Any, accelerator: str) -> None:
    if accelerator == "cuda" and torch.cuda.is_available():
        pytest.skip("about machines without a GPU")
    messages = []
    for kind in ("plain", "roundpipe"):
        with pytest.raises((ModuleNotFoundError, MisconfigurationException, ValueError)) as caught:
            make_trainer(kind, accelerator=accelerator)
        messages.append((caught.type, str(caught.value)))
    assert messages[0] == messages[1]


# --- what is written and shown ----------------------------------------------------------------------------------------


class Memory(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append({"step": step, **metrics})

    def log_hyperparams(self, params: Any) -> None:
        self.calls.append({"hyperparameters": dict(params)})


@compat("Trainer argument", "logger")
@compat("Trainer argument", "log_every_n_steps")
@pytest.mark.parametrize("every", [1, 2])
def test_loggers_are_called_at_the_same_steps(
    learner: Any, fit_both: Any, make_loader: Any, assert_alike: Any, every: int
) -> None:
    memories = [[Memory(), Memory()] for _ in range(2)]
    fit_both(
        learner,
        val_loader=make_loader(10, 4),
        max_epochs=2,
        log_every_n_steps=every,
        plain={"logger": memories[0]},
        ours={"logger": memories[1]},
    )
    plain, ours = ([memory.calls for memory in pair] for pair in memories)
    assert [call["step"] for call in plain[0] if "loss" in call] == list(range(every - 1, 6, every))
    assert_alike(ours, plain)


@compat("Trainer argument", "enable_autolog_hparams")
@pytest.mark.parametrize("enabled", [True, False])
def test_hyperparameters_are_logged_once(learner: Any, make_trainer: Any, make_loader: Any, enabled: bool) -> None:
    calls = []
    for kind in ("plain", "roundpipe"):
        memory = Memory()
        make_trainer(kind, logger=memory, enable_autolog_hparams=enabled).fit(learner(width=6), make_loader())
        calls.append([call for call in memory.calls if "hyperparameters" in call])
    assert calls[0] == calls[1] == ([{"hyperparameters": {"width": 6}}] if enabled else [])


@compat("Trainer argument", "default_root_dir")
@compat("Trainer argument", "enable_checkpointing")
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX` has been removed")
@pytest.mark.parametrize("checkpoints", [True, False])
def test_the_same_files_in_the_same_folder(
    learner: Any, make_trainer: Any, make_loader: Any, tmp_path: Path, checkpoints: bool
) -> None:
    written = []
    for kind in ("plain", "roundpipe"):
        folder = tmp_path / kind
        trainer = make_trainer(
            kind,
            default_root_dir=folder,
            logger=CSVLogger(folder) if checkpoints else True,
            enable_checkpointing=checkpoints,
        )
        trainer.fit(learner(), make_loader())
        files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        # The name of a TensorBoard file holds the time, the host and the process.
        written.append([re.sub(r"(tfevents\.).*", r"\1", file) for file in files])
    assert written[0] == written[1]
    assert any(file.endswith(".ckpt") for file in written[0]) == checkpoints
    assert len(written[0]) >= 2


class QuietBar(TQDMProgressBar):
    """Notes what a progress bar would show."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.shown.append({"n": self.train_progress_bar.n, "total": self.total_train_batches})
        self.shown.append(self.get_metrics(trainer, module))


@compat("Trainer argument", "enable_progress_bar")
@compat("Trainer argument", "enable_model_summary")
@compat("Trainer argument", "callbacks")
def test_progress_bar_and_summary_are_those_of_plain(
    learner: Any, make_trainer: Any, make_loader: Any, assert_alike: Any
) -> None:
    shown, order, summaries = [], [], []
    for kind in ("plain", "roundpipe"):
        bar, own = QuietBar(), L.Callback()
        trainer = make_trainer(kind, callbacks=[bar, own], enable_progress_bar=True, enable_model_summary=True)
        trainer.fit(learner(), make_loader(), make_loader(10, 4))
        shown.append(bar.shown)
        order.append([type(callback) for callback in trainer.callbacks])
        (summary,) = [callback for callback in trainer.callbacks if isinstance(callback, ModelSummary)]
        summaries.append(str(summary._summary(trainer, trainer.lightning_module)))
        assert own in trainer.callbacks
    assert {"n", "total"} == set(shown[0][0])
    assert {"loss"} <= set(shown[0][1])
    assert_alike(shown[1], shown[0])
    assert order[0] == order[1]
    assert summaries[0] == summaries[1]
    off = make_trainer()
    assert off.progress_bar_callback is None
    assert not [callback for callback in off.callbacks if isinstance(callback, ModelSummary)]


@compat("Trainer argument", "model_registry")
def test_weights_come_from_the_registry(
    learner: Any,
    make_trainer: Any,
    make_loader: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    assert_alike: Any,
) -> None:
    """With a stand-in for the package ``litmodels``, which downloads."""
    first = make_trainer("plain")
    first.fit(learner(), make_loader())
    asked: list[Any] = []

    def download_model(name: str, download_dir: str) -> list[str]:
        asked.append(name)
        first.save_checkpoint(Path(download_dir) / "model.ckpt")
        return ["model.ckpt"]

    package = ModuleType("litmodels")
    package.__spec__ = ModuleSpec("litmodels", None)
    vars(package)["download_model"] = download_model
    monkeypatch.setitem(sys.modules, "litmodels", package)
    for place in ("trainer.trainer", "utilities.model_registry"):
        monkeypatch.setattr(f"lightning.pytorch.{place}.module_available", lambda name: True)
    weights = []
    for kind in ("plain", "roundpipe"):
        module = learner()
        trainer = make_trainer(kind, model_registry="team/model", default_root_dir=tmp_path / kind, max_epochs=2)
        trainer.fit(module, make_loader(), ckpt_path="registry", weights_only=False)
        assert trainer.global_step == 6
        weights.append(dict(module.state_dict()))
    assert asked == ["team/model", "team/model"]
    assert_alike(weights[1], weights[0])


# --- switches of torch ------------------------------------------------------------------------------------------------


@compat("Trainer argument", "deterministic")
@compat("Trainer argument", "benchmark")
@pytest.mark.filterwarnings("ignore:You passed `deterministic=True` and `benchmark=True`")
@pytest.mark.parametrize(("deterministic", "benchmark"), [(True, False), ("warn", True), (False, True)])
def test_steps_see_the_switches_of_torch(
    learner: Any, fit_both: Any, assert_same_training: Any, deterministic: Any, benchmark: bool
) -> None:
    class Looks(learner):
        def look(self) -> None:
            is_on, only_warns = (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            self.seen.add((is_on, only_warns, torch.backends.cudnn.benchmark))

    plain, ours = fit_both(Looks, deterministic=deterministic, benchmark=benchmark)
    assert plain.module.seen == {(bool(deterministic), deterministic == "warn", benchmark)}
    assert ours.module.seen == plain.module.seen
    assert_same_training(plain, ours)


@compat("Trainer argument", "deterministic")
def test_a_nondeterministic_operator_in_a_unit_is_an_error(small: Any, make_trainer: Any, make_loader: Any) -> None:
    class Puts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.put(torch.tensor([0]), x.new_zeros(1))

    for kind in ("plain", "roundpipe"):
        module = small()
        module.body[1][1] = Puts()
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            make_trainer(kind, deterministic=True).fit(module, make_loader())


# --- finding what is wrong --------------------------------------------------------------------------------------------


class Root(nn.Module):
    """Its result is a number, its gradient is none: 0 times infinity."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.0 * torch.sqrt(x - x)  # the line that is to be named


@compat("Trainer argument", "detect_anomaly")
@pytest.mark.parametrize("place", ["first unit", "last unit", "user code"])
def test_the_operator_and_the_line_of_a_nan_are_named(
    small: Any, make_trainer: Any, make_loader: Any, place: str
) -> None:
    """Also where a unit is run again for the backward: the first unit is far in front of the fused stage."""
    seen: set[bool] = set()

    class Rooted(small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.add(torch.is_anomaly_enabled())
            x = self.body(batch[0])
            return nn.functional.cross_entropy(self.head(Root()(x) if place == "user code" else x), batch[1])

    for kind in ("plain", "roundpipe"):
        module = Rooted()
        if place != "user code":
            module.body[0 if place == "first unit" else 3].append(Root())
        with (
            pytest.warns(UserWarning, match=r"Error detected in SqrtBackward0") as caught,
            pytest.raises(RuntimeError, match=r"'SqrtBackward0' returned nan values in its 0th output"),
        ):
            make_trainer(kind, detect_anomaly=True).fit(module, make_loader())
        assert any("# the line that is to be named" in str(warning.message) for warning in caught)
        assert seen == {True}
        assert not torch.is_anomaly_enabled()


@compat("Trainer argument", "detect_anomaly")
def test_without_the_flag_nothing_is_detected(small: Any, make_trainer: Any, make_loader: Any) -> None:
    module = small()
    module.body[0].append(Root())
    make_trainer(detect_anomaly=False).fit(module, make_loader())
    assert module.body[0][0].weight.isnan().all()


# --- modes of torch around a run --------------------------------------------------------------------------------------


class FunctionMode(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "FunctionMode": FunctionMode,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
}


@compat(
    "Misuse",
    "modes of torch around a run (FlopCounterMode, save_on_cpu)",
    "refused",
    "An error before the run: they hold for one thread. Enter them inside modules.",
)
@pytest.mark.parametrize("name", MODES)
def test_modes_of_one_thread_are_refused(small: Any, make_trainer: Any, make_loader: Any, name: str) -> None:
    trainer = make_trainer()
    with pytest.raises(MisconfigurationException, match=rf"inside \w*{name}, .*thread"), MODES[name]():
        trainer.fit(small(), make_loader())
    assert trainer.global_step == 0
    trainer.fit(small(), make_loader())
    assert trainer.global_step == 3


def test_a_default_device_and_modes_in_steps_are_fine(small: Any, fit_both: Any, assert_same_training: Any) -> None:
    class Counts(small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with FunctionMode():
                return self.loss(batch)

    with torch.device("cpu"):
        plain, ours = fit_both(Counts)
    assert_same_training(plain, ours)


# --- evaluation -------------------------------------------------------------------------------------------------------


@compat("Trainer argument", "inference_mode")
@pytest.mark.parametrize("inference_mode", [True, False])
def test_modes_and_results_of_evaluation(
    small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, inference_mode: bool
) -> None:
    """In the steps, in their units, and in the tensors that come out; gradients can be had without the mode."""

    class Probe(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
            return x

    class Predicts(small):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.loss(batch))
            if not inference_mode:
                with torch.enable_grad():
                    x = batch[0].clone().requires_grad_()
                    (gradient,) = torch.autograd.grad(x.square().sum(), x)
                self.log("gradient", gradient.mean())

    found = []
    for kind in ("plain", "roundpipe"):
        seen: set[Any] = set()
        module = Predicts()
        module.body[2].append(Probe())
        trainer = make_trainer(kind, inference_mode=inference_mode)
        predictions = trainer.predict(module, make_loader())
        assert {p.is_inference() for p in predictions} == {inference_mode}
        found.append({"predictions": predictions, "tested": trainer.test(module, make_loader(), verbose=False)})
        assert seen == {(inference_mode, False)}
    assert_alike(found[1], found[0])
