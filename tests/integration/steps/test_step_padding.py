"""Padding masks of ``nn.TransformerEncoder`` in evaluation, which packs sequences where weights are on the host."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.parity import make_trainer
from tests.support.rows import compat
from tests.support.small import CLASSES, WIDTH


class Encodes(L.LightningModule):
    """An encoder whose padded positions are part of the loss, or are not."""

    def __init__(self, *, packs: bool = True, looks_at_padding: bool = True) -> None:
        super().__init__()
        self.looks_at_padding = looks_at_padding
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=packs)
            self.head = nn.Linear(WIDTH, CLASSES)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, padding = batch
        encoded = self.encoder(x, src_key_padding_mask=padding)
        scores = self.head(encoded).square().sum(-1)
        if not self.looks_at_padding:
            scores = scores.masked_fill(padding, 0.0)
        self.log("val", scores.mean())


@pytest.fixture
def padded() -> Iterator[DataLoader[Any]]:
    """Two batches of four sequences of several lengths."""
    x = torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(5))
    lengths = torch.tensor([5, 3, 2, 4, 5, 1, 5, 3])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors is in prototype stage")
        yield DataLoader(TensorDataset(x, torch.arange(5) >= lengths[:, None]), batch_size=4)


# Arguments of the module, options, and whether the result is plain Lightning's.
ENCODERS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "memory of the host": ({}, {}, True),
    "memory of their own": ({}, {"virtual_copies": True}, False),
    "loss without padding": ({"looks_at_padding": False}, {"virtual_copies": True}, True),
    "no packing": ({"packs": False}, {"virtual_copies": True}, True),
}


@compat(
    "Library",
    "torch (`nn.TransformerEncoder` with padding masks, in evaluation)",
    status="differs",
    note="On GPUs padded positions are not zero: leave them out, or use `enable_nested_tensor=False`.",
)
@pytest.mark.parametrize("case", ENCODERS)
def test_padding_masks(padded: Any, case: str) -> None:
    arguments, options, is_equal = ENCODERS[case]
    plain = make_trainer("plain").validate(Encodes(**arguments), padded, verbose=False)[0]["val"]
    ours = make_trainer(options=options).validate(Encodes(**arguments), padded, verbose=False)[0]["val"]
    assert (ours == pytest.approx(plain, rel=1e-4)) is is_equal
