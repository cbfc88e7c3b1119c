"""What every test gets: fixed seeds, restored global state, and a check that no thread is left behind."""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# MKL, which multiplies torch's matrices on x86, chooses its kernels by the processor and, on some processors, by the
# addresses of the numbers; another kernel adds up in another order. So the same product may differ in its last bit
# where it is computed again from other memory: a micro-batch is a view of its batch, and is copied for the recompute.
# In this mode there is one order for all processors and addresses, as tests need that compare bits. MKL reads it once:
# it is set before torch is imported, here for all tests, and the processes that tests start inherit it. Another value
# in the environment is kept: an empty one is no mode.
if "torch" in sys.modules and "MKL_CBWR" not in os.environ:
    raise pytest.UsageError("torch was imported before tests/conftest.py: set MKL_CBWR=COMPATIBLE in the environment")
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import torch
from hypothesis.internal.conjecture import providers
from lightning.fabric.utilities import registry

from lightning_roundpipe.devices.gpu.device import GpuDevice
from lightning_roundpipe.integration.links import Links
from tests.support import accelerator
from tests.support.engine.partitions import search_briefly
from tests.support.forks import Forks
from tests.support.rank_runs import hosts

# Folders of tests that train, to compare with other trainings. A third of their time would be the search for plans,
# which the tests of planning and of the commands, the project and the examples do as it is.
_TRAINING = ("integration", "compatibility", "parity")
# Folders of tests whose models are so small that a second thread only costs, and would split sums differently in plain
# Lightning than on a virtual device.
_SMALL_MODELS = (*_TRAINING, "reporting")
# Threads that libraries keep for the life of the process, or end in their own time.
_LIBRARIES = ("tqdm", "tensorboard", "tensorboardX", "pytest_timeout", "torch._inductor")
_JOIN_SECONDS = 30.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--accelerator",
        action="store_true",
        help="install the simulated accelerator, which is torch.accelerator's current one from then on",
    )
    parser.addoption(
        "--network", action="store_true", help="run the tests of ranks on two hosts, which are network namespaces"
    )
    parser.addoption(
        "--kills", type=int, default=2, help="how often a rank is killed in tests/ranks/test_ranks_killed.py"
    )
    parser.addoption("--random", type=int, default=12, help="how many models tests/parity/test_parity_random.py makes")


def pytest_configure(config: pytest.Config) -> None:
    """Installs what must be there before test modules are imported and before the first backward of the process."""
    if config.getoption("--accelerator") and accelerator.why_not() is None:
        os.environ.setdefault("SIM_DEVICES", "4")  # as many as the tests use at most
        accelerator.install()
    # Hypothesis also tries constants of the modules that are loaded: examples would depend on which tests ran before.
    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants


def _reasons_to_skip(config: pytest.Config) -> Iterator[tuple[str, str]]:
    """Yield (marker, why tests with it cannot run)."""
    if not torch.cuda.is_available():
        yield "gpu", "needs a CUDA device"
    if not config.getoption("--accelerator"):
        yield "accelerator", "needs the simulated accelerator: run 'make test-accelerator'"
    elif reason := accelerator.why_not():
        yield "accelerator", reason
    if not config.getoption("--network"):
        yield "network", "needs hosts of its own: run 'make test-network'"
    elif reason := hosts.why_not():
        yield "network", reason


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, reason in _reasons_to_skip(config):
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _keep_from_the_collector() -> None:
    """What is there now and is no garbage is looked at no more."""
    gc.collect()
    gc.freeze()


def _is_of_a_library(thread: threading.Thread) -> bool:
    if isinstance(thread, threading._DummyThread):  # not started by Python: a worker of autograd, for example
        return True
    work = getattr(thread, "_target", None) or getattr(thread, "function", None)
    modules = (type(thread).__module__, getattr(work, "__module__", None) or "")
    return any(module == name or module.startswith(name + ".") for module in modules for name in _LIBRARIES)


def _folder_of(request: pytest.FixtureRequest) -> str:
    return request.path.relative_to(Path(__file__).parent).parts[0]


@pytest.fixture(scope="module", autouse=True)
def short_search(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plans of trainings are searched for in fewer attempts: results are those of any plan."""
    with pytest.MonkeyPatch.context() as patch:
        if _folder_of(request) in _TRAINING:
            search_briefly(patch.setattr)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_links_measured() -> Iterator[None]:
    """Plans do not depend on how fast the simulated accelerator copies and computes; tests of that put it back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GpuDevice, "has_own_speed", False)
        patch.setattr(Links, "measure", lambda *args: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_preparations_for_others() -> Iterator[None]:
    """What each seed and each Trainer does for GPUs that are not there and for callbacks of packages is done once.

    A seed is noted, with the lines that have set it, for accelerators that may be initialized later; a Trainer reads
    what every package of the environment says of itself.
    """
    with pytest.MonkeyPatch.context() as patch:
        for backend in (torch.cuda, torch.xpu, torch.mtia):
            if not backend.is_available():
                patch.setattr(backend, "manual_seed_all", lambda seed: None, raising=False)
        patch.setattr(registry, "entry_points", functools.cache(registry.entry_points))
        yield


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Runs scripts in processes of their own."""
    with Forks(tmp_path_factory.mktemp("forks")) as forks:
        yield forks


@pytest.fixture(scope="module", autouse=True)
def few_objects_of_other_modules() -> None:
    """The tests themselves, libraries that they import as they run, and what is kept of each test stay to the end:
    without this, each collection of garbage looks at all of them."""
    _keep_from_the_collector()


@pytest.fixture
def few_objects() -> None:
    """The collector looks at what the test makes alone: at all that is left of other tests it takes half a second."""
    _keep_from_the_collector()


@pytest.fixture
def without_collector(few_objects: None) -> Iterator[None]:
    """Only reference counts free memory: what a cycle holds stays."""
    gc.disable()
    yield
    gc.enable()


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


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest, fixed_global_state: None) -> None:
    if _folder_of(request) in _SMALL_MODELS:
        torch.set_num_threads(1)
