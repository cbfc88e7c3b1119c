"""Which errors of a driver say that its GPU is lost, and which are mistakes of the program."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from lightning_roundpipe.devices.device import DeviceLostError
from lightning_roundpipe.devices.gpu import cuda
from lightning_roundpipe.devices.gpu.driver import GpuDriver
from lightning_roundpipe.devices.memory import DeviceOutOfMemoryError
from tests.support.engine.faults import MESSAGE, Fault
from tests.support.engine.lazy_link import cpu_pool

HINTS = "\nCUDA kernel errors might be asynchronously reported at some other API call."


class CodedError(RuntimeError):
    """As ``torch.AcceleratorError`` is from torch 2.8 on."""

    def __init__(self, text: str, error_code: int) -> None:
        super().__init__(text)
        self.error_code = error_code


@pytest.mark.parametrize("code", [46, 201, 214, 220, 709, 999])
def test_errors_of_the_hardware_are_known_by_their_codes(code: int) -> None:
    assert cuda.is_lost(CodedError("CUDA error: in other words", code))


@pytest.mark.parametrize("code", [1, 2, 98, 209, 700, 701, 702, 710, 714, 715, 716, 717, 718, 719])
def test_errors_of_the_program_are_not(code: int) -> None:
    assert not cuda.is_lost(CodedError("CUDA error: unknown error", code))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("CUDA error: unknown error", True),
        ("HIP error: context is destroyed", True),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: unspecified launch failure", False),
        ("CUDA error: the launch timed out and was terminated", False),
        ("there was an unknown error", False),
    ],
)
def test_without_codes_the_words_of_the_runtime_tell(text: str, expected: bool) -> None:
    assert cuda.is_lost(RuntimeError(text + HINTS)) is expected


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA error: unknown error"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        DeviceOutOfMemoryError("GPU 0 is out of memory"),
        IndexError("index 7 is out of range"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not(error: BaseException) -> None:
    assert not cuda.is_lost(error)


def test_other_accelerators_call_it_by_its_name() -> None:
    driver = GpuDriver("cpu")
    assert driver.is_lost(RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"))
    assert not driver.is_lost(RuntimeError("level_zero backend failed with error: 40 (UR_RESULT_ERROR_INVALID_VALUE)"))


@pytest.mark.parametrize(("error", "passes"), [("unknown error", False), ("an illegal memory access", True)])
def test_caches_are_emptied_as_far_as_a_lost_gpu_lets_them(
    monkeypatch: pytest.MonkeyPatch, error: str, passes: bool
) -> None:
    driver = GpuDriver("cpu")

    def fail() -> None:
        raise RuntimeError(f"CUDA error: {error}")

    monkeypatch.setattr(driver, "_api", SimpleNamespace(empty_cache=fail))
    with pytest.raises(RuntimeError, match=error) if passes else contextlib.nullcontext():
        driver.empty_cache()


def test_a_pool_finds_a_lost_device() -> None:
    pool = cpu_pool(3)
    assert pool.find_lost() == []
    Fault(pool[1], at=0)
    with pytest.raises(DeviceLostError, match=MESSAGE):
        pool[1].computing()
    assert pool.find_lost() == [pool[1]]
