"""Copies of virtual devices: of any tensor, in pieces, and poison where there is no copy yet, or none any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_roundpipe.common.sizes import num_bytes_of
from lightning_roundpipe.devices.chunks import pairs_of, pieces_of
from lightning_roundpipe.devices.transfer import Edge
from lightning_roundpipe.devices.virtual import TimedLink
from tests.support.engine.lazy_link import LazyLink, opened

LINKS: dict[str, Callable[[], TimedLink]] = {"timed": lambda: TimedLink(chunk_bytes=16), "lazy": LazyLink}


def bulk_of(num_bytes: int) -> Tensor:
    return (torch.arange(num_bytes) % 251).to(torch.uint8)


# -------------------------------------------------------------------------------------------------------------- pieces


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=6),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.complex128]),
    layout=st.sampled_from(["contiguous", "transposed", "strided", "expanded"]),
    max_bytes=st.integers(1, 400),
)
def test_pieces_are_small_and_make_every_element_once(
    shapes: list[list[int]], dtype: torch.dtype, layout: str, max_bytes: int
) -> None:
    sources = [make(shape, dtype, layout) for shape in shapes]
    pairs = pairs_of(sources)
    pieces = pieces_of(pairs, max_bytes)
    for piece in pieces:
        num_bytes = num_bytes_of([copy for copy, _ in piece])
        assert num_bytes <= max_bytes or [copy.numel() for copy, _ in piece] == [1]
    assert sum(copy.numel() for piece in pieces for copy, _ in piece) == sum(s.numel() for s in sources)
    for piece in pieces:
        for copy, source in piece:
            copy.copy_(source)
    assert all(torch.equal(copy, source) for (copy, _), source in zip(pairs, sources, strict=True))


def make(shape: list[int], dtype: torch.dtype, layout: str) -> Tensor:
    """A tensor with numbers that differ."""
    if layout == "expanded":
        return torch.arange(1, 1 + shape[-1]).to(dtype).expand(shape) if shape else torch.ones((), dtype=dtype)
    if layout == "strided":
        shape = [2 * n for n in shape]
    numbers = torch.arange(1, 1 + torch.Size(shape).numel()).to(dtype).reshape(shape)
    if layout == "strided":
        return numbers[tuple(slice(None, None, 2) for _ in shape)]
    return numbers.permute(tuple(reversed(range(len(shape))))) if layout == "transposed" else numbers


def test_small_tensors_share_a_chunk() -> None:
    pieces = pieces_of(pairs_of([bulk_of(n) for n in (300, 300, 300, 2500, 400, 600, 1)]), 1000)
    assert [[len(copy) for copy, _ in piece] for piece in pieces] == [
        [300, 300, 300],
        [1000],
        [1000],
        [500, 400],
        [600, 1],
    ]


# ---------------------------------------------------------------------------------------------------- kinds of tensors

TENSORS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "every other": lambda: torch.randn(3, 8)[:, ::2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "empty": lambda: torch.empty(0, 3),
    "0-dim": lambda: torch.tensor(3.0),
    "bool": lambda: torch.tensor([True, False, True]),
    "int": lambda: torch.arange(5),
    "uint8": lambda: torch.arange(5, dtype=torch.uint8),
    "bf16": lambda: torch.randn(5).bfloat16(),
    "complex": lambda: torch.randn(4, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "part of a graph": lambda: torch.randn(3, requires_grad=True) * 2,
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("kind", TENSORS)
def test_copies_equal_their_sources_and_share_nothing_with_them(kind: str, link: str) -> None:
    source = TENSORS[kind]()
    with opened(LINKS[link]()) as device:
        for is_bulk in (True, False):
            (copy,) = device.upload([source], "x", is_bulk=is_bulk).wait(Edge.WEIGHTS)
            assert torch.equal(copy, source)
            assert (copy.dtype, copy.shape, copy.requires_grad) == (source.dtype, source.shape, False)
            assert copy.numel() == 0 or copy.data_ptr() != source.data_ptr()
            if kind in ("plain", "transposed", "channels last"):
                assert copy.stride() == source.stride()
        assert device.h2d.num_bytes == 2 * source.numel() * source.element_size()
        assert device.d2h.num_bytes == 0


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("is_coalesced", [True, False])
def test_sparse_gradients_travel_as_they_are(link: str, is_coalesced: bool) -> None:
    gradient = torch.sparse_coo_tensor(
        [[1, 2 if is_coalesced else 1]], torch.randn(2, 3), (4, 3), check_invariants=True
    )
    if is_coalesced:
        gradient = gradient.coalesce()
    with opened(LINKS[link]()) as device:
        (copy,) = device.download([gradient], "gradients", is_bulk=True).wait(Edge.GRADIENTS)
        assert copy.layout is torch.sparse_coo
        assert copy.is_coalesced() is is_coalesced
        assert torch.equal(copy.to_dense(), gradient.to_dense())
        assert torch.equal(copy._values(), gradient._values())
        assert device.d2h.num_bytes == 2 * 3 * 4
        device.free([copy])
        assert copy._values().isnan().all()


def test_sparse_copies_are_poisoned_until_they_are_made() -> None:
    gradient = torch.sparse_coo_tensor([[1]], torch.randn(1, 3), (4, 3), check_invariants=True)
    with opened(LazyLink()) as device:
        transfer = device.download([gradient], "gradients")
        assert transfer.tensors[0].to_dense()[1].isnan().all()


@pytest.mark.parametrize("link", LINKS)
def test_tensors_of_inference_mode_travel_and_are_freed(link: str) -> None:
    with opened(LINKS[link]()) as device:
        with torch.inference_mode():
            source = torch.ones(10)
            (copy,) = device.upload([source], "x").wait(Edge.INPUTS)
            snapshot = device.snapshot(copy)
        assert copy.tolist() == [1.0] * 10
        device.free([copy, snapshot])
        assert copy.isnan().all()
        assert snapshot.isnan().all()


# -------------------------------------------------------------------------------------------------------------- poison


@pytest.mark.parametrize(
    ("source", "is_poisoned"),
    [
        (torch.ones(2), lambda t: bool(t.isnan().all())),
        (torch.ones(2, dtype=torch.complex64), lambda t: bool(t.isnan().all())),
        (torch.ones(2, dtype=torch.int64), lambda t: t.tolist() == [-(2**63)] * 2),
        (torch.ones(2, dtype=torch.bool), lambda t: t.tolist() == [False] * 2),
    ],
)
def test_a_copy_is_poisoned_until_it_is_waited_for(source: Tensor, is_poisoned: Callable[[Tensor], bool]) -> None:
    with opened(LazyLink()) as device:
        transfer = device.upload([source], "x")
        assert not transfer.is_done()
        assert is_poisoned(transfer.tensors[0])
        assert torch.equal(transfer.wait(Edge.INPUTS)[0], source)
        assert transfer.is_done()


@pytest.mark.parametrize("link", LINKS)
def test_memory_is_poisoned_when_it_is_freed_and_not_before_its_last_reader(link: str) -> None:
    with opened(LINKS[link]()) as device:
        on_device, expanded = torch.ones(1000), torch.ones(3, 1).expand(3, 4)
        transfer = device.download([on_device], "output", is_bulk=True)
        assert device.free([on_device], after=transfer) is transfer
        (copy,) = transfer.wait(Edge.OFFLOADED)
        device.free([expanded])
    assert copy.tolist() == [1.0] * 1000
    assert on_device.isnan().all()
    assert expanded.isnan().all()
