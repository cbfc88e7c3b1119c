"""Which parameters count as low: those whose low form gives the same results, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_roundpipe.weights.casts import CastWatch, Use, in_doubt

WIDTH = 4
LOW = torch.bfloat16


class Own(nn.Module):
    """A weight, a bias, and a function of the input and both."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


class Custom(torch.autograd.Function):
    """Its backward runs without autocast, and computes with the weight as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient.float() @ weight, gradient.float().t() @ x


def own(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Own(function)


def with_dtype_of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(F.dropout(x.to(weight.dtype), 0.0) * 0.1, weight)


CAST, AGAIN, OTHER = Use.CAST, Use.CAST_AGAIN, Use.OTHER
# name -> (module, use of its parameters in their order)
CASES: dict[str, tuple[Callable[[], nn.Module], list[Use | None]]] = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), [CAST, CAST]),
    "linear, twice": (own(lambda x, w, b: F.linear(F.linear(x, w), w, b)), [AGAIN, CAST]),
    "convolution": (lambda: nn.Conv1d(3, 3, 1), [CAST, CAST]),
    "bilinear": (own(lambda x, w, b: torch.einsum("ij,kj->ik", x, w)), [CAST, None]),
    "matrix product": (own(lambda x, w, b: torch.addmm(b, x, w.t())), [CAST, CAST]),
    "attention": (lambda: Attention(), [CAST, CAST, CAST, CAST]),
    "pieces": (own(lambda x, w, b: torch.cat([F.linear(x, part) for part in w.chunk(2)])), [CAST, None]),
    "overlapping pieces": (own(lambda x, w, b: F.linear(x, w[:3]).sum() + F.linear(x, w[1:])), [AGAIN, None]),
    "expert": (own(lambda x, w, b: x @ w.view(2, 2, WIDTH)[1].t()), [CAST, None]),
    "normalisation": (lambda: nn.LayerNorm(WIDTH), [OTHER, OTHER]),
    "arithmetic": (own(lambda x, w, b: F.linear(x, w) + w.sum() + b), [OTHER, OTHER]),
    "embedding": (own(lambda x, w, b: F.embedding(torch.tensor([1, 2]), w)), [OTHER, None]),
    "expanded": (own(lambda x, w, b: x.expand(2, 3, WIDTH) @ w.expand(2, WIDTH, WIDTH)), [OTHER, None]),
    "dtype": (own(with_dtype_of), [OTHER, None]),
    "dtype of a view": (own(lambda x, w, b: x.to(w[0].dtype) + F.linear(x, w, b)), [OTHER, CAST]),
    "converted by the user": (own(lambda x, w, b: F.linear(x, w.to(LOW))), [OTHER, None]),
    "converted to what it is": (own(lambda x, w, b: F.linear(x, w.float(), b)), [OTHER, CAST]),
    "shape and device": (own(lambda x, w, b: F.linear(x.view(-1, w.shape[1]).to(w.device), w, b)), [CAST, CAST]),
    "custom function": (own(lambda x, w, b: Custom.apply(x, w) + F.linear(x, w, b)), [OTHER, CAST]),
    "without gradient": (own(lambda x, w, b: detached(F.linear)(x, w) + F.linear(x, w, b)), [OTHER, CAST]),
    "unused": (own(lambda x, w, b: F.linear(x, w)), [CAST, None]),
    "shared memory": (lambda: Shared(), [OTHER, OTHER]),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x + 1.0, x, need_weights=False)[0]


class Shared(nn.Module):
    """Two parameters in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.other = nn.Parameter(self.one.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.one), self.other)


def detached(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Tensor) -> Tensor:
        with torch.no_grad():
            return function(*args)

    return call


def watched_run(module: nn.Module, x: Tensor) -> CastWatch:
    watch = CastWatch(module.parameters(), LOW)
    with autocast(), watch:
        watch.note_results([module(x)])
    return watch


def autocast() -> torch.autocast:
    return torch.autocast("cpu", dtype=LOW, cache_enabled=False)


@pytest.mark.parametrize("name", CASES)
def test_uses_are_known_and_low_parameters_give_the_same_results(name: str) -> None:
    """Outputs and all gradients, bit for bit; those of low parameters before they are added up."""
    make, expected = CASES[name]
    for trained, worst in ((True, Use.CAST), (False, Use.CAST_AGAIN)):
        plain = make().requires_grad_(trained)
        x = torch.randn(3, WIDTH)
        watch = watched_run(plain, x.clone().requires_grad_())
        assert [watch.use_of(p) for p in plain.parameters()] == expected
        low = copy.deepcopy(plain)
        for parameter, original in zip(low.parameters(), plain.parameters(), strict=True):
            if (watch.use_of(original) or Use.OTHER) <= worst:
                parameter.data = parameter.data.to(LOW)
        results = [list(run(module, x)) for module in (plain, low)]
        for wanted, found in zip(*results, strict=True):
            assert (wanted is None) == (found is None)
            if wanted is not None:
                assert torch.equal(found.float(), wanted.float())


def run(module: nn.Module, x: Tensor) -> Iterator[Tensor | None]:
    x = x.clone().requires_grad_()
    with autocast():
        output = module(x)
    yield output.detach()
    if output.requires_grad:
        output.float().square().sum().backward()
    yield x.grad
    yield from (parameter.grad for parameter in module.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_uses_without_gradients(mode: Callable[[], Any]) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Attention())
    with mode():
        watch = watched_run(module, torch.randn(3, WIDTH))
    assert [watch.use_of(p) for p in module.parameters()] == [CAST] * 2 + [OTHER] * 2 + [CAST] * 4


def test_a_result_that_is_a_parameter_is_another_use() -> None:
    module = Own(lambda x, w, b: w.t())
    watch = watched_run(module, torch.randn(3, WIDTH))
    assert watch.use_of(module.weight) is OTHER


def test_casts_to_another_dtype_are_another_use() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    watch = CastWatch(module.parameters(), torch.float16)
    with autocast(), watch:
        module(torch.randn(3, WIDTH))
    assert watch.use_of(module.weight) is OTHER


def test_nothing_is_watched_afterwards_even_if_the_run_fails() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    watch = CastWatch(module.parameters(), LOW)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), autocast(), watch:
        module(torch.randn(3, WIDTH + 1))
    assert watch.use_of(module.weight) is CAST
    with autocast():
        module(torch.randn(3, WIDTH)).sum()
        _ = module.weight.dtype
    assert watch.use_of(module.weight) is CAST


def test_attention_in_evaluation_is_in_doubt() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.TransformerEncoderLayer(WIDTH, 2, 8))
    assert list(in_doubt(module)) == []
    module.eval()
    assert {id(p) for p in in_doubt(module)} == {id(p) for p in module[1].parameters()}
