"""Optimizer steps behind the pipeline and what users do: clipping in hooks, weights in the same memory, trainers within
callbacks. The updates are late, see :class:`Late`."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from torch import nn

from lightning_roundpipe.weights.futures import PendingParameter
from tests.support.late_updates import Late, copied
from tests.support.parity import Run, compare, make_loader, make_trainer
from tests.support.small import Small


def num_pending(module: nn.Module) -> int:
    return sum(type(parameter) is PendingParameter for parameter in module.parameters())


def seen(run: Run) -> Any:
    """What the callback of a run has noted."""
    return run.trainer.callbacks[0].seen  # type: ignore[attr-defined]


# --- clipping --------------------------------------------------------------------------------------------------------


class Clips(cb.Callback):
    """Clips before the Trainer does, and looks at what has come of it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        pl_module.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        self.seen.append(copied([parameter.grad for parameter in pl_module.parameters()]))


@pytest.mark.parametrize("clip_val", [None, 0.05])
def test_clipping_in_a_hook(late: Late, clip_val: float | None) -> None:
    """The Trainer clips nothing, or gradients that have this norm already."""
    compare(Small, make_loader(24), callbacks=lambda: [Clips()], also=seen, gradient_clip_val=clip_val)
    assert late.num_buckets > 0


# --- weights in the same memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_part", "is_frozen"), [(False, True), (True, False)])
def test_updates_of_weights_in_the_same_memory_do_not_overlap(late: Late, is_part: bool, is_frozen: bool) -> None:
    """Tied by ``data``, or in parts, and a frozen alias of a trained weight."""

    class Learns(Small):
        def __init__(self) -> None:
            super().__init__()
            first, last = self.body[0][0].weight, self.body[3][0].weight
            last.data = first.data
            if is_part:
                memory = torch.cat([first.detach(), last.detach()])
                first.data, last.data = memory[: len(first)], memory[2 : 2 + len(last)]
            last.requires_grad_(not is_frozen)

    compare(Learns, make_loader(24))
    assert late.num_buckets == 0


# --- trainers, references, ends --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("late")
def test_another_trainer_in_a_callback() -> None:
    pending: list[bool] = []

    class Validates(cb.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
            class Judges(Small):
                def validation_step(self, batch: Any, batch_idx: int) -> None:
                    self.log("val", self.loss(batch))

            judge = Judges()
            judge.body, judge.head = pl_module.body, pl_module.head
            pending.append(num_pending(judge) > 0)
            self.seen.append(make_trainer().validate(judge, make_loader(16), verbose=False))

    compare(Small, make_loader(24), callbacks=lambda: [Validates()], also=seen)
    assert pending[-3:] == [False, True, False]  # of the pipelined run


def test_a_reference_to_the_state_sees_all_of_it(late: Late) -> None:
    """Taken as early as there are optimizers."""

    class Watches(cb.Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []
            self.state: Any = None

        def on_fit_start(self, trainer: L.Trainer, *args: Any) -> None:
            self.state = trainer.optimizers[0].state

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen.append(copied([self.state[parameter] for parameter in args[1].parameters()]))

    compare(Small, make_loader(24), callbacks=lambda: [Watches()], also=seen)
    assert late.num_buckets > 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"limit_train_batches": 3}, [0, 1, 0]),  # the first update makes the state, and ends at once
        ({"max_steps": 7, "max_epochs": 2}, [0, 1, 1, 1, 0, 1, 0]),
        ({"accumulate_grad_batches": 2, "max_steps": 2}, [0, 0, 0, 0]),
        ({"accumulate_grad_batches": 2}, [0, 0, 0, 1, 0]),
    ],
)
def test_updates_before_something_else_are_waited_for(
    late: Late, settings: dict[str, Any], expected: list[int]
) -> None:
    """After the last batch of an epoch and after the last step come exports, other trainers and new workers."""
    found: list[int] = []

    class Learns(Small):
        def on_train_batch_end(self, *args: Any) -> None:
            found.append(int(num_pending(self) > 0))

        def on_train_epoch_end(self) -> None:
            assert num_pending(self) == 0

        def on_train_end(self) -> None:
            assert num_pending(self) == 0

    make_trainer(options={"optimizer_overlap": "exact"}, **settings).fit(Learns(), make_loader(40))
    assert found == expected
