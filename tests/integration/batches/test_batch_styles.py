"""Batches in the style of common projects, through real data loaders: trained as in plain Lightning, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_roundpipe import BatchSplitError
from lightning_roundpipe.integration.batches.loaders import Readings
from lightning_roundpipe.integration.batches.packed import find_packed, split_packed
from tests.support.huggingface import causal
from tests.support.loaders import Loader
from tests.support.parity import assert_alike, compare, fit, make_loader, make_trainer
from tests.support.small import Small

WIDTH = 6


def vectors(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int, length: int) -> Tensor:
    return torch.randint(3, (length,), generator=torch.Generator().manual_seed(seed))


def test_detection_in_the_style_of_torchvision_trains_as_in_plain_lightning() -> None:
    """Batches as large as an image has channels, and some of the samples boxes, are those that can be mistaken."""

    class Learns(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            losses = [
                (self(image).mean(0) - self(target["boxes"]).mean(0).flip(0)).square().mean()
                for image, target in zip(*batch, strict=True)
            ]
            return torch.stack(losses).mean()

    data = [(vectors(i, 3), {"boxes": vectors(99 + i, 1 + i % 4), "id": i}) for i in range(7)]
    loader: Any = DataLoader(data, batch_size=3, collate_fn=lambda samples: tuple(zip(*samples, strict=True)))  # type: ignore[arg-type]
    compare(Learns, loader)


def graphs(samples: list[Any]) -> Any:
    """Nodes of all graphs one after the other, and the graph of each."""
    sizes = torch.tensor([len(nodes) for nodes in samples])
    return {"x": torch.cat(samples), "graph": torch.repeat_interleave(torch.arange(len(samples)), sizes)}


REFUSED: dict[str, tuple[DataLoader[Any], str]] = {
    "graphs": (
        DataLoader([vectors(i, 2 + i) for i in range(8)], batch_size=4, collate_fn=graphs),  # type: ignore[arg-type]
        r"DataLoader gives 4 samples per batch, but batch\['x'\] of shape \(14, 6\) has 14 rows",
    ),
    "time first, as long as the last batch": (
        DataLoader([vectors(i, 3) for i in range(7)], batch_size=4, collate_fn=lambda s: torch.stack(s, 1)),  # type: ignore[arg-type]
        r"4 samples per batch, but batch of shape \(3, 4, 6\) has 3 rows",
    ),
    "a size from a function that calls default_collate": (
        DataLoader(
            [{"x": vectors(i), "size": (i, 2 * i)} for i in range(4)],
            batch_size=2,
            collate_fn=lambda s: torch.utils.data.default_collate(s),
        ),  # type: ignore[arg-type]
        r"one entry per sample \(batch\['size'\], a list of 2 entries\)",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_batch_without_a_certain_reading_is_refused_before_any_step(kind: str) -> None:
    loader, words = REFUSED[kind]

    class Never(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("the step must not run")

    with pytest.raises(BatchSplitError, match=words) as caught:
        make_trainer().fit(Never(), loader)
    for way_out in ("split_batch=fn", "roundpipe_split_batch", "num_microbatches=1"):
        assert way_out in str(caught.value)


def test_a_later_batch_that_reads_otherwise_names_the_leaf() -> None:
    """Class weights, as many as samples in all batches but the last."""

    class Weighs(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch["x"]).square().mean()

    def collate(samples: list[Tensor]) -> Any:
        return {"x": torch.stack(samples), "weights": torch.ones(4)}

    loader: Any = DataLoader([vectors(i) for i in range(7)], batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    with pytest.raises(
        BatchSplitError, match=r"batch\['weights'\] of shape \(4,\).*earlier batches.*one row per sample"
    ):
        make_trainer().fit(Weighs(), loader)


# --- packed text -----------------------------------------------------------------------------------------------------


class Packed(L.LightningModule):
    """A tiny Llama that takes rows of packed sequences."""

    def __init__(self, *, use_cache: bool = False) -> None:
        super().__init__()
        self.model = causal(use_cache=use_cache)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-2)


def packed_loader(lengths: list[int], batch_size: int) -> Any:
    hf = pytest.importorskip("transformers")
    data = [{"input_ids": (tokens(i, length) + 3).tolist()} for i, length in enumerate(lengths)]
    return DataLoader(data, batch_size=batch_size, collate_fn=hf.DataCollatorWithFlattening())  # type: ignore[arg-type]


LENGTHS = [5, 3, 7, 2, 4, 6, 3, 8]


def test_packed_rows_run_whole_with_one_warning(recwarn: Any) -> None:
    compare(Packed, packed_loader(LENGTHS, 4), max_epochs=2)
    said = [str(w.message) for w in recwarn.list if "packed sequences" in str(w.message)]
    assert len(said) == 1
    assert "one row of 4 packed sequences" in said[0]
    assert "split_batch='packed'" in said[0]


def _two_rows(_: Any) -> dict[str, Any]:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])
    ids = tokens(3, 12).reshape(2, 6) + 3
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def _masked(item: Any) -> dict[str, Any]:
    return {**_two_rows(item), "attention_mask": torch.ones(2, 6, dtype=torch.long)}


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    ("collate", "settings"),
    [
        (None, {}),
        (None, {"options": {"split_batch": "packed"}}),
        (None, {"num_microbatches": 1}),
        (_two_rows, {}),
        (_masked, {}),
    ],
    ids=["whole", "cut", "one", "rows", "mask"],
)
def test_a_cache_that_would_join_packed_sequences_is_spoken_of_once(
    use_cache: bool, collate: Any, settings: Any, recwarn: Any
) -> None:
    """It is off in training steps here. Without one, and with a mask, which the model takes for the whole truth, the
    losses are those of plain Lightning."""
    loader: Any = packed_loader(LENGTHS, 4)
    if collate is not None:
        loader = DataLoader([0, 1, 2, 3], batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    differs = use_cache and collate is not _masked
    losses = [
        torch.tensor(fit(kind, lambda: Packed(use_cache=use_cache), loader, max_epochs=2, **own).module.losses)
        for kind, own in (("plain", {}), ("roundpipe", settings))
    ]
    said = [str(w.message) for w in recwarn.list if "use_cache" in str(w.message)]
    assert torch.allclose(losses[1], losses[0], rtol=1e-4) is not differs
    assert len(said) == differs
    assert all("config.use_cache of LlamaForCausalLM is on" in text for text in said)


def test_packed_rows_are_cut_between_sequences() -> None:
    plain, ours = compare(Packed, packed_loader(LENGTHS, 4), ours={"options": {"split_batch": "packed"}})
    assert_alike(ours.module.losses, plain.module.losses)
    assert len(plain.module.losses) == 2


@given(st.lists(st.integers(1, 9), min_size=2, max_size=7), st.integers(2, 8))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_parts_of_a_packed_row_are_what_the_collator_makes_of_their_sequences(lengths: list[int], count: int) -> None:
    hf = pytest.importorskip("transformers")
    collator = hf.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    data = [{"input_ids": list(range(3, 3 + length))} for length in lengths]
    batch = collator(data)
    packed = find_packed(batch)
    assert packed is not None
    assert packed.num_sequences == len(lengths)
    parts, sizes, _ = split_packed(batch, packed, count, predicts_next=True, in_tokens=False)
    assert len(parts) == min(count, len(lengths))
    start = 0
    for part, number in zip(parts, sizes, strict=True):
        expected = collator(data[start : start + number])
        assert part.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(torch.as_tensor(part[key]), torch.as_tensor(value)), key
        start += number
    assert start == len(lengths)


@pytest.mark.parametrize(("shape", "split"), [((3,), None), ((3,), "packed"), ((1, 3), "packed")])
def test_boundaries_may_have_a_dimension_for_the_batch(shape: tuple[int, ...], split: Any) -> None:
    """And without labels every token weighs."""

    class Learns(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = F.one_hot(batch["input_ids"], WIDTH).float()
            return F.cross_entropy(self(x).flatten(0, 1), batch["targets"].flatten())

    batch = {
        "input_ids": tokens(1, 9)[None],
        "targets": tokens(2, 9)[None],
        "cu_seqlens": torch.tensor([0, 7, 9]).reshape(shape),
    }
    loader: Any = DataLoader([batch] * 2, batch_size=None)  # type: ignore[arg-type]
    compare(Learns, loader, ours={"options": {"split_batch": split}})


def test_a_label_that_crosses_a_cut_is_refused() -> None:
    batch = {"input_ids": torch.arange(3, 9)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    batch["labels"] = batch["input_ids"].clone()
    trainer = make_trainer(options={"split_batch": "packed"})
    with pytest.raises(BatchSplitError, match=r"batch\['labels'\] at position 3.*is not -100"):
        trainer.fit(Packed(), DataLoader([batch], batch_size=None))


def test_an_entry_that_fits_no_cut_is_named() -> None:
    batch = {"input_ids": torch.arange(3, 9)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    trainer = make_trainer(options={"split_batch": "packed"})
    with pytest.raises(BatchSplitError, match=r"batch\['extra'\] of shape \(5,\) fits neither the 6 tokens nor the 2"):
        trainer.fit(Packed(), DataLoader([{**batch, "extra": torch.zeros(5)}], batch_size=None))


# --- what is known of a loader ---------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(vectors(i), i % 3) for i in range(10)])


DATA = TensorDataset(vectors(0, 10), torch.arange(10) % 3)
# name: (loader, what is known of each batch, whether torch's default has collated it)
LOADERS: dict[str, tuple[Callable[[], Any], list[tuple[int, ...]], bool]] = {
    "of a data set": (lambda: DataLoader(DATA, batch_size=4), [(4,), (4,), (2,)], True),
    "of a data set of fewer samples": (lambda: DataLoader(DATA, batch_size=16), [(10,)], True),
    "that drops the last batch": (lambda: DataLoader(DATA, batch_size=4, drop_last=True), [(4,), (4,)], True),
    "with a batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=torch.utils.data.BatchSampler(range(10), 4, False)),
        [(4,), (4,), (2,)],
        True,
    ),
    "with lists of indices": (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), [(2,), (2,)], True),
    "with lists of several sizes": (lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2]]), [(), ()], True),
    "with a function": (lambda: DataLoader(DATA, batch_size=5, collate_fn=lambda s: s), [(5,), (5,)], False),
    "of a stream": (lambda: DataLoader(Stream(), batch_size=4), [(4,), (4,), (4,)], True),
    "of whole batches": (lambda: DataLoader(DATA, batch_size=None), [()] * 10, False),
    "of no class of torch": (lambda: Loader([(vectors(0, 4), torch.arange(4) % 3)]), [()], False),
    "of one size together": (
        lambda: CombinedLoader([DataLoader(DATA, batch_size=5), DataLoader(DATA, batch_size=5)], "min_size"),
        [(5,), (5,)],
        True,
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_what_is_known_of_a_loader(kind: str) -> None:
    make, sizes, is_collated = LOADERS[kind]
    seen = []

    class Looks(Small):
        def on_fit_start(self) -> None:
            self.readings = Readings(self)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.readings.of("training_step", batch, (batch_idx,))[0])
            return self(vectors(0, 2)).sum()

    make_trainer(num_microbatches=1).fit(Looks(), make())
    assert [source.sizes for source in seen] == sizes
    assert seen[0].is_collated is is_collated
    assert seen[0].is_joined is (kind == "of one size together")
    assert seen[0].is_item is (kind in ("of whole batches", "of no class of torch"))


def test_loaders_may_become_more_between_epochs() -> None:
    class Grows(Small):
        def train_dataloader(self) -> Any:
            loaders = {"a": make_loader()}
            return loaders if self.trainer.current_epoch == 0 else {**loaders, "b": make_loader()}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return sum(self.loss(part) for part in batch.values())

    trainer = make_trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Grows())
    assert trainer.global_step == 6


def test_evaluation_knows_its_own_loaders() -> None:
    seen = []

    class Looks(Small):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            seen.append(
                (dataloader_idx, Readings(self).of("validation_step", batch, (batch_idx, dataloader_idx))[0].sizes)
            )

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            seen.append(
                (dataloader_idx, Readings(self).of("predict_step", batch, (batch_idx, dataloader_idx))[0].sizes)
            )

    loaders = [make_loader(6, 3), make_loader(5, 5)]
    make_trainer(num_microbatches=1).fit(Looks(), make_loader(), loaders)
    make_trainer(num_microbatches=1).validate(Looks(), loaders)
    make_trainer(num_microbatches=1).predict(Looks(), loaders)
    assert seen == [(0, (3,)), (0, (3,)), (1, (5,))] * 3


class Augments:
    """Mixed into the small model: a hook that leaves the layout of a batch as it is, and one that does not."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, [view * 2 for view in batch[1]]]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum((k + 1) * self(x).square().mean() for k, x in enumerate((batch[0], *batch[1])))


def test_a_transfer_hook_that_keeps_the_layout_keeps_the_reading() -> None:
    """Two columns of two views of two samples: whatever could be mistaken is."""

    class Learns(Augments, Small):
        pass

    data = [(vectors(i), [vectors(i + 9), vectors(i + 20)]) for i in range(5)]
    compare(Learns, DataLoader(data, batch_size=2))  # type: ignore[arg-type]


def test_a_transfer_hook_may_change_what_the_collate_function_made() -> None:
    class Stacks(Small):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {"x": list(batch[0]), "y": batch[1]}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss((torch.stack(batch["x"]), batch["y"]))

    compare(Stacks)
