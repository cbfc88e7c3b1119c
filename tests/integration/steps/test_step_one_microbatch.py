"""With one micro-batch steps may do what they do in plain Lightning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.parity import COPIES, compare, make_loader, make_trainer
from tests.support.small import WIDTH, Small

OPTIONS: dict[str, dict[str, Any]] = {"shared": {}, "copies": COPIES}


class Teaches(Small):
    """A teacher that follows the student, before or after its use in the step, or between two uses."""

    when, assigns = "before", False

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def follow(self) -> None:
        for pt, ps in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
            if self.assigns:
                pt.data = 0.5 * pt.data + 0.5 * ps.data
            else:
                pt.data.mul_(0.5).add_(ps.data, alpha=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        loss = self.loss(batch)
        if self.when == "before":
            self.follow()
        for _ in range(2 if self.when == "between" else 1):
            loss = loss + (self.body(x) - self.teacher(x) - 0.1).square().mean()
            if self.when != "before":
                self.follow()
        return loss


@pytest.mark.parametrize("assigns", [False, True], ids=["in place", "assigned"])
@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_teacher_is_updated_through_data(when: str, assigns: bool, options: dict[str, Any]) -> None:
    kind = type("Teacher", (Teaches,), {"when": when, "assigns": assigns})
    compare(kind, max_epochs=3, ours={"num_microbatches": 1, **options})


class Level(nn.Module):
    """As the extra levels of a feature pyramid: puts features and their names into lists that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        features.append(self.linear(features[-1]))
        names.append("pool")
        return features, names


class Pyramid(Small):
    returns = True

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([Level(), Level()])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, names = [self.body(batch[0])], ["body"]
        for level in self.levels:
            found = level(features, names)
            if self.returns:
                features, names = found
        assert names == ["body", "pool", "pool"]
        return torch.stack([self.head(x).square().mean() for x in features]).mean()


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("returns", [True, False], ids=["returned", "as they were given"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_units_fill_lists_that_they_are_given(returns: bool, num_microbatches: int, options: dict[str, Any]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind = type("Pyramid", (Pyramid,), {"returns": returns})
        compare(kind, max_epochs=2, ours={"num_microbatches": num_microbatches, **options})


class Holder(dict[str, Any]):
    """A dict of a class of the user's."""


class Puts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, holder: Holder, *lists: list[str]) -> Tensor:
        holder["x"] = x
        for each in lists:
            each.append("x")
        return self.linear(x)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.puts = nn.ModuleList([Puts()])


@pytest.mark.parametrize("num_lists", [0, 1], ids=["alone", "beside a list"])
def test_what_units_put_into_other_objects_is_refused(num_lists: int) -> None:
    """Also where they fill a list in the same call; the error names a module around them that can be a unit."""

    class Refused(Small):
        def __init__(self) -> None:
            super().__init__()
            self.around = Around()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            lists: list[list[str]] = [[] for _ in range(num_lists)]
            return self.around.puts[0](self.body(batch[0]), Holder(), *lists).square().mean()

    with pytest.raises(RuntimeError, match=r"units=\['Around'\]"):
        make_trainer(num_microbatches=1).fit(Refused(), make_loader())
