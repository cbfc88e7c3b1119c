"""Weights that are not plain: quantized bases, classes of parameters, hooks of accelerate.

bitsandbytes, torchao, HQQ and accelerate are not installed: stand-ins have the same structure. Every layer here
computes ``x @ weight.T`` with 8-bit weights, and is followed by a trained layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.integration.checks import check_model
from tests.support.parity import assert_alike, make_trainer
from tests.support.rows import compat

WIDTH = 6


def quantized() -> tuple[Tensor, Tensor]:
    weight = torch.randn(WIDTH, WIDTH)
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().add(128).to(torch.uint8), scale


def restored(values: Tensor, scale: Tensor) -> Tensor:
    return (values.float() - 128) * scale


# Stand-ins -----------------------------------------------------------------------------------------------------------


class StatefulParameter(nn.Parameter):
    """As in bitsandbytes: the scales are an attribute, and ``to`` is more than a copy."""

    quant_state: Tensor

    def __new__(cls, values: Tensor, quant_state: Tensor) -> StatefulParameter:
        made = torch.Tensor._make_subclass(cls, values, False)
        made.quant_state = quant_state
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return StatefulParameter(self.data.to(*args, **kwargs), self.quant_state)


class NamedParameter(nn.Parameter):
    """A class without a state."""


class Wrapped(Tensor):
    """As in torchao: a tensor class whose values are in other tensors."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)
        made.values, made.scale = values, scale
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __tensor_flatten__(self) -> Any:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *args: Any) -> Wrapped:
        return Wrapped(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return Wrapped(args[0].values, args[0].scale)
        opened = [restored(x.values, x.scale) if isinstance(x, Wrapped) else x for x in args]
        return function(*opened, **(kwargs or {}))


class Bitsandbytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = StatefulParameter(*quantized())

    def forward(self, x: Tensor) -> Tensor:
        return x @ restored(self.weight, self.weight.quant_state).T


class Torchao(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Wrapped(*quantized()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Hqq(nn.Module):
    """The scales are in a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        values, scale = quantized()
        self.W_q = nn.Parameter(values, requires_grad=False)
        self.meta = {"scale": scale, "nbits": 8}

    def forward(self, x: Tensor) -> Tensor:
        return x @ restored(self.W_q, self.meta["scale"]).T


class Marked(nn.Module):
    """An attribute of a plain parameter holds the scales."""

    def __init__(self) -> None:
        super().__init__()
        values, scale = quantized()
        self.weight = nn.Parameter(values, requires_grad=False)
        self.weight.SCB = scale  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return x @ restored(self.weight, self.weight.SCB).T  # type: ignore[attr-defined]


class Gptq(nn.Module):
    """All in buffers."""

    def __init__(self) -> None:
        super().__init__()
        values, scale = quantized()
        self.register_buffer("qweight", values)
        self.register_buffer("scales", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ restored(self.qweight, self.scales).T


class Fp8(nn.Module):
    """All in parameters: 8-bit floats, integers, and scales, of which one has a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        values, scale = quantized()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.rand(WIDTH, 1), requires_grad=False)
        self.integers = nn.Parameter(values, requires_grad=False)
        self.integers_scale = NamedParameter(scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.float() * self.weight_scale + restored(self.integers, self.integers_scale)).T


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).relu().to_sparse(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.weight, x.T).T


class Net(L.LightningModule):
    """Three quantized layers, each with an adapter; the same weights at every call."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(kind(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, batch: Any) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def loader() -> Any:
    generator = torch.Generator().manual_seed(4)
    data = torch.utils.data.TensorDataset(torch.randn(10, WIDTH, generator=generator))
    return torch.utils.data.DataLoader(data, batch_size=5)


# What works ----------------------------------------------------------------------------------------------------------

HONOURED = [
    pytest.param(
        Gptq,
        (False, True),
        id="gptq",
        marks=compat(
            "Library",
            "quantized weights in buffers (GPTQ, AWQ)",
            "differs",
            "Buffers travel whenever a unit is loaded, and no memory limit counts them. Shown with a stand-in.",
        ),
    ),
    pytest.param(
        Fp8,
        (False, True),
        id="fp8",
        marks=[
            compat("Library", "quantized weights in plain parameters (FP8)", note="Shown with a stand-in."),
            compat("Library", "subclasses of nn.Parameter"),
        ],
    ),
    # Where devices use the memory of the host.
    pytest.param(Hqq, (False,), id="hqq"),
    pytest.param(Torchao, (False,), id="torchao"),
]


@pytest.mark.parametrize(("kind", "ways"), HONOURED)
def test_bases_that_are_honoured(kind: type[nn.Module], ways: tuple[bool, ...]) -> None:
    plain = Net(kind)
    make_trainer("plain").fit(plain, loader())
    trained = {name: p.detach().clone() for name, p in plain.named_parameters() if p.requires_grad}
    start = dict(Net(kind).named_parameters())
    assert trained
    assert all((p != start[name]).any() for name, p in trained.items())
    for virtual_copies in ways:
        ours = Net(kind)
        make_trainer("roundpipe", options={"virtual_copies": virtual_copies}).fit(ours, loader())
        assert_alike({name: p.detach() for name, p in ours.named_parameters() if p.requires_grad}, trained)


# What is refused -----------------------------------------------------------------------------------------------------

REFUSED = [
    pytest.param(
        Bitsandbytes,
        (False, True),
        r"'layers\.0\.0\.weight'.*StatefulParameter.*'quant_state'.*strategy='auto'",
        id="bitsandbytes",
        marks=compat(
            "Library",
            "bitsandbytes",
            "refused",
            "Use plain weights, or another strategy. Shown with a stand-in.",
        ),
    ),
    pytest.param(Marked, (False, True), r"'layers\.0\.0\.weight'.*'SCB' holds tensors.*strategy='auto'", id="marked"),
    pytest.param(
        Torchao,
        (True,),
        r"'layers\.0\.0\.weight'.*Wrapped.*in other tensors.*strategy='auto'",
        id="torchao",
        marks=compat(
            "Library",
            "torchao, quanto, DTensor",
            "refused",
            "Use plain weights, or another strategy. Shown with a stand-in.",
        ),
    ),
    pytest.param(
        Hqq,
        (True,),
        r"'layers\.0\.0'.*Hqq.*'W_q'.*'meta'.*strategy='auto'",
        id="hqq",
        marks=compat(
            "Library",
            "HQQ",
            "refused",
            "Use plain weights, or another strategy. Shown with a stand-in.",
        ),
    ),
    pytest.param(
        Sparse,
        (False, True),
        r"'layers\.0\.0\.weight'.*torch\.sparse_coo.*strategy='auto'",
        id="sparse",
        marks=compat("Library", "sparse parameters", "refused", "Only dense weights are copied to devices."),
    ),
]


@pytest.mark.parametrize(("kind", "ways", "message"), REFUSED)
def test_bases_that_are_refused(kind: type[nn.Module], ways: tuple[bool, ...], message: str) -> None:
    """Before anything has run, in every kind of run."""
    make_trainer("plain").fit(Net(kind), loader())
    for virtual_copies in ways:
        for run in (L.Trainer.fit, L.Trainer.predict):
            trainer = make_trainer("roundpipe", options={"virtual_copies": virtual_copies})
            with pytest.raises(MisconfigurationException, match=message):
                run(trainer, Net(kind), loader())
            assert isinstance(trainer.strategy, RoundPipeStrategy)
            assert trainer.strategy.last_step is None


@compat(
    "Library",
    "accelerate (device_map)",
    "refused",
    "Load the model without `device_map`.",
)
def test_hooks_of_accelerate_are_refused() -> None:
    net = Net(Gptq)
    net.layers[1]._hf_hook = object()
    with pytest.raises(MisconfigurationException, match=r"'layers\.1'.*accelerate.*without device_map"):
        make_trainer("roundpipe").fit(net, loader())


class Plain(nn.Module):
    """What must not be taken for a quantized layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.weight._is_hf_initialized = True  # type: ignore[attr-defined]
        self.weight.main_grad = torch.zeros(2)  # type: ignore[attr-defined]
        self.counts = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        self.register_buffer("adjacency", torch.eye(2).to_sparse())
        self.phases = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.scale = 2.0


class Beside(nn.Module):
    """Tensors beside weights that are no integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.cache = {"mask": torch.ones(2)}


@pytest.mark.parametrize("make", [Plain, Beside])
def test_plain_weights_pass(make: Callable[[], nn.Module]) -> None:
    check_model(nn.Sequential(make(), nn.Embedding(2, 2), nn.LSTM(2, 2)), has_copies=True)
