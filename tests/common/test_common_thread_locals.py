"""One object per thread: references, and threads."""

from __future__ import annotations

import ctypes
import inspect
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_roundpipe.common import thread_locals
from lightning_roundpipe.common.thread_locals import AutogradLocal
from lightning_roundpipe.common.threads import Worker


@pytest.fixture(params=["torch as it is", "torch that steals references"])
def local(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AutogradLocal[Any]]:
    stash = torch._C._stash_obj_in_tls  # type: ignore[attr-defined]

    def stealing(key: str, value: Any) -> None:
        stash(key, value)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))

    if "steals" in request.param:
        if thread_locals._steals_references():
            pytest.skip("this torch does so by itself: the other case tests it")
        monkeypatch.setattr(torch._C, "_stash_obj_in_tls", stealing)
        monkeypatch.setattr(thread_locals, "_steals_references", thread_locals._steals_references.__wrapped__)
        assert thread_locals._steals_references()
    yield AutogradLocal("roundpipe_test")
    monkeypatch.undo()
    AutogradLocal[Any]("roundpipe_test").set(None)


def test_an_object_keeps_its_references_and_is_let_go(local: AutogradLocal[Any]) -> None:
    value = object()
    before = sys.getrefcount(value)
    for _ in range(10):
        local.set(value)
        assert local.get() is value
        assert sys.getrefcount(value) == before + 1
        local.set(None)
        assert local.get() is None
        assert sys.getrefcount(value) == before


def test_each_thread_has_its_own(local: AutogradLocal[Any]) -> None:
    local.set("mine")
    seen: list[Any] = []

    def other() -> None:
        seen.append(local.get())
        local.set("its own")
        seen.append(local.get())
        local.set(None)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [None, "its own"]
    assert local.get() == "mine"


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch cannot remove an object again")
def test_nothing_is_left_to_the_end_of_a_thread(local: AutogradLocal[Any]) -> None:
    """Whose destructor would take the interpreter lock, while the process ends perhaps."""
    left: list[str] = []

    def other() -> None:
        inspect.unwrap(thread_locals._steals_references)()  # which may be cached
        local.set("its own")
        local.set(None)
        is_left = torch._C._is_key_in_tls  # type: ignore[attr-defined]
        left.extend(key for key in ("roundpipe_probe", "roundpipe_test") if is_left(key))

    worker = Worker()
    worker.call(other, "leaves")
    worker.close()
    assert left == []
