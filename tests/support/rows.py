"""Rows of the compatibility table: which feature of Lightning a test shows to work here, or to be refused.

[Note: compatibility rows]
A test that shows features carries ``@compat(kind, names)``. ``docs/reference/compatibility.md`` is made of these marks
by ``python -m tests.compatibility.table``, which reads them from the sources, so that the arguments must be literals. A
feature may have several tests. Whether all of the installed Lightning has a row is a test of its own. What follows the
name in parentheses is a case of a feature, with a row of its own: ``precision (plugin object)``. A phrase may be a row
as well: ``hooks set on the instance``.
"""

from __future__ import annotations

from typing import Literal

import pytest

# ``equal``: as in plain Lightning on one device. ``refused``: a clear error. ``differs``: works, with a difference that
# the note names.
Status = Literal["equal", "refused", "differs"]

# Of these kinds every name has a row, which a test holds, so that the page need not list those that work.
COMPLETE = (
    "Trainer argument",
    "Trainer method",
    "Trainer attribute",
    "LightningModule hook",
    "LightningModule method",
    "LightningModule attribute",
    "LightningDataModule",
    "Callback hook",
)
KINDS = (
    *COMPLETE,
    "Callback",
    "Logger",
    "Profiler",
    "Precision",
    "Plugin",
    "LightningCLI",
    "Library",
    "Migration",
    "Misuse",
)


def compat(kind: str, names: str, status: Status = "equal", note: str = "") -> pytest.MarkDecorator:
    """Marks a test as the one that shows features; see [Note: compatibility rows].

    Args:
        kind: one of :data:`KINDS`.
        names: of the features, as users write them (``max_time``, ``on_train_start``), with semicolons between them.
        status: how they behave.
        note: one sentence, for ``refused`` and ``differs``: what happens, what to do instead.
    """
    return pytest.mark.compat(kind, names, status, note)
