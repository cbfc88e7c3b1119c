"""Fingerprints and sizes of tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.common.fingerprints import UNKNOWN, Versions, fingerprint_of, version_of
from lightning_roundpipe.common.sizes import extent_of, num_bytes_of


def give_memory(tensor: Tensor) -> None:
    tensor.data = tensor.data.clone()


def transpose(tensor: Tensor) -> None:
    tensor.data = tensor.data.t()


def change_dtype(tensor: Tensor) -> None:
    tensor.data = tensor.data.view(torch.int32)


@pytest.mark.parametrize(
    ("change", "is_seen", "memory_differs"),
    [
        (lambda tensor: tensor.add_(1), True, False),
        (lambda tensor: tensor[0].zero_(), True, False),
        (give_memory, True, True),
        (transpose, True, True),
        (change_dtype, True, True),
        (lambda tensor: tensor.data.add_(1), False, False),
        (lambda tensor: tensor + 1, False, False),
    ],
    ids=["written", "written through a view", "other memory", "other strides", "other dtype", "through data", "read"],
)
def test_a_fingerprint_tells_whether_a_tensor_has_changed(
    change: Callable[[Tensor], object], is_seen: bool, memory_differs: bool
) -> None:
    tensor = torch.zeros(2, 2)
    before = fingerprint_of(tensor)
    change(tensor)
    after = fingerprint_of(tensor)
    assert (after != before) is is_seen
    assert (after.memory != before.memory) is memory_differs


def test_inference_tensors_do_not_count_writes() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
        tensor.add_(1)
    assert version_of(tensor) == UNKNOWN


def test_versions_name_what_was_written_and_know_other_tensors() -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2), "c": nn.Parameter(torch.zeros(2))}
    versions = Versions(tensors.items())
    assert versions.written() == []
    assert versions.has("a", tensors["a"])
    assert not versions.has("a", tensors["b"])
    assert not versions.has("a", None)
    assert not versions.has("d", tensors["a"])
    tensors["a"].add_(1)
    with torch.no_grad():
        tensors["c"].mul_(2)
    assert versions.written() == ["a", "c"]
    assert not versions.has("a", tensors["a"])
    assert versions.has("b", tensors["b"])


def test_bytes_are_those_of_the_tensors_among_values() -> None:
    values = [torch.zeros(3, dtype=torch.float64), None, 7, torch.zeros(2, 2, dtype=torch.int8), "text"]
    assert num_bytes_of(values) == 3 * 8 + 4


@pytest.mark.parametrize(
    ("tensor", "extent"),
    [
        (torch.zeros(2, 3), (0, 6)),
        (torch.zeros(4, 5)[1:3, 2:4], (7, 14)),
        (torch.zeros(4, 5).t(), (0, 20)),
        (torch.zeros(5).expand(3, 5), (0, 5)),
        (torch.zeros(5)[3:3], (3, 3)),
        (torch.tensor(1.0), (0, 1)),
    ],
    ids=["whole", "part", "transposed", "expanded", "empty", "scalar"],
)
def test_the_extent_of_a_tensor_is_what_it_spans_in_its_storage(tensor: Tensor, extent: tuple[int, int]) -> None:
    assert extent_of(tensor) == extent
