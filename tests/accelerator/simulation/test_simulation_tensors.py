"""Views, storages, files, and operators whose shapes depend on values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize(
    "function",
    [
        torch.nonzero,
        torch.unique,
        lambda t: t[t > 0],
        lambda t: torch.masked_select(t, t > 1),
        lambda t: torch.where(t > 0)[0],
        lambda t: torch.bincount(t.flatten().long()),
        lambda t: t.flatten().long().repeat_interleave(t.flatten().long()),
    ],
)
def test_shape_that_depends_on_values_makes_the_host_wait(
    function: Callable[[Tensor], Tensor], sim: ModuleType
) -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    there = x.to("sim:0")
    sim.reset_stats()
    found = function(there)
    assert sim.stats()["synchronous_operators"] > 0
    assert torch.equal(found.cpu(), function(x))


def test_write_through_a_mask_leaves_later_writes_through_indices_late(sim: ModuleType) -> None:
    x, places = torch.zeros(4, device="sim:0"), torch.tensor([1, 3], device="sim:0")
    x[x == 0] = torch.ones(4, device="sim:0")
    sim.reset_stats()
    x[places] = torch.full((2,), 5.0, device="sim:0")
    assert sim.stats()["synchronous_operators"] == 0
    assert x.tolist() == [1.0, 5.0, 1.0, 5.0]


def test_parameter_takes_data_of_another_device() -> None:
    x = torch.arange(24.0, device="sim:0")
    home = nn.Parameter(torch.ones(3))
    home.data = x[:3]
    assert home.device == x.device
    assert home.data_ptr() == x.data_ptr()


def test_file_is_loaded_on_the_device_and_on_the_host(tmp_path: Path) -> None:
    x = torch.arange(24.0, device="sim:0")
    torch.save(x, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").device == x.device
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location="cpu"), x.cpu())


def test_number_of_the_host_is_taken_with_its_value_of_now(sim: ModuleType) -> None:
    factor = torch.tensor(2.0)
    with sim.held():
        y = torch.ones(3, device="sim:0") * factor
        factor.fill_(5)
    assert y.tolist() == [2.0] * 3
