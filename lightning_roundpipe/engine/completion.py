"""Notices weights whose gradients are complete while the backward of others is still to come.

The last slot of a stage has ended: by the plan nothing will be added to the gradients of its units any more. What else
could use a weight is left out: units whose backward is in several stages, weights of several units, and those that glue
uses. No micro-batch is in its forward at that time, as each of them has been in the backward of the stage; what glue
still needs of a weight, its graph holds. So the graph shows weights that get a gradient, and for others the count of
those who hold the memory of a weight tells: the weight, and its replicas.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .recompute import walk_graph

if TYPE_CHECKING:
    from .gradients import GradientStore
    from .loading import Slot
    from .requests import StepRequest
    from .resources import Resources
    from .units import Unit
    from .walk import Walk

# Of the graph of one micro-batch's glue. To look at more would take longer than what is won.
_MAX_NODES = 2000
# Masters, and what waits for their gradients: it gives those that have come, as one sum each.
Tell = Callable[[Sequence[nn.Parameter], Callable[[], Mapping[nn.Parameter, Tensor]]], None]


class Completion:
    """Follows the slots of one schedule, in which all micro-batches of a step run.

    Args:
        tell: is told of weights, from the threads of micro-batches.
        store: where their gradients come to.
        walks: of all micro-batches.
        in_glue: weights that glue uses.
        is_open: whether glue runs code in its backward that may do anything.
        num_aliases: how many replicas of a unit use the memory of a master.
    """

    def __init__(
        self,
        tell: Tell,
        store: GradientStore,
        walks: Collection[Walk],
        in_glue: Collection[nn.Parameter],
        is_open: Callable[[], bool],
        num_aliases: Callable[[Unit, nn.Parameter], int],
    ) -> None:
        self._tell = tell
        self._store = store
        self._walks = walks
        self._in_glue = in_glue
        self._is_open = is_open
        self._num_aliases = num_aliases
        self._lock = threading.Lock()
        self._left: Counter[int] = Counter()
        self._units: dict[int, list[Unit]] = {}
        self._leaves: set[Tensor] = set()  # of the graphs of glue
        self._is_overlooked = False

    def follow(self, slots: Iterable[Slot]) -> None:
        """The slots are known: of all devices."""
        units: dict[int, tuple[Unit, ...]] = {}
        for slot in slots:
            units[slot.stage] = slot.units if slot.has_gradients else ()
            self._left[slot.stage] += 1
        stages_of = Counter(unit for found in units.values() for unit in found)
        owners = Counter(p for unit in stages_of for p in unit.module.parameters())
        self._units = {
            stage: [u for u in found if stages_of[u] == 1 and all(owners[p] == 1 for p in u.module.parameters())]
            for stage, found in units.items()
        }

    def look_at_glue(self, roots: list[Any]) -> None:
        """A micro-batch has been through its forward.

        Args:
            roots: autograd nodes of its glue to start from: of the loss, and of the inputs of its calls.
        """
        nodes = list(itertools.islice(walk_graph(roots), _MAX_NODES))
        found = {node.variable for node in nodes if hasattr(node, "variable")}
        with self._lock:
            self._leaves |= found
            self._is_overlooked |= len(nodes) == _MAX_NODES

    def end_slot(self, slot: Slot) -> None:
        """A slot has ended, and its gradients are on their way home."""
        with self._lock:
            self._left[slot.stage] -= 1
            if self._left[slot.stage]:
                return
        if self._is_open() or self._is_overlooked or any(walk.num_off_plan for walk in self._walks):
            return
        for unit in self._units[slot.stage]:
            masters = [p for p in unit.module.parameters() if p.requires_grad and not self._is_in_glue(unit, p)]
            if masters:
                self._tell(masters, functools.partial(self._store.collect, masters))

    def _is_in_glue(self, unit: Unit, master: nn.Parameter) -> bool:
        is_leaf = master in self._in_glue or master in self._leaves
        return is_leaf or _num_holders(master) != 1 + self._num_aliases(unit, master)


def completion_of(
    request: StepRequest, resources: Resources, store: GradientStore, walks: Collection[Walk]
) -> Completion | None:
    """Follows a step all of whose micro-batches run over one schedule, if anybody wants to know."""
    if request.completed is None:
        return None
    is_open, num_aliases = resources.glue_is_user_code.is_set, resources.replicas.num_aliases
    return Completion(request.completed, store, walks, resources.glue_parameters, is_open, num_aliases)


def _num_holders(master: nn.Parameter) -> int:
    """How many tensors use the memory of ``master``, itself included."""
    storage = master.data.untyped_storage()
    # But for the Python object of the storage: there is one at most, whoever keeps it (page-locked memory does).
    return torch._C._storage_Use_Count(storage._cdata) - 1
