"""What GPUs may use of their memory, and what the driver asks of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_roundpipe.devices.gpu import GpuDevice
from lightning_roundpipe.devices.gpu_driver import GpuDriver, MemoryState, is_supported
from lightning_roundpipe.devices.memory import DeviceOutOfMemoryError
from tests.support.engine.gpu_stub import GIB, StubDriver

MIB = 2**20
JOIN_S = 60.0


@pytest.fixture
def driver() -> StubDriver:
    return StubDriver()


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
    driver: StubDriver, state: MemoryState, fraction: float | None, num_sharing: int, expected: int
) -> None:
    driver.state, driver.user_fraction = state, fraction
    devices = [GpuDevice(i, 0, num_sharing=num_sharing, driver=driver) for i in range(num_sharing)]
    assert [device.memory.limit for device in devices] == [expected] * num_sharing
    assert driver.user_fraction == fraction, "the user's setting stays"
    for device in devices:
        device.dispose()


def test_a_full_gpu_is_refused(driver: StubDriver) -> None:
    driver.state = MemoryState(GIB, 24 * GIB, 0, 0)
    with pytest.raises(DeviceOutOfMemoryError, match="cpu has no memory left for a step") as caught:
        GpuDevice(0, 0, driver=driver)
    assert (
        "Of its 24.0 GiB this process may use 24.0 GiB. It has 0 B allocated already, 1.00 GiB are not in use by "
        "anybody, and 1.20 GiB are kept"
    ) in str(caught.value)
    assert driver.user_fraction == 1.0, "nothing was limited"


def test_an_explicit_limit_that_others_have_used_up_is_refused_with_what_is_there(driver: StubDriver) -> None:
    driver.state = MemoryState(12 * GIB, 24 * GIB, 6 * GIB, 7 * GIB)
    with pytest.raises(DeviceOutOfMemoryError, match=r"may use 6\.00 GiB\. It has 6\.00 GiB allocated") as caught:
        GpuDevice(0, 0, driver=driver, memory_limit=6 * GIB)
    assert "raise device_memory_limit" in str(caught.value)
    assert not caught.value.fits_if_split
    assert driver.user_fraction == 1.0


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
    driver: StubDriver, state: MemoryState, num_sharing: int, limit: int, expected: int
) -> None:
    driver.state = state
    devices = [GpuDevice(i, 0, num_sharing=num_sharing, memory_limit=limit, driver=driver) for i in range(num_sharing)]
    assert [device.memory.limit for device in devices] == [expected] * num_sharing
    assert driver.user_fraction == num_sharing * limit / state.total, "the allocator has all of it"
    for device in devices:
        device.dispose()


@pytest.mark.parametrize("users", [1.0, 0.9, None])
def test_an_explicit_limit_holds_for_the_allocator_until_the_end(driver: StubDriver, users: float | None) -> None:
    driver.user_fraction = users
    first, second = (GpuDevice(i, 0, num_sharing=2, memory_limit=6 * GIB, driver=driver) for i in range(2))
    assert first.memory.limit == second.memory.limit == (12 * GIB - int(0.05 * 12 * GIB)) // 2
    assert driver.user_fraction == 0.5
    first.dispose()
    first.dispose()
    assert driver.user_fraction == 0.5, "another device needs it"
    second.dispose()
    assert driver.user_fraction == (1.0 if users is None else users)


def test_the_users_own_limit_is_kept_if_it_is_smaller(driver: StubDriver) -> None:
    driver.user_fraction = 0.25
    device = GpuDevice(0, 0, memory_limit=12 * GIB, driver=driver)
    assert device.memory.limit == 6 * GIB - GIB // 2
    assert driver.user_fraction == 0.25
    device.dispose()
    assert driver.user_fraction == 0.25
    driver.limit(torch.device("cpu"), 12 * GIB)
    assert driver.user_fraction == 0.25
    driver.unlimit(torch.device("cpu"))


def test_page_locks_go_with_the_last_device(driver: StubDriver) -> None:
    devices = [GpuDevice(i, 0, num_sharing=2, driver=driver) for i in range(2)]
    weight = torch.randn(MIB)
    driver.host.lock(weight)
    devices[0].dispose()
    assert driver.locked
    devices[1].dispose()
    assert not driver.locked
    assert devices[0].memory.name == "device 0 on GPU 0"


# --- what it calls of torch --------------------------------------------------------------------------------------


class Recorder:
    """Stands for torch.cuda: notes what is called, and returns what it is told to."""

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


GPU = torch.device("cuda", 1)


def use_module(module: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """``module`` is what torch has for every type of accelerator."""
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)


def test_the_driver_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    event = Recorder(record=None)
    made: list[dict[str, bool]] = []

    def make_event(enable_timing: bool = False, blocking: bool = False) -> Recorder:
        made.append({"enable_timing": enable_timing, "blocking": blocking})
        return event

    fake = Recorder(
        set_device=None, default_stream="default", current_stream="current", Stream="new", stream="context",
        mem_get_info=(3, 8), memory_allocated=1, memory_reserved=2, max_memory_allocated=7,
        get_per_process_memory_fraction=0.5, set_per_process_memory_fraction=None, empty_cache=None,
    )  # fmt: skip
    fake.Event = make_event
    use_module(fake, monkeypatch)
    driver = GpuDriver()
    assert driver.torch_device(1) == GPU
    driver.set_device(GPU)
    assert driver.default_stream(GPU) == "default"
    assert driver.new_stream(GPU) == "new"
    assert driver.on("stream") == "context"
    assert driver.record("stream", is_timed=True) is event
    assert event.calls == [("record", "stream")]
    assert made == [{"enable_timing": True, "blocking": True}]
    assert driver.memory(GPU) == MemoryState(free=3, total=8, allocated=1, reserved=2)
    assert driver.peak_allocated(GPU) == 7
    assert driver.fraction(GPU) == 0.5
    driver.empty_cache()
    assert fake.calls[-1] == ("empty_cache",)
    driver.limit(GPU, 2)
    driver.unlimit(GPU)
    assert [call for call in fake.calls if call[0].startswith("set_per")] == [
        ("set_per_process_memory_fraction", 0.25, GPU),
        ("set_per_process_memory_fraction", 0.5, GPU),
    ]


def test_an_accelerator_may_have_less_than_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.xpu`` has events that do not let the host sleep, no name for the default stream, no page-locks."""
    event = Recorder(record=None)
    fake = Recorder(current_stream="default")
    fake.Event = lambda enable_timing=False: event
    use_module(fake, monkeypatch)
    driver = GpuDriver("xpu")
    gpu = driver.torch_device(0)
    assert gpu == torch.device("xpu", 0)
    assert driver.default_stream(gpu) == "default"
    assert driver.record("stream") is event
    assert driver.page_lock(4096, 100) != 0
    driver.set_fraction(gpu, 0.5)
    assert driver.fraction(gpu) is None
    driver.empty_cache()


@pytest.mark.parametrize(
    ("device_type", "expected"), [("cuda", True), ("xpu", True), ("cpu", False), ("mps", False), ("meta", False)]
)
def test_accelerators_with_streams_and_memory_are_supported(device_type: str, expected: bool) -> None:
    assert is_supported(device_type) is expected


def test_older_versions_of_torch_cannot_tell_the_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    use_module(Recorder(), monkeypatch)
    assert GpuDriver().fraction(GPU) is None


def test_the_driver_copies_and_tells_the_allocator() -> None:
    class Noting(Tensor):
        told: list[Any]

        def record_stream(self, stream: Any) -> None:  # type: ignore[override]
            self.told = [stream]

    tensor = torch.zeros(3).as_subclass(Noting)
    GpuDriver().copy(tensor, torch.ones(3))
    assert tensor.eq(1).all()
    GpuDriver().record_stream(tensor, "stream")
    assert tensor.told == ["stream"]
    assert not GpuDriver().is_page_locked(torch.zeros(3))


def test_a_refused_page_lock_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would report it again to the next launch, which has nothing to do with it."""
    runtime = Recorder(cudaHostRegister=712, cudaHostUnregister=713)
    use_module(Recorder(cudart=runtime), monkeypatch)
    launches: list[Any] = []

    def raises(*args: Any, **kwargs: Any) -> Tensor:
        launches.append(kwargs)
        raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")

    monkeypatch.setattr(torch, "zeros", raises)
    driver = GpuDriver()
    assert driver.page_lock(4096, 100) == 712
    driver.page_unlock(4096)
    assert runtime.calls == [("cudaHostRegister", 4096, 100, 1), ("cudaHostUnregister", 4096)]
    assert launches == [{"device": "cuda"}] * 2


def test_a_page_lock_that_works_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    use_module(Recorder(cudart=Recorder(cudaHostRegister=0, cudaHostUnregister=0)), monkeypatch)
    monkeypatch.setattr(torch, "zeros", None)
    driver = GpuDriver()
    assert driver.page_lock(4096, 100) == 0
    driver.page_unlock(4096)
