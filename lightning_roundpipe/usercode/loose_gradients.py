"""Gradients of parameters that user code uses between units.

[Note: loose parameters]
``F.linear(h, self.lm_head.weight)`` in ``training_step`` makes the master itself a leaf of the graph between units. All
micro-batches share it, so the engine's own backward does not accumulate into its ``.grad``: it asks autograd for the
gradients of the leaves, and keeps them per micro-batch. At the end of the segment they are added up in the order of
the micro-batches. Until ``loss.backward()`` of the user, ``.grad`` is what it was before the step, and hooks of
parameters, which are out of the way meanwhile (:func:`hooks_out_of_the_way`), see the whole gradient, once::

    loss --> user code --> cut of unit 1 --> anchor                 its gradient, and that of the weight,
                 +-------> self.lm_head.weight                      are asked for

A walk over the graph between units finds the leaves, once per micro-batch, before its backward. For each node that is
little beside what autograd takes to make and walk it. A graph is cut at units (:class:`Cut`), and each cut leads to the
anchor of its micro-batch, which is one of the leaves. So whatever autograd would walk for ``loss.backward()``, it walks
for these leaves. A leaf that is no parameter (``batch.requires_grad_()``) gets its ``.grad`` when the backward of the
micro-batch ends, unless an optimizer updates it.

What user code on a device computes with a copy of a small parameter gives a gradient there, which autograd does not
bring to the host: it is put aside where it is (:meth:`LooseGradients.put_aside`). When the backward of the micro-batch
ends, all of them go home on the lanes, and are added up there as autograd would have done it: walk by walk, the last
use first, whatever devices these were on.

The graph inside a unit belongs to its replica, and accumulates into the replica's leaves. A hook on a submodule may
bring a parameter from elsewhere into it; the first call of the unit notes so (``Facts.has_loose``), and the leaves of
such a graph are found and asked for as well.

The walk finds functions of users, too: their backward is user code. One that begins a backward of its own there, which
would accumulate into the masters, or miss them, is refused (:func:`nested_backwards_refused`, :func:`check_unused`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from ..common.attributes import attribute_set
from ..common.graphs import is_of_user, walk_graph
from ..devices.device import Device
from ..devices.transfer import Done, Edge, Joined, Transfer
from ..weights.gradients import added

_LEAF_NODE: Any = vars(torch._C._functions)["AccumulateGrad"]
_engine: Any = torch.autograd.Variable._execution_engine
_others_lock = threading.Lock()


def leaves_behind(roots: Iterable[Any]) -> dict[Tensor, GradientEdge]:
    """The leaves of the graph that begins at the nodes ``roots``, and where their gradients arrive."""
    return {node.variable: GradientEdge(node, 0) for node in walk_graph(roots) if isinstance(node, _LEAF_NODE)}


def node_of(tensor: Tensor) -> Any:
    """The autograd node that a gradient of ``tensor`` goes to."""
    return get_gradient_edge(tensor).node


def run_backward(roots: list[Any], gradients: list[Tensor], *, on_host: bool) -> None:
    """``torch.autograd.backward`` without its checks of arguments, which cost as much as a small backward.

    Args:
        on_host: whether all of it runs on the calling thread. Those of autograd are given the context of this one, with
            which torch compiles backwards there.
    """
    run = _engine.run_backward if on_host else _engine_run_backward
    run(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


class LooseGradients:
    """What the backward of one micro-batch gives for leaves between units; see [Note: loose parameters].

    Args:
        is_trained: whether a leaf that is no parameter is trained like one.

    Attributes:
        is_walking: whether the engine itself walks a graph of this micro-batch at the moment.
    """

    def __init__(self, is_trained: Callable[[Tensor], bool] = lambda leaf: False) -> None:
        self.is_walking = False
        self._is_trained = is_trained
        self._edges: dict[Tensor, GradientEdge] = {}
        self._sums: dict[Tensor, Tensor] = {}
        self._num_walks = 0
        self._num_uses = 0
        self._aside: dict[tuple[int, int], _Aside] = {}

    def look_up(self, roots: Iterable[Any]) -> bool:
        """A backward is about to begin, which will start from some of the nodes ``roots`` at a time.

        Returns:
            Whether there are functions of the user among the nodes.
        """
        self._edges = {}
        has_functions = False
        for node in walk_graph(roots):
            if isinstance(node, _LEAF_NODE):
                self._edges[node.variable] = GradientEdge(node, 0)
            elif is_of_user(node):
                has_functions = True
        return has_functions

    def run_backward(self, roots: Sequence[Any], gradients: Sequence[Tensor]) -> None:
        """``torch.autograd.backward`` through user code, from tensors or edges. The graph is kept, because the backward
        of other calls leads through it too."""
        for leaf, gradient in self._walk(roots, gradients, self._edges, retain_graph=True):
            self._add(leaf, gradient)

    def run_unit_backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor], own: Container[Tensor]) -> None:
        """``torch.autograd.backward`` inside a unit that computes with loose parameters.

        Args:
            own: leaves of the unit's replica, which accumulate.
        """
        edges = leaves_behind(map(node_of, roots))
        for leaf, gradient in self._walk(roots, gradients, edges, retain_graph=False):
            if leaf not in own:
                self._add(leaf, gradient)
            else:
                _accumulate(leaf, gradient)

    def _add(self, leaf: Tensor, gradient: Tensor) -> None:
        known = self._sums.get(leaf)
        self._sums[leaf] = gradient if known is None else added(known, gradient)

    def _walk(
        self,
        roots: Sequence[Any],
        gradients: Sequence[Tensor],
        edges: dict[Tensor, GradientEdge],
        *,
        retain_graph: bool,
    ) -> list[tuple[Tensor, Tensor]]:
        """Walks the graph from ``roots`` to ``edges``; the leaves that got a gradient."""
        leaves = [leaf for leaf in edges if leaf.requires_grad]  # as torch: a flag that was switched off since counts
        before, self.is_walking = self.is_walking, True
        self._num_walks += 1
        try:
            found = _engine_run_backward(
                tuple(roots), tuple(gradients), retain_graph, False, tuple([edges[leaf] for leaf in leaves]),
                allow_unreachable=True, accumulate_grad=False,
            )  # fmt: skip
        finally:
            self.is_walking = before
        return [(leaf, gradient) for leaf, gradient in zip(leaves, found, strict=True) if gradient is not None]

    def begin_use(self) -> int:
        """A parameter is used on a device, as part of the graph; the ordinal of the use, downwards."""
        self._num_uses -= 1
        return self._num_uses

    def put_aside(self, use: int, parameter: nn.Parameter, device: Device, gradient: Tensor) -> None:
        """Takes the gradient of a use, on the device; called by autograd, on a thread of its own on GPUs."""
        self._aside[self._num_walks, use] = _Aside(self._num_walks, parameter, device, gradient)

    def take(self) -> tuple[list[nn.Parameter], Transfer] | None:
        """The backward has ended: parameters and their gradients, which are on their way to the host. Autograd may hold
        the same tensors elsewhere. Other leaves get theirs into ``.grad``. None if there are no parameters among the
        leaves."""
        aside = [self._aside[key] for key in sorted(self._aside)]
        sums = self._sums
        self.clear()
        for leaf in [leaf for leaf in sums if not (isinstance(leaf, nn.Parameter) or self._is_trained(leaf))]:
            with _others_lock:
                _accumulate(leaf, sums.pop(leaf))
        on_host = cast(dict[nn.Parameter, Tensor], sums)
        if aside:
            arriving = _Arriving(aside, on_host)
            return arriving.parameters, arriving
        return (list(on_host), Done(list(on_host.values()))) if on_host else None

    def clear(self) -> None:
        """Nothing is kept, neither of the graph nor of gradients."""
        self._edges = {}
        self._sums = {}
        self._aside = {}


class _Aside(NamedTuple):
    """The gradient that a walk has given for a use of a parameter on a device."""

    walk: int
    parameter: nn.Parameter
    device: Device
    gradient: Tensor


class _Arriving(Joined):
    """Gradients of a micro-batch on their way to the host, and those that are there; gives their sums.

    Attributes:
        parameters: for which there are sums, in their order.
    """

    def __init__(self, aside: Sequence[_Aside], on_host: dict[nn.Parameter, Tensor]) -> None:
        self._walks = [(one.parameter, one.walk) for one in aside]
        self._on_host = on_host
        self.parameters = list(dict.fromkeys([*(one.parameter for one in aside), *on_host]))
        devices: dict[Device, list[int]] = {}
        for i, one in enumerate(aside):
            devices.setdefault(one.device, []).append(i)
        self._arriving = [i for found in devices.values() for i in found]
        super().__init__(
            [
                device.download([aside[i].gradient for i in found], "gradients in user code")
                for device, found in devices.items()
            ]
        )

    def wait(self, edge: Edge) -> list[Tensor]:
        """The sums, each in a new tensor, or one of those on the host."""
        sums: dict[nn.Parameter, Tensor] = dict(self._on_host)
        of_walks: dict[tuple[nn.Parameter, int], Tensor] = {}
        arrived = dict(zip(self._arriving, self.arrived(edge), strict=True))
        for i, key in enumerate(self._walks):
            of_walks[key] = added(of_walks[key], arrived[i]) if key in of_walks else arrived[i]
        for (parameter, _), gradient in of_walks.items():
            sums[parameter] = added(sums[parameter], gradient) if parameter in sums else gradient
        return [sums[parameter] for parameter in self.parameters]


def _accumulate(leaf: Tensor, gradient: Tensor) -> None:
    # autograd may hold the same tensor elsewhere
    leaf.grad = gradient.clone() if leaf.grad is None else added(leaf.grad, gradient)


@contextlib.contextmanager
def nested_backwards_refused() -> Iterator[None]:
    """While open, a backward that user code runs inside one of the engine's must not accumulate into parameters."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        # In a backward that asks for gradients; torch has the same test, for its reentrant checkpoints.
        is_nested = torch._C._current_graph_task_id() != -1 and not _engine.is_checkpoint_valid()
        if is_nested and kwargs.get("inputs") is None and _parameters_behind(tensors):
            raise _nested_backward()
        original(tensors, *args, **kwargs)

    with attribute_set(torch.autograd, "backward", backward):
        yield


def check_unused(outputs: Sequence[Tensor], inputs: Iterable[Any]) -> None:
    """``torch.autograd.grad`` in user code has found no way to some of ``inputs``.

    Raises:
        RuntimeError: if these may be parameters, or copies of them, that were used all the same: a unit that a backward
            calls again computes with leaves of its own.
    """
    asked = set(map(id, inputs))
    if torch._C._current_graph_task_id() != -1 and any(id(leaf) not in asked for leaf in _parameters_behind(outputs)):
        raise _nested_backward()


def _nested_backward() -> RuntimeError:
    return RuntimeError(
        "a function of the user (an activation checkpoint of another library, reversible layers, the adjoint of an "
        "ODE) runs a backward of its own inside the backward of the step, where its gradients cannot be followed. "
        "Leave a checkpoint out: RoundPipe recomputes units by itself; or name the class of the module around the "
        "function in RoundPipeStrategy(units=[...])"
    )


def _parameters_behind(tensors: Any) -> list[nn.Parameter]:
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return [leaf for leaf in leaves_behind(map(node_of, roots)) if isinstance(leaf, nn.Parameter)]


@contextlib.contextmanager
def hooks_out_of_the_way(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """While open, hooks on the gradients of ``parameters`` do not run: parts of gradients arrive."""
    hooks = [(parameter, parameter._backward_hooks) for parameter in parameters if parameter._backward_hooks]
    for parameter, _ in hooks:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hook in hooks:
            parameter._backward_hooks = hook
