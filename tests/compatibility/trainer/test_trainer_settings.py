"""Arguments of the Trainer around the loops: what it is made of, what it writes, switches, errors."""

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
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_utilities.core import rank_zero as rank_zero_of_utilities
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_roundpipe import RoundPipeStrategy
from tests.compatibility.versions import need
from tests.support.models import Logs
from tests.support.parity import both, both_refuse, compare, fit, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small

# --- accelerator, devices, strategy, nodes --------------------------------------------------------------------------


@compat("Trainer argument", "accelerator; strategy; devices")
@pytest.mark.parametrize(("accelerator", "devices"), [("cpu", 1), ("auto", "2"), ("roundpipe", [0, 1])])
def test_every_way_to_name_devices_trains(accelerator: str, devices: Any) -> None:
    if accelerator != "cpu" and torch.cuda.is_available():
        pytest.skip("about machines without a GPU: these accelerators mean GPUs where there are some")
    ours = {"strategy": "roundpipe", "accelerator": accelerator, "devices": devices}
    for run in compare(Small, ours=ours):
        assert (run.trainer.world_size, run.trainer.num_nodes, run.trainer.global_rank) == (1, 1, 0)
    assert isinstance(run.trainer.strategy, RoundPipeStrategy)
    assert len(run.trainer.strategy.pool) == (len(devices) if isinstance(devices, list) else int(devices))


@compat("Trainer argument", "num_nodes", note="The processes train together, as with DDP.")
def test_several_nodes_have_a_rank_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainings themselves are in ``tests/ranks``."""
    for only in (rank_zero_only, rank_zero_of_utilities.rank_zero_only):
        monkeypatch.setattr(only, "rank", 0)
    monkeypatch.setenv("NODE_RANK", "1")
    trainer = make_trainer(num_nodes=2)
    assert (trainer.num_nodes, trainer.world_size, trainer.global_rank, trainer.node_rank) == (2, 2, 1, 1)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}
    assert not trainer.is_global_zero
    trainer = make_trainer(num_nodes=2, options={"ranks_per_node": 3})
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank) == (6, 3, 0)


@compat("Misuse", "accelerators that are not there", "refused", "The error comes with the Trainer.")
@pytest.mark.parametrize("accelerator", ["tpu", "mps", "hpu", "cuda"])
def test_accelerators_that_are_not_there(accelerator: str) -> None:
    if accelerator == "cuda" and torch.cuda.is_available():
        pytest.skip("about machines without a GPU")
    errors = (ModuleNotFoundError, MisconfigurationException, ValueError)
    both_refuse(lambda kind: make_trainer(kind, accelerator=accelerator), errors, "")


# --- what is written --------------------------------------------------------------------------------------------------


@compat("Trainer argument", "default_root_dir; enable_checkpointing")
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX` has been removed")
def test_the_same_files_in_the_same_folder(tmp_path: Path) -> None:
    def act(kind: str) -> Any:
        folder = tmp_path / kind
        settings = {"logger": True, "log_every_n_steps": 1, "enable_checkpointing": True}
        trainer = make_trainer(kind, default_root_dir=folder, **settings)
        trainer.fit(Logs(), make_loader())
        files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        # The name of a TensorBoard file holds the time, the host and the process.
        return [re.sub(r"(tfevents\.).*", r"\1", file) for file in files]

    written = both(act)
    assert any(file.endswith(".ckpt") for file in written)
    assert len(written) >= 3


@compat("Trainer argument", "model_registry")
def test_weights_come_from_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package ``litmodels``, which downloads."""
    need(L.Trainer, "model_registry")
    first = make_trainer("plain")
    first.fit(Logs(), make_loader())
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

    def act(kind: str) -> Any:
        settings = {"model_registry": "team/model", "default_root_dir": tmp_path / kind, "max_epochs": 2}
        options = {"ckpt_path": "registry", "weights_only": False}
        return fit(kind, Logs, make_loader(), fit_options=options, **settings).results

    assert both(act)["progress"] == (2, 6)
    assert asked == ["team/model", "team/model"]


# --- switches of torch ------------------------------------------------------------------------------------------------


@compat("Trainer argument", "deterministic; benchmark")
@pytest.mark.filterwarnings("ignore:You passed `deterministic=True` and `benchmark=True`")
@pytest.mark.parametrize(("deterministic", "is_tuned"), [(True, False), ("warn", True)])
def test_steps_see_the_switches_of_torch(deterministic: Any, is_tuned: bool) -> None:
    seen: set[Any] = set()

    class Looks(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
            seen.add((torch.are_deterministic_algorithms_enabled(), only_warns, torch.backends.cudnn.benchmark))
            return self.loss(batch)

    compare(Looks, deterministic=deterministic, benchmark=is_tuned)
    assert seen == {(bool(deterministic), deterministic == "warn", is_tuned)}


@compat("Trainer argument", "deterministic")
def test_a_nondeterministic_operator_in_a_unit_is_an_error() -> None:
    class Puts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.put(torch.tensor([0]), x.new_zeros(1))

    module = Small()
    module.body[1][1] = Puts()
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        make_trainer(deterministic=True).fit(module, make_loader())


# --- finding what is wrong --------------------------------------------------------------------------------------------


class Root(nn.Module):
    """Its result is a number, its gradient is none: 0 times infinity."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.0 * torch.sqrt(x - x)  # the line that is to be named


@compat("Trainer argument", "detect_anomaly")
@pytest.mark.parametrize("place", ["first unit", "last unit", "user code"])
def test_the_operator_and_the_line_of_a_nan_are_named(place: str) -> None:
    """Also where a unit is run again for the backward: the first unit is far in front of the fused stage."""
    seen: set[bool] = set()

    class Rooted(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.add(torch.is_anomaly_enabled())
            x = self.body(batch[0])
            return nn.functional.cross_entropy(self.head(Root()(x) if place == "user code" else x), batch[1])

    module = Rooted()
    if place != "user code":
        module.body[0 if place == "first unit" else 3].append(Root())
    with (
        pytest.warns(UserWarning, match=r"Error detected in SqrtBackward0") as caught,
        pytest.raises(RuntimeError, match=r"'SqrtBackward0' returned nan values in its 0th output"),
    ):
        make_trainer(detect_anomaly=True).fit(module, make_loader())
    assert any("# the line that is to be named" in str(warning.message) for warning in caught)
    assert seen == {True}
    assert not torch.is_anomaly_enabled()


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
    "Enter them inside modules.",
)
@pytest.mark.parametrize("name", MODES)
def test_modes_of_one_thread_are_refused(name: str) -> None:
    trainer = make_trainer()
    with pytest.raises(MisconfigurationException, match=rf"inside \w*{name}, .*thread"), MODES[name]():
        trainer.fit(Small(), make_loader())
    assert trainer.global_step == 0
    trainer.fit(Small(), make_loader())
    assert trainer.global_step == 3


def test_a_default_device_and_modes_in_steps_are_fine() -> None:
    class Counts(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with FunctionMode():
                return self.loss(batch)

    with torch.device("cpu"):
        compare(Counts)


# --- evaluation -------------------------------------------------------------------------------------------------------


@compat("Trainer argument", "inference_mode")
@pytest.mark.parametrize("inference_mode", [True, False])
def test_modes_and_results_of_evaluation(inference_mode: bool) -> None:
    """In the steps, in their units, and in the tensors that come out; gradients can be had without the mode."""
    seen: set[Any] = set()

    class Probe(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
            return x

    class Predicts(Small):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.loss(batch))
            if not inference_mode:
                with torch.enable_grad():
                    x = batch[0].clone().requires_grad_()
                    (gradient,) = torch.autograd.grad(x.square().sum(), x)
                self.log("gradient", gradient.mean())

    def act(kind: str) -> Any:
        seen.clear()
        module, trainer = Predicts(), make_trainer(kind, inference_mode=inference_mode)
        module.body[2].append(Probe())
        predictions = trainer.predict(module, make_loader())
        assert {p.is_inference() for p in predictions} == {inference_mode}
        found = predictions, trainer.test(module, make_loader(), verbose=False)
        assert seen == {(inference_mode, False)}
        return found

    both(act)
