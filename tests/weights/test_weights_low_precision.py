"""Working copies: when they are made anew, which form a unit takes, what travels, and that no result changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.common.threads import Worker
from lightning_roundpipe.weights import events
from lightning_roundpipe.weights.casts import Use
from lightning_roundpipe.weights.low_precision import WorkingCopies
from lightning_roundpipe.weights.units import Unit
from tests.weights.autocast_training import AUTOCAST, LOW, Block, Model, Training

# --- copies on the host ----------------------------------------------------------------------------------------------


def test_a_trainable_master_is_converted_once_per_step_into_the_same_memory() -> None:
    weights = WorkingCopies()
    master = nn.Parameter(torch.randn(3, 5))
    before: Any = None
    addresses = set()
    for step in range(3):
        weights.begin_step("train", training=True)
        source, version = weights.source(master, LOW), weights.version(master, LOW)
        assert version != before
        assert torch.equal(source, master.to(LOW))
        master.data.add_(1.0)  # leaves no trace
        addresses |= {source.data_ptr(), weights.source(master, LOW).data_ptr()}
        assert not torch.equal(source, master.to(LOW)), f"converted twice in step {step}"
        assert weights.version(master, LOW) == version
        before = version
    assert len(addresses) == 1
    assert weights.host_bytes == 30


def test_a_frozen_master_is_converted_once_until_it_changes() -> None:
    weights = WorkingCopies()
    master = nn.Parameter(torch.randn(3), requires_grad=False)
    weights.begin_step("train", training=True)
    source, version = weights.source(master, LOW), weights.version(master, LOW)
    source.zero_()  # to see whether it is written again
    weights.begin_step("train", training=True)
    assert not weights.source(master, LOW).any()
    assert weights.version(master, LOW) == version
    master.data.add_(1.0)  # leaves no trace but the values
    weights.begin_step("train", training=True)
    assert torch.equal(weights.source(master, LOW), master.to(LOW))
    master.mul_(2.0)  # raises the version
    assert torch.equal(weights.source(master, LOW), master.to(LOW))
    master.data = torch.randn(3)
    assert torch.equal(weights.source(master, LOW), master.to(LOW))
    master.data = torch.randn(5)
    assert torch.equal(weights.source(master, LOW), master.to(LOW))


def test_what_validation_has_converted_first_is_converted_anew_in_training() -> None:
    master = nn.Parameter(torch.randn(3, 4))
    weights = WorkingCopies()
    with torch.inference_mode():
        weights.begin_step("validate", training=False)
        weights.source(master, LOW)
    weights.begin_step("train", training=True)
    with torch.no_grad():
        master.mul_(2)
    assert torch.equal(weights.source(master, LOW), master.to(LOW))


def test_a_write_without_trace_is_seen_when_another_kind_of_step_begins() -> None:
    weights = WorkingCopies()
    master = nn.Parameter(torch.randn(3), requires_grad=False)
    kinds = ["train", "validate", "train"]
    for kind in kinds:
        weights.begin_step(kind, training=kind == "train")
        before = weights.version(master, LOW)
        weights.source(master, LOW)
        master.data.add_(1.0)
        weights.begin_step("other", training=False)
        assert weights.version(master, LOW) != before
        assert torch.equal(weights.source(master, LOW), master.to(LOW))


def test_what_copies_take_is_known_before_they_are_made_and_given_back_when_the_engine_is_closed() -> None:
    ours = Training(Model())
    ours.train()
    assert ours.weights.host_bytes == 0
    expected = ours.weights.expected_bytes
    ours.train()
    assert ours.weights.host_bytes == expected > 0
    ours.engine.close()
    assert ours.weights.host_bytes == 0
    ours.train()


def test_trainable_masters_are_trusted_between_steps_without_an_update() -> None:
    weights = WorkingCopies()
    master = nn.Parameter(torch.randn(3))
    weights.begin_step("validate", training=False)
    assert weights.outlast_step([master])
    version = weights.version(master, LOW)
    weights.begin_step("validate", training=False)
    assert weights.version(master, LOW) == version
    weights.begin_step("train", training=True)
    assert not weights.outlast_step([master])
    assert weights.outlast_step([nn.Parameter(torch.randn(3), requires_grad=False)])


def test_in_its_own_dtype_the_master_itself_travels() -> None:
    weights = WorkingCopies()
    master = nn.Parameter(torch.randn(3))
    source = weights.source(master, master.dtype)
    assert source.data_ptr() == master.data_ptr()
    assert not source.requires_grad
    assert weights.host_bytes == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 4).t(),
        lambda: torch.randn(4, 6)[:, ::2],
        lambda: torch.randn(()),
        lambda: torch.randn(0, 3),
        lambda: torch.randn(3, 1).expand(3, 4),
    ],
    ids=["channels-last", "transposed", "strided", "scalar", "empty", "expanded"],
)
def test_a_copy_has_the_strides_of_autocasts_cast(make: Callable[[], Tensor]) -> None:
    master = nn.Parameter(make())
    source = WorkingCopies().source(master, LOW)
    assert source.stride() == master.to(LOW).stride()
    assert torch.equal(source, master.to(LOW))


def test_many_threads_get_the_same_copy() -> None:
    weights = WorkingCopies()
    masters = [nn.Parameter(torch.randn(257, 63)) for _ in range(4)]
    found: list[list[Tensor]] = [[] for _ in range(8)]
    start = threading.Barrier(8)

    def ask(mine: list[Tensor]) -> None:
        start.wait()
        mine.extend(weights.source(master, LOW).clone() for master in masters)

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine in found:
        assert all(torch.equal(source, master.to(LOW)) for source, master in zip(mine, masters, strict=True))
    assert weights.host_bytes == 4 * 257 * 63 * 2


def test_large_masters_are_converted_by_the_thread_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(events, "observer", lambda *_: names.append(threading.current_thread().name))
    helper, weights = Worker(1), WorkingCopies()
    large, small = nn.Parameter(torch.randn(2**18)), nn.Parameter(torch.randn(3))
    weights.begin_step("train", training=True, helper=helper)
    for master in (large, large, small):
        assert torch.equal(weights.source(master, LOW), master.to(LOW))
    assert names == ["roundpipe-cast", threading.current_thread().name]
    helper.close()


# --- which form a unit takes -----------------------------------------------------------------------------------------


def known_unit(weights: WorkingCopies, uses: dict[str, Use], autocast: Any = AUTOCAST) -> Unit:
    unit = Unit("block", Block(), 0, facts={"some": "facts"})
    parameters = dict(unit.module.named_parameters())
    weights.note_run(unit, autocast, {parameters[name]: use for name, use in uses.items()})
    return unit


def test_a_unit_is_low_from_the_step_after_it_was_learned() -> None:
    weights = WorkingCopies()
    weights.begin_step("train", training=True)
    unit = known_unit(weights, {"up.weight": Use.CAST, "norm.weight": Use.OTHER, "up.bias": Use.CAST_AGAIN})
    unit.module.norm.bias.requires_grad_(False)
    assert not weights.is_low(unit, AUTOCAST)
    weights.begin_step("train", training=True)
    assert weights.is_low(unit)
    assert weights.is_low(unit, AUTOCAST)
    assert weights.dtype_of(unit, unit.module.up.weight) is LOW
    assert weights.dtype_of(unit, unit.module.norm.weight) is torch.float32
    assert weights.dtype_of(unit, unit.module.up.bias) is torch.float32
    unit.module.up.bias.requires_grad_(False)  # nothing is added up
    assert weights.dtype_of(unit, unit.module.up.bias) is LOW
    assert weights.dtype_of(unit, unit.module.down.weight) is torch.float32, "it was not used"
    weights.begin_step("validate", training=False)
    assert not weights.is_low(unit), "nothing is known about evaluation"


def test_the_worst_use_of_all_runs_counts() -> None:
    weights = WorkingCopies()
    weights.begin_step("train", training=True)
    unit = known_unit(weights, {"up.weight": Use.CAST, "down.weight": Use.CAST})
    weights.note_run(unit, AUTOCAST, {unit.module.up.weight: Use.OTHER})
    weights.note_run(unit, AUTOCAST, {unit.module.up.weight: Use.CAST})
    weights.begin_step("train", training=True)
    assert weights.dtype_of(unit, unit.module.up.weight) is torch.float32
    assert weights.dtype_of(unit, unit.module.down.weight) is LOW


def test_a_unit_without_facts_is_full() -> None:
    weights = WorkingCopies()
    weights.begin_step("train", training=True)
    unit = known_unit(weights, {"up.weight": Use.CAST})
    unit.facts.clear()
    weights.begin_step("train", training=True)
    assert not weights.is_low(unit)


def test_a_unit_that_is_called_in_two_states_of_autocast_stays_full() -> None:
    weights = WorkingCopies()
    weights.begin_step("train", training=True)
    units = [known_unit(weights, {"up.weight": Use.CAST}) for _ in range(2)]
    weights.note_run(units[1], (True, torch.float16), {units[1].module.up.weight: Use.CAST})
    for _ in range(2):
        weights.begin_step("train", training=True)
        assert not weights.is_low(units[0], (False, LOW))
        assert not weights.is_low(units[0], AUTOCAST)
        assert not weights.is_low(units[1], AUTOCAST)


def test_gradients_that_autocast_computes_in_float16() -> None:
    weights = WorkingCopies()
    half = (True, torch.float16)
    weights.begin_step("train", training=True)
    unit = known_unit(weights, {"up.weight": Use.CAST, "down.weight": Use.CAST_AGAIN, "up.bias": Use.OTHER}, half)
    other = known_unit(weights, {"up.weight": Use.CAST})  # in bfloat16
    assert weights.gradient_dtypes() == {unit.module.up.weight: torch.float16}
    weights.note_run(other, half, {unit.module.up.weight: Use.CAST})
    shared = known_unit(weights, {}, half)
    weights.note_run(shared, half, {unit.module.up.weight: Use.CAST})
    assert weights.gradient_dtypes() == {}, "two gradients are added up in float32"
