"""The consistency protocol: the checker that follows real runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.transfer import Transfer
from lightning_roundpipe.weights import events as weight_events
from tests.support.engine.protocol_checker import Event, Ordering, Protocol, ProtocolError, UnitState, following


class Held(Transfer):
    """A transfer that ends when the test says so."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(list(tensors))
        self.is_over = False

    def is_done(self) -> bool:
        return self.is_over

    def await_done(self) -> None:
        raise AssertionError("no thread waits here")

    _await_by_reader = await_done

    def _then(self, then: Callable[[], None]) -> None:
        raise AssertionError("no thread waits here")


class Story:
    """Events of one weight of the unit ``block``, on one device, told to a checker one by one."""

    def __init__(self) -> None:
        self.checker = Protocol()
        self.weight = nn.Parameter(torch.zeros(2))
        self.upload = Held(torch.zeros(2, dtype=torch.bfloat16))
        self.download = Held(torch.zeros(2))

    def tell(self, *steps: Event | str) -> Story:
        """Events, and "uploaded", "downloaded", "end" and "failure" for the ends of transfers and of the step."""
        for step in steps:
            if step == "uploaded":
                self.upload.is_over = True
            elif step == "downloaded":
                self.download.is_over = True
            elif isinstance(step, str):
                self.checker.end_step(succeeded=step == "end")
            else:
                transfer = {Event.UPLOAD: self.upload, Event.DOWNLOAD: self.download, Event.TAKE: self.download}
                place = torch.bfloat16 if step is Event.REFRESH else "replica"
                self.checker.see(step, [self.weight], "block", place, transfer.get(step))
        return self

    @property
    def states(self) -> set[UnitState]:
        return set(self.checker.states_of(self.weight))


UPLOADED = (Event.REFRESH, Event.UPLOAD, "uploaded", Event.ACTIVATE)
DOWNLOADING = (*UPLOADED, Event.DOWNLOAD, Event.DEACTIVATE)
STEP = (*DOWNLOADING, "downloaded", Event.TAKE, "end")


def test_a_weight_goes_through_all_states() -> None:
    story = Story()
    told = [(step, story.tell(step).states) for step in (*STEP, Event.UPDATE, Event.UPDATED)]
    copied = UnitState.COPY_REFRESHED
    assert told == [
        (Event.REFRESH, {copied}),
        (Event.UPLOAD, {copied, UnitState.UPLOADING}),
        ("uploaded", {copied}),
        (Event.ACTIVATE, {copied, UnitState.ON_DEVICE}),
        (Event.DOWNLOAD, {copied, UnitState.ON_DEVICE, UnitState.GRADIENTS_DOWNLOADING}),
        (Event.DEACTIVATE, {copied, UnitState.GRADIENTS_DOWNLOADING}),
        ("downloaded", {copied, UnitState.GRADIENTS_DOWNLOADING}),
        (Event.TAKE, {copied, UnitState.GRADIENTS_READY}),
        ("end", {copied, UnitState.GRADIENTS_READY}),
        (Event.UPDATE, {UnitState.UPDATING}),
        (Event.UPDATED, {UnitState.MASTER_UPDATED}),
    ]
    assert not story.checker.violations
    assert {state for _, states in told for state in states} == set(UnitState)


@pytest.mark.parametrize(
    ("before", "event", "state", "ordering"),
    [
        ((Event.UPLOAD,), Event.REFRESH, UnitState.UPLOADING, Ordering.UPLOADED_BEFORE_REFRESHED),
        ((Event.UPDATE,), Event.UPLOAD, UnitState.UPDATING, Ordering.REFRESHED_BEFORE_UPLOADED),
        (DOWNLOADING, Event.UPDATE, UnitState.GRADIENTS_DOWNLOADING, Ordering.DOWNLOADED_BEFORE_TAKEN),
        ((*UPLOADED, Event.UPDATE), Event.DOWNLOAD, UnitState.UPDATING, Ordering.TAKEN_BEFORE_DOWNLOADED),
        (UPLOADED, Event.UPDATE, UnitState.ON_DEVICE, Ordering.COPIED_BETWEEN_UPDATES),
    ],
    ids=[ordering.name for ordering in Ordering],
)
def test_what_excludes_what(
    before: tuple[Event | str, ...], event: Event, state: UnitState, ordering: Ordering
) -> None:
    story = Story().tell(*before)
    known = len(story.checker.violations)
    # An exception would leave those that wait for an update waiting for ever.
    with contextlib.nullcontext() if event is Event.UPDATE else pytest.raises(ProtocolError):
        story.tell(event)
    (found,) = story.checker.violations[known:]
    for part in ("'block'", event.value, f"during {state.value!r}", ordering.value):
        assert part in str(found)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((Event.DOWNLOAD,), "not during 'on device'"),
        ((Event.TAKE,), "not during 'gradients downloading'"),
        ((Event.DEACTIVATE,), "not during 'on device'"),
        ((*DOWNLOADING, Event.TAKE), "taking gradients waits for their download"),
        ((*DOWNLOADING, "downloaded", "end"), "the end of a step, during 'gradients downloading'"),
        ((Event.UPLOAD, "end"), "the end of a step, during 'uploading'"),
        ((Event.UPLOAD, "failure"), "the end of a step, during 'uploading'"),
        ((*STEP, Event.UPDATE, Event.UPDATED, Event.ACTIVATE), "with weights of update 0 after update 1"),
        ((*STEP, Event.UPDATE, Event.UPDATED, Event.UPLOAD, Event.ACTIVATE), "with weights of update 0 after update 1"),
    ],
    ids=[
        "download",
        "take",
        "deactivate",
        "early",
        "lost",
        "under way",
        "fails",
        "old device copy",
        "old working copy",
    ],
)
def test_what_must_come_first(steps: tuple[Event | str, ...], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        Story().tell(*steps)


def test_a_failed_step_leaves_its_gradients_behind_and_who_reads_a_snapshot_does_not_mind_an_update() -> None:
    story = Story().tell(*DOWNLOADING, "failure", Event.UPDATE)
    master = story.weight.data
    story.weight.data = master.clone()
    story.tell(*UPLOADED)
    assert story.states == {UnitState.UPDATING, UnitState.ON_DEVICE}, "a working copy of a snapshot changes no master"
    story.tell(Event.DOWNLOAD, Event.DEACTIVATE, Event.UPDATED, Event.ACTIVATE, Event.DEACTIVATE)
    assert not story.checker.violations
    story.weight.data = master
    with pytest.raises(ProtocolError, match="uploading it, during 'updating'"):
        story.tell("downloaded", Event.TAKE, "end", Event.UPDATE, Event.UPLOAD)


def test_an_end_without_a_beginning_is_noted_and_raised_when_the_checker_has_ended() -> None:
    weight = nn.Parameter(torch.zeros(2))
    message = "a weight of no unit: the end of its update, not during 'updating'"
    with pytest.raises(ProtocolError, match=message), following() as checker:
        weight_events.tell("updated", [weight])
    assert weight_events.observer is None
    weight_events.tell("updated", [weight])
    assert len(checker.violations) == 1
