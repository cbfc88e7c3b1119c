"""What a plan starts from: what each call costs, and the machine it runs on. Times are in milliseconds, sizes in bytes.

```
CostProfile   calls   embed   layers.0   layers.1   ...   head      in the order in which a step makes them
              each    forward and backward, weights, gradients, inputs, outputs, workspace
Machine       devices, their memory, upload and download lanes, one host memory, the optimizer on the host
```

A profile is measured by the engine or written by hand, and travels as JSON.
"""

from __future__ import annotations

import functools
import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .files import write_text
from .quantities import format_value

_FORMAT_VERSION = 1
# Of ms and of bytes: more is a mistake, and sums of it may overflow.
_MOST = 2**63


@dataclass(frozen=True)
class CallCost:
    """The cost of one call of a unit on one micro-batch.

    Args:
        name: Name of the unit, for messages. Not unique: a unit that is called twice has two entries.
        forward_ms: Time of the forward, in ms.
        backward_ms: Time of the backward alone, in ms, without the recomputed forward; 0 for a call that gets no
            gradient, for which nothing is done in the backward.
        weight_bytes: Bytes of the parameters on the device.
        gradient_bytes: Bytes of the parameter gradients on the device; 0 for frozen parameters.
        input_bytes: Bytes of the tensor inputs of one micro-batch.
        output_bytes: Bytes of the tensor outputs of one micro-batch.
        workspace_bytes: Bytes on the device that the forward and backward of one micro-batch take at their peak,
            besides weights, gradients, inputs and outputs: the graph of the call. An upper bound for a forward alone.

    Raises:
        ValueError: If the name is empty, a time is not a finite number >= 0, or a size is not an integer >= 0.
    """

    name: str
    forward_ms: float
    backward_ms: float
    weight_bytes: int = 0
    gradient_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"CallCost.name must be a non-empty string, got {self.name!r}: pass the unit's name.")
        for key in ("forward_ms", "backward_ms"):
            value = getattr(self, key)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < _MOST:
                raise ValueError(
                    f"CallCost({self.name!r}).{key} must be a finite number of ms >= 0, got {format_value(value)}: "
                    "measure it again."
                )
        for key in ("weight_bytes", "gradient_bytes", "input_bytes", "output_bytes", "workspace_bytes"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
                raise ValueError(
                    f"CallCost({self.name!r}).{key} must be an integer number of bytes >= 0, got "
                    f"{format_value(value)}: leave it out if it is unknown."
                )

    def state_bytes(self, *, is_training: bool) -> int:
        """Return the bytes on a device of the weights, and in training of their gradients."""
        return self.weight_bytes + (self.gradient_bytes if is_training else 0)

    def activation_bytes(self, *, is_training: bool) -> int:
        """Return the bytes on a device of one micro-batch: inputs, outputs, the graph, and in a backward the gradients
        of inputs and outputs."""
        return (2 if is_training else 1) * (self.input_bytes + self.output_bytes) + self.workspace_bytes


_FIELD_NAMES = tuple(field.name for field in fields(CallCost))
_REQUIRED_NAMES = ("name", "forward_ms", "backward_ms")


@dataclass(frozen=True)
class CostProfile:
    """The costs of all calls of one step, in call order.

    Raises:
        ValueError: If an entry is not a `CallCost`.
    """

    calls: tuple[CallCost, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))
        for position, call in enumerate(self.calls):
            if not isinstance(call, CallCost):
                raise ValueError(
                    f"CostProfile.calls[{position}] must be a CallCost, got {call!r}: wrap it in CallCost."
                )

    def to_json(self) -> str:
        """Return the profile as a JSON document that `from_json` reads back unchanged."""
        document = {"version": _FORMAT_VERSION, "calls": [asdict(call) for call in self.calls]}
        return json.dumps(document, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CostProfile:
        """Read a profile that `to_json` wrote.

        Raises:
            ValueError: If the text is not JSON, or not a cost profile; the message names the entry and the field.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"The cost profile is not JSON ({error}): write it with CostProfile.to_json.") from error
        if not isinstance(document, dict) or not isinstance(document.get("calls"), list):
            raise ValueError(
                'A cost profile is a JSON object with a list "calls", '
                f"got {format_value(document)}: write it with CostProfile.to_json."
            )
        version = document.get("version")
        if version != _FORMAT_VERSION:
            raise ValueError(
                f"The cost profile has version {version!r}, this release reads {_FORMAT_VERSION}: measure it again."
            )
        return cls(tuple(_parse_call(position, entry) for position, entry in enumerate(document["calls"])))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file as JSON, whole or not at all.

        Raises:
            OSError: If the file cannot be written, naming it.
        """
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostProfile:
        """Read a profile from a file that `save` wrote.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it does not hold a cost profile; the message names the file.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error


def _parse_call(position: int, entry: Any) -> CallCost:
    """Turn one JSON entry into a `CallCost`, or say which entry and which field is wrong."""
    where = f"calls[{position}] of the cost profile"
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object, got {format_value(entry)}: write it with CostProfile.to_json.")
    if unknown := sorted(set(entry) - set(_FIELD_NAMES)):
        raise ValueError(f"{where} has unknown fields {unknown}: remove them; known are {list(_FIELD_NAMES)}.")
    if missing := [name for name in _REQUIRED_NAMES if name not in entry]:
        raise ValueError(f"{where} lacks the fields {missing}: add them.")
    try:
        return CallCost(**entry)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


@dataclass(frozen=True)
class DeviceTraits:
    """One device, where not all are alike. The defaults describe a virtual device.

    Args:
        speed: How fast it computes: a call takes its time in the profile divided by this.
        memory_bytes: Bytes that the engine may use on it; None for no limit.
        h2d_bytes_per_ms: Bandwidth of its lane from the host.
        d2h_bytes_per_ms: Bandwidth of its lane to the host.

    Raises:
        ValueError: If a number is out of range; the message names the field.
    """

    speed: float = 1.0
    memory_bytes: int | None = None
    h2d_bytes_per_ms: float = math.inf
    d2h_bytes_per_ms: float = math.inf

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise ValueError(f"speed of a device must be a finite number > 0, got {self.speed}: 1.0 is as the profile.")
        _check_memory("memory_bytes", self.memory_bytes)
        for name in ("h2d_bytes_per_ms", "d2h_bytes_per_ms"):
            _check_bandwidth(name, getattr(self, name))


@dataclass(frozen=True)
class SharedLink:
    """A part of the way to the host that several devices share, such as the uplink of a PCIe switch.

    Args:
        devices: Their indices; at least two.
        bytes_per_ms: What goes through it in each direction, for all of them together.

    Raises:
        ValueError: If there are fewer than two devices, or the bandwidth is not above 0.
    """

    devices: tuple[int, ...]
    bytes_per_ms: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        if len(set(self.devices)) < 2:
            raise ValueError(f"A shared link has at least two devices, got {self.devices}: leave it out.")
        _check_bandwidth("bytes_per_ms", self.bytes_per_ms)


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
        host_bytes_per_ms: Bandwidth of the host memory, shared by the lanes of all devices in both directions, and by
            the additions of gradients on the host.
        optimizer_bytes_per_ms: Speed of the optimizer on the host: bytes of gradients that it consumes per ms.
        devices: What holds for each device, instead of the memory and the bandwidths above; empty if all are alike.
        shared_links: Parts of the ways to the host that several devices share.
        num_ranks: Machines like this one that add up their gradients over a network, this one included.
        network_bytes_per_ms: Bandwidth of a rank's network in each direction (10 Gbit/s = 1.25e6 bytes/ms).
        network_latency_ms: Time in ms of a message from one rank to another.
        hop_ms: Time in ms of a micro-batch's way to another device, besides the lanes.

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
    devices: tuple[DeviceTraits, ...] = ()
    shared_links: tuple[SharedLink, ...] = ()
    num_ranks: int = 1
    network_bytes_per_ms: float = math.inf
    network_latency_ms: float = 0.0
    hop_ms: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        object.__setattr__(self, "shared_links", tuple(self.shared_links))
        for name in ("num_devices", "num_ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}: pass how many there are.")
        if len(self.devices) not in (0, self.num_devices):
            raise ValueError(
                f"devices has {len(self.devices)} entries for num_devices={self.num_devices}: pass one for each, or "
                "none if all are alike."
            )
        for link in self.shared_links:
            if not all(0 <= device < self.num_devices for device in link.devices):
                raise ValueError(f"{link} names a device that is not one of {self.num_devices}: correct its devices.")
        _check_memory("device_memory_bytes", self.device_memory_bytes)
        for name in ("transfer_latency_ms", "network_latency_ms", "hop_ms"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 0):
                raise ValueError(
                    f"{name} must be a finite number of ms >= 0, got {value}: pass 0.01 for 10 microseconds."
                )
        for name in (field.name for field in fields(self) if field.name.endswith("_per_ms")):
            _check_bandwidth(name, getattr(self, name))

    @functools.cached_property
    def is_uniform(self) -> bool:
        """Whether all devices compute equally fast, over equal links, in equal memory."""
        return len(set(self.devices)) <= 1

    @functools.cached_property
    def traits(self) -> tuple[DeviceTraits, ...]:
        """What holds for each device."""
        alike = DeviceTraits(1.0, self.device_memory_bytes, self.h2d_bytes_per_ms, self.d2h_bytes_per_ms)
        return self.devices or (alike,) * self.num_devices

    def all_reduce_ms(self, num_bytes: int) -> float:
        """Return the time in ms in which all ranks add up so many bytes each, in a ring: twice around it."""
        ways = 2 * (self.num_ranks - 1)
        return ways * (self.network_latency_ms + num_bytes / self.num_ranks / self.network_bytes_per_ms)

    @functools.cached_property
    def memories(self) -> tuple[int, ...]:
        """The limits of the devices that have one, in bytes, each once, ascending."""
        limits = {device.memory_bytes for device in self.traits}
        return tuple(sorted(limit for limit in limits if limit is not None))


def _check_memory(name: str, value: int | None) -> None:
    if value is not None and value < 0:
        raise ValueError(f"{name} must be >= 0, got {value}: pass None for no limit.")


def _check_bandwidth(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be > 0 bytes per ms, got {value}: pass inf for no limit.")
