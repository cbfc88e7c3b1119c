"""Exceptions that several parts raise or catch; those of one part are where they are raised."""

from __future__ import annotations


class StepAborted(BaseException):
    """Unwinds the threads of a step after another thread failed; never reaches the user.

    A ``BaseException`` so that ``except Exception`` in user code does not swallow it.
    """


class UnpreparedError(RuntimeError):
    """A step has done something for which nothing was prepared, and has to be run again: from now on it is.

    Attributes:
        remedy: what helps where it cannot be run again.
    """

    remedy = ""
