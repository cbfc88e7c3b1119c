"""What older versions of Lightning do not take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest


def known(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that ``function`` has a name for; without the others it does what they ask for."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def need(function: Callable[..., Any], name: str) -> None:
    """Skips the test if ``function`` has no argument of that name."""
    if name not in inspect.signature(function).parameters:
        pytest.skip(f"needs a Lightning whose {function.__qualname__} takes {name}")
