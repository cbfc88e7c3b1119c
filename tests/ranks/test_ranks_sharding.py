"""Optimizers divided among ranks, against plain Lightning on one device with the batches of all ranks together.

What a rank keeps is what it owns; what a checkpoint has is what one device would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.support.forks import Forks
from tests.support.parity import Watch, assert_alike, make_trainer, ready
from tests.support.rank_runs.launch import place, values_of_ranks
from tests.support.small import CLASSES, WIDTH, Small

STEPS = 4
# Rows of each rank in a batch.
PARTS = {1: (7,), 2: (5, 2), 3: (3, 1, 3)}


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    """The batches of all ranks together."""
    generator = torch.Generator().manual_seed(1)
    rows = sum(PARTS[size])
    return [
        (torch.randn(rows, WIDTH, generator=generator), torch.randint(CLASSES, (rows,), generator=generator))
        for _ in range(STEPS)
    ]


def part_of_rank(rank: int, size: int) -> list[tuple[Tensor, ...]]:
    start = sum(PARTS[size][:rank])
    return [tuple(part[start : start + PARTS[size][rank]] for part in batch) for batch in batches(size)]


class Groups(Small):
    """AdamW with two groups of weights, and a scheduler."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Frozen(Groups):
    """A part is frozen, a part is not used, and two weights share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body[0].requires_grad_(False)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.body[2][0].weight = self.body[1][0].weight

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.body[0].requires_grad_(True)


class Adagrad(Small):
    """Makes its state before the first step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


class Two(Small):
    """Manual optimization with two optimizers, one of which gets more weights later, and clipping by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        body, head = self.optimizers()
        for factor in (1.0, 0.5):
            self.manual_backward(self.loss(batch) * factor)
        self.clip_gradients(body, 0.03, "norm")
        body.step()
        head.step()
        body.zero_grad()
        head.zero_grad()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.optimizers[0].add_param_group({"params": list(self.body[0].parameters()), "lr": 0.2})

    def configure_optimizers(self) -> Any:
        body = torch.optim.SGD(self.body[1:].parameters(), lr=0.1, momentum=0.9)
        return body, torch.optim.Adam(self.head.parameters(), lr=0.01, eps=1e-4)


class ClipsItself(Groups):
    """Sees clipped gradients before the update."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.03, "norm")
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(2.0)


MODULES: dict[str, Callable[[], L.LightningModule]] = {
    "momentum": Small,
    "groups": Groups,
    "frozen": Frozen,
    "adagrad": Adagrad,
    "two": Two,
    "clips itself": ClipsItself,
}


@dataclass(frozen=True)
class Case:
    """A module, settings of both trainers, and options of the strategy."""

    module: str
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rtol: float = 1e-3


CASES = {
    "groups, scheduler": Case("groups"),
    "overlap off": Case("groups", {"gradient_clip_val": 0.05}, {"optimizer_overlap": "off"}),
    "clipped by value": Case("momentum", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "clips itself": Case("clips itself"),
    "accumulated": Case("groups", {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}),
    "frozen": Case("frozen"),
    "adagrad": Case("adagrad"),
    "two": Case("two"),
    "bf16-mixed": Case("groups", {"precision": "bf16-mixed"}, {"virtual_copies": True}, rtol=0.05),
    "bf16-true": Case("momentum", {"precision": "bf16-true"}, rtol=0.2),
}
# By number of ranks, the cases that run on so many: on three those in which owners have different things.
ON = {2: tuple(CASES), 3: ("groups, scheduler", "frozen", "two")}


def make_module(name: str) -> L.LightningModule:
    torch.manual_seed(3)
    return MODULES[name]()


def state_of(module: L.LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def state_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Of what is as large as a weight."""
    values = [value for optimizer in optimizers for entry in optimizer.state.values() for value in entry.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.dim())


class Held(L.Callback):
    """What a rank has while it trains: bytes of optimizer state, and weights with a gradient before an update."""

    def __init__(self) -> None:
        self.state_bytes: list[int] = []
        self.gradients: list[set[str]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append({name for name, p in pl_module.named_parameters() if p.grad is not None})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.state_bytes.append(state_bytes(trainer.optimizers))


class Middle(L.Callback):
    """Writes a checkpoint after the second step, whose update is still under way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint(self.path)


def all_trained(folder: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """One training after the other, between which ranks stay connected; the checkpoint of each has its name."""
    return {name: trained_on_a_rank(name, folder) for name in names}


OfRanks = dict[int, tuple[Path, list[dict[str, dict[str, Any]]]]]


@pytest.fixture(scope="module")
def of_ranks(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> OfRanks:
    """By number of ranks: where checkpoints are, and by rank what came of each case."""
    folder = tmp_path_factory.mktemp("ranks")
    found = {}
    for size, names in ON.items():
        place = folder / str(size)
        ranks = values_of_ranks(forks, place, size, all_trained, str(place), names)
        found[size] = place, ranks
    return found


def trained_on_a_rank(name: str, folder: str, resumed: str | None = None, **more: Any) -> dict[str, Any]:
    """The rank's rows of each batch."""
    case = CASES[name]
    rank, size = place()
    module, held = make_module(case.module), Held()
    trainer = make_trainer(
        devices=2 * size,
        num_microbatches=2,
        options={"shard_optimizer": True, **case.options, **more},
        callbacks=[held, Middle(Path(folder) / f"{name}, middle.ckpt")],
        use_distributed_sampler=False,
        max_epochs=1 if resumed is None else 2,
        **case.settings,
    )
    trainer.fit(module, ready(part_of_rank(rank, size)), ckpt_path=resumed)
    trainer.save_checkpoint(Path(folder) / f"{name}.ckpt")
    return {
        "weights": state_of(module),
        "steps": trainer.global_step,
        "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "bytes": held.state_bytes[-1],
        "gradients": held.gradients,
    }


def trained_plainly(
    case: Case, size: int, epochs: int = 1, callbacks: Iterable[L.Callback] = ()
) -> tuple[L.LightningModule, L.Trainer, Watch]:
    module, watch = make_module(case.module), Watch()
    trainer = make_trainer("plain", callbacks=[watch, *callbacks], max_epochs=epochs, **case.settings)
    trainer.fit(module, ready(batches(size)))
    return module, trainer, watch


@pytest.mark.parametrize(("name", "size"), [(name, size) for size, names in ON.items() for name in names])
def test_sharded_ranks_train_as_one_device_and_write_its_checkpoints(
    of_ranks: OfRanks, tmp_path: Path, name: str, size: int
) -> None:
    case = CASES[name]
    module, trainer, _ = trained_plainly(case, size, callbacks=[Middle(tmp_path / f"{name}, middle.ckpt")])
    trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    start = make_module(case.module).state_dict()
    assert max(float((value - start[key]).abs().max()) for key, value in module.state_dict().items()) > 1e-3
    folder, ranks = of_ranks[size]
    found = [one[name] for one in ranks]
    for one in found:
        assert_alike(one["weights"], state_of(module), rtol=case.rtol, atol=case.rtol * 0.01)
        assert one["steps"] == trainer.global_step
        for key, value in one["weights"].items():
            assert torch.equal(value, found[0]["weights"][key]), key
    for file in (f"{name}.ckpt", f"{name}, middle.ckpt"):
        checkpoint, expected = (torch.load(place / file, weights_only=True) for place in (folder, tmp_path))
        for state in expected["optimizer_states"]:  # where a weight is trained later, plain state has it at the end
            state["state"] = dict(sorted(state["state"].items()))
        for part in ("state_dict", "optimizer_states"):
            assert_alike(checkpoint[part], expected[part], rtol=case.rtol, atol=case.rtol * 0.01)


@pytest.mark.parametrize("size", ON)
def test_a_rank_keeps_gradients_and_state_of_its_own_weights_alone(of_ranks: OfRanks, size: int) -> None:
    _, trainer, watch = trained_plainly(CASES["groups, scheduler"], size)
    found = [one["groups, scheduler"] for one in of_ranks[size][1]]
    total, largest = state_bytes(trainer.optimizers), 2 * 4 * WIDTH * WIDTH
    assert sum(one["bytes"] for one in found) == total
    assert all(abs(one["bytes"] - total / size) <= largest for one in found)
    for step in range(len(watch.gradients)):
        names = [name for one in found for name in one["gradients"][step]]
        assert sorted(names) == sorted(watch.gradients[step])


@pytest.mark.parametrize(("writers", "readers", "shards"), [(2, 3, True), (3, 2, False)])
def test_a_checkpoint_resumes_with_another_number_of_ranks(
    forks: Forks, of_ranks: OfRanks, tmp_path: Path, writers: int, readers: int, shards: bool
) -> None:
    """All ranks together have the same rows, however many there are."""
    name = "groups, scheduler"
    expected, trainer, _ = trained_plainly(CASES[name], 1, epochs=2)
    assert_alike(batches(writers), batches(readers), rtol=0.0, atol=0.0)
    path = of_ranks[writers][0] / f"{name}.ckpt"
    found = values_of_ranks(forks, tmp_path, readers, resumed_on_a_rank, name, str(path), shards)
    for one in found:
        assert one["steps"] == 2 * STEPS
        assert_alike(one["weights"], state_of(expected), rtol=1e-3, atol=1e-5)
        assert_alike(one["rates"], [group["lr"] for group in trainer.optimizers[0].param_groups])


def resumed_on_a_rank(name: str, path: str, shards: bool) -> dict[str, Any]:
    return trained_on_a_rank(name, ".", path, shard_optimizer=shards)
