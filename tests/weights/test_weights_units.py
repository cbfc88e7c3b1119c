"""Modules that are too large for a device are looked into, where that is possible and the user has not chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.weights.units import UnitTable, state_bytes

WIDTH = 8
LINEAR = 2 * 4 * (WIDTH * WIDTH + WIDTH)  # weights and gradients


class Block(nn.Module):
    """Two linear layers, called one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Wrapped(nn.Module):
    """A block behind a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Attention(nn.Module):
    """A module of torch that uses the weights of its parts without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1)


class Hinted(nn.Module):
    """Says itself what should not be divided, as models of transformers do."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()


def model_of(*blocks: nn.Module) -> nn.Module:
    root = nn.Module()
    root.blocks = nn.ModuleList(blocks)
    root.head = nn.Linear(WIDTH, WIDTH)
    return root


def names_of(root: nn.Module, **options: Any) -> list[str]:
    return [unit.name for unit in UnitTable(root, **options).units.values()]


def test_only_what_is_larger_is_looked_into() -> None:
    root = model_of(Block(), Block())
    assert names_of(root) == ["blocks.0", "blocks.1", "head"]
    assert names_of(root, max_unit_bytes=2 * LINEAR) == ["blocks.0", "blocks.1", "head"]
    parts = [f"blocks.{i}.{part}" for i in range(2) for part in ("up", "down")]
    assert names_of(root, max_unit_bytes=2 * LINEAR - 1) == [*parts, "head"]


def test_a_module_around_one_part_is_looked_through() -> None:
    root = model_of(Wrapped())
    assert names_of(root) == ["blocks.0", "head"]
    assert names_of(root, max_unit_bytes=LINEAR) == ["blocks.0.inner.up", "blocks.0.inner.down", "head"]


def test_what_cannot_be_divided_stays_whole() -> None:
    root = model_of(nn.Linear(WIDTH, WIDTH), Attention())
    assert names_of(root, max_unit_bytes=1) == ["blocks.0", "blocks.1", "head"]


def test_hints_of_the_model_count_less_than_memory() -> None:
    root = nn.Module()
    root.body = Hinted()
    assert names_of(root) == ["body.first", "body.second"]
    parts = ["body.first.up", "body.first.down", "body.second.up", "body.second.down"]
    assert names_of(root, max_unit_bytes=LINEAR) == parts


def test_what_the_user_has_chosen_stays_whole() -> None:
    root = model_of(Block(), Block())
    assert names_of(root, unit_classes=["Block"], max_unit_bytes=1) == ["blocks.0", "blocks.1", "head"]


@pytest.mark.parametrize(("is_trained", "factor"), [(True, 2), (False, 1)])
def test_frozen_weights_have_no_gradients(is_trained: bool, factor: int) -> None:
    block = Block().requires_grad_(is_trained)
    assert state_bytes(block) == factor * 2 * 4 * (WIDTH * WIDTH + WIDTH)
