"""Units compiled by ``torch.compile``, once per structure; and units in which the user has compiled something.

[Note: compiled units]
The blocks of a model repeat. What is compiled is therefore a function that takes the module as an argument: weights
become inputs of the graph, so that one graph serves all units of a structure and all their replicas. Functions are kept
per structure, torch device and grad mode, each with a code object of its own: torch keeps what it has compiled, and
counts it against a limit, per code object. A unit is compiled whole or not at all.

A function is called in two ways. First with what has been compiled so far: if that does not fit, its Python body runs,
and says so. Then it is compiled, while no user code and no other unit runs::

    unit 0   unit_running( cached: does not fit )   exclusive( compiled )
    unit 1   unit_running( ................... )   |                     |   unit_running( cached: fits )

Compiling changes the whole process: it replaces ``Module.__call__``, sets flags that compiled functions and user code
ask for, and puts the random generators back afterwards, as if no other thread had drawn. See [Note: exclusive sections]
in :mod:`usercode.lock`.

Only calls whose compiled form does the same run that way, see :func:`_suits`; the others run as ever.
Compiled, a unit that draws on a GPU draws other numbers. So such a call runs again as it has run before, and a forward
that will be recomputed runs with its graph, in the very function of the recomputation (``engine.execution``). If
something cannot be compiled, one warning names it, and the units of that structure run as ever.
"""

from __future__ import annotations

import contextlib
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor, nn

from ..usercode.lock import UserCodeLock, UserCodeState, current, entered
from ..weights.parameters import Replica
from ..weights.units import Unit
from .recompute import Call

# Versions of one function: sizes (torch makes them dynamic at the second one), training or not, autocast, inputs with
# and without gradient. Torch's own limit of 8 would be reached by ordinary use.
_MAX_VERSIONS = 16
_module: Any = nn.modules.module
_GLOBAL_HOOKS: tuple[Mapping[int, Any], ...] = (
    _module._global_forward_hooks, _module._global_forward_pre_hooks,
    _module._global_backward_hooks, _module._global_backward_pre_hooks,
)  # fmt: skip


class _NotCompiled(Exception):
    """Raised by the Python body of a function that was to run compiled."""


def _body(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.compiler.is_dynamo_compiling():  # always true while torch traces this
        raise _NotCompiled
    return module.forward(*args, **kwargs)


class _Function:
    """A compiled function; see [Note: compiled units].

    Attributes:
        cached: runs what is compiled; raises :class:`_NotCompiled` if that does not fit the arguments.
        compiled: compiles first if need be.
        num_versions: how often it was compiled.
        is_final: whether it is not compiled any more.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        body = types.FunctionType(_body.__code__.replace(), _body.__globals__, "roundpipe_unit")
        self.cached: Callable[..., Any] = torch._dynamo.run(body)
        self.compiled: Callable[..., Any] = torch.compile(body, fullgraph=True, **options)
        self.num_versions = 0
        self.is_final = False


class UnitCompiler:
    """Runs units compiled, where that is possible; see [Note: compiled units].

    Args:
        options: arguments of ``torch.compile``: ``backend``, ``mode``, ``options``, ``dynamic``; None if only what the
            user has compiled in units runs compiled, see [Note: functions that the user compiled] in
            :mod:`autograd.compiled_by_user`.

    Raises:
        RuntimeError, ValueError: if torch does not know the options.
    """

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self._options = options
        self._functions: dict[Hashable, _Function] = {}
        self._structures: weakref.WeakKeyDictionary[Unit, Hashable] = weakref.WeakKeyDictionary()
        self._warned: set[Hashable] = set()
        self._lock = threading.Lock()
        if options is not None:
            _Function(options)  # checks them

    def run(
        self, call: Call, replica: Replica, args: tuple[Any, ...], kwargs: dict[str, Any], lock: UserCodeLock
    ) -> tuple[Any, bool]:
        """The unit's forward, in the caller's grad mode, on a loaded replica on the current device.

        Args:
            call: the call, with the facts about it.
            replica, args, kwargs: the unit's.
            lock: of the step.

        Returns:
            What the unit returned, and whether it was compiled now, which took most of the time.

        Raises:
            RuntimeError: if the call draws, ran compiled, and cannot any more.
        """
        assert call.facts is not None
        before = call.is_compiled if call.facts.draws.gpu else None
        suits = _suits(call)
        if self._options is None or before is False or not suits:
            with lock.unit_running():
                result, was_compiled = _run_as_it_is(call, replica, args, kwargs, suits=suits)
            call.is_compiled = False
        else:
            result, was_compiled, call.is_compiled = self._run(call, replica, args, kwargs, lock)
        if before and not call.is_compiled:
            raise RuntimeError(
                f"unit {call.unit.name!r} draws random numbers, ran compiled, and cannot be compiled any more for its "
                "backward, which would draw others: leave it out of compile_units."
            )
        return result, was_compiled

    def _run(
        self, call: Call, replica: Replica, args: tuple[Any, ...], kwargs: dict[str, Any], lock: UserCodeLock
    ) -> tuple[Any, bool, bool]:
        """The result, whether it was compiled now, and whether it ran compiled."""
        module, function = replica.module, self._function_of(replica)
        with lock.unit_running():
            with contextlib.suppress(_NotCompiled):
                if function.num_versions:
                    return function.cached(module, args, kwargs), False, True
            if function.is_final:
                return *_run_as_it_is(call, replica, args, kwargs, suits=True), False
        with lock.exclusive(alone=True):
            return self._compile(function, replica, args, kwargs)

    def _function_of(self, replica: Replica) -> _Function:
        with self._lock:
            structure = self._structure_of(replica.unit)
            key = (structure, replica.device.torch_device, torch.is_grad_enabled())
            function = self._functions.get(key)
            if function is None:
                assert self._options is not None
                function = self._functions[key] = _Function(self._options)
            return function

    def _structure_of(self, unit: Unit) -> Hashable:
        """Equal for units that probably have the same graph. Torch checks what it relied on, each time."""
        known = self._structures.get(unit)
        if known is None:
            known = self._structures[unit] = tuple(
                (
                    name,
                    type(module),
                    tuple((n, p.shape) for n, p in module._parameters.items() if p is not None),
                    tuple((n, b.shape) for n, b in module._buffers.items() if b is not None),
                )
                for name, module in unit.module.named_modules()
            )
        return known

    def _compile(
        self, function: _Function, replica: Replica, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, bool, bool]:
        """As :meth:`_run`, alone: compiles, or gives up."""
        with contextlib.suppress(_NotCompiled):  # another thread was faster
            return function.cached(replica.module, args, kwargs), False, True
        if not function.is_final and function.num_versions < _MAX_VERSIONS:
            try:
                with entered(None), compile_settings():  # the tracer sets attributes of modules of its own
                    result = function.compiled(replica.module, args, kwargs)
            except (torch._dynamo.exc.TorchDynamoException, _NotCompiled) as error:
                reason = _first_line(error)
            else:
                function.num_versions += 1
                return result, True, True
        else:
            reason = f"it was compiled {_MAX_VERSIONS} times already, for other arguments or attributes"
        # If the unit itself fails, this raises the error that it would raise without compiling.
        result = replica.module.forward(*args, **kwargs)
        self._give_up(function, replica.unit, reason)
        return result, False, False

    def _give_up(self, function: _Function, unit: Unit, reason: str) -> None:
        if function.is_final:
            return
        function.is_final = True
        structure = self._structure_of(unit)
        if structure in self._warned:
            return
        self._warned.add(structure)
        rest = "other calls of it" if function.num_versions else "units like it"
        warnings.warn(
            f"compile_units: {type(unit.module).__name__} (unit {unit.name!r}) is not compiled, {rest} run without: "
            f"{reason}",
            stacklevel=2,
        )


def _run_as_it_is(
    call: Call, replica: Replica, args: tuple[Any, ...], kwargs: dict[str, Any], *, suits: bool
) -> tuple[Any, bool]:
    """The result of a unit in which what the user compiled runs compiled, if that suits; and whether some was compiled
    now."""
    assert call.facts is not None
    with user_compiles(suits and not call.facts.draws) as state:
        return replica.module.forward(*args, **kwargs), state.has_compiled


@contextlib.contextmanager
def user_compiles(wanted: bool) -> Iterator[UserCodeState]:
    """While open, on the thread of a micro-batch, what the user compiled runs compiled, or does not."""
    state = current()
    assert state is not None
    state.runs_compiled, state.has_compiled = wanted, False
    try:
        yield state
    finally:
        state.runs_compiled = None


def _suits(call: Call) -> bool:
    """Whether the call does the same compiled, going by the facts about it. (Units that draw are watched instead.)

    Written buffers and attributes, changed inputs, hooks on submodules and attributes that user code set are followed
    by the engine in eager mode only. And compiled code gives zeros, in place of no gradient, to parameters that only
    serve results without gradient.
    """
    facts = call.facts
    if facts is None or call.unit.written or facts.writes or call.side or call.hooks:
        return False
    if not all(isinstance(slot, int) for slot in facts.slots) or _has_hooks(call.unit) or _has_other_modes():
        return False
    if len(facts.flagged) > 1 and torch.is_grad_enabled():
        return not call.kept and call.gradients.keys() == call.flagged
    return True


def without_flags(leaves: list[Any]) -> list[Any]:
    """Arguments that do not require a gradient, for a run without a graph.

    Torch would compile a unit twice: for arguments from the same device, which still carry the flag, and for arguments
    that have come from elsewhere, which do not.
    """
    return [x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in leaves]


def _first_line(error: BaseException) -> str:
    if isinstance(error, _NotCompiled):
        return "torch.compile is switched off, or skips it"
    cause = getattr(error, "inner_exception", error)  # what a backend raised
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0] if lines else 'no message'}"


@contextlib.contextmanager
def compile_settings() -> Iterator[None]:
    """Backwards are compiled with their forwards, so that a failure shows at once; and the limit is ours."""
    functorch, dynamo = torch._functorch.config, torch._dynamo.config
    with contextlib.ExitStack() as stack:
        if hasattr(functorch, "force_non_lazy_backward_lowering"):
            stack.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
        limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"  # torch 2.6
        stack.enter_context(dynamo.patch({limit: 2 * _MAX_VERSIONS}))
        yield


def _has_hooks(unit: Unit) -> bool:
    """Whether a submodule carries hooks. Torch does not check that there are still none. Hooks on the unit itself run
    as user code."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in unit.members[1:]
    ) or any(_GLOBAL_HOOKS)


def _has_other_modes() -> bool:
    """Whether user code has entered a mode around the unit that sees every operator."""
    return torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0
