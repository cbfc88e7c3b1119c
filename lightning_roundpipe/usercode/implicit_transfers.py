"""Makes a pool of GPUs look like one device to user code.

[Note: implicit transfers]
User code creates tensors on ``self.device`` (the host), uses raw parameters (the host's masters), labels of the batch
(host) and outputs of units (the GPU of their stage). A function mode on the micro-batch's thread brings the operands
of a call that live on different devices to one: for in-place functions the target's, otherwise the current stage's.
The move is part of the graph, so gradients find their way back, also to masters on the host::

    h (GPU 2) * self.scale (host)     h * copy of self.scale on GPU 2
    self.total (host).add_(loss)      self.total.add_(copy of loss on the host)

The engine knows where its tensors are: in it the mode does nothing. In a unit everything is on one device already, and
each function that the mode sees costs time on the host's thread, much beside the operators of a small layer: so the
mode is taken off in units, except for hooks of the user (``UserCodeLock.in_user_code``).

On virtual devices that have copies of their own no tensor tells where it is. There the rule for raw parameters is the
same, so that what happens on GPUs can be tested: beside anything else they are operands of another device.

What is only on the host stays there: a penalty on the norms of all weights needs no device. Parameters, and views of
most of a parameter, have copies that all micro-batches share, see [Note: raw parameters] in
:mod:`usercode.loose_parameters`. If a function changes an operand that was moved (``F.embedding`` with ``max_norm``,
running statistics), the change is brought back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..common import trees
from ..common.fingerprints import version_of
from ..devices.devices import Device
from .gpu_draws import drawing, is_random
from .lock import UserCodeState, current
from .loose_parameters import LooseParameters

# Functions that take operands on several devices by design.
_MOVES = frozenset({"to", "copy_", "cpu", "cuda", "type_as", "set_", "backward"})
_WRITES = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"})
# A scalar of the host may meet a tensor anywhere, but not here.
_JOINS = frozenset({"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "row_stack"})
# These write operands whose versions do not show it.
_WRITES_UNSEEN = frozenset({"batch_norm", "instance_norm"})
# Ways to the memory of a tensor that its version does not follow.
_data: Any = vars(torch._C.TensorBase)["data"]
_OPENS = frozenset(
    {_data.__get__, _data.__set__, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage}
)


class ImplicitTransfers(TorchFunctionMode):
    """Moves operands of user code to one device; see [Note: implicit transfers].

    Args:
        where: gives the device of the current stage.
        parameters: the copies of raw parameters.
        is_engine: tells whether the engine itself walks the graph of this micro-batch at the moment.
    """

    def __init__(self, where: Callable[[], Device], parameters: LooseParameters, is_engine: Callable[[], bool]) -> None:
        super().__init__()
        self._where = where
        self._parameters = parameters
        self._is_engine = is_engine

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        state = current()
        if state is not None and not _is_user_code(state):
            return func(*args, **kwargs)
        if func in _OPENS and (opened := _parameter_of(args[0])) is not None:
            self._parameters.open(opened)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        leaves: list[Any] = []
        structure = trees.flatten((args, kwargs), leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        writes = name in _WRITES or "out" in kwargs or (name.endswith("_") and not name.endswith("__"))
        if writes:
            for tensor in tensors:
                if (parameter := _parameter_of(tensor)) is not None:
                    self._parameters.before_write(parameter)
        place = self._where()
        homes = {_home(t, place) for t in tensors if name in _JOINS or not _goes_anywhere(t)}
        if len(homes) < 2 or name in _MOVES:
            return _called(func, name, state, leaves, args, kwargs)
        target: torch.device | None = place.torch_device
        fixed = kwargs.get("out", args[0]) if writes or name == "__getitem__" else None  # an index follows its tensor
        if isinstance(fixed, Tensor):
            target = _home(fixed, place)
        elsewhere = [t for t in tensors if _home(t, place) != target and (name in _JOINS or not _goes_anywhere(t))]
        moved = {id(t): (t, self._move(t, target, place)) for t in elsewhere}
        versions = {key: version_of(there) for key, (_, there) in moved.items()}
        given = [moved[id(leaf)][1] if id(leaf) in moved else leaf for leaf in leaves]
        args, kwargs = trees.unflatten(structure, given)
        result = _called(func, name, state, given, args, kwargs)
        for key, (tensor, there) in moved.items():
            if version_of(there) != versions[key] or (name in _WRITES_UNSEEN and not tensor.requires_grad):
                with torch.no_grad():
                    tensor.copy_(there)
        return result

    def _move(self, tensor: Tensor, target: torch.device | None, place: Device) -> Tensor:
        """``tensor`` on the device ``target``, as part of the graph."""
        if target == place.torch_device and (master := _master_of(tensor)) is not None:
            tracks = tensor.requires_grad and torch.is_grad_enabled()
            copy = self._parameters.use(master, place, current(), self._is_engine, tracks=tracks)
            if copy is not None and tensor is master:
                return copy
            if copy is not None and copy.stride() == master.stride():
                offset = tensor.storage_offset() - master.storage_offset() + copy.storage_offset()
                return copy.as_strided(tensor.shape, tensor.stride(), offset)
        return tensor.to(target or "cpu")


def _called(
    func: Any, name: str, state: UserCodeState | None, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The function's result; ``leaves`` are its arguments."""
    if state is None or not is_random(name):
        return func(*args, **kwargs)
    with drawing(state, name, leaves, args, kwargs):
        return func(*args, **kwargs)


def take_off_mode() -> TorchFunctionMode | None:
    """Takes the mode off the stack of the calling thread, which enters a unit; returns what :func:`put_on_mode` takes.

    Nothing is taken off if the user has entered a mode around the unit, which comes first.
    """
    height = torch._C._len_torch_function_stack()
    if height and isinstance(torch._C._get_function_stack_at(height - 1), ImplicitTransfers):
        return cast(TorchFunctionMode, torch._C._pop_torch_function_stack())
    return None


def put_on_mode(mode: TorchFunctionMode | None) -> None:
    """The thread is in user code again."""
    if mode is not None:
        torch._C._push_on_torch_function_stack(mode)


def _is_user_code(state: UserCodeState) -> bool:
    """Neither inside a unit nor in the engine, which knows where its tensors are."""
    return state.unit_writes is None and state.lock is not None and state.lock.is_held_by(state)


def _home(tensor: Tensor, place: Device) -> torch.device | None:
    """Where ``tensor`` is, for user code at ``place``; None on the host."""
    if tensor.device.type != "cpu":
        return tensor.device
    on_host = place.torch_device.type != "cpu" or _parameter_of(tensor) is not None
    return None if on_host else tensor.device


def _goes_anywhere(tensor: Tensor) -> bool:
    """A scalar on the host is an operand like a number."""
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def _parameter_of(tensor: Tensor) -> nn.Parameter | None:
    """The parameter on the host that ``tensor`` is, or is a view of."""
    base = tensor if isinstance(tensor, nn.Parameter) else tensor._base if tensor._is_view() else None
    return base if type(base) is nn.Parameter and base.device.type == "cpu" else None


def _master_of(tensor: Tensor) -> nn.Parameter | None:
    """The parameter that ``tensor`` can be made of on a device, at less cost than if it travelled by itself."""
    base = _parameter_of(tensor)
    if base is None or base.layout is not torch.strided:
        return None
    if tensor is base:
        return base
    # Only what has the same elements as they are, and nothing of its own in the graph.
    if tensor.dtype != base.dtype or tensor.is_conj() or tensor.is_neg() or tensor._backward_hooks:
        return None
    if tensor.retains_grad or (tensor.requires_grad and not base.requires_grad):
        return None
    return base if 2 * tensor.numel() > base.numel() else None
