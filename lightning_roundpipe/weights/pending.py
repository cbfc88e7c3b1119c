"""Weights whose update is under way: who looks at one waits for it.

[Note: pending weights]
An optimizer step that runs behind the pipeline leaves weights that are not what they will be. Everything that looks at
one must see the finished value: the upload for the next forward, and as well checkpoints, callbacks, hooks, loggers,
code of the user that nobody has heard of. So a weight itself knows: while its update is under way its class is
:class:`PendingParameter`, whose ``__torch_function__`` waits for the update before anything reads or changes the
weight, and before anybody gets hold of its gradient, which the update still reads. Then it is a plain parameter again.
Shape, dtype and other things that an update does not change can be looked at without a wait.

What cannot be noticed are tensors and arrays that share the memory of the weight and were made before the update began
(``view = weight.detach()``).

What goes wrong in an update is raised to everybody who looks at one of its weights, finished or not, until the thread
that trains has got it. What follows then, such as hooks for exceptions and the tear-down, finds the weights as they
are; training itself does not go on (:meth:`Failure.check`).

Classes of weights are set without a lock: a signal handler that looks at a weight may run at any place. Each operation
on :data:`_shares` and on a class is atomic, and whoever has set a class looks at the table again (:func:`_classify`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from .events import tell


class Failure:
    """What went wrong in an update; see [Note: pending weights]."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._lost: Share | None = None
        self._trains = threading.get_ident()

    def __bool__(self) -> bool:
        return self._error is not None

    def note(self, error: BaseException, parameters: Sequence[nn.Parameter]) -> None:
        """Keeps ``error``: from now on whoever looks at ``parameters`` gets it."""
        self._error, self._lost = error, _Lost(parameters, self)
        self._lost.begin()

    def tell(self) -> None:
        """Somebody looks at a weight.

        Raises:
            BaseException: what went wrong, unless the thread that trains knows of it.
        """
        if self._lost is not None:
            self.check()

    def check(self) -> None:
        """Training goes on, or comes to its end.

        Raises:
            BaseException: what went wrong, unless this is the tear-down after it.
        """
        error, handled = self._error, sys.exc_info()[1]
        lost = self._lost
        if lost is not None and threading.get_ident() == self._trains:
            self._lost = None
            lost.end(is_undone=True)
        while handled is not None and handled is not error:
            handled = handled.__cause__ or handled.__context__
        if error is not None and handled is None:
            raise error


class Share:
    """Weights that are updated together.

    Args:
        failure: raised by those who wait.
    """

    passes_for: Collection[int] = ()  # the thread that is about to begin the update, until that is done

    def __init__(self, parameters: Sequence[nn.Parameter], failure: Failure) -> None:
        self.parameters = list(parameters)
        self._failure = failure
        self._done = threading.Event()

    def begin(self) -> None:
        """From now on whoever looks at the weights waits."""
        tell("update", self.parameters)
        for parameter in self.parameters:
            _shares[id(parameter)] = self
            _classify(parameter)

    def end(self, *, is_undone: bool = False) -> None:
        """The weights are updated, or are not going to be.

        Args:
            is_undone: whether they are what they were before.
        """
        tell("not_updated" if is_undone else "updated", self.parameters)
        for parameter in self.parameters:
            if _shares.get(id(parameter)) is self:
                del _shares[id(parameter)]
                _classify(parameter)
        self._done.set()

    @property
    def is_over(self) -> bool:
        """Whether nobody has to wait any more."""
        return self._done.is_set()

    def wait(self) -> None:
        """Blocks until the weights are updated. (A signal handler in the thread that is about to begin the update does
        not wait: it sees what was before, of all weights.)

        Raises:
            BaseException: what went wrong.
            RuntimeError: in the update itself, which would wait for itself.
        """
        if getattr(_this_thread, "updates", False) and not self.is_over:
            raise RuntimeError(
                "an optimizer looks at a weight in another way than through its param_groups: its step cannot be taken "
                "apart. Leave out is_separable = True, or use optimizer_overlap='off'"
            )
        self._await_end()
        self._failure.tell()

    def _await_end(self) -> None:
        self._done.wait()


class _Lost(Share):
    """Weights of an update that went wrong."""

    def _await_end(self) -> None:
        pass


class PendingParameter(nn.Parameter):
    """See [Note: pending weights]."""

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """A plain parameter: ``type(weight)(tensor)`` makes one that nobody updates."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with unwaited():
                return func(*args, **kwargs)
        passes = False
        for parameter in _pending_in((args, kwargs)):
            share = _shares.get(id(parameter))
            if share is None:
                _classify(parameter)  # made one by torch.utils.swap_tensors
            elif threading.get_ident() in share.passes_for:
                passes = True
            else:
                share.wait()
        with unwaited() if passes else contextlib.nullcontext():
            return func(*args, **kwargs)


_shares: dict[int, Share] = {}
_this_thread = threading.local()

_GETTERS = (
    "shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "grad_fn", "output_nr", "_version",
    "_backward_hooks", "_post_accumulate_grad_hooks", "is_sparse", "is_cuda", "is_cpu", "is_meta", "is_quantized",
    "is_nested", "is_mps", "is_xla", "itemsize", "nbytes", "_base", "name", "names",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "is_inference", "is_signed", "is_pinned", "is_shared", "data_ptr",
    "requires_grad_", "_is_view", "__len__",
)  # fmt: skip
_FUNCTIONS = ("is_floating_point", "is_complex", "is_tensor", "numel", "is_inference")


def _harmless() -> Iterator[Any]:
    for name in _GETTERS:
        found = getattr(torch.Tensor, name, None)
        if hasattr(found, "__get__"):
            yield found.__get__  # type: ignore[union-attr]
    yield torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
    yield from (getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name))
    yield from (getattr(torch, name) for name in _FUNCTIONS)


_HARMLESS = frozenset(_harmless())


def _classify(parameter: nn.Parameter) -> None:
    """Gives ``parameter`` the class that it should have."""
    parameter.__class__ = nn.Parameter
    if id(parameter) in _shares:  # asked last: another thread may have put it there
        parameter.__class__ = PendingParameter


def _pending_in(value: Any) -> Iterator[nn.Parameter]:
    if isinstance(value, Tensor):
        if type(value) is PendingParameter:
            yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _pending_in(entry)
    elif isinstance(value, (list, tuple, set)):
        for entry in value:
            yield from _pending_in(entry)


def unwaited() -> AbstractContextManager[Any]:
    """While open, the calling thread does not wait: for what does not disturb an update."""
    return cast(AbstractContextManager[Any], torch._C.DisableTorchFunctionSubclass())


@contextlib.contextmanager
def replaced(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """While open, the parameters have these values, and nobody waits for them; updates go on with the others."""
    before: dict[nn.Parameter, Tensor] = {}
    try:
        for parameter, value in values.items():
            parameter.__class__ = nn.Parameter
            before[parameter] = parameter.data
            parameter.data = value
        yield
    finally:
        for parameter, data in before.items():
            parameter.data = data
        for parameter in values:
            _classify(parameter)


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """Around updates: whoever the calling thread waited for would wait for it."""
    _this_thread.updates = True
    try:
        yield
    finally:
        _this_thread.updates = False


def can_be_pending(parameter: nn.Parameter) -> bool:
    """Whether the update of ``parameter`` may be under way while others run: a plain parameter on the host."""
    return (
        type(parameter) in (nn.Parameter, PendingParameter)
        and parameter.device.type == "cpu"
        and not parameter.is_inference()
    )


def is_pending(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether one would have to wait for any of ``parameters``."""
    return bool(_shares) and any(type(parameter) is PendingParameter for parameter in parameters)


def _finish_before_fork() -> None:
    """A child has no thread that ends an update."""
    if not getattr(_this_thread, "updates", False):
        for share in list(_shares.values()):
            share._await_end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_finish_before_fork)
