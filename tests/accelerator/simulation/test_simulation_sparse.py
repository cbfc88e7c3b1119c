"""Sparse COO tensors, and what training makes of them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.accelerator

INDICES = torch.tensor([[0, 2, 0], [1, 0, 1]])
VALUES = torch.tensor([1.0, 2.0, 4.0])
DENSE = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 0.0], [2.0, 0.0, 0.0]])


def _sparse(device: str = "sim:0") -> Tensor:
    return torch.sparse_coo_tensor(INDICES.to(device), VALUES.to(device), (3, 3), check_invariants=True)


def test_made_on_the_device_it_has_its_parts_there(sim: ModuleType) -> None:
    made = _sparse()
    assert made.is_sparse
    assert made.device == made._values().device == torch.device("sim:0")
    assert (made._nnz(), made.sparse_dim(), made.dense_dim(), made.is_coalesced()) == (3, 2, 0, False)
    assert torch.equal(made.to_dense().cpu(), DENSE)
    assert sim.stats()["races"] == 0


def test_copied_to_the_device_and_back_it_is_the_same(sim: ModuleType) -> None:
    there = _sparse("cpu").to("sim:0")
    back = there.to("sim:1").cpu()
    assert back.device.type == "cpu"
    assert torch.equal(back._indices(), INDICES)
    assert torch.equal(back._values(), VALUES)


def test_copies_of_its_pageable_parts_block(sim: ModuleType) -> None:
    home = _sparse("cpu")
    home.to("sim:0", non_blocking=True)
    assert sim.stats()["blocking_copies"] == 2, "indices and values"


def _trained(device: str, make: Callable[..., torch.optim.Optimizer]) -> tuple[list[Tensor], bool]:
    torch.manual_seed(0)
    embedding = nn.Embedding(9, 4, sparse=True).to(device)
    optimizer = make(embedding.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for shift in (0, 1):  # gradients of two backward passes add up
            places = (torch.tensor([[0, 3, 3], [8, 3, 1]]) + step * shift) % 9
            embedding(places.to(device)).square().sum().backward()
        assert embedding.weight.grad is not None
        is_sparse = embedding.weight.grad.is_sparse
        optimizer.step()
    return [embedding.weight.detach().cpu()], is_sparse


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
def test_embedding_with_sparse_gradients_trains_as_on_the_host(
    make: Callable[..., torch.optim.Optimizer], sim: ModuleType
) -> None:
    found, is_sparse = _trained("sim:0", make)
    expected, _ = _trained("cpu", make)
    assert is_sparse
    torch.testing.assert_close(found, expected)
    assert sim.stats()["races"] == 0


def test_sparse_gradients_of_two_streams_are_recorded(sim: ModuleType) -> None:
    x, stream = _sparse(), sim.Stream("sim:0")
    stream.wait_stream(sim.current_stream())
    with sim.stream(stream):
        y = x.to_dense()
    x._values().record_stream(stream)
    x._indices().record_stream(stream)
    sim.current_stream().wait_stream(stream)
    assert torch.equal(y.cpu(), DENSE)
    assert sim.stats()["races"] == 0
