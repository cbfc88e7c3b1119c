"""What tests of the simulated accelerator share: ``torch.sim`` with fresh counts, and comparisons with the host."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_roundpipe.devices.gpu.device import GpuDevice
from lightning_roundpipe.devices.gpu.driver import driver_of

# Not the current device: so an operator is found out that forgets where its arguments are.
_DEVICE = "sim:1"
# What torch.sim counts, as far as an operator may be the reason.
_COUNTED = ("races", "blocking_copies", "item_syncs", "synchronous_operators")


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> None:
    """What earlier tests have left in cycles still has its memory, and some tests expect that nothing has."""
    gc.collect()


@pytest.fixture
def sim() -> Iterator[ModuleType]:
    """``torch.sim``, with nothing in its queues and all counts at zero."""
    module: ModuleType = torch.get_device_module("sim")
    for index in range(module.device_count()):
        module.synchronize(index)
    module.empty_cache()
    module.reset_stats()
    with module.device(0):
        yield module
        for index in range(module.device_count()):
            module.synchronize(index)


@pytest.fixture
def device(sim: ModuleType) -> Iterator[GpuDevice]:
    """A device on the first GPU, in a step; the thread of the test works on it."""
    made = GpuDevice(0, 0, driver=driver_of("sim"))
    made.open()
    made.enter()
    yield made
    made.close()
    made.dispose()
    assert sim.stats()["races"] == 0


def _to(device: str, value: Any) -> Any:
    """A copy there of all tensors and modules, leaves that need gradients if these do."""
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).to(device)
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
    return value


def _results(function: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
    """Outputs, gradients of inputs and parameters, and buffers."""
    outputs = [leaf for leaf in tree_leaves(function(*inputs)) if isinstance(leaf, Tensor)]
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        # Other weights for each element: a sum alone would not notice where a gradient came from.
        weights = [torch.linspace(0.5, 1.5, out.numel(), device=out.device, dtype=out.dtype) for out in differentiable]
        sum((out * w.view_as(out)).sum() for out, w in zip(differentiable, weights, strict=True)).backward()
    module = function if isinstance(function, nn.Module) else nn.Module()
    leaves = [value for value in inputs if isinstance(value, Tensor)] + list(module.parameters())
    return [*outputs, *(leaf.grad for leaf in leaves if leaf.requires_grad), *module.buffers()]


@pytest.fixture
def assert_same_as_host(sim: ModuleType) -> Callable[..., None]:
    """A function that runs ``function(*inputs)`` and its backward on the host and there, and compares all there is.

    No race, and no wait but those given by name.
    """

    def check(function: Callable[..., Any], *inputs: Any, **waits: int) -> None:
        expected = _results(_to("cpu", function), [_to("cpu", value) for value in inputs])
        there, those = _to(_DEVICE, function), [_to(_DEVICE, value) for value in inputs]
        sim.reset_stats()
        results = _results(there, those)
        sim.synchronize(_DEVICE)
        counts = sim.stats()
        assert {name: counts[name] for name in _COUNTED} == {**dict.fromkeys(_COUNTED, 0), **waits}, counts
        assert len(results) == len(expected) > 0
        assert all(result.device == torch.device(_DEVICE) for result in results if result is not None)
        torch.testing.assert_close(tree_map(_home, results), tree_map(_home, expected))

    return check


def _home(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value
