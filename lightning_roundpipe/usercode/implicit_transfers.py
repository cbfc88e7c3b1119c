"""Makes a pool of GPUs look like one device to user code.

[Note: implicit transfers]
User code creates tensors on ``self.device`` (the host), uses raw parameters (the host's masters), labels of the batch
(host) and outputs of units (the GPU of their stage). A function mode on the micro-batch's thread brings the operands
of a call that live on different devices to one: for in-place functions the target's, otherwise the current stage's.
So are operands of the user's own autograd functions, which no mode sees: their ``apply`` is replaced. The move is part
of the graph, so gradients find their way back, also to masters on the host::

    h (GPU 2) * self.scale (host)     h * copy of self.scale on GPU 2
    self.total (host).add_(loss)      self.total.add_(copy of loss on the host)
    labels.to(logits.device)          an upload that the GPU waits for, and the host does not
    loss.item(), h.cpu()              a download, which the host waits for without the user-code lock
    h[mask], torch.nonzero(h)         a wait for the device, without that lock as well

Moves go through the lanes: see [Note: moves] in :mod:`usercode.moves`. A copy that torch makes by itself would hold up
the host until the GPU has computed all that it was given, and with it every micro-batch that wants the user-code lock.
While ``logging`` formats a message, it has a lock of its own, which others may want: there the wait keeps both locks.

The engine knows where its tensors are, and in a unit everything is on one device already. Each function that the mode
sees costs time on the host's thread, much beside the operators of a small layer: so the mode is taken off where a
micro-batch calls a unit, and for its backward, except for user code in there: hooks inside a unit
(``UserCodeLock.in_user_code``), and the graph between units. Elsewhere in the engine it does nothing.

What user code has compiled (``torch.compile(loss)``) runs as it is: compiled, a function is one operator, of which no
mode sees the operands. Besides, torch would trace the mode with it, and its backward would not be one that can be
walked in parts. See [Note: functions that the user compiled] in :mod:`autograd.compiled_by_user`.

On virtual devices that have copies of their own no tensor tells where it is. There the rule for raw parameters is the
same, so that what happens on GPUs can be tested: beside anything else they are operands of another device.

What is only on the host stays there: a penalty on the norms of all weights needs no device. Parameters, and views of
most of a parameter, have copies that all micro-batches share, see [Note: raw parameters] in
:mod:`usercode.loose_parameters`. If a function changes an operand that was moved (``F.embedding`` with ``max_norm``,
running statistics), the change is brought back.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..common import trees
from ..common.attributes import attribute_set
from ..common.fingerprints import version_of
from ..devices.device import Device
from ..devices.memory import Passing
from ..devices.offload import TravellingActivations
from .gpu_draws import drawing, is_random
from .lock import UserCodeState, current
from .loose_gradients import LooseGradients
from .loose_parameters import LooseParameters, may_wait, parameter_of
from .moves import moved

_HOST = torch.device("cpu")
_WHAT = "operand in user code"
# Between a function of torch and what has called it, if that is `logging`.
_MAX_FRAMES = 12

# Functions that take operands on several devices by design.
_ANYWHERE = frozenset({"to", "cpu", "cuda", "type_as", "set_", "backward"})
_WRITES = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"})
# These have names like functions that write, and leave values as they are.
_WRITE_NOTHING = frozenset({"requires_grad_", "detach_", "rename_"})
# A scalar of the host may meet a tensor anywhere, but not here.
_JOINS = frozenset(
    {
        *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "row_stack"),
        *("copy_", "apply"),
    }
)
# Their lengths stay on the host.
_WITH_LENGTHS = frozenset({"_pack_padded_sequence", "_pad_packed_sequence"})
# What these give is on the host, and what they read has to come there.
_READS = frozenset({"item", "tolist", "numpy", "is_nonzero"}) | {
    f"__{name}__" for name in ("bool", "float", "int", "index", "complex", "array", "format")
}
# The host has to know a value, or how many there are: torch waits for the device there.
_NEED_VALUES = frozenset({"nonzero", "argwhere", "masked_select", "equal", "allclose", "unique", "unique_consecutive"})
# Arguments by name of what is left of a method after the move: of `cpu` and the like, and of `to`.
_OF_TO = (frozenset({"memory_format"}), frozenset({"device", "dtype", "other", "memory_format"}))
# They make a tensor on the host first.
_MADE_ON_HOST = frozenset({"tensor", "as_tensor", "asarray"})
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
# These write operands whose versions do not show it.
_WRITES_UNSEEN = frozenset({"batch_norm", "instance_norm"})


class ImplicitTransfers(TorchFunctionMode):
    """Moves operands of user code to one device; see [Note: implicit transfers].

    Args:
        where: gives the device of the current stage.
        parameters: the copies of raw parameters.
        gradients: those of the micro-batch for loose parameters.
        activations: of the micro-batch.
    """

    def __init__(
        self,
        where: Callable[[], Device],
        parameters: LooseParameters,
        gradients: LooseGradients,
        activations: TravellingActivations,
    ) -> None:
        super().__init__()
        self._where = where
        self._parameters = parameters
        self._gradients = gradients
        self._activations = activations

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        state = current()
        if state is not None and not _is_user_code(state):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            if name == "__set__" and func == _SET_DATA:
                func = self._parameters.writing(func, args[0])
            return func(*args, **kwargs)
        place = self._where()
        if (done := self._moved_by_user(func, name, args, kwargs, place)) is not None:
            return done[0]
        return self.run(func, name, args, kwargs, place)

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], place: Device) -> Any:
        """Calls a function with its operands on one device."""
        state = current()
        leaves: list[Any] = []
        structure = trees.flatten((args, kwargs), leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_named_so = name.endswith("_") and not name.endswith("__") and name not in _WRITE_NOTHING
        writes = is_named_so or name in _WRITES or "out" in kwargs
        fixed = None
        if writes or name == "__getitem__":  # an index follows its tensor
            fixed = kwargs["out"] if "out" in kwargs else next(iter((*args, *kwargs.values())), None)
        if writes:
            func = self._parameters.writing(func, fixed)
        placed = tensors if name in _JOINS else [t for t in tensors if t is fixed or not _goes_anywhere(t)]
        if name in _WITH_LENGTHS:
            placed = [t for t in placed if t.dtype != torch.int64]
        if place.torch_device.type != "cpu" and _needs_values(name, tensors):
            self._await_place(place)
        homes = {_home(t, place) for t in placed}
        if len(homes) < 2 or name in _ANYWHERE:
            return _called(func, name, state, leaves, args, kwargs)
        target: torch.device | None = place.torch_device
        if isinstance(fixed, Tensor):
            target = _home(fixed, place)
        brought = {id(t): (t, self._move(t, target, place)) for t in placed if _home(t, place) != target}
        versions = {key: version_of(there) for key, (_, there) in brought.items()}
        given = [brought[id(leaf)][1] if id(leaf) in brought else leaf for leaf in leaves]
        args, kwargs = trees.unflatten(structure, given)
        result = _called(func, name, state, given, args, kwargs)
        for key, (tensor, there) in brought.items():
            if version_of(there) != versions[key] or (name in _WRITES_UNSEEN and not tensor.requires_grad):
                with torch.no_grad():
                    tensor.copy_(self._move(there.detach(), _home(tensor, place), place))
        return result

    def _moved_by_user(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], place: Device
    ) -> tuple[Any] | None:
        """The result of a function whose purpose is a move between the host and devices, or between devices; None if
        this one is none."""
        if place.torch_device.type == "cpu":
            return None
        if name in _MADE_ON_HOST:
            device = _indexed(kwargs.get("device"), place)
            if device.type == "cpu" or any(isinstance(arg, Tensor) for arg in args):
                return None
            made = func(*args, **{**kwargs, "device": _HOST})
            return (self._bring(made.detach(), device, place).requires_grad_(made.requires_grad),)
        if not args or not isinstance(args[0], Tensor):
            return None
        tensor, *rest = args
        if name in _READS:
            if tensor.device.type == "cpu" or (name == "__format__" and tensor.dim()):
                return None
            read = tensor if name in ("numpy", "__array__") else tensor.detach()
            return (func(self._bring(read, _HOST, place), *rest, **kwargs),)
        if name not in ("to", "cpu", "type_as", place.torch_device.type):
            return None
        target = _target_of(name, rest, kwargs, place)
        if target is None or target == tensor.device:
            return None
        there = self._bring(tensor, target, place)
        if name == "type_as":
            return (there.to(rest[0].dtype),)
        if name != "to":  # "non_blocking" says nothing to what has arrived
            rest = []
        return (there.to(*rest, **{key: value for key, value in kwargs.items() if key in _OF_TO[name == "to"]}),)

    def _move(self, tensor: Tensor, target: torch.device | None, place: Device) -> Tensor:
        """``tensor`` on the device ``target``, as part of the graph; to be read only."""
        is_here = target == place.torch_device and not torch._C._are_functorch_transforms_active()
        if is_here and (master := _master_of(tensor)) is not None:
            tracks = tensor.requires_grad and torch.is_grad_enabled()
            copy = self._parameters.use(master, place, current(), self._gradients, tracks=tracks)
            if copy is not None and tensor is master:
                return copy
            if copy is not None and copy.stride() == master.stride():
                offset = tensor.storage_offset() - master.storage_offset() + copy.storage_offset()
                return copy.as_strided(tensor.shape, tensor.stride(), offset)
        is_shared = not self._gradients.is_walking  # else other threads may move things for this micro-batch, too
        return self._bring(tensor, target or _HOST, place, is_shared=is_shared)

    def _bring(self, tensor: Tensor, target: torch.device, place: Device, *, is_shared: bool = False) -> Tensor:
        """``tensor`` on the device ``target``, as part of the graph."""
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout in (torch.strided, torch.sparse_coo)
        is_plain = is_plain and not torch._C._are_functorch_transforms_active()  # they know no functions of ours
        if tensor.device == target or not is_plain or not self._activations.reaches(tensor.device, target):
            return tensor.to(target)
        if not is_shared and target == place.torch_device and parameter_of(tensor) is tensor:
            return self._move(tensor, target, place).clone()
        return moved(tensor, target, self._activations, _WHAT, is_shared=is_shared, await_download=self._await_passing)

    def _await_place(self, place: Device) -> None:
        """Waits until a device has done all that it was given, so that torch need not."""
        if (passing := place.free([])) is not None:
            self._await_passing(passing)

    def _await_passing(self, passing: Passing) -> None:
        """Waits, and lets other user code run meanwhile if it may."""
        state = current()
        if state is None or state.lock is None or not may_wait(state, self._gradients) or _is_logging():
            passing.await_done()
            return
        with state.lock.released(state):
            passing.await_done()


@contextlib.contextmanager
def functions_followed() -> Iterator[None]:
    """While open, operands of autograd functions that user code applies are brought to one device."""
    bound = vars(torch.autograd.Function)["apply"].__get__  # in torch 2.15 it is a method in C

    @classmethod  # type: ignore[misc]
    def apply_on_one_device(cls: Any, *args: Any, **kwargs: Any) -> Any:
        mode, state = _mode_on_top(), current()
        if mode is None or (state is not None and not _is_user_code(state)):
            return bound(None, cls)(*args, **kwargs)
        return mode.run(bound(None, cls), "apply", args, kwargs, mode._where())

    with attribute_set(torch.autograd.Function, "apply", apply_on_one_device):
        yield


@contextlib.contextmanager
def lengths_brought_home() -> Iterator[None]:
    """While open, sequences are packed in a unit by lengths that came to its device with the other arguments, and which
    torch wants on the host."""
    original = torch._VF._pack_padded_sequence

    def pack(data: Tensor, lengths: Tensor, *args: Any) -> Any:
        return original(data, lengths if current() is None else lengths.cpu(), *args)

    with attribute_set(torch._VF, "_pack_padded_sequence", pack):
        yield


def _mode_on_top() -> ImplicitTransfers | None:
    height = torch._C._len_torch_function_stack()
    mode = torch._C._get_function_stack_at(height - 1) if height else None
    return mode if isinstance(mode, ImplicitTransfers) else None


def _needs_values(name: str, tensors: list[Tensor]) -> bool:
    """Whether torch waits in this function for what a device computes: also in a selection by a mask."""
    if name == "__getitem__":
        return any([index.dtype is torch.bool and index.device.type != "cpu" for index in tensors[1:]])
    return name in _NEED_VALUES and any([tensor.device.type != "cpu" for tensor in tensors])


def _called(
    func: Any, name: str, state: UserCodeState | None, leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The function's result; ``leaves`` are its arguments."""
    if state is None or not is_random(name):
        return func(*args, **kwargs)
    with drawing(state, name, leaves, args, kwargs):
        return func(*args, **kwargs)


def take_off_mode(state: UserCodeState) -> None:
    """The calling thread goes from user code into the engine: takes the mode off its stack, until :func:`put_on_mode`.

    Nothing is taken off if the user has entered a mode around the unit, which comes first.
    """
    if _mode_on_top() is not None:
        state.mode = cast(TorchFunctionMode, torch._C._pop_torch_function_stack())


def put_on_mode(state: UserCodeState) -> None:
    """The thread is in user code again."""
    mode, state.mode = state.mode, None
    if mode is not None:
        torch._C._push_on_torch_function_stack(mode)


def _is_user_code(state: UserCodeState) -> bool:
    """Neither inside a unit nor in the engine, which knows where its tensors are."""
    return state.unit_writes is None and state.lock is not None and state.lock.is_held_by(state)


def _home(tensor: Tensor, place: Device) -> torch.device | None:
    """Where ``tensor`` is, for user code at ``place``; None on the host."""
    if tensor.device.type != "cpu":
        return tensor.device
    on_host = place.torch_device.type != "cpu" or parameter_of(tensor) is not None
    return None if on_host else tensor.device


def _goes_anywhere(tensor: Tensor) -> bool:
    """A scalar on the host is an operand like a number, unless it gets a gradient, which is computed on the device."""
    is_scalar = tensor.dim() == 0 and tensor.device.type == "cpu"
    return is_scalar and not (tensor.requires_grad and torch.is_grad_enabled())


def _target_of(name: str, rest: list[Any], kwargs: dict[str, Any], place: Device) -> torch.device | None:
    """Where ``to``, ``cpu``, ``type_as`` or the method that is called like a type of devices bring a tensor; None if
    they leave it where it is."""
    if name == "cpu":
        return _HOST
    other = rest[0] if rest else kwargs.get("other")
    if isinstance(other, Tensor):
        return other.device
    if name == "to":
        parsed = torch._C._nn._parse_to(*rest, **{key: value for key, value in kwargs.items() if key != "copy"})
        device: torch.device | None = parsed[0]
    else:
        device = torch.device(name, other) if isinstance(other, int) else torch.device(other or name)
    return None if device is None else _indexed(device, place)


def _indexed(device: Any, place: Device) -> torch.device:
    """A device of torch; without an index it is the one that user code is on."""
    known = torch.device(device or _HOST)
    return place.torch_device if known.type == place.torch_device.type and known.index is None else known


def _is_logging() -> bool:
    """Whether the standard library's ``logging`` formats a message, with the lock of a handler."""
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "logging":
            return True
    return False


def _master_of(tensor: Tensor) -> nn.Parameter | None:
    """The parameter that ``tensor`` can be made of on a device, at less cost than if it travelled by itself."""
    base = parameter_of(tensor)
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
