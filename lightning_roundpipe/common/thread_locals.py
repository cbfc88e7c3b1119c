"""One object per thread, which the threads of autograd take over.

Autograd runs what is on a GPU on a thread of that GPU, which serves all backwards there. For the time of a node it
takes over what torch keeps for the thread that has begun the backward::

    thread A      set(a) | backward ............................. | set(None)
    autograd's           | node of A: get() is a | node of B: b |
    thread B                     set(b) | backward ...................... |
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any, Generic, TypeVar

import torch

_tls: Any = torch._C
_T = TypeVar("_T")


class AutogradLocal(Generic[_T]):
    """See above.

    Args:
        key: identifies it in the process.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def get(self) -> _T | None:
        """The object of the thread that the calling one works for; None if it has none."""
        found: _T | None = _tls._get_obj_in_tls(self._key) if _tls._is_key_in_tls(self._key) else None
        return found

    def set(self, value: _T | None) -> None:
        """Sets that of the calling thread."""
        steals = _steals_references()
        if value is None:
            _remove(self._key, steals=steals)
        else:
            _stash(self._key, value, steals=steals)


def _stash(key: str, value: object, *, steals: bool) -> None:
    if steals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _tls._stash_obj_in_tls(key, value)


def _remove(key: str, *, steals: bool) -> None:
    """A thread that ends must have no object left, not even None: its destructor would take the interpreter lock, and
    end the process if that is ending as well. Versions of torch that cannot remove an object keep None."""
    if not hasattr(_tls, "_remove_obj_from_tls"):
        _stash(key, None, steals=steals)
    elif _tls._is_key_in_tls(key):
        _tls._remove_obj_from_tls(key)


@functools.cache
def _steals_references() -> bool:
    """Whether torch lets go of a reference to the object that it has not taken, as in 2.11: the object would be freed
    while it is in use."""
    probe, key = object(), "roundpipe_probe"
    before = sys.getrefcount(probe)
    _tls._stash_obj_in_tls(key, probe)
    steals = sys.getrefcount(probe) == before
    if steals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    _remove(key, steals=steals)
    return steals
