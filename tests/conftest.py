"""What every test gets: fixed seeds, restored global state, and a check that no thread is left behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch

# Threads that libraries keep for the life of the process, or end in their own time.
_LIBRARIES = ("tqdm", "tensorboard", "tensorboardX", "pytest_timeout", "torch._inductor")
_JOIN_SECONDS = 5.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _is_of_a_library(thread: threading.Thread) -> bool:
    if isinstance(thread, threading._DummyThread):  # not started by Python: a worker of autograd, for example
        return True
    work = getattr(thread, "_target", None) or getattr(thread, "function", None)
    modules = (type(thread).__module__, getattr(work, "__module__", None) or "")
    return any(module == name or module.startswith(name + ".") for module in modules for name in _LIBRARIES)


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread running."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _JOIN_SECONDS
    new = [thread for thread in threading.enumerate() if thread not in before and not _is_of_a_library(thread)]
    for thread in new:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in new if thread.is_alive()]
    if left:
        pytest.fail(f"the test left {len(left)} thread(s) behind: {', '.join(left)}", pytrace=False)


@pytest.fixture(autouse=True)
def fixed_global_state() -> Iterator[None]:
    """Seed the generators, and put the global switches of torch back after the test."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    random.seed(0)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
