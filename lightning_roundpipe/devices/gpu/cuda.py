"""What only CUDA's runtime has, and ROCm's under the same names: page-locking the host's memory where it is, and the
codes of its errors.

[Note: errors of a lost GPU]
CUDA documents its errors with ``cudaError_t`` in the reference of the runtime. A GPU counts as lost where the error is
of the hardware, of the link to it, or of the driver, whatever the program does. Errors of a kernel do not count, though
they make the GPU unusable for the process as well: asserts (710, an index out of range), addresses (700, 716, 717),
instructions and stacks (714, 715, 718), time limits (702). On the next GPU they would come again, until none is left.
Nor does 719, an "unspecified launch failure": its common cause is a kernel that reads outside of its memory, though it
may also be what a broken GPU says.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import torch
from torch import Tensor

# cudaHostRegisterPortable: page-locked for all GPUs of the process.
_PORTABLE = 1
# cudaErrorNotSupported, which stands for accelerators whose runtime torch does not show.
_NOT_SUPPORTED = 801

# Code -> what torch writes behind "CUDA error: ". Torch has the code in the error from 2.8 on.
_LOST = {
    46: "CUDA-capable device(s) is/are busy or unavailable",  # cudaErrorDevicesUnavailable
    201: "invalid device context",  # cudaErrorDeviceUninitialized: the driver has none for the process any more
    214: "uncorrectable ECC error encountered",  # cudaErrorECCUncorrectable
    220: "uncorrectable NVLink error detected during the execution",  # cudaErrorNvlinkUncorrectable
    709: "context is destroyed",  # cudaErrorContextIsDestroyed
    999: "unknown error",  # cudaErrorUnknown: those of kernels have codes of their own
}
_ERROR_OF_RUNTIME = re.compile(r"(?:CUDA|HIP) error: (.*)")


def is_lost(error: BaseException) -> bool:
    """Whether ``error`` says that a GPU is lost; see [Note: errors of a lost GPU]."""
    if not isinstance(error, RuntimeError):
        return False
    code = getattr(error, "error_code", None)
    if code is not None:
        return code in _LOST
    found = _ERROR_OF_RUNTIME.search(str(error))
    return found is not None and found[1].strip() in _LOST.values()


class PageLocker:
    """Page-locks memory of the host for accelerators of one type."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._api: Any = torch.get_device_module(device_type)

    def page_lock(self, address: int, num_bytes: int) -> int:
        """Page-locks memory; 0, or the runtime's error code."""
        if not hasattr(self._api, "cudart"):
            return _NOT_SUPPORTED
        error = int(self._api.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
        if error:
            self._clear_error()
        return error

    def page_unlock(self, address: int) -> None:
        """Undoes :meth:`page_lock`."""
        if int(self._api.cudart().cudaHostUnregister(address)):
            self._clear_error()

    def is_page_locked(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor on the host is page-locked, by this process or others."""
        return tensor.is_pinned()

    def _clear_error(self) -> None:
        """The runtime reports an error again to the next kernel launch of the thread, and torch raises it there.

        Torch has no call to clear it, so that a launch is made for it.
        """
        with contextlib.suppress(RuntimeError):
            torch.zeros((), device=self._device_type).add_(1)
