"""What GPUs may use of their memory, and what the driver asks of torch."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.devices.gpu.cuda import PageLocker
from lightning_roundpipe.devices.gpu.device import GpuDevice
from lightning_roundpipe.devices.gpu.driver import GpuDriver, MemoryState, is_supported
from lightning_roundpipe.devices.memory import DeviceOutOfMemoryError

MIB, GIB = 2**20, 2**30
GPU = torch.device("cuda", 0)


class Recorder:
    """Stands for a module or an object of torch: notes what is called, and returns what it is told to."""

    Event: Any

    def __init__(self, **returns: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._returns = returns

    def __getattr__(self, name: str) -> Any:
        if name not in self._returns:
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args, *kwargs.items()))
            return self._returns[name]

        return call


class Cuda(Recorder):
    """Stands for ``torch.cuda``, as far as memory goes.

    Attributes:
        state: of the memory of every GPU.
        fraction: of it that this process may use.
    """

    def __init__(self, **returns: Any) -> None:
        super().__init__(Stream=None, default_stream=None, **returns)
        self.state = MemoryState(free=20 * GIB, total=24 * GIB, allocated=0, reserved=0)
        self.fraction: float | None = 1.0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.state.free, self.state.total

    def memory_allocated(self, device: torch.device) -> int:
        return self.state.allocated

    def memory_reserved(self, device: torch.device) -> int:
        return self.state.reserved

    def get_per_process_memory_fraction(self, device: torch.device) -> float | None:
        return self.fraction

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction


def use_module(module: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """``module`` is what torch has for every type of accelerator."""
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    module = Cuda(cudart=Recorder(cudaHostRegister=0, cudaHostUnregister=0))
    use_module(module, monkeypatch)
    return module


@pytest.fixture
def driver(cuda: Cuda) -> GpuDriver:
    return GpuDriver()


# --- limits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "fraction", "num_sharing", "expected"),
    [
        (MemoryState(20 * GIB, 24 * GIB, 0, 0), 1.0, 1, 20 * GIB - int(0.05 * 24 * GIB)),
        (MemoryState(20 * GIB, 24 * GIB, 0, 0), None, 1, 20 * GIB - int(0.05 * 24 * GIB)),
        (MemoryState(20 * GIB, 24 * GIB, 0, 0), 1.0, 2, (20 * GIB - int(0.05 * 24 * GIB)) // 2),
        # The user allows half: what this process has allocated counts.
        (MemoryState(20 * GIB, 24 * GIB, 2 * GIB, 3 * GIB), 0.5, 1, 10 * GIB - int(0.05 * 12 * GIB)),
        # What the allocator keeps for nothing is as good as free.
        (MemoryState(5 * GIB, 24 * GIB, 2 * GIB, 10 * GIB), 1.0, 1, 13 * GIB - int(0.05 * 24 * GIB)),
        (MemoryState(3 * GIB, 4 * GIB, 0, 0), 1.0, 1, 3 * GIB - GIB // 2),
    ],
)
def test_the_default_limit(
    cuda: Cuda, driver: GpuDriver, state: MemoryState, fraction: float | None, num_sharing: int, expected: int
) -> None:
    cuda.state, cuda.fraction = state, fraction
    devices = [GpuDevice(i, 0, num_sharing=num_sharing, driver=driver) for i in range(num_sharing)]
    assert [device.memory.limit for device in devices] == [expected] * num_sharing
    assert cuda.fraction == fraction, "the user's setting stays"
    for device in devices:
        device.dispose()


def test_a_full_gpu_is_refused(cuda: Cuda, driver: GpuDriver) -> None:
    cuda.state = MemoryState(GIB, 24 * GIB, 0, 0)
    with pytest.raises(DeviceOutOfMemoryError, match="cuda:0 has no memory left for a step") as caught:
        GpuDevice(0, 0, driver=driver)
    assert (
        "Of its 24.0 GiB this process may use 24.0 GiB. It has 0 B allocated already, 1.00 GiB are not in use, and "
        "1.20 GiB are kept"
    ) in str(caught.value)
    assert cuda.fraction == 1.0, "nothing was limited"


def test_an_explicit_limit_that_others_have_used_up_is_refused_with_what_is_there(
    cuda: Cuda, driver: GpuDriver
) -> None:
    cuda.state = MemoryState(12 * GIB, 24 * GIB, 6 * GIB, 7 * GIB)
    with pytest.raises(DeviceOutOfMemoryError, match=r"may use 6\.00 GiB\. It has 6\.00 GiB allocated") as caught:
        GpuDevice(0, 0, driver=driver, memory_limit=6 * GIB)
    assert "raise device_memory_limit" in str(caught.value)
    assert not caught.value.fits_if_split
    assert cuda.fraction == 1.0


@pytest.mark.parametrize(
    ("state", "num_sharing", "limit", "expected"),
    [
        (MemoryState(20 * GIB, 24 * GIB, 0, 0), 1, 16 * GIB, 16 * GIB - int(0.05 * 16 * GIB)),
        (MemoryState(20 * GIB, 24 * GIB, 0, 0), 1, 4 * GIB, 4 * GIB - GIB // 2),
        # Where little may be used, a quarter of it.
        (MemoryState(20 * GIB, 24 * GIB, 0, 0), 1, 256 * MIB, 192 * MIB),
        # What the process has allocated already is part of the limit, and is shared as the rest is.
        (MemoryState(20 * GIB, 24 * GIB, 2 * GIB, 3 * GIB), 1, 4 * GIB, 2 * GIB - GIB // 2),
        (MemoryState(20 * GIB, 24 * GIB, 2 * GIB, 3 * GIB), 2, 4 * GIB, (6 * GIB - GIB // 2) // 2),
        # Others have taken what the limit would allow.
        (MemoryState(3 * GIB, 24 * GIB, 0, 0), 1, 16 * GIB, 3 * GIB - int(0.05 * 16 * GIB)),
    ],
)
def test_the_books_give_out_less_than_an_explicit_limit(
    cuda: Cuda, driver: GpuDriver, state: MemoryState, num_sharing: int, limit: int, expected: int
) -> None:
    cuda.state = state
    devices = [GpuDevice(i, 0, num_sharing=num_sharing, memory_limit=limit, driver=driver) for i in range(num_sharing)]
    assert [device.memory.limit for device in devices] == [expected] * num_sharing
    assert cuda.fraction == num_sharing * limit / state.total, "the allocator has all of it"
    for device in devices:
        device.dispose()


@pytest.mark.parametrize("users", [1.0, 0.9, None])
def test_an_explicit_limit_holds_for_the_allocator_until_the_end(
    cuda: Cuda, driver: GpuDriver, users: float | None
) -> None:
    cuda.fraction = users
    first, second = (GpuDevice(i, 0, num_sharing=2, memory_limit=6 * GIB, driver=driver) for i in range(2))
    assert first.memory.limit == second.memory.limit == (12 * GIB - int(0.05 * 12 * GIB)) // 2
    assert cuda.fraction == 0.5
    first.dispose()
    first.dispose()
    assert cuda.fraction == 0.5, "another device needs it"
    second.dispose()
    assert cuda.fraction == (1.0 if users is None else users)


def test_the_users_own_limit_is_kept_if_it_is_smaller(cuda: Cuda, driver: GpuDriver) -> None:
    cuda.fraction = 0.25
    device = GpuDevice(0, 0, memory_limit=12 * GIB, driver=driver)
    assert device.memory.limit == 6 * GIB - GIB // 2
    assert cuda.fraction == 0.25
    device.dispose()
    assert cuda.fraction == 0.25


def test_page_locks_go_with_the_last_device(cuda: Cuda, driver: GpuDriver) -> None:
    devices = [GpuDevice(i, 0, num_sharing=2, driver=driver) for i in range(2)]
    driver.host.buffers.empty_like(torch.randn(MIB))
    devices[0].dispose()
    assert driver.host.buffers.own_bytes
    devices[1].dispose()
    assert [call[0] for call in cuda.cudart().calls] == ["cudaHostRegister", "cudaHostUnregister"]
    assert devices[0].memory.name == "device 0 on GPU 0"


def test_a_device_that_is_not_used_any_more_holds_no_tensors(cuda: Cuda, driver: GpuDriver) -> None:
    """Objects outlive it that know it: a Trainer, and a module that was trained."""

    class Late:
        has_passed = False

        def __init__(self, **options: Any) -> None:
            pass

        def record(self, stream: Any) -> None:
            pass

        def query(self) -> bool:
            return self.has_passed

        def synchronize(self) -> None:
            self.has_passed = True

    cuda.Event = Late
    device = GpuDevice(0, 0, driver=driver)
    tensor = torch.ones(1)
    held = weakref.ref(tensor)
    device.free([tensor])
    del tensor
    assert held() is not None, "what was issued may still read it"
    device.dispose()
    assert held() is None


# --- what it calls of torch --------------------------------------------------------------------------------------


def test_an_accelerator_may_have_less_than_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.xpu`` has events that do not let the host sleep, no name for the default stream, no page-locks."""
    event = Recorder(record=None)
    fake = Recorder(current_stream="default")
    fake.Event = lambda enable_timing=False: event
    use_module(fake, monkeypatch)
    driver = GpuDriver("xpu")
    gpu = torch.device("xpu", 0)
    assert driver.default_stream(gpu) == "default"
    assert driver.record("stream") is event
    assert PageLocker("xpu").page_lock(4096, 100) != 0
    driver.set_fraction(gpu, 0.5)
    assert driver.fraction(gpu) is None
    driver.empty_cache()


def test_accelerators_with_streams_and_memory_are_supported() -> None:
    supported = [kind for kind in ("cuda", "xpu", "cpu", "mps", "meta") if is_supported(kind)]
    assert supported == ["cuda", "xpu"]


def test_older_versions_of_torch_cannot_tell_the_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    use_module(Recorder(), monkeypatch)
    assert GpuDriver().fraction(GPU) is None


def test_a_refused_page_lock_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would report it again to the next launch, which has nothing to do with it."""
    runtime = Recorder(cudaHostRegister=712, cudaHostUnregister=713)
    use_module(Recorder(cudart=runtime), monkeypatch)
    launches: list[Any] = []

    def raises(*args: Any, **kwargs: Any) -> Tensor:
        launches.append(kwargs)
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    monkeypatch.setattr(torch, "zeros", raises)
    locker = PageLocker("cuda")
    assert locker.page_lock(4096, 100) == 712
    locker.page_unlock(4096)
    assert runtime.calls == [("cudaHostRegister", 4096, 100, 1), ("cudaHostUnregister", 4096)]
    assert launches == [{"device": "cuda"}] * 2


def test_a_page_lock_that_works_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    use_module(Recorder(cudart=Recorder(cudaHostRegister=0, cudaHostUnregister=0)), monkeypatch)
    monkeypatch.setattr(torch, "zeros", None)
    locker = PageLocker("cuda")
    assert locker.page_lock(4096, 100) == 0
    locker.page_unlock(4096)
