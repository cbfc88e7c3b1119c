"""Norms read side by side: those of torch to the last bit, and None where torch has to clip by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.optimizer import clipping
from lightning_roundpipe.optimizer.clipping import clip_factor, norms
from lightning_roundpipe.optimizer.updates import Updates
from lightning_roundpipe.weights.futures import is_pending


def make_gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = [(70_001,), (3,), (129, 257), (), (40_000,), (1, 1), (511,), (0,)]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


@pytest.fixture
def always_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "MIN_BYTES", 0)


@pytest.mark.usefixtures("always_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 3, 16])
@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_gradients_times_the_factor_are_those_that_torch_has_clipped(
    dtype: torch.dtype, num_threads: int, max_norm: float
) -> None:
    gradients = make_gradients(dtype)
    weights = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    total = nn.utils.clip_grad_norm_(weights, max_norm)
    factor = clip_factor(gradients, max_norm, num_threads)
    assert factor is not None
    assert (factor == 1.0) == (total < max_norm)
    for weight, gradient in zip(weights, gradients, strict=True):
        assert torch.equal(weight.grad, gradient.mul(factor))  # type: ignore[arg-type]


@pytest.mark.usefixtures("always_threads")
def test_norms_come_in_the_order_of_the_gradients() -> None:
    gradients = [torch.full((n,), 1.0) for n in (4, 10_000, 1, 2500, 9)]
    assert [norm.item() for norm in norms(gradients, 3)] == [2.0, 100.0, 1.0, 50.0, 3.0]


def test_little_is_read_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("threads")

    monkeypatch.setattr(clipping, "ThreadPoolExecutor", forbidden)
    assert len(norms(make_gradients(), 4)) == len(make_gradients())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_give_what_torch_gives(broken: float) -> None:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([1.0, broken, 2.0])
    factor = clip_factor([weight.grad.clone()], 1.0, 2)
    assert factor is not None
    expected = weight.grad.mul(factor)
    nn.utils.clip_grad_norm_([weight], 1.0)
    assert torch.equal(weight.grad.isnan(), expected.isnan())
    assert torch.equal(weight.grad.nan_to_num(), expected.nan_to_num())


def _sparse() -> list[Tensor]:
    return [torch.ones(2), torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3,), check_invariants=True)]


def _twice_the_same() -> list[Tensor]:
    gradient = torch.ones(2)
    return [gradient, gradient]


@pytest.mark.parametrize(
    "make",
    [list, _sparse, _twice_the_same, lambda: [torch.ones(2), torch.ones(2, dtype=torch.float64)]],
    ids=["none", "sparse", "twice the same", "two dtypes"],
)
def test_what_torch_has_to_clip_by_itself(make: Callable[[], list[Tensor]]) -> None:
    assert clip_factor(make(), 1.0, 2) is None


def test_only_the_step_whose_closure_runs_takes_a_factor() -> None:
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))]
    mine, other = (torch.optim.SGD([weight], lr=1.0) for weight in weights)
    updates = Updates(1)
    half = torch.tensor(0.5)
    taken = []

    def closure() -> None:
        weights[0].grad = torch.full((4,), 2.0)
        taken.extend(
            [updates.multiplies(other, lambda gradients: half), updates.multiplies(mine, lambda gradients: None)]
        )
        taken.extend(
            [updates.multiplies(mine, lambda gradients: half), updates.multiplies(mine, lambda gradients: half)]
        )

    with updates.overlapping(mine, lambda: [weights]):
        assert not updates.multiplies(mine, lambda gradients: half)
        mine.step(closure)
        assert not updates.multiplies(mine, lambda gradients: half)
    updates.wait()
    assert not is_pending(weights)
    assert taken == [False, False, True, False]
    assert weights[0].grad is not None
    assert weights[0].grad.tolist() == [1.0] * 4  # multiplied, once
    assert weights[0].tolist() == [0.0] * 4
    with updates.overlapping(mine, lambda: [weights]):  # the factor was for that step alone
        mine.step(lambda: None)
    updates.wait()
    assert weights[0].tolist() == [-1.0] * 4
