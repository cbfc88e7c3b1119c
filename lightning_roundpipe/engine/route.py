"""A micro-batch's way from worker to worker, what it takes along, and what it has on their books.

[Note: activations that wait]
What the last unit of a stage gave stays in the hands of the user's code until it calls the next unit, and a gradient
until the next backward begins, also while the micro-batch waits for its turn elsewhere. So it stays on the books of the
device that made it until then, and the planner leaves room for as many as there are micro-batches in a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..autograd.recompute import Call
from ..devices.devices import Device
from ..devices.offload import SavedInputs, TravellingActivations
from ..devices.pool import DevicePool
from ..planning.schedule import Action
from .gate import Gate


class Route:
    """Where one micro-batch is.

    Args:
        slot: index of the micro-batch in the schedule of the gate.

    Attributes:
        stage: the stage that it is in; -1 before the first.
        device: the worker of that stage.
        cargo: what it has brought along.
        saved: what of it is on the host.
    """

    def __init__(self, pool: DevicePool, gate: Gate, slot: int) -> None:
        self._pool = pool
        self.begin(gate, slot)
        self.device = self._device_of(0)
        self._has_entered = False
        self.saved = SavedInputs()
        self.activations = TravellingActivations(self.saved, pool.owners)
        self.activations.go_to(self.device)
        self._waiting: tuple[Device, int] = (self.device, 0)

    def begin(self, gate: Gate, slot: int) -> None:
        """A run over a schedule begins; arguments as of the class. The micro-batch comes from where it was before."""
        self._gate = gate
        self._slot = slot
        self.stage = -1

    def _device_of(self, stage: int) -> Device:
        return self._pool[self._gate.device_of(Action(stage, self._slot))]

    def move_to(self, stage: int, values: Sequence[Any] = (), what: str = "") -> None:
        """Leaves the current stage and waits for the turn in ``stage``; stages in between are skipped.

        Args:
            values: what is needed there first: it travels meanwhile.
            what: that is, for the trace.
        """
        if stage <= self.stage:
            return
        before, target = self.device, self._device_of(stage)
        if target is not before:
            # Before anybody else's work is queued on the device that is left.
            self.activations.offload(values, what)
        for passed in range(max(self.stage, 0), stage):
            self._gate.leave(Action(passed, self._slot))
        is_first, self._has_entered = not self._has_entered, True
        self.stage, self.device = stage, target
        if target is before:
            self.activations.drop()
        else:
            self.activations.go_to(target)
        action = Action(stage, self._slot)
        if not target.aliases_host:
            self._gate.approach(action)
            self.activations.send(values, what)
        self._gate.enter(action)
        target.enter(None if is_first else before)
        target.throttle()

    # --- books, on devices whose activations are booked ----------------------------------------------------------

    def book(self, num_bytes: int) -> int:
        """Books activations of a unit that runs here; the bytes to be released in the end."""
        if not self.device.counts_activations:
            return 0
        self.device.memory.reserve("activations", num_bytes)
        return num_bytes

    def release(self, num_bytes: int) -> None:
        """Ends what :meth:`book` has begun."""
        if num_bytes:
            self.device.memory.release("activations", num_bytes)

    def book_forward(self, call: Call, input_bytes: int) -> int:
        """Books a forward that is about to run, by what is known about it; the bytes booked."""
        if not self.device.counts_activations:
            return 0
        return self.book(self._forward_bytes(call, input_bytes))

    def rebook_forward(self, call: Call, input_bytes: int, booked: int, *, has_learned: bool) -> None:
        """A forward has run: now all is known about it. What a kept graph holds stays booked until the backward."""
        if not self.device.counts_activations:
            return
        assert call.facts is not None
        output_bytes, graph_bytes = call.facts.bytes_for(input_bytes)
        needed = self._forward_bytes(call, input_bytes) + graph_bytes * (has_learned and not call.kept)
        booked += self.book(max(0, needed - booked))
        # Of a call that is not recorded (frozen, before all that is trained) nothing is kept.
        is_kept = call.kept and bool(call.flagged)
        call.booked = output_bytes + graph_bytes if is_kept else 0
        waiting = min(booked, 0 if is_kept else output_bytes)
        self.release(booked - call.booked - waiting)
        self._wait_with(waiting)

    def _forward_bytes(self, call: Call, input_bytes: int) -> int:
        inputs = max(0, input_bytes - self.activations.booked_bytes)  # those that were brought are on the books already
        if call.facts is None:
            return inputs
        output_bytes, graph_bytes = call.facts.bytes_for(input_bytes)
        return inputs + output_bytes + graph_bytes * call.kept

    def book_backward(self, call: Call, input_bytes: int, output_bytes: int, graph_bytes: int) -> int:
        """Books a backward that is about to run, what was brought for it included: both ends, their gradients, and the
        graph; without what a kept graph has on the books already."""
        gradients = input_bytes + output_bytes
        return self.book(gradients if call.kept else 2 * gradients + graph_bytes)

    def rebook_backward(self, booked: int, gradient_bytes: int) -> None:
        """A backward has run: what is left of it are the gradients of the inputs."""
        if self.device.counts_activations:
            waiting = min(booked, gradient_bytes)
            self.release(booked - waiting)
            self._wait_with(waiting)

    def _wait_with(self, num_bytes: int) -> None:
        """So many bytes that are booked here stay so until the next unit has run; see [Note: activations that wait]."""
        device, waited = self._waiting
        if waited:
            device.memory.release("activations", waited)
        self._waiting = self.device, num_bytes

    def put_aside(self, call: Call, versions: tuple[int, ...]) -> None:
        """A call outlives its segment: a graph that was kept goes, and will be recomputed from the saved inputs.

        Args:
            versions: of the weights of its unit.
        """
        self.release(call.booked)
        call.booked = 0
        call.put_aside(versions)

    def rest(self) -> None:
        """The micro-batch waits for others: nothing that it has brought along stays."""
        self._wait_with(0)
        self.activations.drop()

    def forget(self, call: Call) -> None:
        """Drops what a call remembers."""
        self.release(call.booked)
        call.booked = 0
        call.forget()

    def clear(self) -> None:
        """The micro-batch is over."""
        self._wait_with(0)
        self.activations.clear()
        self.saved.clear()
