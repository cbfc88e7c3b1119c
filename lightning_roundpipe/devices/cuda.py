"""What only CUDA's runtime has, and ROCm's under the same names: page-locking the host's memory where it is."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

# cudaHostRegisterPortable: page-locked for all GPUs of the process.
_PORTABLE = 1
# cudaErrorNotSupported, which stands for accelerators whose runtime torch does not show.
_NOT_SUPPORTED = 801


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
