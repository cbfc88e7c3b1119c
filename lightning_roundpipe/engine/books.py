"""What one micro-batch has on the books of the devices, for the activations of its calls.

[Note: activations that wait]
What the last unit of a stage gave stays in the hands of the user's code until it calls the next unit, and a gradient
until the next backward begins, also while the micro-batch waits for its turn elsewhere. So it stays on the books of the
device that made it until then, and the planner leaves room for as many as there are micro-batches in a round.
"""

from __future__ import annotations

from ..autograd.recompute import Call
from ..devices.device import Device
from ..devices.offload import TravellingActivations


class ActivationBooks:
    """Books the activations of one micro-batch; used by its thread, only where a device counts activations.

    Args:
        activations: what the micro-batch has brought along: that is on the books already.
    """

    def __init__(self, activations: TravellingActivations) -> None:
        self._activations = activations
        self._waiting: tuple[Device, int] | None = None
        self._graphs: dict[Call, tuple[Device, int]] = {}  # that are kept, and what they gave

    def begin_forward(self, device: Device, call: Call, input_bytes: int) -> int:
        """Books a forward that is about to run, by what is known about it; the bytes booked."""
        return _reserve(device, self._forward_bytes(call, input_bytes))

    def end_forward(self, device: Device, call: Call, input_bytes: int, booked: int, *, has_learned: bool) -> None:
        """A forward has run: now all is known about it. What a kept graph holds stays booked until the backward."""
        assert call.facts is not None
        output_bytes, graph_bytes = call.facts.bytes_for(input_bytes)
        needed = self._forward_bytes(call, input_bytes) + graph_bytes * (has_learned and not call.kept)
        booked += _reserve(device, max(0, needed - booked))
        # Of a call that is not recorded (frozen, before all that is trained) nothing is kept.
        is_kept = call.kept and bool(call.flagged)
        graph = output_bytes + graph_bytes if is_kept else 0
        if graph:
            self._graphs[call] = device, graph
        waiting = min(booked, 0 if is_kept else output_bytes)
        device.memory.release("activations", booked - graph - waiting)
        self.wait_with(device, waiting)

    def _forward_bytes(self, call: Call, input_bytes: int) -> int:
        inputs = max(0, input_bytes - self._activations.booked_bytes)
        if call.facts is None:
            return inputs
        output_bytes, graph_bytes = call.facts.bytes_for(input_bytes)
        return inputs + output_bytes + graph_bytes * call.kept

    def begin_backward(self, device: Device, call: Call) -> int:
        """Books a backward that is about to run, what was brought for it included: both ends, their gradients, and the
        graph; without what a kept graph has on the books already."""
        assert call.ran is not None
        gradients = call.ran.input_bytes + call.ran.output_bytes
        return _reserve(device, gradients if call.kept else 2 * gradients + call.ran.graph_bytes)

    def end_backward(self, device: Device, booked: int, gradient_bytes: int) -> None:
        """A backward has run: what is left of it are the gradients of the inputs."""
        waiting = min(booked, gradient_bytes)
        device.memory.release("activations", booked - waiting)
        self.wait_with(device, waiting)

    def wait_with(self, device: Device, num_bytes: int) -> None:
        """So many bytes that are booked on ``device`` stay so until the next unit has run, see [Note: activations that
        wait]; those that waited before are released."""
        if self._waiting is not None and self._waiting[1]:
            self._waiting[0].memory.release("activations", self._waiting[1])
        self._waiting = device, num_bytes

    def release(self, call: Call) -> None:
        """The graph of a call goes, if one was kept; the micro-batch may be on another device by now."""
        if call in self._graphs:
            device, num_bytes = self._graphs.pop(call)
            device.memory.release("activations", num_bytes)


def _reserve(device: Device, num_bytes: int) -> int:
    device.memory.reserve("activations", num_bytes)
    return num_bytes
