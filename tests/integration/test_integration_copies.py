"""Mixed precision with updates behind the pipeline: no step converts what an update has just written."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lightning_roundpipe.weights import events
from lightning_roundpipe.weights.futures import PendingParameter
from tests.support.parity import make_loader, make_trainer
from tests.support.small import Small

NUM_LEARNING = 4  # steps in which units are learned, and in which weights are looked at for mistakes of the user


class Converted:
    """By which threads copies are made, in each step; begins with what the update before it has made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[list[str]] = [[]]
        monkeypatch.setattr(events, "observer", self._note)

    def _note(self, event: str, *args: Any) -> None:
        if event == "refresh":
            self.steps[-1].append(threading.current_thread().name)
        elif event == "step_ended":
            self.steps.append([])


def fit(mode: str, on_batch_end: Any = None) -> Any:
    torch.manual_seed(3)
    module = Small()
    if on_batch_end is not None:
        module.on_train_batch_end = lambda *_: on_batch_end(module)
    options = {"virtual_copies": True, "optimizer_overlap": mode}
    make_trainer(options=options, precision="bf16-mixed").fit(module, make_loader(80))
    assert not any(type(parameter) is PendingParameter for parameter in module.parameters())
    return module


def test_copies_are_made_by_the_updates_alone(small_updates: None, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = Converted(monkeypatch)
    fit("exact")
    late = [name for step in converted.steps[NUM_LEARNING:-1] for name in step]
    assert late
    assert set(late) == {"roundpipe-optimizer"}, converted.steps


def _clamped(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("on_batch_end", [None, _clamped])
def test_weights_are_those_of_plain_updates(small_updates: None, on_batch_end: Any) -> None:
    """Also where a hook writes a few values of them without a trace."""
    wanted = fit("off", on_batch_end)
    found = fit("exact", on_batch_end)
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, wanted.get_parameter(name)), name
