"""Every wait for a copy is needed: leaving out any one of them gives wrong results, or an error.

The devices copy lazily: a copy that is not waited for is never made, and what has not been copied yet, or has been
freed, is poison. So a missing wait shows in every run, whatever the timing. This is mutation testing of the engine
itself: a wait that can be left out without a difference is either not needed, or the tests would not notice its loss.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_roundpipe
from lightning_roundpipe.devices.memory import DeviceMemory, Kind
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.transfer import Edge, Transfer
from lightning_roundpipe.devices.virtual import TimedLink
from tests.support.engine import wide_units
from tests.support.engine.lazy_link import LazyLink, LazyTransfer, cpu_pool
from tests.support.engine.whole_steps import FEATURES, NUM_DEVICES, difference, results, right_results

PACKAGE = Path(lightning_roundpipe.__file__).parent
UNTIED = FEATURES - {"tied"}
# How a lane waits depends on the lane: what the lazy ones do is left out as well, but need not be everything.
# The lanes themselves, and what moves between the host and GPUs only: see tests/accelerator.
_LANES = {"transfer.py", "virtual.py", "lanes.py", "moves.py"}


class Tight(DeviceMemory):
    """Has room for the activations that must be there, and never for one more."""

    def reserve(self, kind: Kind, num_bytes: int) -> None:
        super().try_reserve(kind, num_bytes)

    def try_reserve(self, kind: Kind, num_bytes: int, **kwargs: Any) -> bool:
        return kind != "activations" and super().try_reserve(kind, num_bytes, **kwargs)


def two_devices(link: TimedLink) -> DevicePool:
    return DevicePool([torch.device("cpu")] * NUM_DEVICES, link=link)


def no_room_to_spare(link: TimedLink) -> DevicePool:
    pool = two_devices(link)
    for device in pool.devices:
        device.memory = Tight(device.memory.name)
    return pool


POOLS = (two_devices, no_room_to_spare)


@dataclass(frozen=True, order=True)
class Place:
    """Where in the engine's source a wait is."""

    file: str
    line: int


def steps_on(make_pool: Callable[[TimedLink], DevicePool]) -> dict[str, Tensor]:
    return results(make_pool(LazyLink(is_strict=True)), features=UNTIED)


class Waits:
    """Takes the place of ``Transfer.wait`` and ``Transfer.when_done``.

    Attributes:
        seen: where the engine waited, and for what.
        left_out: the waits that are left out.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[tuple[Edge, Place]] = set()
        self.left_out: tuple[Edge, Place] | None = None
        wait, when_done = Transfer.wait, Transfer.when_done

        def waits(transfer: Transfer, edge: Edge) -> list[Tensor]:
            return transfer.tensors if self._is_left_out(edge) else wait(transfer, edge)

        def calls_when_done(transfer: Transfer, edge: Edge, then: Callable[[], None]) -> None:
            if self._is_left_out(edge):
                then()
            else:
                when_done(transfer, edge, then)

        monkeypatch.setattr(Transfer, "wait", waits)
        monkeypatch.setattr(Transfer, "when_done", calls_when_done)

    def _is_left_out(self, edge: Edge) -> bool:
        caller = sys._getframe(2)
        place = Place(Path(caller.f_code.co_filename).name, caller.f_lineno)
        self.seen.add((edge, place))
        return (edge, place) == self.left_out

    def without(self, edge: Edge, place: Place, make_pool: Callable[[TimedLink], DevicePool]) -> str | None:
        """What goes wrong when there is no wait for ``edge`` at ``place``; None if nothing does."""
        self.left_out = edge, place
        try:
            return difference(steps_on(make_pool), right_results(UNTIED))
        except Exception as error:
            return repr(error)
        finally:
            self.left_out = None


@pytest.mark.parametrize("make_pool", POOLS)
@pytest.mark.parametrize("link", [LazyLink(is_strict=True), TimedLink(latency_ms=0.1)], ids=["strict", "slow"])
def test_copies_change_nothing(link: TimedLink, make_pool: Callable[[TimedLink], DevicePool]) -> None:
    assert difference(results(make_pool(link), features=UNTIED), right_results(UNTIED)) is None


@pytest.mark.parametrize("edge", Edge, ids=lambda edge: edge.name)
def test_every_wait_is_needed(monkeypatch: pytest.MonkeyPatch, edge: Edge) -> None:
    places = sorted(place for seen, place in waits_seen() if seen is edge and place.file not in _LANES)
    assert places, f"nothing waits for {edge}: the model of this test must need it"
    right_results(UNTIED)
    waits = Waits(monkeypatch)
    for place in places:
        found = any(waits.without(edge, place, make_pool) is not None for make_pool in POOLS)
        assert found, f"without the wait for {edge.name} at {place.file}:{place.line} nothing changes"


@functools.cache
def waits_seen() -> set[tuple[Edge, Place]]:
    """Where the engine waits on any of the pools."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        waits = Waits(monkeypatch)
        for make_pool in POOLS:
            steps_on(make_pool)
    return waits.seen


def test_every_wait_in_the_source_is_left_out_once() -> None:
    missing = [
        f"{file.name}:{node.lineno}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.name not in _LANES
        for node in waits_in(file)
        if not any(is_at(place, file, node) for _, place in waits_seen())
    ]
    assert not missing, "the model of this test does not get to these waits"


def test_user_code_does_not_change_what_is_still_to_be_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no room for a snapshot, user code may not go on before the copy was made."""
    right = wide_units.train(cpu_pool(NUM_DEVICES))
    assert difference(wide_units.train(no_room_to_spare(LazyLink(is_strict=True))), right) is None
    await_done, callers = LazyTransfer.await_done, []

    def without_waiting_to_offload(transfer: LazyTransfer) -> None:
        callers.append(Path(sys._getframe(1).f_code.co_filename).name)
        if callers[-1] != "offload.py":
            await_done(transfer)

    monkeypatch.setattr(LazyTransfer, "await_done", without_waiting_to_offload)
    with pytest.raises(RuntimeError, match="gave another result"):
        wide_units.train(no_room_to_spare(LazyLink(is_strict=True)))
    assert "offload.py" in callers


def waits_in(file: Path) -> Iterator[ast.Call]:
    """The calls ``....wait(...)`` with an edge, and ``....when_done(...)``."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            names = {part.id for part in ast.walk(node.args[0]) if isinstance(part, ast.Name)}
            if node.func.attr == "when_done" or (node.func.attr == "wait" and names & {"Edge", "edge"}):
                yield node


def is_at(place: Place, file: Path, node: ast.Call) -> bool:
    assert node.end_lineno is not None
    return place.file == file.name and node.lineno <= place.line <= node.end_lineno
