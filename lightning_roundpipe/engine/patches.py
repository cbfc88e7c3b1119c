"""What the engine changes outside itself, for how long, and its undoing on every exit path.

[Note: patches]
Most replacements ask for the micro-batch of the calling thread, and do what the original does where there is none. So
they are installed once for all engines of the process and stay as long as one of them is open (the Trainer keeps its
engine open from set-up to tear-down) or runs a step. Some are methods of classes from which hundreds of others are
derived (``nn.Module``): to set one makes Python forget what it has cached about all of them, which takes milliseconds.
What belongs to one segment of a step is undone at its end.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..autograd.checkpointing import checkpoints_passed_through
from ..autograd.compiled_by_user import compiled_functions_followed
from ..autograd.parametrizations import parametrizations_apart, power_iterations_once
from ..autograd.recompute import GradientCutError, cut_on_the_way, note_hook, reached_cut
from ..autograd.relays import as_it_is, note_removal, own_hook
from ..autograd.unit_context import InsideUnit
from ..common.attributes import attribute_set, is_registered, read
from ..usercode.functional_calls import functional_calls_apart
from ..usercode.gpu_draws import gpu_generators_left_alone
from ..usercode.implicit_transfers import functions_followed, lengths_brought_home
from ..usercode.key_value_caches import caches_followed
from ..usercode.lock import UserCodeState, current
from ..usercode.loose_gradients import check_unused, hooks_out_of_the_way, nested_backwards_refused
from ..weights.attributes import note_set
from ..weights.units import Unit, UnitTable

_transforms_active = torch._C._are_functorch_transforms_active  # of torch.func

_lock = threading.Lock()
_num_users = 0  # the lock is held where it changes
_installed = contextlib.ExitStack()


@contextlib.contextmanager
def torch_patched() -> Iterator[None]:
    """While open, on any thread, micro-batch threads find the replacements that stay; see [Note: patches]."""
    global _num_users, _installed
    with _lock:
        if not _num_users:
            with contextlib.ExitStack() as stack:
                for installed in _STAYING:
                    stack.enter_context(installed())
                _installed = stack.pop_all()
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if not _num_users:
                _installed.close()


def modules_of(root: nn.Module) -> list[nn.Module]:
    """``root.modules()``, in the same order, several times as fast."""
    found: dict[nn.Module, None] = {}
    todo: list[nn.Module | None] = [root]
    while todo:
        module = todo.pop()
        if module is not None and module not in found:
            found[module] = None
            todo.extend(reversed(module._modules.values()))
    return list(found)


def patch(
    stack: contextlib.ExitStack, table: UnitTable, parameters: list[nn.Parameter], num_threads: int | None
) -> None:
    """A segment of a step begins, which ends when ``stack`` is closed; ``table`` has seen the model in this step.

    Args:
        parameters: of the model.
    """
    stack.enter_context(intercepted(table))
    stack.enter_context(nested_backwards_refused())
    stack.enter_context(hooks_out_of_the_way(parameters))
    stack.enter_context(process_settings_kept())
    stack.enter_context(parametrizations_apart())
    stack.enter_context(power_iterations_once())
    stack.enter_context(intra_op_threads(num_threads))


@contextlib.contextmanager
def intercepted(table: UnitTable) -> Iterator[None]:
    """While open, calls of candidate modules by micro-batch threads go to the engine.

    The instance attribute ``forward`` is replaced, so hooks on the module itself run as user code around the unit, and
    put back afterwards: copies, pickles and ``state_dict`` never see it.
    """
    before: list[tuple[nn.Module, Any]] = []
    try:
        for module, unit in table.units.items():
            own = module.__dict__.get("forward")
            before.append((module, own))
            # The same object in every step: a replica that saw it has nothing new to copy.
            if unit.interceptor is None or unit.interceptor[0] is not own:
                unit.interceptor = (own, _Interceptor(unit))
            module.__dict__["forward"] = unit.interceptor[1]
        yield
    finally:
        for module, forward in before:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


class _Interceptor:
    """In the place of the ``forward`` of a unit: micro-batches call the engine.

    Copies and pickles of the module that user code makes in the middle of a step get the forward that it has otherwise.
    """

    def __init__(self, unit: Unit) -> None:
        module = unit.module
        own = module.__dict__.get("forward")
        original = own or module.forward  # of a traced module the class has none
        functools.update_wrapper(self, original)
        self._unit, self._original, self.roundpipe_original = unit, original, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = current()
        if state is None or state.unit_writes is not None or state.call_unit is None or _transforms_active():
            return self._original(*args, **kwargs)
        return state.call_unit(self._unit, args, kwargs)

    def __reduce__(self) -> Any:
        return as_it_is, (self._original,)


@contextlib.contextmanager
def guarded_grad() -> Iterator[None]:
    """While open, ``torch.autograd.grad`` in user code that ends at a cut says so; a unit that calls it is noted.

    It only walks nodes on the way to its inputs; a cut has no way on, so torch would call the inputs unused, or leave
    out a part of the gradient. What is replaced is the function that it calls: user code may have imported ``grad`` by
    its name.
    """
    namespace: Any = torch.autograd
    original = namespace._engine_run_backward

    @functools.wraps(original)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        state = current()
        if state is None or kwargs.get("accumulate_grad"):  # a backward, which the cut itself notices
            return original(outputs, *args, **kwargs)
        if (writes := state.unit_writes) is not None:
            if isinstance(writes, InsideUnit) and writes.run is not None:
                writes.run[1].unit.differentiates = True
            return original(outputs, *args, **kwargs)
        roots = [root for root in outputs if isinstance(root, Tensor)]
        asked = args[3]  # behind grad_outputs, retain_graph and create_graph
        if state.has_cuts and (call := cut_on_the_way(outputs, asked)) is not None:
            raise GradientCutError.at(call)
        is_on_gpu = any([not root.is_cpu for root in roots])
        try:
            with state.lock.walking(state) if is_on_gpu and state.lock is not None else contextlib.nullcontext():
                result = original(outputs, *args, **kwargs)
        except RuntimeError as error:
            if "not have been used" in str(error):
                if (call := reached_cut(roots)) is not None:
                    raise GradientCutError.at(call) from error
                check_unused(roots, asked)
            raise
        if any(gradient is None for gradient in result):
            if (call := reached_cut(roots)) is not None:
                raise GradientCutError.at(call)
            check_unused(roots, asked)
        return result

    with attribute_set(namespace, "_engine_run_backward", run_backward):
        yield


@contextlib.contextmanager
def noting_writes() -> Iterator[None]:
    """While open, what user code and units write on modules is noted: see [Note: attribute writes] in
    :mod:`usercode.lock`. Parameters have no such methods of their own, and what is not there costs nothing outside of
    fits."""
    set_attribute, delete_attribute = nn.Module.__setattr__, nn.Module.__delattr__
    register_buffer = nn.Module.register_buffer

    def noting_setattr(self: nn.Module, name: str, value: Any) -> None:
        _note(self, name, value)
        set_attribute(self, name, value)

    def noting_delattr(self: nn.Module, name: str) -> None:
        _note(self, name)
        delete_attribute(self, name)

    @functools.wraps(register_buffer)
    def noting_register_buffer(self: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        state = current()
        if state is not None and state.unit_writes is not None:
            state.unit_writes.note_registered(self, name, is_persistent=persistent)
        register_buffer(self, name, tensor, persistent)

    def noting_parameter_setattr(self: nn.Parameter, name: str, value: Any) -> None:
        if name == "requires_grad":
            _note_flag(self, value)
        object.__setattr__(self, name, value)

    def noting_requires_grad_(self: nn.Parameter, requires_grad: bool = True) -> Tensor:
        _note_flag(self, requires_grad)
        return Tensor.requires_grad_(self, requires_grad)

    with contextlib.ExitStack() as stack:
        stack.enter_context(attribute_set(nn.Module, "__setattr__", noting_setattr))
        stack.enter_context(attribute_set(nn.Module, "__delattr__", noting_delattr))
        stack.enter_context(attribute_set(nn.Module, "register_buffer", noting_register_buffer))
        stack.enter_context(attribute_set(nn.Parameter, "__setattr__", noting_parameter_setattr))
        stack.enter_context(attribute_set(nn.Parameter, "requires_grad_", noting_requires_grad_))
        yield


def _note(module: nn.Module, name: str, value: Any = None) -> None:
    state = current()
    if state is None:
        note_set(module, name, value)
        return
    if state.unit_writes is not None:
        state.unit_writes.note(module, name)
    elif state.lock is not None and not is_registered(module, name):
        state.lock.note(state, module, name, value)


def _note_flag(parameter: nn.Parameter, value: bool) -> None:
    state = current()
    in_user_code = state is not None and state.unit_writes is None and state.lock is not None
    if in_user_code and value != read(parameter, "requires_grad"):
        assert state is not None
        assert state.lock is not None
        state.lock.note_flag(state, parameter)


@contextlib.contextmanager
def autocast_followed() -> Iterator[None]:
    """While open, ``torch.autocast`` in a micro-batch on GPUs means them where it names the host, which is where
    ``self.device`` and the batch are."""
    original = torch.autocast.__init__

    @functools.wraps(original)
    def init(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        state = current()
        if state is not None and device_type == "cpu" and type(self) is torch.autocast:
            device_type = state.autocast_device
        original(self, device_type, *args, **kwargs)

    with attribute_set(torch.autocast, "__init__", init):
        yield


@contextlib.contextmanager
def noting_hooks() -> Iterator[None]:
    """While open, hooks that user code registers on outputs of units are noted, and those that it registers on modules
    and removes: see :class:`recompute.Receiver`, and [Note: hooks of a call] in :mod:`autograd.relays`."""

    def noting(original: Callable[..., Any], note: Callable[[UserCodeState, Tensor], None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            state = current()
            if state is not None:
                note(state, self)
            return original(self, *args, **kwargs)

        return method

    def registering(original: Callable[..., Any], *, is_pre: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def register(self: nn.Module, hook: Callable[..., Any], **kwargs: Any) -> Any:
            state = current()
            if state is not None and state.unit_writes is None:
                hook = own_hook(state, self, hook, is_pre=is_pre)
            elif state is not None and not is_pre:
                state.on_module_hook()
            return original(self, hook, **kwargs)

        return register

    remove, register, register_pre = (
        RemovableHandle.remove, nn.Module.register_forward_hook, nn.Module.register_forward_pre_hook,
    )  # fmt: skip

    @functools.wraps(remove)
    def noting_remove(self: RemovableHandle) -> None:
        state, hooks = current(), self.hooks_dict_ref()
        if state is not None and state.unit_writes is None and hooks is not None:
            others = [ref() for ref in self.extra_dict_ref]
            note_removal(state, self.id, (hooks, next(filter(None, others), {})))
        remove(self)

    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (Tensor, "register_hook", noting(Tensor.register_hook, _note_tensor_hook)),
            (Tensor, "retain_grad", noting(Tensor.retain_grad, lambda state, tensor: note_hook(tensor))),
            (nn.Module, "register_forward_hook", registering(register, is_pre=False)),
            (nn.Module, "register_forward_pre_hook", registering(register_pre, is_pre=True)),
            (RemovableHandle, "remove", noting_remove),
        ):
            stack.enter_context(attribute_set(owner, name, replacement))
        yield


def _note_tensor_hook(state: UserCodeState, tensor: Tensor) -> None:
    note_hook(tensor)
    if state.unit_writes is None:
        state.on_late_code()


@contextlib.contextmanager
def process_settings_kept() -> Iterator[None]:
    """Restores settings of the whole process that micro-batches may leave changed.

    ``with warnings.catch_warnings()`` or a temporary default dtype around a unit is undone in the wrong order when
    several micro-batches are inside at once.
    """
    filters, show, dtype = warnings.filters, warnings.showwarning, torch.get_default_dtype()
    content = list(filters)
    try:
        yield
    finally:
        if warnings.filters is not filters or list(filters) != content:
            filters[:] = content  # type: ignore[index]
            warnings.filters = filters
        warnings.showwarning = show
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)


@contextlib.contextmanager
def intra_op_threads(num_threads: int | None) -> Iterator[None]:
    """Threads that start while this is open use ``num_threads`` for an operator (None: unchanged)."""
    if num_threads is None or num_threads == torch.get_num_threads():
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_STAYING = (
    noting_writes,
    noting_hooks,
    autocast_followed,
    checkpoints_passed_through,
    functions_followed,
    lengths_brought_home,
    compiled_functions_followed,
    guarded_grad,
    gpu_generators_left_alone,
    functional_calls_apart,
    caches_followed,
)
