"""``whole_batch`` beside training: where it gives back what it was given, what it refuses, and what the proof says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe import whole_batch
from lightning_roundpipe.engine.barrier import BarrierError, LateBarrierError
from tests.support.parity import Watch, make_loader, make_trainer
from tests.support.small import Small


class Comparing(Small):
    """Compares the rows of what ``gather`` gives with each other."""

    def __init__(self, gather: Callable[[Any, Tensor], Tensor] = lambda module, z: whole_batch(z)) -> None:
        super().__init__()
        self.gather = gather
        self.seen: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        z = F.normalize(self.gather(self, self(batch[0])), dim=-1)
        return F.cross_entropy(5 * z @ z.T, torch.arange(len(z)))


class Coupling(nn.Module):
    """A unit that wants the rows of all micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return whole_batch(self.inner(x))


def fit(module: Small, kind: str = "roundpipe", **settings: Any) -> Watch:
    watch = Watch()
    make_trainer(kind, callbacks=[watch], **settings).fit(module, make_loader())
    return watch


@pytest.mark.parametrize("settings", [{"kind": "plain"}, {"num_microbatches": 1}], ids=["plain", "one"])
def test_without_others_it_gives_back_what_it_was_given(settings: dict[str, Any]) -> None:
    def same(module: Small, z: Tensor) -> Tensor:
        assert whole_batch(z) is z
        return z

    fit(Comparing(same), **settings)
    rows = [torch.ones(2)]
    assert whole_batch(rows) is rows


def test_rows_are_in_the_order_of_the_batch_and_each_micro_batch_may_change_its_own() -> None:
    found: list[dict[str, Tensor]] = []

    def gather(module: Small, z: Tensor) -> Tensor:
        given = {"z": z, "index": torch.arange(len(z))}
        gathered = whole_batch(given)
        found.append({name: value.detach().clone() for name, value in gathered.items()})
        gathered["index"].zero_()
        return gathered["z"]

    trainer = make_trainer(limit_train_batches=0, limit_val_batches=1)
    module = Comparing(gather)
    module.validation_step = module.training_step  # type: ignore[method-assign]
    trainer.validate(module, make_loader(), verbose=False)
    for one in found[-3:]:
        assert one["index"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
        torch.testing.assert_close(one["z"], module(next(iter(make_loader()))[0]))


ERRORS: dict[str, tuple[type[Exception], str, Callable[[Any, Tensor], Any]]] = {
    "no tensor": (TypeError, r"got a str \('rows'\): it gathers tensors", lambda m, z: whole_batch([z, "rows"])[0]),
    "no rows": (ValueError, "a tensor of no dimension", lambda m, z: whole_batch(z.sum())),
    "sparse": (ValueError, "the layout torch.sparse_coo", lambda m, z: whole_batch(z.to_sparse())),
    "shapes": (
        ValueError,
        r"those of micro-batch 0 are float32 of shape \(3, 4\), and those of micro-batch 2 float32 of shape \(2, 3\)",
        lambda m, z: whole_batch(F.pad(z, (0, len(z) - 2))),
    ),
    "dtypes": (
        ValueError,
        "and those of micro-batch 2 float64",
        lambda m, z: whole_batch(z.double() if len(z) < 3 else z),
    ),
    "calls": (
        BarrierError,
        "0 to whole_batch, micro-batch 2 to the end of the step. All must make the same calls of whole_batch",
        lambda m, z: z if len(z) < 3 else whole_batch(z),
    ),
    "unit": (RuntimeError, "called inside a unit.*call whole_batch in training_step", lambda m, z: m.head[1](z)),
    "checkpoint": (
        RuntimeError,
        "called in a backward, by an activation checkpoint",
        lambda m, z: checkpoint(lambda x: whole_batch(x) * z.sum(), z, use_reentrant=False),
    ),
    "gradient": (
        RuntimeError,
        "a backward pass inside the step went through unit 'whole_batch'",
        lambda m, z: torch.autograd.grad(whole_batch(z).sum(), z)[0],
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_refused(case: str) -> None:
    error, match, gather = ERRORS[case]
    module = Comparing(gather)
    if case == "unit":
        module.head = nn.Sequential(module.head, Coupling())
    with pytest.raises(error, match=match):
        fit(module, options={"check_split": "off"}, limit_train_batches=1)


@pytest.mark.parametrize("place", ["before", "after", "backward"])
def test_an_error_of_one_micro_batch_ends_the_others(place: str) -> None:
    def fail(*args: Any) -> None:
        raise ArithmeticError("of one micro-batch")

    def gather(module: Small, z: Tensor) -> Tensor:
        rows = len(z)
        if place == "after":
            z = whole_batch(z)
        if rows < 3:
            z.register_hook(fail) if place == "backward" else fail()
        return z if place == "after" else whole_batch(z)

    with pytest.raises(ArithmeticError, match="of one micro-batch"):
        fit(Comparing(gather), options={"check_split": "off"})


def test_the_proof_finds_it_exact_and_names_it_where_it_is_missing(recwarn: pytest.WarningsRecorder) -> None:
    assert set(fit(Comparing(), num_microbatches="auto", options={"check_split": "error"}).num_microbatches) == {4}
    assert not [warning for warning in recwarn if "split" in str(warning.message)]
    with pytest.warns(match=r"compares all rows.*Ways out: lightning_roundpipe\.whole_batch\(x\) in the step"):
        assert set(fit(Comparing(lambda module, z: z), num_microbatches="auto").num_microbatches) == {1}
    with pytest.warns(match=r"probably because the loss .*Ways out: .*lightning_roundpipe\.whole_batch\(x\)"):
        fit(Spread(), num_microbatches="auto", limit_train_batches=1)


class Spread(Small):
    """Keeps the outputs of a batch apart, by a statistic."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + (1 - self(batch[0]).std(0)).relu().mean() * 5


def test_a_proof_in_which_micro_batches_meet_gives_both_halves_the_same_numbers() -> None:
    def gather(module: Small, z: Tensor) -> Tensor:
        z = z + torch.randn_like(z)
        return whole_batch(z) + whole_batch(torch.randn_like(z))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*num_workers.*|.*val_dataloader.*")
        assert set(fit(Comparing(gather), num_microbatches="auto").num_microbatches) == {4}


def test_a_proof_in_which_micro_batches_meet_still_sees_what_differs() -> None:
    def gather(module: Small, z: Tensor) -> Tensor:
        whole_batch(z + torch.randn_like(z))
        return z + torch.randn_like(z)

    with pytest.warns(match="splitting the batch changes the loss"):
        assert set(fit(Comparing(gather), num_microbatches="auto").num_microbatches) == {1}


def test_steps_that_are_verified_say_that_they_meet() -> None:
    with pytest.warns(match="verify=1: training step 0 of epoch 0 is not compared .* meet in whole_batch"):
        fit(Comparing(), options={"verify": 1}, limit_train_batches=1)


def test_a_step_that_cannot_be_run_again_is_to_call_it_from_the_start() -> None:
    def gather(module: Small, z: Tensor) -> Tensor:
        return z if module.trainer.global_step == 0 else whole_batch(z)

    class Changing(Comparing):
        def __init__(self) -> None:
            super().__init__(gather)
            self.register_buffer("table", torch.zeros(2**19))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.table.add_(1.0)
            return super().training_step(batch, batch_idx)

    match = "that did not call it so far.*because the buffer 'table' has changed.*call it in the first step as well"
    with pytest.raises(LateBarrierError, match=match):
        fit(Changing(), options={"check_split": "off"})
