"""Precision: every value of ``Trainer(precision=...)``, Lightning's plugins given as objects, plugins of the user.

What mixed precision is equal to is shown in tests/parity/test_parity_precision.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import (
    DoublePrecision,
    MixedPrecision,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compatibility.versions import known
from tests.support.models import AllSteps, Logs
from tests.support.parity import KINDS, Run, both, compare, fit, make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import Small

# Splitting a batch changes the order of sums only, so a tolerance is what the order is worth in the format. float16 has
# 11 significant bits, bfloat16 8: one rounding is 2**-12 or 2**-9 relative, and a few of them meet in a weight. In
# mixed precision the weights are float32, and a gradient of rounding size moves them by lr = 0.1 of it.
TOLERANCES: dict[str, dict[str, float]] = {
    "64-true": {"rtol": 1e-9, "atol": 1e-12},
    "16-true": {"rtol": 2**-10, "atol": 2**-10},
    "bf16-true": {"rtol": 2**-7, "atol": 2**-7},
    "bf16-mixed": {"rtol": 2**-7, "atol": 0.1 * 2**-7},
}


class Looks(AllSteps):
    """Notes which numbers its steps see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        cast = str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else None
        dtypes = [str(dtype) for dtype in (x.dtype, logits.dtype, torch.get_default_dtype())]
        self.seen.add((str(self.trainer.state.stage), *dtypes, cast))
        return logits


def evaluated(run: Run) -> Any:
    tested = run.trainer.test(run.module, make_loader(10, 4), verbose=False)
    return tested, run.trainer.predict(run.module, make_loader(10, 4))


def compared(expected: str, **settings: Any) -> set[Any]:
    """Trains, validates, tests and predicts in both ways; gives what steps have seen."""
    runs = compare(Looks, None, make_loader(10, 4), also=evaluated, tolerances=TOLERANCES[expected], **settings)
    plain, ours = runs
    assert {run.trainer.precision for run in runs} == {expected}
    assert type(ours.trainer.precision_plugin) is type(plain.trainer.precision_plugin)
    assert ours.module.seen == plain.module.seen
    assert len({stage for stage, *_ in ours.module.seen}) == 4
    assert torch.get_default_dtype() == torch.float32
    return ours.module.seen


VALUES = {**{name: name for name in ("64-true", "16-true", "bf16-true", "bf16-mixed")}, "16-mixed": "bf16-mixed"}


@compat("Trainer argument", "precision")
@compat("Precision", "32-true; 64-true; 16-true; bf16-true; bf16-mixed; 16-mixed")
@compat("Plugin", "HalfPrecision")
@pytest.mark.filterwarnings("ignore:You passed `Trainer\\(accelerator='cpu', precision='16-mixed'\\)`")
@pytest.mark.parametrize("value", VALUES)
def test_values_of_precision(value: str) -> None:
    """32-true is that of almost all tests."""
    compared(VALUES[value], precision=value)


@compat("Plugin", "DoublePrecision")
def test_a_plugin_given_to_the_strategy() -> None:
    """As ``precision="64-true"`` in plain Lightning."""
    ours = {"options": {"precision_plugin": DoublePrecision()}}
    compared("64-true", plain={"precision": "64-true"}, ours=ours)


# --- plugins of the user ----------------------------------------------------------------------------------------------


class Noting(Precision):
    """Overrides everything, notes every call, and changes what is computed wherever it can."""

    precision = "32-true"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.loaded: Any = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        self.calls.append("convert_module")
        return module.double()

    def convert_input(self, data: Any) -> Any:
        self.calls.append("convert_input")
        return [data[0].double() * 2, data[1]]

    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        self.calls.append("connect")
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = 0.05
        return super().connect(model, optimizers, lr_schedulers)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        self.calls.append("forward_context")
        yield
        self.calls.append("forward_context left")

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        self.calls.append("train_step_context")
        with self.forward_context():
            yield

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        self.calls.append("val_step_context")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            yield

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        self.calls.append("pre_backward")
        return super().pre_backward(tensor, module) * 3.0

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append("backward")
        super().backward(tensor * 2.0, model, optimizer, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        self.calls.append("post_backward")
        return super().post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        self.calls.append("optimizer_step")
        return super().optimizer_step(optimizer, model, closure, **kwargs)

    def clip_gradients(self, optimizer: Any, clip_val: Any = 0.0, *args: Any, **kwargs: Any) -> None:
        self.calls.append("clip_gradients")
        super().clip_gradients(optimizer, clip_val / 2, *args, **kwargs)

    def main_params(self, optimizer: Any) -> Any:
        self.calls.append("main_params")
        return super().main_params(optimizer)

    def state_dict(self) -> dict[str, Any]:
        self.calls.append("state_dict")
        return {"calls": len(self.calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        self.loaded = state_dict

    def teardown(self) -> None:
        self.calls.append("teardown")


@compat("Plugin", "Precision")
@compat("Trainer argument", "plugins")
def test_every_hook_of_an_own_plugin_is_honoured(tmp_path: Path) -> None:
    class Learner(Logs):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert torch.is_autocast_enabled("cpu")  # float64 is not cast
            super().validation_step(batch, batch_idx)

    def act(kind: str) -> Any:
        plugin, path = Noting(), tmp_path / f"{kind}.ckpt"
        first = fit(kind, Learner, make_loader(), make_loader(10, 4), plugins=[plugin], gradient_clip_val=0.1)
        first.trainer.save_checkpoint(path)
        options = {"ckpt_path": path, **known(L.Trainer.fit, weights_only=False)}
        resumed = fit(kind, Learner, make_loader(), fit_options=options, plugins=[plugin], max_epochs=2)
        return first.results, resumed.results, plugin.calls, plugin.loaded

    first, _, calls, _ = both(act, **TOLERANCES["64-true"])
    hooks = {name for name, value in vars(Noting).items() if callable(value) and not name.startswith("_")}
    assert set(calls) == hooks | {"forward_context left"}
    assert first["state"]["head.weight"].dtype == torch.float64


class Wraps(Precision):
    """Gives Lightning another module to train."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return nn.Sequential(module)


@compat(
    "Misuse",
    "Precision.convert_module that returns another module",
    "refused",
    "Change the module in place, and return it.",
)
def test_a_module_that_is_replaced_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"Wraps\.convert_module returned a Sequential.*in place"):
        make_trainer(plugins=[Wraps()]).fit(Small(), make_loader())


class OwnMixed(MixedPrecision):
    """Mixed precision that leaves the validation alone."""

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        with torch.autocast("cpu", enabled=False):
            yield


@compat("Plugin", "MixedPrecision")
def test_an_own_mixed_precision_is_honoured() -> None:
    own = [{"plugins": [OwnMixed("bf16-mixed", "cpu")]} for _ in KINDS]
    seen = compared("bf16-mixed", plain=own[0], ours=own[1])
    assert {stage for stage, *_, cast in seen if cast is None} == {str(RunningStage.VALIDATING)}


def test_an_own_mixed_precision_for_other_devices_is_refused() -> None:
    """Lightning's own class is replaced by what Lightning would have made; one of the user cannot be."""
    assert make_trainer(plugins=[MixedPrecision("bf16-mixed", "cuda")]).precision_plugin.device == "cpu"
    with pytest.raises(MisconfigurationException, match=r"OwnMixed is autocast for 'cuda'.*device='cpu'"):
        make_trainer(plugins=[OwnMixed("bf16-mixed", "cuda")])


class Changes(TorchDispatchMode):
    """Would do something to every operator."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class InMode(Precision):
    """Runs steps inside a mode of torch, which is one of the calling thread."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with Changes():
            yield


@compat(
    "Misuse",
    "Precision.forward_context that enters a mode of torch",
    "refused",
    "Micro-batches run on other threads, which would not be in the mode.",
)
def test_a_context_that_micro_batches_would_not_see_is_refused() -> None:
    trainer = make_trainer(plugins=[InMode()])
    with pytest.raises(MisconfigurationException, match=r"inside Changes, which holds for the calling thread alone"):
        trainer.fit(Small(), make_loader())
    assert trainer.global_step == 0
