"""The backward of one call on a device: bring what was saved, make the graph again or take the kept one, walk it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..autograd.recompute import Call, Slot
from ..autograd.unit_run import UnitRunner, autocast_as
from ..common.sizes import num_bytes_of
from ..devices.offload import TravellingActivations
from ..devices.transfer import Edge
from ..usercode.loose_gradients import LooseGradients, run_backward
from ..weights.parameters import Replica
from .forward import add_changed, enter
from .route import Route


@dataclass
class BackwardRunner:
    """Backward runs of one micro-batch."""

    runner: UnitRunner
    activations: TravellingActivations
    route: Route
    loose: LooseGradients
    anchor: Tensor
    autocast_device: str

    def run(self, call: Call, replica: Replica, drop_all_but_coming: Callable[[], list[Any]]) -> tuple[Any, Any]:
        """From the gradients of the call's results to those of its arguments and weights; on the replica's device.

        Args:
            drop_all_but_coming: called when everything is there: drops what was brought, gives what is needed next.

        Returns:
            Stamps of the begin and the end.

        Raises:
            RuntimeError: if the unit does something else in the recomputation.
        """
        device, name = replica.device, call.unit.name
        assert call.ran is not None
        assert call.facts is not None
        replica.book_gradients(True)
        sizes = call.ran.input_bytes, call.ran.output_bytes, call.ran.graph_bytes
        slots = list(call.gradients)
        gradients = self.activations.receive(
            [call.gradients[slot] for slot in slots], Edge.OUTPUT_GRADIENTS, f"gradient {name}"
        )
        leaves = None if call.kept else self.activations.receive(call.leaves, Edge.RELOADED, f"saved {name}")
        coming = drop_all_but_coming()
        booked = self.route.book_backward(call, *sizes)
        self.activations.send(coming, "saved inputs")
        started = device.stamp()
        local = call.local if leaves is None else self._recompute(call, replica, leaves)
        assert local is not None
        replica.has_gradients = True
        now = frozenset(slot for slot, tensor in local.items() if tensor.requires_grad)
        if now != call.flagged:
            raise RuntimeError(
                f"unit {name!r} gave another result when it was recomputed for the backward: outputs "
                f"{sorted(map(str, now ^ call.flagged))} require a gradient in one of the runs only. A unit must "
                "do the same when it is called again with the same arguments."
            )
        roots = [local[slot] for slot in slots]
        if call.facts.has_loose:
            self.loose.run_unit_backward(roots, gradients, replica.leaves)
        else:
            run_backward(roots, gradients)
        replica.add_up()
        ended = device.stamp()
        self.activations.settle()
        self.route.rebook_backward(booked, num_bytes_of(call.input_gradients))
        return started, ended

    def _recompute(self, call: Call, replica: Replica, leaves: list[Any]) -> dict[Slot, Tensor]:
        """Runs the unit again with its graph, on what the forward saw."""
        assert call.facts is not None
        target = replica.device.torch_device
        for i in call.changed:  # the saved copy may serve other calls
            leaves[i] = leaves[i].clone()
        swapped = []
        for master, name, value in call.buffer_values:
            copy = replica.copy_of(master)
            assert copy is not None
            swapped.append((copy, name, copy._buffers[name]))
            copy._buffers[name] = value.to(target, copy=True)
        try:
            with torch.enable_grad(), autocast_as(self.autocast_device, call.autocast):
                enter(call, leaves, self.anchor)
                result = self.runner.run(call, replica, leaves, foreign=call.facts.foreign)
                add_changed(call, result, leaves)
        finally:
            for copy, name, buffer in swapped:
                copy._buffers[name] = buffer
        return result.slots
