"""Masters that their owners alone keep, where code of the user looks at weights or writes them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from torch import Tensor, nn

from lightning_roundpipe.weights.kept_low import low_of
from tests.ranks.masters.divided import told, trained
from tests.ranks.test_ranks_sharding import STEPS, Groups, part_of_rank
from tests.support.forks import Forks
from tests.support.parity import assert_alike, ready
from tests.support.rank_runs.launch import SOON_S, place, run_ranks, values_of_ranks
from tests.support.small import WIDTH

AVERAGES = hasattr(callbacks, "WeightAveraging")


class Regularized(Groups):
    """Its loss has a weight in it that its forward uses as well."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch) + 0.1 * self.body[1][0].weight.square().sum()
        return loss


class Average(L.Callback):
    """Follows all weights after each step."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        weights = [p.detach() for p in pl_module.parameters()]
        before = self.found or weights
        self.found = [0.5 * a + 0.5 * p for a, p in zip(before, weights, strict=True)]


class Holds(L.Callback):
    """Keeps the memory of weights, which it has from before the fit, and looks at them no more until the end."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.found = [weight.data for weight in pl_module.parameters()]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert all(map(torch.equal, self.found, pl_module.parameters()))


class Exports(L.Callback):
    """Sees the weights when the training has ended."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.found = {name: value.clone() for name, value in pl_module.state_dict().items()}


class LooksOnce(L.Callback):
    """Looks at a weight after the third step, and may write it."""

    def __init__(self, factor: float | None = None, loads: bool = False) -> None:
        self.factor = factor
        self.loads = loads
        self.value = torch.empty(0)
        self.kept: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = pl_module.body[1][0].weight
        self.kept.append(low_of(weight) is not None)
        if trainer.global_step != 3:
            return
        if self.loads:
            generator = torch.Generator().manual_seed(1)
            state = {name: torch.randn(p.shape, generator=generator) for name, p in pl_module.named_parameters()}
            pl_module.load_state_dict(state)
        elif self.factor is not None:
            with torch.no_grad():
                weight.mul_(self.factor)
        else:
            self.value = weight.detach().clone()


class Evaluated(Groups):
    """In evaluation a unit computes in full precision; the first one comes after two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.body[1] = Full()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.loss(batch), sync_dist=True)


class Full(nn.Module):
    """Without autocast in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.training):
            return self.inner(x if self.training else x.float())


def evaluated(divides: bool) -> dict[str, Any]:
    run = trained(
        Evaluated,
        divides=divides,
        loaders={"val_dataloaders": ready(part_of_rank(*place()))},
        val_check_interval=2,
        limit_val_batches=2,
        max_epochs=2,
    )
    return {**told(run), "value": run["trainer"].callback_metrics["value"].clone()}


def pair(make: Any, *callbacks: Any) -> list[dict[str, Any]]:
    """Divided, and all kept; with what their callbacks have."""
    found = []
    for divides in (True, False):
        own = [make_callback() for make_callback in callbacks]
        run = told(trained(make, divides=divides, callbacks=own))
        found.append({**run, "callbacks": [callback.found for callback in own]})
    return found


def averaged() -> list[dict[str, Any]]:
    def every_second() -> L.Callback:
        class EverySecond(callbacks.WeightAveraging):
            def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
                return step_idx is not None and step_idx % 2 == 1

        return EverySecond()

    return [told(trained(Groups, divides=divides, callbacks=[every_second()])) for divides in (True, False)]


def all_runs() -> dict[str, Any]:
    return {
        "regularized": pair(Regularized),
        "average": pair(Groups, Average),
        "holds": pair(Groups, Holds),
        "exports": pair(Groups, Exports),
        **({"averaged": averaged()} if AVERAGES else {}),
        "evaluated": [evaluated(divides) for divides in (True, False)],
    }


@pytest.fixture(scope="module")
def of_ranks(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, and by name, what came of training with divided masters, and with whole ones."""
    return values_of_ranks(forks, tmp_path_factory.mktemp("ranks"), 2, all_runs, limit_s=120.0)


@pytest.mark.parametrize("name", ["regularized", "average", "holds", "exports", "averaged", "evaluated"])
def test_code_that_looks_from_the_start_finds_what_whole_masters_give(of_ranks: Any, name: str) -> None:
    if name == "averaged" and not AVERAGES:
        pytest.skip("averages of weights are in newer Lightning")
    for rank in of_ranks:
        divided, whole = rank[name]
        for run in (divided, whole):
            run.pop("handed out")
        is_divided = divided.pop("bytes")[-1] < whole.pop("bytes")[-1]
        assert is_divided == (name not in ("average", "averaged", "holds"))
        assert_alike(divided, whole, rtol=0.0, atol=0.0)


def late_looks() -> list[dict[str, Any]]:
    found = []
    for callback in (LooksOnce(), LooksOnce(factor=0.7), LooksOnce(loads=True)):
        for divides in (True, False):
            callback.kept = []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run = told(trained(Groups, divides=divides, callbacks=[callback], max_epochs=2))
            texts = [str(one.message) for one in caught if "low precision" in str(one.message)]
            found.append({**run, "warnings": texts, "value": callback.value, "kept": callback.kept})
    return found


@pytest.fixture(scope="module")
def of_late_looks(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """By rank: looks, writes and loads, each with divided masters and with whole ones."""
    return values_of_ranks(forks, tmp_path_factory.mktemp("late"), 2, late_looks, limit_s=120.0)


def test_a_later_look_finds_rounded_values_with_a_warning_and_changes_nothing(of_late_looks: Any) -> None:
    rounded = 0
    for divided, whole, *_ in of_late_looks:
        assert_alike(divided["weights"], whole["weights"], rtol=0.0, atol=0.0)
        if not divided["kept"][2]:
            assert torch.equal(divided["value"], whole["value"])
            continue
        rounded += 1
        assert torch.equal(divided["value"], whole["value"].bfloat16().float())
        assert not torch.equal(divided["value"], whole["value"])
        assert len(divided["warnings"]) == 1
        assert "'body.1.0.weight'" in divided["warnings"][0]
        assert divided["kept"][3:] == [False] * (2 * STEPS - 3)
    assert rounded == 1


def test_a_later_write_on_all_ranks_is_that_of_the_owner_after_the_next_update(of_late_looks: Any) -> None:
    (_, _, divided, whole, _, _), (_, _, other, *_) = of_late_looks
    assert_alike(divided["weights"], other["weights"], rtol=0.0, atol=0.0)
    assert_alike(divided["weights"], whole["weights"], rtol=0.02, atol=2e-3)


def test_weights_that_are_loaded_in_between_are_exact(of_late_looks: Any) -> None:
    for *_, divided, whole in of_late_looks:
        assert_alike(divided["weights"], whole["weights"], rtol=0.0, atol=0.0)
        assert_alike(divided["losses"], whole["losses"], rtol=0.0, atol=0.0)


class Fails(L.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and place()[0] == 1:
            raise ValueError("boom")


def failing() -> None:
    modules: list[Any] = []

    def make() -> Groups:
        modules.append(Groups())
        return modules[0]

    try:
        trained(make, callbacks=[Fails()])
    finally:
        weights = dict(modules[0].named_parameters())
        assert all(type(weight) is nn.Parameter and low_of(weight) is None for weight in weights.values())
        rounded = [name for name, p in weights.items() if torch.equal(p, p.bfloat16().float())]
        assert all(p.isfinite().all() for p in weights.values())
        print(f"rounded: {len(rounded)} of {len(weights)}")


def test_after_an_error_weights_of_other_ranks_are_rounded_and_a_warning_says_so(forks: Forks, tmp_path: Path) -> None:
    total = 0
    for rank, end in enumerate(run_ranks(forks, tmp_path, 2, failing)):
        assert end.status == 1
        assert end.late_s < SOON_S
        assert "boom" in end.output
        assert f"ranks have parted after an error: on rank {rank} '" in end.output
        (line,) = [line for line in end.output.splitlines() if line.startswith("rounded: ")]
        total += int(line.split()[1])
    assert total == len(list(Groups().parameters()))
