"""What steps do to a batch, and return of it: as plain Lightning leaves it for the hooks that come after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_roundpipe.integration.batches import changes
from tests.support.parity import COPIES, assert_alike, make_trainer, ready
from tests.support.small import CLASSES, WIDTH, Small

OPTIONS: dict[str, dict[str, Any]] = {"shared": {}, "copies": COPIES}
EVALUATIONS = ("validate", "test", "predict")


class Image(Tensor):
    """As those of torchvision: what moves it makes another object, although nothing moves."""

    def cpu(self, *args: Any) -> Any:
        return super().cpu(*args).as_subclass(Image)


@dataclass
class Record:
    x: Tensor
    info: dict[str, Any] = field(default_factory=dict)
    prediction: Any = None


class Unready:
    """A descriptor of a library, which cannot be asked for its value in the class."""

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            raise NameError("not yet")
        return vars(instance)["x"]

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)["x"] = value


class Fields(NamedTuple):
    x: Tensor
    info: dict[str, Any]


class Plain:
    """No dataclass; with one micro-batch it need not be split."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.info: dict[str, Any] = {"deep": {"old": x, "x": x + 1}}

    def to(self, *args: Any, **kwargs: Any) -> Plain:
        return self


def rows() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))


BATCHES: dict[str, Callable[[], Any]] = {
    "dataclass": lambda: Record(rows(), {"deep": {"old": rows(), "x": rows() + 1}}),
    "named tuple": lambda: Fields(rows(), {"deep": {"old": rows(), "x": rows() + 1}}),
    "dict": lambda: {"x": rows(), "info": {"deep": {"old": rows(), "x": rows() + 1}}},
}
WHOLE: dict[str, Callable[[], Any]] = {
    **BATCHES,
    "object": lambda: Plain(rows()),
    "subclass of tensors": lambda: Record(rows().as_subclass(Image), {"deep": {"old": rows(), "x": rows()}}),
}


def entry(batch: Any, name: str) -> Any:
    return batch[name] if isinstance(batch, dict) else getattr(batch, name)


def put(batch: Any, name: str, value: Any) -> None:
    if isinstance(batch, dict):
        batch[name] = value
    elif not isinstance(batch, tuple):
        setattr(batch, name, value)


class Changes(Small):
    """Puts in, replaces, takes out, changes in place, at all depths, and returns what it was given."""

    def act(self, batch: Any) -> Any:
        x, info = entry(batch, "x").as_subclass(Tensor), entry(batch, "info")
        x.mul_(0.5)
        put(batch, "prediction", self(x))
        put(batch, "same", entry(batch, "x"))
        info["deep"]["score"] = self(x).sum(1)
        info["deep"]["x"] = info["deep"]["x"] * 2 + info["deep"].pop("old")
        info["new"] = {"first": x[:, 0], "names": "n"}
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        returned = self.act(batch)
        return {"loss": entry(batch, "info")["deep"]["score"].square().mean(), "batch": returned}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.act(batch)

    test_step = predict_step = validation_step

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch


class Looks(L.Callback):
    """Keeps what callbacks find."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def _look(self, batch: Any, returned: Any) -> None:
        info = entry(batch, "info")
        is_open = not isinstance(batch, tuple)
        found = {"info": info, "x": entry(batch, "x").as_subclass(Tensor), "batch": returned is batch}
        if is_open:
            found |= {"prediction": entry(batch, "prediction"), "same": entry(batch, "same") is entry(batch, "x")}
        self.found.append(found)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._look(batch, outputs["batch"])

    def on_validation_batch_end(self, t: Any, m: Any, outputs: Any, batch: Any, *rest: Any) -> None:
        self._look(batch, outputs)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


def run(kind: str, how: str, make: Callable[[], Any], module: type[Small] = Changes, **settings: Any) -> Any:
    looks = Looks()
    trainer = make_trainer(kind, callbacks=[looks], **settings)
    getattr(trainer, how)(module(), ready([make(), make()]))
    return looks.found


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("how", ["fit", *EVALUATIONS])
@pytest.mark.parametrize("kind", WHOLE)
def test_one_microbatch_is_the_batch(kind: str, how: str, options: dict[str, Any]) -> None:
    expected = run("plain", how, WHOLE[kind])
    assert expected[0]["batch"]
    assert_alike(run("roundpipe", how, WHOLE[kind], num_microbatches=1, **options), expected)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("how", ["fit", "test"])
@pytest.mark.parametrize("kind", BATCHES)
def test_changes_of_several_microbatches_come_back(kind: str, how: str, options: dict[str, Any]) -> None:
    expected = run("plain", how, BATCHES[kind])
    assert_alike(run("roundpipe", how, BATCHES[kind], num_microbatches=3, **options), expected)


def test_nothing_that_is_left_in_a_batch_has_a_graph() -> None:
    found = run("roundpipe", "fit", BATCHES["dict"], num_microbatches=1)
    assert not found[0]["prediction"].requires_grad
    assert not found[0]["info"]["deep"]["score"].requires_grad


class FillsLists(Changes):
    """Lists in a batch: of columns, to which one is added, and of samples, of which each is replaced."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        batch["columns"].append(self(batch["columns"][0]))
        batch["columns"][0] = batch["columns"][0] * 2
        batch["names"][:] = [name.upper() for name in batch["names"]]
        for sample in batch["samples"]:
            sample["score"] = self(sample["x"])
        return [batch["columns"], batch["samples"], batch["x"]]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_lists_in_a_batch_are_filled(num_microbatches: int, options: dict[str, Any]) -> None:
    def make() -> Any:
        return {
            "x": rows(),
            "columns": [rows(), rows() + 1],
            "names": list("abcdefgh"),
            "samples": [{"x": row} for row in rows()],
        }

    def act(kind: str, **settings: Any) -> Any:
        batch = make()
        (returned,) = make_trainer(kind, **settings).predict(FillsLists(), ready([batch]))
        return batch, returned

    plain = act("plain")
    assert plain[0]["names"][0] == "A"
    assert plain[0]["columns"][2].shape == (8, CLASSES)
    assert_alike(act("roundpipe", num_microbatches=num_microbatches, **options), plain)


def test_a_dataclass_whose_fields_are_descriptors() -> None:
    described = dataclass(type("Described", (), {"__annotations__": {"x": Tensor}}))
    described.x = Unready()
    parts = [described(rows()[:4]), described(rows()[4:])]
    noted = changes.Changes(parts, (4, 4), (0.5, 0.5))
    for part in parts:
        part.label = part.x + 1
    whole = described(rows())
    noted.bring_back(whole)
    assert torch.equal(whole.label, rows() + 1)
