"""Weights that are put in the place of parameters for one call, while other micro-batches use the same modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

from tests.support.engine.steps import Steps

WIDTH, ROWS, COUNT = 4, 3, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + self.shift)


class Model(nn.Module):
    """One unit makes the weights of others, of which one is called with its own weights, too."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(WIDTH, WIDTH * WIDTH)
        self.units = nn.ModuleList(Block() for _ in range(3))

    def made(self, x: Tensor) -> Tensor:
        return self.maker(x.mean(0)).view(WIDTH, WIDTH)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        made = self.made(x)
        x = self.units[0](x)
        x = functional_call(self.units[0], {"inner.weight": made}, x)
        return F.mse_loss(self.units[2](self.units[1](x)), made[0].expand_as(x))


class AroundUnits(Model):
    """The module that is called has units, and user code between them that uses the weight by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = Whole()

    def forward(self, x: Tensor) -> Tensor:
        made = self.made(x)
        return functional_call(self.whole, {"units.0.inner.weight": made, "scale": made[1]}, x) + self.whole(x)  # type: ignore[no-any-return]


class Transformed(Model):
    """A unit is called inside transforms, and once by itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.units[1](self.units[0](x))
        slopes = vmap(jacrev(self.units[1]))(x)
        return self.units[2](x + slopes.sum(-1)).square().mean()  # type: ignore[no-any-return]


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.units[1](self.units[0](x) * self.scale).square().mean()  # type: ignore[no-any-return]


def batches_of(seed: int) -> list[Tensor]:
    return list(torch.randn(COUNT, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("copies", [False, True], ids=["alias", "copies"])
@pytest.mark.parametrize("kind", [Model, AroundUnits, Transformed], ids=lambda kind: kind.__name__)
def test_gradients_are_those_of_plain_autograd(kind: type[Model], copies: bool) -> None:
    """Also of what the replaced parameters get in other calls; and modules are what they were."""
    model = kind()
    parameters = dict(model.named_parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    steps = Steps(model, num_devices=2, copies=copies)
    for step in range(2):
        found = steps.train(batches_of(step)).gradients
        assert all(now is parameters[name] for name, now in model.named_parameters())
        assert not any("weight" in vars(module) or "scale" in vars(module) for module in model.modules())
        for batch in batches_of(step):
            (model(batch) / COUNT).backward()
        wanted = {p: p.grad for p in model.parameters() if p.grad is not None}
        model.zero_grad()
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(dict(model.named_buffers()), buffers)


def test_an_error_in_the_call_leaves_the_parameter_in_its_place() -> None:
    model = Model()

    def function(x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError):
            functional_call(model.units[0], {"inner.weight": torch.ones(1, 1)}, x)
        return model(x)  # type: ignore[no-any-return]

    found = Steps(model).train(batches_of(0), function=function).gradients
    assert not any("weight" in vars(module) for module in model.modules())
    assert found[model.units[1].inner.weight].abs().max() > 0
