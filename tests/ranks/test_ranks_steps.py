"""Training steps on one rank, beside others with the same batches: what travels when, and what is run again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.memory import DeviceOutOfMemoryError
from lightning_roundpipe.integration.steps import ranks as ranks_module
from lightning_roundpipe.ranks.group import RankGroup
from lightning_roundpipe.weights.gradients import GradientStore
from lightning_roundpipe.weights.placement import Loader
from tests.support.parity import Watch, assert_alike, make_loader, make_trainer
from tests.support.rank_runs.paused import Paused, one_by_one
from tests.support.rank_threads import TIMEOUT_S, EchoRank


@pytest.fixture(autouse=True)
def gradients_travel_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one(monkeypatch.setattr)


def fit(module: L.LightningModule, group: RankGroup, **settings: Any) -> Watch:
    watch = Watch()
    trainer = make_trainer(callbacks=[watch], **settings)
    trainer.strategy._group = group
    trainer.fit(module, make_loader(rows=24))
    return watch


def plain() -> Watch:
    watch = Watch()
    make_trainer("plain", callbacks=[watch]).fit(Paused(), make_loader(rows=24))
    return watch


def assert_as_plain(watch: Watch) -> None:
    expected = plain()
    assert len(expected.gradients) == 3
    assert_alike(watch.gradients, expected.gradients)
    assert_alike(watch.losses, expected.losses)


@pytest.mark.parametrize("options", [{}, {"virtual_copies": True}], ids=["aliases", "copies"])
def test_gradients_of_the_last_units_travel_while_the_backward_of_the_first_waits(options: dict[str, Any]) -> None:
    gone = threading.Event()

    class Rank(EchoRank):
        def add_up(self, tensor: Tensor, what: str, wire: torch.dtype | None = None) -> None:
            super().add_up(tensor, what, wire)
            if what.startswith("gradients of body.2.0.weight in training step 2"):
                gone.set()

    module, group = Paused(), Rank()
    last = list(make_loader(rows=24))[2][0][-1]

    def in_backward(index: int, x: Tensor) -> None:
        if index == 2 and any(torch.equal(row, last) for row in x):  # the last micro-batch: no other waits for it
            assert gone.wait(TIMEOUT_S), "nothing has gone before the end"

    module.in_backward = in_backward
    assert_as_plain(fit(module, group, options=options))
    names = [what.split()[2] for what, _, thread in group.sent if thread == "roundpipe-reduction"]
    assert list(dict.fromkeys(names)) == [name for name, _ in reversed(list(module.named_parameters()))]


def test_what_travels_is_each_gradient_once_and_no_frozen_weight() -> None:
    module, group = Paused(), EchoRank(3)
    module.body[2].requires_grad_(False)
    fit(module, group)
    trained = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
    for step in range(3):
        sent: dict[str, int] = {}
        for what, size, _ in group.sent:
            if what.endswith(f"in training step {step} of epoch 0"):
                sent[what.split()[2]] = sent.get(what.split()[2], 0) + size
        assert sum(sent.values()) == sum(trained.values())
        assert not any(name.startswith("body.2") for name in sent)


def test_one_process_has_nothing_to_do_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("called")

    for owner, name in (
        (Loader, "foreseen"), (GradientStore, "foresee"), (GradientStore, "take_planned"),
        (ranks_module, "StepReduction"), (ranks_module.Reduction, "agree"), (ranks_module.Reduction, "take_local"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, refuse)
    threads: set[str] = set()
    module = Paused()
    module.in_backward = lambda index, x: threads.update(thread.name for thread in threading.enumerate())
    trainer = make_trainer(callbacks=[watch := Watch()])
    trainer.fit(module, make_loader(rows=24))
    assert_as_plain(watch)
    assert threads
    assert "roundpipe-reduction" not in threads


def failing_once(where: int) -> Callable[[int], None]:
    """Raises what a device without memory raises, once, in that step."""
    failed: list[int] = []

    def fail(index: int) -> None:
        if index == where and not failed:
            failed.append(index)
            raise DeviceOutOfMemoryError("there is no room")

    return fail


LIMITED = {"virtual_copies": True, "device_memory_limit": "1GiB"}


def test_a_step_that_has_sent_nothing_is_run_again_and_sends_once() -> None:
    module, group = Paused(), EchoRank()
    module.in_forward = failing_once(1)
    watch = fit(module, group, num_microbatches="auto", options=LIMITED)
    assert_as_plain(watch)
    assert watch.num_microbatches == [4, 8, 8]
    sizes = [size for what, size, _ in group.sent if what.endswith("in training step 1 of epoch 0")]
    assert sum(sizes) == sum(p.numel() for p in module.parameters())


def test_a_step_that_others_have_gradients_of_is_not_run_again() -> None:
    gone = threading.Event()

    class Rank(EchoRank):
        def add_up(self, tensor: Tensor, what: str, wire: torch.dtype | None = None) -> None:
            super().add_up(tensor, what, wire)
            if what.startswith("gradients of head.bias in training step 1"):
                gone.set()

    module = Paused()
    last = list(make_loader(rows=24))[1][0][-1]

    def in_backward(index: int, x: Tensor) -> None:
        if index == 1 and any(torch.equal(row, last) for row in x):
            assert gone.wait(TIMEOUT_S)
            raise DeviceOutOfMemoryError("there is no room")

    module.in_backward = in_backward
    with pytest.raises(DeviceOutOfMemoryError, match=r"other ranks have some of its gradients already.*no room"):
        fit(module, Rank(), num_microbatches="auto", options=LIMITED)


def test_a_step_that_fails_leaves_local_gradients_where_they_were() -> None:
    module = Paused()

    def in_forward(index: int) -> None:
        if index == 2:
            raise ValueError("user code")

    module.in_forward = in_forward
    trainer = make_trainer(accumulate_grad_batches=3)
    trainer.strategy._group = EchoRank()
    seen: dict[str, Tensor] = {}
    module.on_train_batch_start = lambda batch, batch_idx: seen.update(  # type: ignore[method-assign]
        {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    )
    with pytest.raises(ValueError, match="user code"):
        trainer.fit(module, make_loader(rows=24))
    assert len(seen) == 10
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, seen[name])


def test_losses_that_are_multiplied_by_the_user_after_an_accumulation_are_refused() -> None:
    class Doubling(Paused):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            (2.0 * loss).backward(*args, **kwargs)

    trainer = make_trainer(accumulate_grad_batches=3)
    trainer.strategy._group = EchoRank()
    with pytest.raises(Exception, match="gradients that were accumulated have been added already"):
        trainer.fit(Doubling(), make_loader(rows=24))
