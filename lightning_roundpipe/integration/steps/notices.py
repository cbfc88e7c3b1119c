"""What the user is told once."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ...common.attributes import attribute_set
from ...lightning_packages import rank_zero_info, rank_zero_warn
from ...usercode.lock import current


class Notices:
    """Warnings and notes of one run, each given once under its name.

    Args:
        said: what the runs before it have said, in the same words; these are not repeated.
    """

    def __init__(self, said: set[str] | None = None) -> None:
        self.given: set[str] = set()
        self._said = set() if said is None else said

    def warn(self, name: str, text: str, *, is_note: bool = False, **kwargs: Any) -> None:
        """Gives a warning, or a note in the log, unless there was one of this name, or with this text."""
        if name in self.given:
            return
        self.given.add(name)
        if text in self._said:
            return
        self._said.add(text)
        if is_note:
            rank_zero_info(text)
        else:
            rank_zero_warn(text, **kwargs)


@contextlib.contextmanager
def heard_once() -> Iterator[None]:
    """Around a step: of what micro-batches warn of at one place, only what the first of them says is shown."""
    shows = functools.partial(_show_of_first, warnings.showwarning, {})
    with attribute_set(warnings, "showwarning", shows):
        yield


def _show_of_first(
    show: Callable[..., None],
    firsts: dict[Any, int],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    *rest: Any,
    **more: Any,
) -> None:
    """``warnings.showwarning``, for this step."""
    state = current()
    if state is None or firsts.setdefault((category, filename, lineno), state.index) == state.index:
        show(message, category, filename, lineno, *rest, **more)
