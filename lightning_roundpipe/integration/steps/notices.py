"""What the user is told once per run."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn


class Notices:
    """Warnings and notes of one run, each given once under its name."""

    def __init__(self) -> None:
        self.given: set[str] = set()

    def warn(self, name: str, text: str, *, is_note: bool = False, **kwargs: Any) -> None:
        """Gives a warning, or a note in the log, unless there was one of this name."""
        if name not in self.given:
            self.given.add(name)
            if is_note:
                rank_zero_info(text)
            else:
                rank_zero_warn(text, **kwargs)
