"""Which micro-batch a thread of autograd works for, and what it sees there: in user code, and inside units."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.devices.gpu.lanes import GpuTransfer
from lightning_roundpipe.usercode.lock import current
from tests.support.engine.steps import Steps
from tests.support.identical import assert_identical

pytestmark = pytest.mark.accelerator

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.linear(x)), 0.3)


class Model(nn.Module):
    """Units, and between them what a test makes."""

    def __init__(self, between: Callable[[Model, Tensor], Tensor], block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(5))
        self.scale = nn.Parameter(torch.rand(WIDTH) + 1)
        self.between = [between]  # in a list: it is no attribute of the micro-batch

    def forward(self, x: Tensor) -> Tensor:
        self.row = float(x[0, 0])
        x = self.between[0](self, self.blocks[0](x))
        return self.blocks[4](self.blocks[3](x)).square().mean()


def parts() -> list[Tensor]:
    torch.manual_seed(3)
    return list(torch.randn(12, WIDTH).chunk(4))


@pytest.fixture(autouse=True)
def late_kernels() -> Iterator[None]:
    torch.sim.set_delay(50)
    torch.sim.reset_stats()
    yield
    torch.sim.set_delay(0)
    assert torch.sim.stats()["races"] == 0


def results_of(between: Callable[[Model, Tensor], Tensor], num_devices: int, **options: Any) -> list[Any]:
    """Losses and gradients of the second step."""
    torch.manual_seed(0)
    model = Model(between, options.pop("block", Block))
    steps = Steps(model, num_devices=num_devices, **{"device_type": "sim", **options})
    steps.train(parts(), 1)
    result = steps.train(parts(), 2)
    return [*map(float, result.outputs), *(result.gradients.get(p) for p in model.parameters())]


def region(model: Model, x: Tensor) -> Tensor:
    x = F.dropout(torch.sin(model.blocks[1](x)), 0.2) * torch.rand_like(x) * model.scale + torch.rand(WIDTH)
    return torch.cos(model.blocks[2](x)) * model.scale


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_user_code_with_a_unit_recomputes_what_the_forward_has_computed_and_leaves_nothing(
    use_reentrant: bool,
) -> None:
    def between(model: Model, x: Tensor) -> Tensor:
        return checkpoint(region, model, x, use_reentrant=use_reentrant)

    expected = results_of(region, 1)
    assert_identical(results_of(between, 1), expected)
    assert_identical(results_of(between, 2), expected)
    gc.collect()
    assert [torch.sim.memory_allocated(index) for index in range(2)] == [0, 0]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Scaled(torch.autograd.Function):
    """Its backward calls a function, and meets a tensor on the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Callable[[], float]) -> Tensor:
        ctx.scale = scale
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * torch.full((WIDTH,), ctx.scale()), None


def hooked(x: Tensor, scale: Callable[[], float]) -> Tensor:
    x.register_hook(lambda gradient: gradient * scale())
    return x * 3


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("scaled", [hooked, Scaled.apply], ids=["hook", "function"])
def test_user_code_in_the_backward_reads_the_attributes_of_its_microbatch(
    scaled: Callable[[Tensor, Callable[[], float]], Tensor], num_devices: int
) -> None:
    def reading_late(model: Model, x: Tensor) -> Tensor:
        return scaled(torch.sin(model.blocks[1](x)), lambda: model.row)

    def reading_early(model: Model, x: Tensor) -> Tensor:
        row = model.row
        return scaled(torch.sin(model.blocks[1](x)), lambda: row)

    found = results_of(reading_late, num_devices, block=Plain)
    for a, b in zip(found, results_of(reading_early, 1, device_type="cpu", block=Plain), strict=True):
        torch.testing.assert_close(a, b)


class Kernel(torch.autograd.Function):
    """As those of fused kernels: the backward is in Python."""

    seen: ClassVar[list[tuple[Any, ...]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        state = current()
        is_inside = state is not None and state.unit_writes is not None
        ctx.module.mark = 1
        height = torch._C._len_torch_function_stack()
        Kernel.seen.append((is_inside, height, torch.is_grad_enabled(), ctx.module.linear.weight.device.type))
        return gradients[0] * 2, None


class Fused(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return Kernel.apply(super().forward(x), self)


def test_a_function_inside_a_unit_runs_its_backward_as_part_of_the_unit() -> None:
    Kernel.seen.clear()
    results_of(lambda model, x: model.blocks[2](model.blocks[1](x)), 2, block=Fused)
    assert set(Kernel.seen) == {(True, 0, False, "sim")}


class Laid(nn.Module):
    """Notes how its argument lies in memory."""

    seen: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        if masks:
            Laid.seen.append(tuple(map(layout_of, masks)))
        for mask in masks:
            x = x * mask.reshape(-1)[:WIDTH].detach() + 0 * mask.sum()
        return torch.tanh(self.linear(x))


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset() * tensor.element_size() % 16


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.t(),
    lambda x: x[:, None, :].expand(-1, 5, -1),
    lambda x: x.t()[:, None, :].expand(-1, 5, -1),
    lambda x: x[:, 1:4],  # with gaps
    lambda x: x[:, None, 1:4].expand(-1, 5, -1),
    lambda x: x.flatten()[1:],  # at an odd address
]


def test_forward_and_recomputation_see_the_same_layouts() -> None:
    Laid.seen.clear()
    results_of(lambda model, x: model.blocks[1](x, *(lay(x * 2) for lay in LAYOUTS)), 2, block=Laid)
    assert len(Laid.seen) > 8
    assert len(set(Laid.seen)) == 1


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.linear(x)))


def test_units_that_write_buffers_do_not_hold_up_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    await_done = GpuTransfer.await_done

    def noting(transfer: GpuTransfer) -> None:
        if current() is not None:
            waits.append(transfer)
        await_done(transfer)

    torch.manual_seed(0)
    model, reference = (Model(lambda model, x: model.blocks[1](x), Normed) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    steps = Steps(model, num_devices=2, device_type="sim")
    for step in (1, 2):  # in which units are compared with their recomputation
        steps.train(parts(), step)
        Steps(reference).train(parts(), step)
    monkeypatch.setattr(GpuTransfer, "await_done", noting)
    torch.sim.reset_stats()
    steps.train(parts(), 3)
    Steps(reference).train(parts(), 3)
    assert torch.sim.stats()["item_syncs"] == 0
    assert len(waits) == len(parts())  # for the results, and for nothing else
    for (name, buffer), expected in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, msg=name)
