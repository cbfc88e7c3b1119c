"""Calls with something in between, as Ctrl-C and signal handlers come."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def call_with(handler: Callable[[], object], call: Callable[[], object]) -> None:
    """``call()``, with ``handler()`` before each instruction of Python in it."""

    def trace(frame: Any, event: str, arg: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
