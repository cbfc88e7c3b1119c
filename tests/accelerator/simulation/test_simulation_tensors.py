"""Views, storages, files, and operators whose shapes depend on values."""

from __future__ import annotations

import copy
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


def test_results_given_by_the_caller_get_their_shape() -> None:
    x = torch.tensor([1.0, 0.0, 3.0], device="sim:0")
    places, total = torch.empty(0, dtype=torch.long, device="sim:0"), torch.empty(0, device="sim:0")
    torch.nonzero(x, out=places)
    torch.add(x, x, out=total)
    assert places.tolist() == [[0], [2]]
    assert total.tolist() == [2.0, 0.0, 6.0]


def test_writes_through_views_change_the_base() -> None:
    x, z = torch.arange(24.0, device="sim:0"), torch.arange(24.0)
    for base in (x, z):
        base.view(2, 3, 4).transpose(0, 2)[1:, :, 0].add_(100)
    assert torch.equal(x.cpu(), z)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.unfold(0, 3, 2),
        lambda t: t.view(torch.int32),
        lambda t: torch.as_strided(t, (2, 2), (5, 1), 3),
        lambda t: t.view(2, 12).diagonal(),
        lambda t: t.view(2, 3, 4).permute(2, 0, 1).flatten(1),
        lambda t: torch.view_as_complex(t.view(12, 2)).conj().imag,
    ],
    ids=["unfold", "dtype", "strided", "diagonal", "permute", "complex"],
)
def test_view_has_the_values_of_the_view_on_the_host(view: Callable[[Tensor], Tensor]) -> None:
    assert torch.equal(view(torch.arange(24.0, device="sim:0")).cpu(), view(torch.arange(24.0)))


def test_parameter_takes_data_of_another_device() -> None:
    x = torch.arange(24.0, device="sim:0")
    home = nn.Parameter(torch.ones(3))
    home.data = x[:3]
    assert home.device == x.device
    assert home.data_ptr() == x.data_ptr()


def test_module_that_moves_keeps_its_parameters() -> None:
    module = nn.Linear(3, 3)
    before = list(module.parameters())
    module.to("sim:1")
    assert all(now is then for now, then in zip(module.parameters(), before, strict=True))
    assert {parameter.device.index for parameter in module.parameters()} == {1}


def test_tensor_that_is_resized_keeps_its_values() -> None:
    x = torch.arange(24.0, device="sim:0")
    x.resize_(30)
    assert torch.equal(x[:24].cpu(), torch.arange(24.0))


def test_file_is_loaded_on_the_device_and_on_the_host(tmp_path: Path) -> None:
    x = torch.arange(24.0, device="sim:0")
    torch.save(x, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").device == x.device
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location="cpu"), x.cpu())


def test_copy_and_representation_name_the_device() -> None:
    x = torch.arange(3.0, device="sim:0")
    copied = copy.deepcopy(x)
    assert copied.data_ptr() != x.data_ptr()
    assert torch.equal(copied, x)
    assert "device='sim:0'" in repr(x)


def test_number_of_the_host_is_taken_with_its_value_of_now(sim: ModuleType) -> None:
    factor = torch.tensor(2.0)
    with sim.held():
        y = torch.ones(3, device="sim:0") * factor
        factor.fill_(5)
    assert y.tolist() == [2.0] * 3
