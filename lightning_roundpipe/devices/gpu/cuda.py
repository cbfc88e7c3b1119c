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


def host_register(api: Any, device_type: str, address: int, num_bytes: int) -> int:
    """Page-locks memory of the host; 0, or the runtime's error code.

    Args:
        api: the module of torch for accelerators of ``device_type``.
    """
    if not hasattr(api, "cudart"):
        return _NOT_SUPPORTED
    error = int(api.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))
    if error:
        _clear_error(device_type)
    return error


def host_unregister(api: Any, device_type: str, address: int) -> None:
    """Undoes :func:`host_register`."""
    if int(api.cudart().cudaHostUnregister(address)):
        _clear_error(device_type)


def _clear_error(device_type: str) -> None:
    """The runtime reports an error again to the next kernel launch of the thread, and torch raises it there.

    Torch has no call to clear it, so that a launch is made for it.
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device=device_type).add_(1)
