"""The consistency protocol: every interleaving of a small model of it, and the checker that follows real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.transfer import Transfer
from lightning_roundpipe.weights import events as weight_events
from tests.support.engine.protocol_checker import RULES, Event, Ordering, Protocol, ProtocolError, UnitState, following
from tests.support.engine.protocol_model import Name, Operation, Settings, Violation, explore, lanes_of

MODES = ("off", "exact", "stale", "paper")
WAITS = [
    (mode, clips, name) for mode in MODES for clips in (False, True) for name in Settings(mode, clips=clips).waits_of()
]

# --- the model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clips", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("num_steps", [2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_no_interleaving_reads_torn_or_wrong_weights_or_loses_a_gradient(
    mode: str, num_steps: int, clips: bool
) -> None:
    num_states = explore(Settings(mode, num_steps, clips))
    num_operations = sum(map(len, lanes_of(Settings(mode, num_steps, clips)).values()))
    assert num_states > 2 * num_operations + 1  # so many has a single interleaving


@pytest.mark.parametrize("clips", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("mode", ["off", "exact"])
def test_no_interleaving_loses_an_accumulated_gradient(mode: str, clips: bool) -> None:
    assert explore(Settings(mode, 4, clips, accumulated=2)) > 100


@pytest.mark.parametrize(("mode", "clips", "name"), WAITS)
def test_every_wait_is_needed(mode: str, clips: bool, name: str) -> None:
    with pytest.raises(Violation):
        explore(Settings(mode, clips=clips), without=name)


def test_only_the_paper_has_all_five_orderings_as_waits() -> None:
    found = {
        mode: {
            ordering for ordering in Ordering for name in Settings(mode).waits_of() if name.startswith(ordering.name)
        }
        for mode in MODES
    }
    assert found == {
        "off": {Ordering.REFRESHED_BEFORE_UPLOADED, Ordering.DOWNLOADED_BEFORE_TAKEN},
        "exact": {Ordering.REFRESHED_BEFORE_UPLOADED, Ordering.DOWNLOADED_BEFORE_TAKEN},
        "stale": {Ordering.DOWNLOADED_BEFORE_TAKEN, Ordering.TAKEN_BEFORE_DOWNLOADED},
        "paper": set(Ordering),
    }


@pytest.mark.parametrize(("mode", "overlaps"), [("off", False), ("exact", True), ("stale", True), ("paper", True)])
def test_updates_overlap_with_the_next_step(mode: str, overlaps: bool) -> None:
    """Else the model would show nothing: some state has an update of step 0 beside the forward of step 1."""
    lanes = lanes_of(Settings(mode))
    # An update that touches what the forward touches is torn exactly where both can go on at a time.
    shared = ("shared", 0)
    marked = {
        lane: [
            replace(op, writes=(*op.writes, shared)) if op.name in {("update", 1, 0), ("forward", 0, 1)} else op
            for op in row
        ]
        for lane, row in lanes.items()
    }
    if overlaps:
        with pytest.raises(Violation, match="shared"):
            explore(Settings(mode), lanes=marked)
    else:
        explore(Settings(mode), lanes=marked)


def changed(change: Callable[[Operation], Operation | None]) -> dict[str, list[Operation]]:
    """The lanes of exact mode with other operations; None leaves one out."""
    return {
        lane: [new for op in row if (new := change(op)) is not None]
        for lane, row in lanes_of(Settings("exact")).items()
    }


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (("update", 1, 2), lambda op: None, "the updates of unit 1"),
        (("take", 0, 1), lambda op: replace(op, effect=lambda values: (values[1],)), "the gradient of an update"),
        (("take", 0, 1), lambda op: replace(op, effect=lambda values: ((1, 1),)), "the gradient of an update"),
        (("refresh", 0, 1), lambda op: replace(op, effect=lambda values: (0,)), "the weights on the device: 0, not 1"),
        (("upload", 0, 1), lambda op: replace(op, waits=((None, ("take", 0, 1)),)), "deadlock"),
    ],
    ids=["missing update", "lost gradient", "gradient used twice", "old weights", "deadlock"],
)
def test_the_model_notices(name: Name, change: Callable[[Operation], Operation | None], message: str) -> None:
    lanes = changed(lambda op: change(op) if op.name == name else op)
    with pytest.raises(Violation, match=message):
        explore(Settings("exact"), lanes=lanes)


# --- the checker -------------------------------------------------------------------------------------------------


class Held(Transfer):
    """A transfer that is over when the test says so."""

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


ILLEGAL: list[tuple[tuple[Event | str, ...], Event, UnitState, Ordering]] = [
    ((Event.UPLOAD,), Event.REFRESH, UnitState.UPLOADING, Ordering.UPLOADED_BEFORE_REFRESHED),
    ((Event.UPDATE,), Event.REFRESH, UnitState.UPDATING, Ordering.COPIED_BETWEEN_UPDATES),
    ((Event.UPDATE,), Event.UPLOAD, UnitState.UPDATING, Ordering.REFRESHED_BEFORE_UPLOADED),
    ((Event.UPDATE,), Event.ACTIVATE, UnitState.UPDATING, Ordering.REFRESHED_BEFORE_UPLOADED),
    (DOWNLOADING, Event.UPDATE, UnitState.GRADIENTS_DOWNLOADING, Ordering.DOWNLOADED_BEFORE_TAKEN),
    ((Event.UPLOAD,), Event.UPDATE, UnitState.UPLOADING, Ordering.COPIED_BETWEEN_UPDATES),
    (UPLOADED, Event.UPDATE, UnitState.ON_DEVICE, Ordering.COPIED_BETWEEN_UPDATES),
    ((Event.UPDATE,), Event.UPDATE, UnitState.UPDATING, Ordering.COPIED_BETWEEN_UPDATES),
    ((*UPLOADED, Event.UPDATE), Event.DOWNLOAD, UnitState.UPDATING, Ordering.TAKEN_BEFORE_DOWNLOADED),
    ((*DOWNLOADING, "downloaded", Event.UPDATE), Event.TAKE, UnitState.UPDATING, Ordering.TAKEN_BEFORE_DOWNLOADED),
]


@pytest.mark.parametrize(
    ("before", "event", "state", "ordering"),
    ILLEGAL,
    ids=[f"{event.name}-{state.name}" for _, event, state, _ in ILLEGAL],
)
def test_what_excludes_what(
    before: tuple[Event | str, ...], event: Event, state: UnitState, ordering: Ordering
) -> None:
    story = Story().tell(*before)
    known = len(story.checker.violations)
    if event is Event.UPDATE:  # an exception would leave others waiting for ever
        story.tell(event)
    else:
        with pytest.raises(ProtocolError):
            story.tell(event)
    (found,) = story.checker.violations[known:]
    for part in ("'block'", event.value, f"during {state.value!r}", ordering.value):
        assert part in str(found)


def test_every_exclusion_is_tested_and_every_ordering_excludes_something() -> None:
    rules = {(event, state, o) for event, rule in RULES.items() for state, o in rule.never_during.items()}
    assert rules == {(event, state, ordering) for _, event, state, ordering in ILLEGAL}
    assert {ordering for _, _, ordering in rules} == set(Ordering)


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


def test_gradients_of_a_failed_step_are_left_behind() -> None:
    story = Story().tell(*DOWNLOADING, "failure", Event.UPDATE, Event.UPDATED)
    assert story.states == {UnitState.MASTER_UPDATED}
    assert not story.checker.violations


def test_who_reads_a_snapshot_does_not_mind_an_update() -> None:
    story = Story().tell(Event.UPDATE)
    master = story.weight.data
    story.weight.data = master.clone()
    story.tell(Event.UPLOAD, "uploaded", Event.ACTIVATE, Event.DOWNLOAD, Event.DEACTIVATE, Event.UPDATED)
    assert not story.checker.violations
    story.weight.data = master
    with pytest.raises(ProtocolError, match="uploading it, during 'updating'"):
        story.tell("downloaded", Event.TAKE, "end", Event.UPDATE, Event.UPLOAD)


def test_a_working_copy_of_a_snapshot_leaves_the_master_updating() -> None:
    story = Story().tell(Event.UPDATE)
    story.weight.data = story.weight.data.clone()
    story.tell(*UPLOADED)
    assert story.states == {UnitState.UPDATING, UnitState.ON_DEVICE}
    story.tell(Event.DEACTIVATE, Event.UPDATED, Event.ACTIVATE)
    assert not story.checker.violations


def test_an_end_without_a_beginning_is_noted_and_raised_when_the_checker_has_ended() -> None:
    weight = nn.Parameter(torch.zeros(2))
    message = "a weight of no unit: the end of its update, not during 'updating'"
    with pytest.raises(ProtocolError, match=message), following() as checker:
        weight_events.tell("updated", [weight])
    assert weight_events.observer is None
    weight_events.tell("updated", [weight])
    assert len(checker.violations) == 1
