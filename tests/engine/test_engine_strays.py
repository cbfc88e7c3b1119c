"""Stray operands, with ``meta`` as the device of the current stage: the logic needs two devices, not a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lightning_roundpipe.engine.glue import GlueState, UnitWrites, entered
from lightning_roundpipe.engine.strays import StrayOperands

STAGE = torch.device("meta")


@pytest.fixture
def on_host() -> torch.Tensor:
    return torch.ones(3, 4)


@pytest.fixture
def on_stage() -> torch.Tensor:
    return torch.ones(3, 4, device=STAGE)


def test_operands_of_several_devices_meet_on_the_stage(on_host: torch.Tensor, on_stage: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="device"):
        F.mse_loss(on_host, on_stage)
    with StrayOperands(lambda: STAGE):
        assert F.mse_loss(on_host, on_stage).device == STAGE
        assert torch.cat([on_host, on_stage]).device == STAGE


def test_an_in_place_function_keeps_its_target_where_it_is(on_stage: torch.Tensor) -> None:
    target = torch.zeros(3, 4, device=STAGE)
    with StrayOperands(lambda: torch.device("cpu")):
        assert target.add_(torch.ones(3, 4)).device == STAGE
        target[0] = torch.ones(4)
        target += torch.ones(3, 4)
    assert target.device == STAGE


def test_operands_of_one_device_and_explicit_moves_are_left_alone(
    on_host: torch.Tensor, on_stage: torch.Tensor
) -> None:
    with StrayOperands(lambda: STAGE):
        assert (on_host + on_host).device.type == "cpu"
        assert on_host.to(STAGE).device == STAGE
        assert (on_stage * torch.tensor(2.0)).device == STAGE


def test_the_move_is_part_of_the_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    with StrayOperands(lambda: STAGE):
        out = torch.ones(3, 4, device=STAGE) * parameter
    assert out.requires_grad


def test_inside_a_unit_nothing_is_moved(on_host: torch.Tensor, on_stage: torch.Tensor) -> None:
    state = GlueState(0, 0)
    state.unit_writes = UnitWrites()
    with entered(state), StrayOperands(lambda: STAGE), pytest.raises(RuntimeError, match="device"):
        F.mse_loss(on_host, on_stage)
