"""What the user has compiled, made anew for the replicas of units.

What torch makes of a module (``module.compile()``, ``torch.compile(module)``) is bound to that module, and would
compute with the weights on the host. The same settings serve the copy. Torch keeps what it has compiled with the code,
so that copies of one structure share it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule


def compiled_as(compiled: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any] | None:
    """``function`` compiled with the settings of ``compiled``; None if torch does not show them."""
    code, cells = getattr(compiled, "__code__", None), getattr(compiled, "__closure__", None)
    found = {} if code is None else dict(zip(code.co_freevars, cells or (), strict=True))
    settings = found["self"].cell_contents if "self" in found else None
    return settings(function) if callable(settings) else None


def wrapping(wrapper: OptimizedModule, module: nn.Module) -> Callable[..., Any]:
    """The forward of a copy of ``wrapper`` that wraps ``module``."""
    made: Any = types.SimpleNamespace(_orig_mod=module, dynamo_ctx=wrapper.dynamo_ctx)
    OptimizedModule._initialize(made)
    return made.forward  # type: ignore[no-any-return]
