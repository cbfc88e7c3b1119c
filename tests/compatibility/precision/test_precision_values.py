"""Precision: every value of ``Trainer(precision=...)``, Lightning's plugins given as objects, plugins of the user.

How close mixed precision is to plain Lightning is shown in tests/parity/test_parity_precision.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.rows import compat

# Splitting a batch changes the order of sums only, so a tolerance is what the order is worth in the format. float16 has
# 11 significant bits, bfloat16 8: one rounding is 2**-12 or 2**-9 relative, and a few of them meet in a weight. In
# mixed precision the weights are float32, and a gradient of rounding size moves them by lr = 0.1 of it.
TOLERANCES: dict[str, dict[str, float]] = {
    "32-true": {"rtol": 1e-4, "atol": 1e-6},
    "64-true": {"rtol": 1e-9, "atol": 1e-12},
    "16-true": {"rtol": 2**-10, "atol": 2**-10},
    "bf16-true": {"rtol": 2**-7, "atol": 2**-7},
    "bf16-mixed": {"rtol": 2**-7, "atol": 0.1 * 2**-7},
}


@pytest.fixture
def run(small: Any, make_trainer: Any, make_loader: Any) -> Callable[..., Any]:
    """Trains, validates, tests and predicts; gives what steps saw, the results, the module and the trainer."""

    class Looks(small):
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[Any] = set()

        def look(self, what: str, x: Tensor, logits: Tensor) -> None:
            cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            self.seen.add((what, x.dtype, logits.dtype, torch.get_default_dtype(), cast))

        def step(self, what: str, batch: Any) -> Tensor:
            x, y = batch
            logits = self(x)
            self.look(what, x, logits)
            return nn.functional.cross_entropy(logits, y)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.step("training", batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.step("validation", batch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.step("test", batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self(batch[0])
            self.look("predict", batch[0], logits)
            return logits

    def train(kind: str, **settings: Any) -> Any:
        module, trainer = Looks(), make_trainer(kind, **settings)
        trainer.fit(module, make_loader(), make_loader(10, 4))
        found = {
            "weights": dict(module.state_dict()),
            "optimizer": trainer.optimizers[0].state_dict(),
            "fitted": dict(trainer.callback_metrics),
            "tested": trainer.test(module, make_loader(10, 4), verbose=False),
            "predicted": trainer.predict(module, make_loader(10, 4)),
        }
        return found, module.seen, trainer

    return train


def dtypes_in(value: Any) -> list[Any]:
    """Of every tensor in a nesting, in order."""
    if isinstance(value, dict):
        return [dtype for entry in value.values() for dtype in dtypes_in(entry)]
    if isinstance(value, (list, tuple)):
        return [dtype for entry in value for dtype in dtypes_in(entry)]
    return [value.dtype] if isinstance(value, Tensor) else []


@pytest.fixture
def assert_as_in_plain(run: Any, assert_alike: Any) -> Callable[..., Any]:
    """Runs both with the same settings, which must come to ``precision``, and compares all they give."""

    def check(precision: str, make_settings: Callable[[], dict[str, Any]]) -> Any:
        (plain, plain_seen, plain_trainer), (ours, seen, trainer) = (
            run(kind, **make_settings()) for kind in ("plain", "roundpipe")
        )
        assert trainer.precision == plain_trainer.precision == precision
        assert type(trainer.precision_plugin) is type(plain_trainer.precision_plugin)
        assert seen == plain_seen
        assert {what for what, *_ in seen} == {"training", "validation", "test", "predict"}
        assert dtypes_in(ours) == dtypes_in(plain)
        assert_alike(ours, plain, **TOLERANCES[precision])
        return seen

    return check


VALUES: list[Any] = [
    pytest.param("32-true", "32-true", marks=compat("Precision", "32-true")),
    pytest.param("64-true", "64-true", marks=compat("Precision", "64-true")),
    pytest.param("16-true", "16-true", marks=compat("Precision", "16-true")),
    pytest.param("bf16-true", "bf16-true", marks=compat("Precision", "bf16-true")),
    pytest.param("bf16-mixed", "bf16-mixed", marks=compat("Precision", "bf16-mixed")),
    pytest.param("16-mixed", "bf16-mixed", marks=compat("Precision", "16-mixed")),
]


@compat("Trainer argument", "precision")
@pytest.mark.filterwarnings("ignore:You passed `Trainer\\(accelerator='cpu', precision='16-mixed'\\)`")
@pytest.mark.parametrize(("value", "precision"), VALUES)
def test_values_of_precision(assert_as_in_plain: Any, value: Any, precision: str) -> None:
    assert_as_in_plain(precision, lambda: {"precision": value})
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.filterwarnings("ignore:.*is supported for historical reasons but its usage is discouraged")
@pytest.mark.filterwarnings("ignore:You passed `Trainer\\(accelerator='cpu', precision='16-mixed'\\)`")
@pytest.mark.parametrize("value", [16, "16", 32, "32", 64, "64", "bf16", None])
def test_old_values_of_precision_mean_the_same(make_trainer: Any, value: Any) -> None:
    plain, ours = (make_trainer(kind, precision=value) for kind in ("plain", "roundpipe"))
    assert ours.precision == plain.precision
    assert type(ours.precision_plugin) is type(plain.precision_plugin)


PLUGINS: list[Any] = [
    pytest.param(Precision, "32-true", marks=compat("Plugin", "Precision")),
    pytest.param(DoublePrecision, "64-true", marks=compat("Plugin", "DoublePrecision")),
    pytest.param(lambda: HalfPrecision("bf16-true"), "bf16-true", marks=compat("Plugin", "HalfPrecision")),
    pytest.param(lambda: MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed", marks=compat("Plugin", "MixedPrecision")),
]


@compat("Trainer argument", "plugins")
@pytest.mark.parametrize(("make", "precision"), PLUGINS)
def test_plugins_given_as_objects(assert_as_in_plain: Any, make: Callable[[], Precision], precision: str) -> None:
    assert_as_in_plain(precision, lambda: {"plugins": make()})


def test_a_plugin_given_to_the_strategy(run: Any, assert_alike: Any) -> None:
    plain, seen, _ = run("plain", precision="64-true")
    ours, our_seen, trainer = run("roundpipe", options={"precision_plugin": DoublePrecision()})
    assert trainer.precision == "64-true"
    assert our_seen == seen
    assert_alike(ours, plain, **TOLERANCES["64-true"])


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_modules_made_by_the_trainer_have_its_dtype(make_trainer: Any, precision: str) -> None:
    dtypes = []
    for kind in ("plain", "roundpipe"):
        with make_trainer(kind, precision=precision).init_module():
            layer = nn.Linear(2, 2)
        dtypes.append((layer.weight.dtype, layer.weight.device))
    assert dtypes[0] == dtypes[1]
    assert dtypes[0][0] != torch.float32


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
def test_every_hook_of_an_own_plugin_is_honoured(
    small: Any, make_trainer: Any, make_loader: Any, assert_alike: Any, tmp_path: Any
) -> None:
    class Learner(small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert torch.is_autocast_enabled("cpu")  # float64 is not cast
            self.log("val", self.loss(batch))

    found, plugins = [], [Noting(), Noting()]
    for kind, plugin in zip(("plain", "roundpipe"), plugins, strict=True):
        module, path = Learner(), tmp_path / f"{kind}.ckpt"
        trainer = make_trainer(kind, plugins=[plugin], gradient_clip_val=0.1)
        trainer.fit(module, make_loader(), make_loader(10, 4))
        trainer.save_checkpoint(path)
        resumed = Learner()
        make_trainer(kind, plugins=[plugin], max_epochs=2).fit(
            resumed, make_loader(), ckpt_path=path, weights_only=False
        )
        found.append([dict(module.state_dict()), dict(resumed.state_dict()), dict(trainer.callback_metrics)])
    assert plugins[1].calls == plugins[0].calls
    assert plugins[1].loaded == plugins[0].loaded
    hooks = {name for name, value in vars(Noting).items() if callable(value) and not name.startswith("_")}
    assert set(plugins[0].calls) == hooks | {"forward_context left"}
    assert found[0][0]["head.weight"].dtype == torch.float64
    assert_alike(found[1], found[0], **TOLERANCES["64-true"])


class Wraps(Precision):
    """Gives Lightning another module to train."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return nn.Sequential(module)


@compat(
    "Misuse",
    "Precision.convert_module that returns another module",
    "refused",
    "An error before training: change the module in place, and return it.",
)
def test_a_module_that_is_replaced_is_refused(small: Any, make_trainer: Any, make_loader: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"Wraps\.convert_module returned a Sequential.*in place"):
        make_trainer(plugins=[Wraps()]).fit(small(), make_loader())


class OwnMixed(MixedPrecision):
    """Mixed precision that leaves the validation alone."""

    @contextmanager
    def val_step_context(self) -> Iterator[None]:
        with torch.autocast("cpu", enabled=False):
            yield


@compat("Plugin", "MixedPrecision")
def test_an_own_mixed_precision_is_honoured(run: Any, assert_alike: Any) -> None:
    (plain, plain_seen, _), (ours, seen, _) = (
        run(kind, plugins=[OwnMixed("bf16-mixed", "cpu")]) for kind in ("plain", "roundpipe")
    )
    assert seen == plain_seen
    assert {(what, cast) for what, *_, cast in seen} == {
        ("training", torch.bfloat16),
        ("validation", None),
        ("test", torch.bfloat16),
        ("predict", torch.bfloat16),
    }
    assert_alike(ours, plain, **TOLERANCES["bf16-mixed"])


def test_an_own_mixed_precision_for_other_devices_is_refused(make_trainer: Any) -> None:
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
    "An error in the first step: micro-batches run on threads of their own, which would not be in the mode.",
)
def test_a_context_that_micro_batches_would_not_see_is_refused(small: Any, make_trainer: Any, make_loader: Any) -> None:
    trainer = make_trainer(plugins=[InMode()])
    with pytest.raises(MisconfigurationException, match=r"inside Changes, which holds for the calling thread alone"):
        trainer.fit(small(), make_loader())
    assert trainer.global_step == 0
