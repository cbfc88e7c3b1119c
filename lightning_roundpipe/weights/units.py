"""Finds the units of a model: the modules that are run whole.

[Note: units]
Containers (``nn.Sequential``, ``nn.ModuleList``, ``nn.ModuleDict``) are transparent: their members are *blocks*, and a
block is never looked into. Modules around blocks are *user code*: their own ``forward`` is user code that calls units.
So are modules, other than blocks, in which parts carry forward hooks: what these keep, the ``forward`` may use.
Every other module that owns parameters is a candidate, at every level: which level counts is decided by the first call
that arrives from user code, because inside a unit nothing is intercepted. So the unit is the coarsest module that is
really called, without guessing, and a module that is never called (an embedding whose weight a decoder uses by
itself) needs no rule: its parameters are used by user code.

What can never fit on a device is looked into all the same, blocks included, if it has several parts to run one after
the other: then its own forward is user code.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..common.attributes import is_container
from ..common.sizes import num_bytes_of
from ..devices.issue_lock import Pace

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Forward pre-hooks of these types compute a parameter-dependent attribute outside the module's own forward: the
# module runs as user code, where that is ordinary autograd.
_LEGACY_NORMS = ("SpectralNorm", "WeightNorm")
# A module that owns more than this part of all parameters is looked into: as one unit it would leave no pipeline.
_MAX_PART = 0.5

_PLAIN = frozenset({bool, int, float, str})
UnitClasses = Sequence[type[nn.Module] | str]
Written = tuple[nn.Module, str, Any]  # module, name of an attribute, its value before the step


@dataclass(eq=False)
class Unit:
    """A module that is run whole.

    Attributes:
        name: dotted path below the root module.
        module: the module itself; it holds the master weights.
        order: position in ``named_modules`` order; identifies the unit.
        members: all modules of the unit.
        places: id of a member -> its index among them.
        interceptor: the ``forward`` that it was made for, and what replaces that while a step runs.
        facts: what the first call with the same kind of arguments taught about it (see ``recompute.Facts``).
        forward_pace, backward_pace: what the issue lock knows of its runs.
        written: buffers that a call of any kind has written: (master module, name). What calls that only read them
            compute depends on when they come.
        fills: lists and dicts that it puts something into: (master module, name of the attribute), as an ordered set.
        fills_arguments: ordinals of the lists and dicts among its arguments that it puts something into.
        around: the class of the module around it, if that can be a unit.
        differentiates: whether its forward takes gradients (``torch.autograd.grad``), for which it needs a graph.
        seen: for each member, what it held at the last :meth:`look`: another list as soon as that is something else.
            Holds the values, so that the same object means the same value.
    """

    name: str
    module: nn.Module
    order: int
    facts: dict[Any, Any] = field(default_factory=dict)
    written: set[tuple[nn.Module, str]] = field(default_factory=set)
    fills: dict[tuple[nn.Module, str], None] = field(default_factory=dict)
    fills_arguments: frozenset[int] = frozenset()
    around: str | None = None
    differentiates: bool = False
    interceptor: tuple[Any, Any] | None = None
    _settings: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forward_pace, self.backward_pace = Pace(), Pace()
        self.members = tuple(self.module.modules())
        self.places = {id(module): i for i, module in enumerate(self.members)}
        self.seen: list[list[Any]] = [[] for _ in self.members]

    def look(self, written: Iterable[Written] = ()) -> None:
        """Once per segment: notices what was exchanged or switched on the members since the last time.

        Args:
            written: what micro-batches have written on modules: values that must not be kept alive.
        """
        is_same = True
        for i, module in enumerate(self.members):
            parameters, seen = module._parameters.values(), self.seen[i]
            now = [
                *module.__dict__.values(), *parameters, *module._modules.values(), *module._buffers.values(),
                len(module._forward_hooks), *[p.requires_grad for p in parameters if p is not None],
            ]  # fmt: skip
            if len(now) != len(seen) or any(map(operator.is_not, now, seen)):
                self.seen[i], is_same = now, False
        if not is_same:
            self._look_at_settings()
        for module, _, _ in written:
            if (place := self.places.get(id(module))) is not None:
                self.seen[place] = []

    def _look_at_settings(self) -> None:
        """Facts hold as long as nothing switches the unit to another behaviour: its flags, numbers and trainability, or
        another forward of a part; hooks inside, as what they are shown is a result of the unit; lists and dicts there
        are, which it may fill."""
        plain: list[Any] = [len(module._forward_hooks) for module in self.members[1:]]
        flags: list[bool] = []
        for module in self.members:
            plain.extend([value for value in module.__dict__.values() if type(value) in _PLAIN])
            plain.append(module.__dict__.get("forward"))
            plain.extend([name for name, value in module.__dict__.items() if is_container(value)])
            flags.extend([p.requires_grad for p in module._parameters.values() if p is not None])
        settings = [plain, flags]
        if settings != self._settings:
            self._settings = settings
            self.facts.clear()
            self.written.clear()

    def facts_of_kind(self, kind: Hashable) -> Any:
        """Facts about calls of the same kind at any position; None if there are none."""
        return next((facts for (_, other), facts in list(self.facts.items()) if other == kind), None)

    def parameters(self) -> list[nn.Parameter]:
        """Those of its module as they are now, in the order of ``module.parameters()``, several times as fast."""
        found = [p for module in self.members for p in module._parameters.values() if p is not None]
        return list(dict(zip(map(id, found), found, strict=True)).values())

    def coarser(self) -> str:
        """How users make the module around this unit the unit."""
        if self.around is None:
            return "put the module into another one, whose class is named in RoundPipeStrategy(units=[...])"
        return f"make the module around it the unit with RoundPipeStrategy(units=[{self.around!r}])"

    @property
    def has_buffers(self) -> bool:
        """Whether there is anything that its forward could write as a buffer."""
        return any(module._buffers for module in self.members)

    def weight_bytes(self) -> int:
        """Bytes of all its parameters."""
        return num_bytes_of(self.module.parameters())


class UnitTable:
    """All modules of ``root`` that may turn out to be units; see [Note: units].

    Args:
        root: the user's model; never a unit itself.
        unit_classes: classes (or class names) whose instances are blocks, wherever they are; overrides the rules.
        exempt: classes that are never units (metrics).
        max_unit_bytes: modules whose weights and gradients take more are looked into; None for no limit.

    Attributes:
        modules: of the root, as :meth:`is_of` has seen them.
        filled_by_users: lists and dicts of units that user code fills: (module, name of the attribute).

    Raises:
        ValueError: if a class of ``unit_classes`` does not occur in ``root``.
    """

    def __init__(
        self,
        root: nn.Module,
        unit_classes: UnitClasses | None = None,
        exempt: tuple[type, ...] = (),
        max_unit_bytes: int | None = None,
    ) -> None:
        self.root = root
        self._max_unit_bytes = max_unit_bytes
        self._exempt = exempt
        self._chosen = tuple(unit_classes or ())
        self._no_split = {
            name for module in root.modules() for name in getattr(module, "_no_split_modules", None) or ()
        }
        self._total = max(1, _num_parameters(root))
        self.filled_by_users: dict[tuple[nn.Module, str], None] = {}
        self.blocks: list[nn.Module] = []
        self.user_code: set[nn.Module] = {root}
        self._descend(root)
        check_chosen(root, self._chosen)
        names = {module: name for name, module in root.named_modules()}
        self.modules = list(names)
        self.is_of(self.modules)
        inside_blocks = {m for block in self.blocks for m in block.modules() if m is not block}
        self.units: dict[nn.Module, Unit] = {}
        for order, (module, name) in enumerate(names.items()):
            if module in self.user_code or module in inside_blocks or not self._can_be_unit(module):
                continue
            self.units[module] = Unit(name, module, order, around=_class_around(root, name))

    def is_of(self, modules: list[nn.Module]) -> bool:
        """Whether the root still has the modules that it had; ``modules`` are those that it has now."""
        return len(modules) == len(self.modules) and not any(map(operator.is_not, modules, self.modules))

    def parameters(self) -> list[nn.Parameter]:
        """Those of the root; shared ones several times."""
        return [p for module in self.modules for p in module._parameters.values() if p is not None]

    def forget_facts(self) -> None:
        """Calls have other sizes from now on, and the facts know them: they are learned again."""
        for unit in self.units.values():
            unit.facts.clear()

    def filled(self) -> list[tuple[nn.Module, str]]:
        """Lists and dicts of units that they, or user code, are known to fill: (module, name of the attribute)."""
        return [*self.filled_by_users, *(place for unit in self.units.values() for place in unit.fills)]

    def _is_chosen(self, module: nn.Module) -> bool:
        return any(_is_of(module, choice) for choice in self._chosen)

    def _can_be_unit(self, module: nn.Module) -> bool:
        if isinstance(module, (*self._exempt, *_CONTAINERS, nn.ParameterList, nn.ParameterDict)):
            return False
        if any(type(hook).__name__ in _LEGACY_NORMS for hook in module._forward_pre_hooks.values()):
            return False
        return _num_parameters(module) > 0 or isinstance(module, _NormBase)

    def _descend(self, module: nn.Module) -> None:
        """``module`` is user code: sorts its children into blocks, further user code, and plain candidates."""
        for child in module.children():
            if isinstance(child, self._exempt) or child in self.user_code:
                continue
            if self._is_block(child, module):
                if child not in self.blocks:
                    self.blocks.append(child)
            elif isinstance(child, _CONTAINERS) or self._is_user_code(child):
                self.user_code.add(child)
                self._descend(child)

    def _is_block(self, module: nn.Module, parent: nn.Module) -> bool:
        if self._chosen:
            return self._is_chosen(module)
        if type(module).__name__ in self._no_split:
            return not self._must_be_divided(module)
        if isinstance(module, _CONTAINERS) or not isinstance(parent, _CONTAINERS) or self._must_be_divided(module):
            return False
        return not any(type(m).__name__ in self._no_split for m in module.modules())

    def _is_user_code(self, module: nn.Module) -> bool:
        """Whether there is something to pipeline inside ``module``, which is neither a container nor a block."""
        inside = [m for m in module.modules() if m is not module]
        if self._chosen:
            return any(self._is_chosen(m) for m in inside)
        if not _is_torch_module(module) and any(m._forward_hooks for m in inside):
            return True  # its forward may use what its hooks keep
        if self._must_be_divided(module):
            return True
        if any(type(m).__name__ in self._no_split for m in inside):
            return True
        if any(_has_repeated_members(m) for m in module.modules() if isinstance(m, _CONTAINERS)):
            return True
        children = [child for child in module.children() if _num_parameters(child)]
        if _is_torch_module(module) or len(children) < 2:
            return False
        return _repeats_class(children) or _num_parameters(module) > _MAX_PART * self._total

    def _must_be_divided(self, module: nn.Module) -> bool:
        """Whether it is too large for a device, and can be divided."""
        if self._max_unit_bytes is None or self._chosen or state_bytes(module) <= self._max_unit_bytes:
            return False
        return _is_divisible(module)


def check_chosen(root: nn.Module, unit_classes: UnitClasses | None) -> None:
    """Checks that every class of ``unit_classes`` occurs in ``root``.

    Raises:
        ValueError: for one that does not, with names of classes that are like it, and all that own parameters.
    """
    for choice in unit_classes or ():
        if any(_is_of(module, choice) for module in root.modules()):
            continue
        named = choice if isinstance(choice, str) else choice.__name__
        names = {type(module).__name__: _num_parameters(module) > 0 for module in root.modules() if module is not root}
        alike = get_close_matches(named, names, cutoff=0.5)
        hint = f" Did you mean {' or '.join(map(repr, alike))}?" if alike else ""
        raise ValueError(
            f"units={named!r}: no module of this class in {type(root).__name__}.{hint} Classes that own parameters "
            f"there: {', '.join(sorted(name for name, owns in names.items() if owns))}."
        )


def _class_around(root: nn.Module, name: str) -> str | None:
    """The class of the innermost module inside ``root`` that has a forward and holds the one of this name."""
    while name := name.rpartition(".")[0]:
        module = root.get_submodule(name)
        if not isinstance(module, _CONTAINERS):
            return type(module).__name__
    return None


def _is_of(module: nn.Module, choice: type[nn.Module] | str) -> bool:
    return type(module).__name__ == choice if isinstance(choice, str) else isinstance(module, choice)


def state_bytes(module: nn.Module) -> int:
    """Bytes of the weights of a module, and of the gradients of those that are trained."""
    parameters = [p for p in module.parameters() if not nn.parameter.is_lazy(p)]
    return sum(p.numel() * p.element_size() * (2 if p.requires_grad else 1) for p in parameters)


def _is_divisible(module: nn.Module) -> bool:
    """Whether it has several parts that own parameters; one part counts as far as it has several itself.

    Modules of torch use the weights of their parts themselves, without calling them.
    """
    if _is_torch_module(module) and not isinstance(module, _CONTAINERS):
        return False
    children = [child for child in module.children() if _num_parameters(child)]
    return len(children) > 1 or any(map(_is_divisible, children))


def _is_torch_module(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() if not nn.parameter.is_lazy(p) else 1 for p in module.parameters())


def _repeats_class(children: list[nn.Module]) -> bool:
    """Whether two of ``children`` that have structure of their own are of the same class."""
    classes = [type(child) for child in children if any(True for _ in child.children())]
    return len(classes) != len(set(classes))


def _has_repeated_members(container: nn.Module) -> bool:
    classes = [type(m) for m in _members(container) if _num_parameters(m)]
    return len(classes) != len(set(classes))


def _members(container: nn.Module) -> Iterator[nn.Module]:
    for child in container.children():
        if isinstance(child, _CONTAINERS):
            yield from _members(child)
        else:
            yield child


def rebind(
    value: Any, modules: dict[int, nn.Module], parameters: dict[int, nn.Parameter], *, enters: bool = True
) -> Any:
    """``value`` with references to master modules and parameters replaced by those of a replica.

    Covers what modules keep in their ``__dict__``: a parameter, a module, a bound method, and one level of list,
    tuple or dict of these (an RNN's ``_flat_weights``), if it ``enters`` them. Returns ``value`` itself where there is
    nothing to replace.
    """
    if isinstance(value, torch.Tensor):
        return parameters.get(id(value), value)
    if isinstance(value, nn.Module):
        return modules.get(id(value), value)
    if isinstance(value, types.MethodType):
        owner = modules.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if enters and type(value) in (list, tuple):
        replaced = [rebind(item, modules, parameters, enters=False) for item in value]
        return value if all(a is b for a, b in zip(value, replaced, strict=True)) else type(value)(replaced)
    if enters and type(value) is dict:
        new = {k: rebind(v, modules, parameters, enters=False) for k, v in value.items()}
        return value if all(new[k] is value[k] for k in value) else new
    return value
