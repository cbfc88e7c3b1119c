"""The machine a plan is made for: how many devices, how much memory, how fast its links are."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Machine:
    """Devices with one upload and one download lane each, all of them fed from one host memory.

    The defaults describe virtual devices: nothing has to travel, and memory has no limit.

    Args:
        num_devices: N, at least 1.
        device_memory_bytes: Bytes that the engine may use on a device; None for no limit.
        h2d_bytes_per_ms: Bandwidth of a device's upload lane (PCIe 4.0 x16 in practice: 25 GB/s = 25e6 bytes/ms).
        d2h_bytes_per_ms: Bandwidth of a device's download lane.
        transfer_latency_ms: Time in ms until a copy begins to move.
        host_bytes_per_ms: Bandwidth of the host memory, shared by the lanes of all devices in both directions.
        optimizer_bytes_per_ms: Speed of the optimizer on the host: bytes of gradients that it consumes per ms.

    Raises:
        ValueError: If a number is out of range; the message names the field.
    """

    num_devices: int
    device_memory_bytes: int | None = None
    h2d_bytes_per_ms: float = math.inf
    d2h_bytes_per_ms: float = math.inf
    transfer_latency_ms: float = 0.0
    host_bytes_per_ms: float = math.inf
    optimizer_bytes_per_ms: float = math.inf

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ValueError(f"num_devices must be >= 1, got {self.num_devices}: pass how many there are.")
        if self.device_memory_bytes is not None and self.device_memory_bytes < 0:
            raise ValueError(
                f"device_memory_bytes must be >= 0, got {self.device_memory_bytes}: pass None for no limit."
            )
        if not (math.isfinite(self.transfer_latency_ms) and self.transfer_latency_ms >= 0):
            raise ValueError(
                f"transfer_latency_ms must be a finite number of ms >= 0, got {self.transfer_latency_ms}: pass 0.01 "
                "for 10 microseconds."
            )
        for name in (field.name for field in fields(self) if field.name.endswith("_per_ms")):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0 bytes per ms, got {getattr(self, name)}: pass inf for no limit.")
