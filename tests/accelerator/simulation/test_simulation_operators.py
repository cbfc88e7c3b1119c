"""Operators of every form: outputs, gradients and buffers are those of the host, in double precision.

The parity tests on this accelerator use more of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = pytest.mark.accelerator

MODULES = {
    "1d-circular": (lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 9)),
    "2d-grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 9, 8)),
    "3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 3)),
    "1d-transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (2, 4, 5)),
    "batch-2d": (lambda: nn.BatchNorm2d(6), (3, 6, 4, 5)),
    "batch-in-evaluation": (lambda: nn.BatchNorm2d(6).eval(), (3, 6, 4, 5)),
    "layer": (lambda: nn.LayerNorm(6), (3, 4, 6)),
    "max-2d": (lambda: nn.MaxPool2d(2), (2, 3, 6, 8)),
    "upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 4, 5)),
}
# Name -> (function, shapes of its inputs).
FUNCTIONS: dict[str, tuple[Callable[..., object], tuple[tuple[int, ...], ...]]] = {
    "attention-mask": (
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias),
        (*((2, 3, 5, 4),) * 3, (5, 5)),
    ),
    "attention-grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        ((2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)),
    ),
    "topk": (lambda x: x.topk(3), ((4, 7),)),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), ((2, 3, 4), (2, 5, 4))),
    "pad": (lambda x: (F.pad(x, (1, 2), "reflect"), F.pad(x, (2, 1))), ((2, 3, 5),)),
    "split": (lambda x: [part * 2 for part in x.split(2, dim=1)], ((4, 7),)),
    "statistics": (lambda x: (x.std(1), *torch.var_mean(x, 0), x.norm(), x.amax(1)), ((4, 7),)),
    "complex": (lambda x: torch.view_as_real(torch.fft.rfft(x)), ((4, 8),)),
    "foreach": (lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2), ((4, 3), (4, 3))),
}


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


@pytest.mark.parametrize("name", MODULES)
def test_module_in_training_forward_backward_and_buffers_agree(
    name: str, assert_same_as_host: Callable[..., None]
) -> None:
    make, shape = MODULES[name]
    assert_same_as_host(make().double(), _leaf(*shape))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_forward_and_backward_agree(name: str, assert_same_as_host: Callable[..., None]) -> None:
    function, shapes = FUNCTIONS[name]
    assert_same_as_host(function, *(_leaf(*shape) for shape in shapes))


def test_convolution_of_channels_last_memory_agrees(assert_same_as_host: Callable[..., None]) -> None:
    images = torch.randn(2, 4, 6, 5, dtype=torch.double).to(memory_format=torch.channels_last).requires_grad_()
    assert_same_as_host(nn.Conv2d(4, 6, 3).double(), images)


def test_convolution_of_frozen_weight_gives_the_gradient_of_the_input(assert_same_as_host: Callable[..., None]) -> None:
    convolution = nn.Conv2d(4, 6, 3).double()
    convolution.weight.requires_grad_(False)
    assert_same_as_host(convolution, _leaf(2, 4, 6, 5))


def test_indexed_writes_with_repeated_places_agree(assert_same_as_host: Callable[..., None]) -> None:
    places = torch.tensor([0, 2, 2, 1])

    def put(x: Tensor, rows: Tensor, where: Tensor) -> tuple[Tensor, ...]:
        return (
            x.index_put((where,), rows, accumulate=True),
            x.index_add(0, where, rows),
            x.scatter_add(0, where[:, None].expand(-1, 3), rows),
            x[where] * 2,
            x.gather(0, where[:, None]),
        )

    assert_same_as_host(put, _leaf(4, 3), _leaf(4, 3), places)


def test_embedding_bag_agrees(assert_same_as_host: Callable[..., None]) -> None:
    bag = nn.EmbeddingBag(7, 3, mode="mean").double()
    assert_same_as_host(bag, torch.tensor([[1, 2, 2], [6, 0, 1]]), synchronous_operators=2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_histogram_of_integers_counts_each_of_them(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 3, 3, 7, 1, 9], dtype=dtype, device="sim:0")
    found = torch.histc(values, bins=8, min=0, max=7)
    assert found.dtype == dtype
    assert found.tolist() == [1, 1, 0, 2, 0, 0, 0, 1], "9 is outside"


def test_histogram_of_integers_without_bounds_takes_those_of_the_values() -> None:
    assert torch.histc(torch.tensor([2, 5, 3, 5], device="sim:0"), bins=2).tolist() == [2, 2]
