"""The scan of a model's modules: found once, and again when modules come, go or change places."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn
from torchmetrics import MeanMetric

from lightning_roundpipe.integration.steps.modules import ModuleScan


def make_model() -> nn.Sequential:
    norm, metric = nn.BatchNorm1d(2), MeanMetric()
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(norm, metric), norm, metric)


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "a module comes": lambda m: m.append(nn.BatchNorm1d(2)),
    "a module goes": lambda m: m.pop(1),
    "a leaf gets a child": lambda m: m[0].add_module("inner", nn.BatchNorm1d(2)),
    "a module is replaced below": lambda m: m[1].__setitem__(0, nn.InstanceNorm1d(2)),
    "a metric is replaced by an equal one": lambda m: m.__setitem__(3, MeanMetric()),
    "two modules change places": lambda m: m._modules.update({"0": m[2], "2": m[0]}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_tree_is_scanned_again(change: str) -> None:
    model = make_model()
    scan = ModuleScan(model)
    CHANGES[change](model)
    scan.refresh()
    fresh = ModuleScan(model)
    assert [name for name, _ in scan.named] == [name for name, _ in model.named_modules()]
    for left, right in ((scan.norms, fresh.norms), (scan.metrics, fresh.metrics)):
        assert [id(module) for module in left] == [id(module) for module in right]


def test_an_unchanged_tree_is_not_scanned_again() -> None:
    scan = ModuleScan(make_model())
    named = scan.named
    scan.refresh()
    assert scan.named is named
    assert len(scan.norms) == len(scan.metrics) == 1, "each once"


def test_names_are_those_of_torch_and_rows_are_coupled_in_training_mode() -> None:
    model = make_model()
    scan = ModuleScan(model)
    assert [name for name, _ in scan.parameters()] == [name for name, _ in model.named_parameters()]
    assert {f"{name}" for name, *_ in scan.buffers()} == {
        "1.0.running_mean",
        "1.0.running_var",
        "1.0.num_batches_tracked",
    }
    assert scan.couples_rows
    model.eval()
    assert not scan.couples_rows
