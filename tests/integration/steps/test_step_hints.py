"""What depends on whole batches and can be seen: one warning per fit that says what to do, none where all is well."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.support.parity import make_loader, make_trainer
from tests.support.rows import compat
from tests.support.small import CLASSES, WIDTH, Small

WORDS = {
    "norms": "the batch norm ",
    "losses": "the loss of micro-batch ",
    "numbers": "training_step leaves a number in self.seen ",
    "buffers": "training_step, or code that it calls, changes the buffer ",
}


def hints_of(kind: str, run: Callable[[], Any]) -> list[str]:
    """Runs something and gives the warnings of one kind, each as often as it was given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if str(warning.message).startswith(WORDS[kind])]


# --- numbers on the module --------------------------------------------------------------------------------------------


class Counts(Small):
    """Keeps a number of its own in each training step: as much as ``amount`` makes of a batch."""

    def __init__(self, amount: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.amount = amount
        self.seen: Any = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen = self.seen + self.amount(batch[0])
        return super().training_step(batch, batch_idx)


NUMBERS: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any], int]] = {
    "rows": (len, {}, 1),
    "rows, as many in each": (len, {"num_microbatches": 4}, 1),
    "one row in each": (len, {"num_microbatches": 8}, 0),
    "a sum": (lambda x: x.sum(), {}, 1),
    "one micro-batch": (len, {"num_microbatches": 1}, 0),
    "the same for all": (lambda x: 1, {}, 0),
    "no number": (lambda x: torch.zeros(2) + len(x), {}, 0),
    "no real number": (lambda x: torch.tensor(1j) * len(x), {}, 0),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_of_which_only_the_last_stays_are_named_once(case: str) -> None:
    amount, options, expected = NUMBERS[case]
    trainer = make_trainer(limit_train_batches=2, **options)
    found = hints_of("numbers", lambda: trainer.fit(Counts(amount), make_loader()))
    assert len(found) == expected
    if found:
        assert "that depends on the micro-batch (" in found[0]
        assert "reduce_fx='sum'" in found[0]


class CountsInside(Small):
    """Keeps numbers of each batch in a dict or list."""

    def __init__(self, keep: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.keep = keep
        self.seen = {"rows": 0, "list": []}
        self.seen_in: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)
        self.keep(self, batch[1])


# What each does with the labels of a micro-batch; the place that the warning names.
NUMBERS_INSIDE: dict[str, tuple[Callable[[Any, Tensor], None], str | None]] = {
    "rows": (lambda module, y: module.seen.update(rows=module.seen["rows"] + len(y)), "self.seen['rows']"),
    "a tensor": (lambda module, y: module.seen.update(most=y.sum()), "self.seen['most']"),
    "a new dict": (lambda module, y: setattr(module, "seen", {"rows": len(y)}), "self.seen['rows']"),
    "a list": (lambda module, y: module.seen_in.append(len(y)), "self.seen_in[-1]"),
    "a mean": (lambda module, y: module.seen.update(mean=y.float().mean().item()), None),
    "the same for all": (lambda module, y: module.seen.update(rows=2), None),
    "samples": (lambda module, y: module.seen_in.extend(y.tolist()), None),
    "no numbers": (lambda module, y: module.seen_in.append(y), None),
    "in one micro-batch only": (lambda module, y: module.seen_in.extend([0] * (len(y) < 3)), None),
}


@pytest.mark.parametrize("case", NUMBERS_INSIDE)
def test_numbers_in_lists_and_dicts_that_are_not_added_up(case: str) -> None:
    keep, place = NUMBERS_INSIDE[case]
    module = CountsInside(keep)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer().validate(module, make_loader(16), verbose=False)
    assert not isinstance(module.seen["rows"], list), "the next step could not add to it"
    texts = [str(warning.message) for warning in caught if "leaves a number" in str(warning.message)]
    assert [text.split(" that depends")[0] for text in texts] == [f"validation_step leaves a number in {place}"] * (
        place is not None
    )


# --- buffers ----------------------------------------------------------------------------------------------------------


class Codebook(nn.Module):
    """With a buffer that its forward changes by ``change``, in training."""

    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.change = change
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.change(self, x)
        return self.inner(x) + self.codes.sum()  # type: ignore[no-any-return]


def assigns(module: Any, x: Tensor) -> None:
    module.codes = module.codes + x.mean(0)


def grows(module: Any, x: Tensor) -> None:
    """A cache that follows the sizes of batches."""
    module.codes = torch.zeros(WIDTH + len(x))


BUFFERS: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, Any], int]] = {
    "in place": (lambda module, x: module.codes.lerp_(x.mean(0), 0.5), {"max_epochs": 2}, 1),
    "on copies": (lambda module, x: module.codes.lerp_(x.mean(0), 0.5), {"options": {"virtual_copies": True}}, 1),
    "by assignment": (assigns, {}, 1),
    "to the same": (lambda module, x: module.codes.zero_(), {}, 0),
    "another size": (grows, {}, 0),
    "one micro-batch": (assigns, {"num_microbatches": 1}, 0),
}


@pytest.mark.parametrize("case", BUFFERS)
@pytest.mark.parametrize("in_unit", [False, True], ids=["user code", "unit"])
def test_buffers_that_a_step_changes(case: str, in_unit: bool) -> None:
    change, settings, expected = BUFFERS[case]

    class Quantizes(Small):
        def __init__(self) -> None:
            super().__init__()
            self.codebook = Codebook(change)
            if not in_unit:
                del self.codebook.inner
                self.codebook.inner = nn.Identity()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return super().training_step((self.codebook(x), y), batch_idx)

    trainer = make_trainer(limit_train_batches=2, **settings)
    found = hints_of("buffers", lambda: trainer.fit(Quantizes(), make_loader()))
    assert len(found) == expected
    for hint in found:
        assert "'codebook.codes': once in each of the 3 micro-batches" in hint
        assert "num_microbatches=1" in hint


# --- batch norm -------------------------------------------------------------------------------------------------------


class Normalizes(Small):
    """The small model with a norm in two of its blocks."""

    def __init__(
        self, make_norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(WIDTH), *, frozen: bool = False
    ) -> None:
        super().__init__()
        self.frozen = frozen
        for block in self.body[:2]:
            block.append(make_norm())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.frozen:
            self.body.eval()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


NORMS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    "in training mode": (Normalizes, {"max_epochs": 2}, 1),
    "without statistics": (lambda: Normalizes(lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False)), {}, 1),
    "one micro-batch": (Normalizes, {"num_microbatches": 1}, 0),
    "in eval mode": (lambda: Normalizes(frozen=True), {}, 0),
    "group norm": (lambda: Normalizes(lambda: nn.GroupNorm(2, WIDTH)), {}, 0),
}


@compat(
    "Library",
    "torch (batch norm in training mode, several micro-batches)",
    status="differs",
    note="Statistics are those of a micro-batch, with a warning: `num_microbatches=1` takes the whole batch.",
)
@pytest.mark.parametrize("case", NORMS)
def test_batch_norms(case: str) -> None:
    make_module, settings, expected = NORMS[case]
    module = make_module()
    for _ in range(1 + expected):  # once per fit, not once per process
        trainer = make_trainer(limit_train_batches=2, limit_val_batches=1, **settings)
        hints = hints_of("norms", lambda trainer=trainer: trainer.fit(module, make_loader(), make_loader()))
        assert len(hints) == expected
        for hint in hints:
            assert "'body.0.3' (BatchNorm1d, and 1 more)" in hint
            assert "each of the 3 micro-batches" in hint
            assert "num_microbatches=1" in hint
            assert "GroupNorm" in hint


def test_batch_norms_in_evaluation() -> None:
    assert not hints_of("norms", lambda: make_trainer().validate(Normalizes(), make_loader(), verbose=False))


# --- losses -----------------------------------------------------------------------------------------------------------


class Labelled(Small):
    """Some of the samples have no label."""

    def loss(self, batch: Any) -> Tensor:
        x, y = (batch["x"], batch["labels"]) if isinstance(batch, dict) else batch
        return F.cross_entropy(self(x), y, ignore_index=-100)


def labelled(labels: list[int], *, as_dict: bool = False) -> DataLoader[Any]:
    """Two batches of six rows with these labels."""
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(4))
    y = torch.tensor(labels * 2)
    rows: Any = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)] if as_dict else TensorDataset(x, y)
    return DataLoader(rows, batch_size=6)


LOSSES: dict[str, tuple[DataLoader[Any], dict[str, Any], int]] = {
    "one micro-batch without a label": (labelled([0, 1, -100, -100, 2, 0]), {"max_epochs": 2}, 1),
    "a label in each": (labelled([0, 1, -100, 1, 2, -100]), {}, 0),
    "no label at all": (labelled([-100] * 6), {}, 0),
    "the whole batch": (labelled([0, 1, -100, -100, 2, 0]), {"num_microbatches": 1}, 0),
    "weighed by labels": (
        labelled([0, 1, -100, -100, 2, 0], as_dict=True), {"options": {"loss_weight": "label_tokens"}}, 0
    ),
}  # fmt: skip


@compat(
    "Misuse",
    "a loss that is NaN in some micro-batches only",
    status="differs",
    note="The loss of the batch is NaN, with a warning that names the ways out.",
)
@pytest.mark.parametrize("case", LOSSES)
def test_losses_that_are_nan(case: str) -> None:
    loader, settings, expected = LOSSES[case]
    for _ in range(1 + expected):
        trainer = make_trainer(**settings)
        hints = hints_of("losses", lambda trainer=trainer: trainer.fit(Labelled(), loader))
        assert len(hints) == expected
        for hint in hints:
            assert "micro-batch 1 of 3 is NaN" in hint
            assert "loss_weight='label_tokens'" in hint
            assert "num_microbatches=1" in hint


# --- padding masks ----------------------------------------------------------------------------------------------------


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
