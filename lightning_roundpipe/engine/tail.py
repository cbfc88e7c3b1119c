"""The tail of a step: what is left of its backward when its results are known.

[Note: tails]
A pipeline that is filled and drained in every step leaves devices idle twice per step. If nobody needs the gradients of
a step before the next one has begun, the next one can fill the devices while this one drains. So a step that may have a
tail (``StepRequest.on_gradients``) ends as soon as every micro-batch has a loss and has left the fused stage: its
turnstile is *paused*, each thread stands still where it waits for its next device, and what the step has changed
outside itself is put back. Devices keep what they have. Nothing runs between two steps: the thread that runs them has
everything for itself, as between the segments of one step ([Note: meetings] in :mod:`meetings`).

The tail goes on

- in the next step, if that is of the same kind and has a plan: on every device the actions of the tail come first
  (``Turnstile.follow``, ``Loader.following``), and there is one glue lock for both steps;
- alone, as soon as anybody wants its gradients (``Engine.finish_tail``), or another kind of step begins.

Both are the same to it: the patches of a step are open, its turnstile is resumed, it is waited for. Its gradients are
those that it would have had without a pause, to the last bit. A step that fails does not take the tail with it, which
comes to its end first; a tail that fails takes the step with it.

Units whose backward is left run again. They must find the attributes and buffers that their modules had in the step,
which may have changed since: by what the step itself has left there, by glue of the next one, by whoever called
``eval()`` or the like. So the attributes are noted, buffers copied, and replicas made with these. (What has changed
*in* an object, such as a configuration that modules share, is not seen.)

Glue of two steps uses the same parameters at the same time. ``.grad`` does not tell whose gradient it is. So while
there is a tail, a backward through glue holds the glue lock and takes what has come to any parameter, see
``Walk._glue_backward``.

A step that computes with other values than those of its parameters (``StepRequest.values``) and its tail read them from
what each was given, and both may be different. Glue finds values in the parameters themselves, and autograd saves a
parameter as such, not what it was. So where a backward through glue is left that ends at a parameter, and not at its
copy on a device, such a step has no tail.

A step has no tail either where glue runs user code in its backward (checkpoints around units), with one device or one
stage, and when it is traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..planning.timeline import Span
from .containers import MISSING
from .glue_parameters import Use
from .recompute import leaves_of_glue
from .requests import StepRequest
from .resources import Resources
from .step_context import Plan
from .threads import await_all
from .tracing import Clock
from .walk import Walk

# Of modules: what is no attribute, or is replaced while a step runs.
_INTERNAL = (vars(nn.Module()).keys() - {"training"}) | {"forward"}


def may_trail(request: StepRequest, plan: Plan, num_devices: int) -> bool:
    """Whether a step that runs by ``plan`` may have a tail, if there are no reasons against it in its graph."""
    is_worth_it = num_devices > 1 and plan.partition.num_stages > 1
    return request.on_gradients is not None and not request.meets and is_worth_it


def can_trail(request: StepRequest, resources: Resources, walks: Sequence[Walk]) -> bool:
    """Whether the backward that is left of a step, whose micro-batches stand still, may come later."""
    if resources.glue_is_user_code.is_set():
        return False
    return not request.values or not any(map(_reaches_parameters, walks))


def _reaches_parameters(walk: Walk) -> bool:
    """Whether a backward through glue is left that may end at a parameter itself, and not at a copy on a device."""
    leaves = leaves_of_glue(walk.glue_nodes(), stops=Use.is_node)
    return leaves is None or any(isinstance(leaf, nn.Parameter) for leaf in leaves)


def trained_in(root: nn.Module) -> set[nn.Parameter]:
    """Parameters that may get gradients in glue."""
    return {parameter for parameter in root.parameters() if parameter.requires_grad}


class Tail:
    """Micro-batches that stand still in their backward; see [Note: tails].

    Args:
        walks: the micro-batches, which share a turnstile that is paused.
        complete: called when they are through; whether the next step has another plan. Raises the first exception of
            any of them.
        abort: stops them for good.

    Attributes:
        shared: what they share.
        is_over: whether they are through, or never will be.
        replanned: whether their costs have led to another plan.
    """

    def __init__(self, walks: Sequence[Walk], complete: Callable[[], bool], abort: Callable[[], None]) -> None:
        self._walks = list(walks)
        self._complete = complete
        self._abort = abort
        self._num_runs = [len(walk.runs) for walk in walks]
        self.shared = walks[0].shared
        self._baseline = self.shared.lock.baseline()
        units = dict.fromkeys(call.unit for walk in walks for call in walk.calls_left)
        self._attributes = [(module, dict(vars(module))) for unit in units for module in unit.members]
        with torch.no_grad():  # whoever changes one later may do so in place
            self.shared.kept = {
                (id(module), name): buffer.clone()
                for module, _ in self._attributes
                for name, buffer in module._buffers.items()
                if buffer is not None
            }
        self.is_over = False
        self.replanned = False

    @contextlib.contextmanager
    def going_on(self, trained: set[nn.Parameter]) -> Iterator[None]:
        """While open the tail runs; it is over at the end. Patches of a step must be open.

        Args:
            trained: see :func:`trained_in`.

        Raises:
            BaseException: the first exception of the tail.
        """
        try:
            self.shared.lock.take_in([walk.state for walk in self._walks])
            self.shared.glue_parameters = trained
            self.shared.left = [*self._changed(), *self._baseline]
            self.shared.turnstile.resume()
            yield
        finally:
            self.shared.turnstile.resume()  # should it not have come to that
            self.await_end()

    def _changed(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """Attributes that are not what they were, and what they were."""
        for module, before in self._attributes:
            now = vars(module)
            for name in before.keys() | now.keys():
                if name not in _INTERNAL and before.get(name, MISSING) is not now.get(name, MISSING):
                    yield module, name, before.get(name, MISSING)

    def spans(self, clock: Clock) -> Iterator[Span]:
        """What it has computed since it was paused."""
        for walk, num_runs in zip(self._walks, self._num_runs, strict=True):
            yield from clock.spans_of(walk.runs[num_runs:], walk.index)

    def await_end(self) -> None:
        """Blocks until the tail is over. The first interrupt is raised then: weights and gradients shall be those of
        whole steps. The second one gives the tail up.

        Raises:
            BaseException: the first exception of the tail.
        """
        interrupt: BaseException | None = None
        while not self.is_over:
            try:
                await_all(walk.attendance.halted for walk in self._walks)
                self.replanned = self._complete()
                self.is_over = True
            except KeyboardInterrupt as error:
                if interrupt is not None:
                    self.give_up()
                interrupt = error
            except BaseException:
                self.give_up()
                raise
        if interrupt is not None:
            raise interrupt

    def give_up(self) -> None:
        """The gradients are lost."""
        self.is_over = True
        self._abort()
