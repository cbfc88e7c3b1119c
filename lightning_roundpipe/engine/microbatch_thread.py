"""The thread of a micro-batch: the user's function, the backward of its loss, and the barriers in between.

Where micro-batches meet ([Note: barriers] in :mod:`engine.barrier`) a micro-batch has several segments, each with a
plan of its own. A call whose backward has not come by the end of a segment is *carried* into the next ones: its graph
is dropped if it was kept, and recomputed when its backward comes, in the stage that the plan of that segment has for
it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd.escape import check_escape
from ..autograd.recompute import Call, Receiver, leave_graph, versions_of
from ..autograd.unit_run import UnitResult
from ..common import trees
from ..common.threads import Worker
from ..devices.device import Device, Run
from ..planning.schedule import Action
from ..usercode.implicit_transfers import ImplicitTransfers, put_on_mode, take_off_mode
from ..usercode.lock import UserCodeState, entered
from ..usercode.loose_gradients import node_of
from ..usercode.outputs import Results
from ..weights.units import Unit
from .barrier import Collective, LateBarrierError, closure_end
from .context import SegmentContext, StepContext
from .execution import run_replayed
from .microbatch import Microbatch


class MicrobatchThread(Microbatch):
    """A micro-batch from its begin to its end. :meth:`begin` and :meth:`resume` are for the thread that runs the step,
    everything else for that of the micro-batch.

    Attributes:
        output: result of the user's function, once it has ended.
    """

    def __init__(self, state: UserCodeState, step: StepContext, schedule_index: int, segment: SegmentContext) -> None:
        self._carried: list[weakref.ref[Call]] = []
        self._exchanges: list[tuple[Call, Collective]] = []  # whose backward may come, in order
        super().__init__(state, step, schedule_index, segment)
        self.output: Any = None
        state.meet = self._meet

    def begin(self, worker: Worker) -> None:
        """Lets ``worker`` run the micro-batch, in a copy of the caller's context, and say so when nothing of it is left
        there."""
        work, name = functools.partial(contextvars.copy_context().run, self._run), f"roundpipe-microbatch-{self.index}"
        worker.begin(work, name)
        worker.begin(self.attendance.end, name)

    def _run(self) -> None:
        surroundings = self._step.surroundings
        try:
            with entered(self.state), surroundings.entered(), self._implicit_transfers():
                try:
                    self.device.enter()  # a new thread works on the first GPU
                    self._send_weights_ahead()
                    self._lock.acquire(self.state)
                    results, roots = self._run_user_code()
                    if roots or (self._exchanges and self._step.request.loss_of is not None):
                        self._lock.release(self.state)
                        with surroundings.in_backward():
                            self.backward(roots)
                finally:
                    self._finish()
                self.output = results.arrive()
        except BaseException as error:  # every error must reach the caller's thread, interrupts included
            self._step.failure.note(error)

    def _implicit_transfers(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.aliases_host:
            return contextlib.nullcontext()
        return ImplicitTransfers(self.place.now, self._step.loose_parameters, self._loose, self._activations)

    def _send_weights_ahead(self) -> None:
        """Each micro-batch starts the uploads of the first weights of one device, so that they travel while others run.
        What an update still works on is waited for by the first call of it."""
        if not self.device.aliases_host:
            schedule = self._gate.schedule
            first = schedule.device_of(Action(0, 0))
            for offset in range(self.schedule_index, len(self._pool), schedule.num_microbatches):
                self._segment.loader.send_ahead(self._pool[(first + offset) % len(self._pool)])

    def _run_user_code(self) -> tuple[Results, list[tuple[Tensor, Tensor]]]:
        """The user's step on one micro-batch: (its results, what to run backward from: tensors, their gradients).

        Nothing else may hold the graph of the loss, so that it dies during the backward: the logits hang on it.
        """
        request = self._step.request
        output = request.function(request.microbatches[self.index])
        loss = None if request.loss_of is None else request.loss_of(output)
        results = Results(output, self._owner_of)
        weight = request.weights[self.index]
        return results, [] if loss is None or weight == 0.0 else [self._root(loss, weight)]

    def _owner_of(self, tensor: Tensor) -> Device | None:
        """The device that has ``tensor``; None if it is on the host."""
        return None if self.device.aliases_host else self._activations.owner(tensor)

    def _root(self, loss: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """A loss to run backward from, and its gradient."""
        if loss.numel() != 1:
            raise ValueError(
                f"training_step has a loss of shape {tuple(loss.shape)}: it must be a scalar, for instance its mean"
            )
        if not loss.requires_grad:
            raise RuntimeError(
                "the loss of training_step does not require a gradient: it does not depend on a trainable parameter, "
                "or was detached on the way, as what an attribute of the module holds is when a step ends"
            )
        if self._is_recording:
            check_escape([loss.grad_fn, *self._user_code_nodes()], self._replicas.leaf_names())
        return loss, torch.ones_like(loss).mul_(weight)  # in float16 maybe infinite: torch 2.6 cannot fill with that

    def _replay(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit called by user code's own recomputation (activation checkpointing around units): runs inline.

        On GPUs on a thread of autograd, which must not wait for the lane of a unit whose backward needs the thread.
        """
        self._gate.check()
        made = self._replayed.setdefault(unit, [i for i, u in enumerate(self._called) if u is unit])
        call = Call(unit, made[-1] if made else len(self._called), self._segment.trained(unit), self.pending)
        leaves: list[Any] = []
        call.structure = trees.flatten_call(args, kwargs, [], leaves)
        lane = contextlib.nullcontext() if self._has_lane else self.device.computing()
        take_off_mode(self.state)
        try:
            with self._lock.released(self.state), lane:
                result = self._run_replayed(call, leaves, made)
        finally:
            put_on_mode(self.state)
        return trees.unflatten(result.structure, result.leaves)

    def _run_replayed(self, call: Call, leaves: list[Any], made: list[int]) -> UnitResult:
        replica = self._replica(call)
        begun = self.device.begin()
        homes = [self._homes[i] for i in made] or [self.device]
        result = run_replayed(self._context, call, replica, leaves, homes)
        self.place.leave_unit(homes[-1])
        ended = None if begun is None else self.device.stamp()
        self.record.runs.append(Run(self.device, "F", call.unit.name, begun, ended, self._stage))
        return result

    def _user_code_nodes(self) -> list[Any]:
        """Autograd nodes of user code that produced the inputs of calls, and of exchanges."""
        calls = [*self._calls, *(exchange for exchange, _ in self._exchanges)]
        edges = [receiver.edge for call in calls for receiver in call.receivers]
        return [edge.node for edge in edges if edge is not None]

    def backward(self, roots: list[tuple[Tensor, Tensor]], *, retain_graph: bool = False) -> None:
        """From the loss to the parameters, by way of exchanges; called without the user-code lock.

        Args:
            roots: tensors and their gradients; emptied, so that the graph of the loss dies when it has been walked.
            retain_graph: whether it may be walked again, in another segment.
        """
        self.state.call_unit = self._replay  # what user code calls from now on, it has called before
        take_off_mode(self.state)
        try:
            self._calls[:0] = self._living()
            self._begin_backward([*(node_of(root) for root, _ in roots), *self._user_code_nodes()])
            if roots:
                self._backward_of_user_code(roots)
            for exchange, collective in self._exchanges[::-1]:
                self._backward_of_calls(exchange.index, retain_graph)
                self._backward_of_exchange(exchange, collective, retain_graph)
            self._backward_of_calls(0, retain_graph)
        finally:
            put_on_mode(self.state)

    @property
    def saved_bytes(self) -> int:
        """Bytes of activations that this micro-batch has put on the host."""
        return self._activations.saved_bytes

    # --- barriers ----------------------------------------------------------------------------------------------

    def _meet(self, collective: Collective, roots: list[tuple[Tensor, float]], retain_graph: bool) -> Any:
        """Called by user code, which holds the user-code lock: see :func:`barrier.meet`."""
        if collective.is_deferred:
            self.attendance.deferred.append(collective)
            return None
        if collective.backward is not None:
            return self._exchange(collective)
        weighted = [self._root(loss, weight) for loss, weight in roots if weight != 0.0]
        takes_part = bool(weighted) or (bool(roots) and bool(self._exchanges))
        roots.clear()
        if takes_part:
            self._lock.release(self.state)
            self.backward(weighted, retain_graph=retain_graph)
        return self._stop_at(collective)

    def _exchange(self, collective: Collective) -> list[Tensor]:
        """Brings tensors to an exchange, and gives those that this micro-batch gets: see [Note: exchanges]."""
        if self._training and not self._step.meets:
            self._step.resources.meeting.add(self._step.request.key)
            if not self._is_recording:
                raise LateBarrierError(f"{collective.name} is called in a step of a kind that did not call it so far")
            self._context.saves_kept = True
        exchange = Call(Unit(collective.name, nn.Module(), -1), len(self._called), (), self.pending)
        is_tracked = torch.is_grad_enabled()
        exchange.receivers = [Receiver(x) for x in collective.tensors if is_tracked and x.requires_grad]
        exchange.differentiable = [i for i, x in enumerate(collective.tensors) if is_tracked and x.requires_grad]
        collective.value = [(x.detach(), is_tracked and x.requires_grad) for x in collective.tensors]
        collective.tensors = ()
        brought = self._stop_at(collective)[self.index]
        results = [tensor.clone() for tensor, _ in brought]
        flagged = [i for i, (_, has_gradient) in enumerate(brought) if is_tracked and has_gradient]
        for i in flagged:
            results[i] = leave_graph(exchange, i, self._context.anchor, [results[i]])
        if flagged:
            self._exchanges.append((exchange, collective))
        self.state.has_cuts = self.state.has_cuts or bool(flagged)
        return results

    def _backward_of_exchange(self, exchange: Call, collective: Collective, retain_graph: bool) -> None:
        """Brings the gradients of an exchange to where those of all micro-batches meet; what is left of the backward
        comes in the segment after it."""
        held = list(self._calls)  # by nothing else, where their gradients have come already
        assert collective.backward is not None
        name, key, gradients = f"the backward of {collective.name}", ("backward", collective.key), exchange.gradients
        found = self._stop_at(Collective(name, key, collective.backward, gradients, takes_gradients=False))[self.index]
        self._lock.release(self.state)
        self.state.call_unit = self._replay
        self._calls[:0] = self._living()
        held.clear()
        self._begin_backward(self._user_code_nodes())
        for receiver, i in zip(exchange.receivers, exchange.differentiable, strict=True):
            if found[i] is not None:
                self.pending.deliver(receiver, found[i])
        exchange.gradients = {}
        if not retain_graph and any(gradient is not None for gradient in found):
            exchange.forget()
            self._exchanges.remove((exchange, collective))

    def _stop_at(self, arrival: Collective) -> Any:
        """Waits at a barrier, without the user-code lock; with it, does then what :meth:`resume` was given."""
        self._end_segment()
        go_on = self.attendance.await_outcome(arrival, self._step.failure.aborted)
        self._send_weights_ahead()
        self._lock.acquire(self.state)
        return go_on()

    def call_closure(self, closure: Callable[[], Any] | None) -> Any:
        """At a barrier: calls the closure that the micro-batch has come with, and comes back."""
        assert closure is not None
        try:
            value = closure()
        except BaseException as error:
            self._step.failure.note(error)  # the barrier ends as well
            raise
        return self._stop_at(closure_end(value))

    def resume(self, schedule_index: int, segment: SegmentContext, go_on: Callable[[], Any]) -> Callable[[], None]:
        """Takes the micro-batch, which stands at a barrier, to the next segment; what lets its thread go on there."""
        self.begin_segment(schedule_index, segment)
        plan = segment.plan
        carried = {call.index: call for call in self._living()}
        for position, index in enumerate(plan.carried):
            call = carried.get(index)
            if call is not None and call.unit is plan.sequence[position]:
                assert call.ran is not None
                call.ran = call.ran._replace(position=position)
                call.backward_stage = plan.stages_of[position][1]
        return functools.partial(self.attendance.resume, go_on)

    def _living(self) -> list[Call]:
        """Calls of earlier segments whose backward may still come; in order."""
        return [call for ref in self._carried if (call := ref()) is not None]

    def _end_segment(self) -> None:
        """Releases tickets and the lock, and keeps what later segments may need."""
        self._lock.release(self.state)
        versions: dict[Unit, tuple[int, ...]] = {}
        if not self.record.has_backward:
            self._calls[:0] = self._living()
        for call in self._calls:
            if call.unit not in versions:
                versions[call.unit] = versions_of(call.unit)
            self._books.release(call)
            call.put_aside(versions[call.unit])
        # What nothing leads to any more goes: the node of the cut is what holds a call.
        self._carried = [weakref.ref(call) for call in self._calls]
        self._calls.clear()
        self._books.wait_with(self.device, 0)
        self._activations.drop()
        self._gate.retire(self.schedule_index)

    def _finish(self) -> None:
        """Releases tickets, the lock and every reference to tensors of the step."""
        self._lock.release(self.state)
        for call in (*self._calls, *self._living()):
            self._forget(call)
        self._calls.clear()
        for exchange, _ in self._exchanges:
            exchange.forget()
        self._exchanges.clear()
        self.pending.clear()
        self._loose.clear()
        self._books.wait_with(self.device, 0)
        self._activations.clear()
        self.state.call_unit = None
        self._gate.retire(self.schedule_index)
