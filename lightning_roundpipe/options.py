"""User options, checked when they are given: a wrong value must not cost the user a started run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .planning.costs import CostProfile
from .planning.quantities import parse_bytes

LOSS_WEIGHTS = ("auto", "samples", "label_tokens", "causal_label_tokens", "nodes", "sum")

# A bare number below that was meant as GiB or MiB.
_LEAST_MEMORY_BYTES = 1024

# Of a device. A configuration may come from a larger host; but every micro-batch has as many.
_MAX_THREADS = 64

_COMPILE_ARGUMENTS = frozenset({"backend", "dynamic", "mode", "options"})
_CUDA_GRAPH_MODES = ("max-autotune", "reduce-overhead")


REDUCE_DTYPES = (None, "bf16")
OPTIMIZER_OVERLAPS = ("exact", "off", "stale")
CHECKS_OF_SPLIT = ("exact", "warn", "error", "off")


@dataclass(frozen=True)
class VirtualLink:
    """The link between the host and a virtual device: copies take as long as they would over this one.

    Each device has a link of its own, with the given speed in each direction. The defaults are what PCIe 4.0 x16
    gives in practice.

    Args:
        gb_per_s: bandwidth in GB/s (1e9 bytes per second); ``inf`` for copies that take no time.
        latency_us: time in microseconds until a copy begins to move.

    Raises:
        ValueError: for numbers out of range, naming the field.
    """

    gb_per_s: float = 25.0
    latency_us: float = 10.0

    def __post_init__(self) -> None:
        if not _is_number(self.gb_per_s) or not self.gb_per_s > 0:
            raise ValueError(f"VirtualLink(gb_per_s={self.gb_per_s!r}): pass a number of GB/s > 0, for instance 25.0")
        if not _is_number(self.latency_us) or not 0 <= self.latency_us < math.inf:
            raise ValueError(
                f"VirtualLink(latency_us={self.latency_us!r}): pass a number of microseconds >= 0, for instance 10.0"
            )

    @property
    def bytes_per_ms(self) -> float:
        """Bandwidth in bytes per ms."""
        return self.gb_per_s * 1e6

    @property
    def latency_ms(self) -> float:
        """Latency in ms."""
        return self.latency_us / 1e3


@dataclass(frozen=True)
class RoundPipeOptions:
    """Options of :class:`RoundPipeStrategy`; see there for their meaning.

    Raises:
        ValueError, TypeError: from the constructor, naming the option, its value and what is allowed.
    """

    num_microbatches: int | str = "auto"
    round_size: int | None = None
    units: Sequence[Any] | None = None
    loss_weight: str | Callable[[Any], float] = "auto"
    split_batch: Callable[[Any, int], Sequence[Any]] | Literal["packed"] | None = None
    threads_per_device: int | None = None
    device_memory_limit: int | str | None = None
    virtual_copies: bool | VirtualLink = False
    virtual_speeds: Sequence[float] | None = None
    compile_units: bool | Mapping[str, Any] = False
    cost_profile: CostProfile | None = None
    save_profile: str | Path | None = None
    trace: str | Path | None = None
    optimizer_overlap: str = "exact"
    stale_after_steps: int = 0
    shard_optimizer: bool = False
    reduce_dtype: str | None = None
    check_split: str = "exact"
    verify: int | None = None

    def __post_init__(self) -> None:
        if self.check_split not in CHECKS_OF_SPLIT:
            raise ValueError(f"check_split={self.check_split!r}: use one of {', '.join(map(repr, CHECKS_OF_SPLIT))}")
        if self.reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype={self.reduce_dtype!r}: use 'bf16', or None (the dtype of the weights)")
        if self.verify is not None:
            allowed = "(how many training steps are compared with plain autograd), or None (one, if it is cheap)"
            check_count("verify", self.verify, allowed, at_least=0)
        if self.optimizer_overlap not in OPTIMIZER_OVERLAPS:
            raise ValueError(
                f"optimizer_overlap={self.optimizer_overlap!r}: use one of {', '.join(map(repr, OPTIMIZER_OVERLAPS))}"
            )
        check_count("stale_after_steps", self.stale_after_steps, at_least=0)
        if self.stale_after_steps and self.optimizer_overlap != "stale":
            raise ValueError(
                f"stale_after_steps={self.stale_after_steps!r} has a meaning with optimizer_overlap='stale' alone, but "
                f"optimizer_overlap={self.optimizer_overlap!r}"
            )
        if not isinstance(self.shard_optimizer, bool):
            raise TypeError(f"shard_optimizer={self.shard_optimizer!r}: use True or False")
        if self.num_microbatches != "auto":
            check_count("num_microbatches", self.num_microbatches, "or 'auto' (two per device)")
        if self.round_size is not None:
            check_count("round_size", self.round_size, "or None (the planner's choice)")
        if self.threads_per_device is not None:
            self._check_threads(self.threads_per_device)
        if not callable(self.loss_weight) and self.loss_weight not in LOSS_WEIGHTS:
            raise ValueError(
                f"loss_weight={self.loss_weight!r}: use one of {', '.join(map(repr, LOSS_WEIGHTS))}, "
                "or a function that takes a micro-batch and returns its weight"
            )
        if self.split_batch not in (None, "packed") and not callable(self.split_batch):
            raise TypeError(
                f"split_batch={self.split_batch!r} is not callable: pass a function "
                "(batch, num_microbatches) -> list of micro-batches, or 'packed' for rows of packed sequences"
            )
        if isinstance(self.units, (str, type)) or (self.units is not None and not self.units):
            raise TypeError(
                f"units={self.units!r}: pass a non-empty list of module classes or class names, "
                "for instance units=['LlamaDecoderLayer']"
            )
        for unit in self.units or ():
            if not isinstance(unit, (str, type)):
                raise TypeError(f"units contains {unit!r}: every entry must be a module class or the name of one")
        self._check_devices()
        self._check_compiling()
        if self.cost_profile is not None and self.save_profile is not None:
            raise ValueError(
                f"save_profile={os.fspath(self.save_profile)!r} would get the given cost_profile again, as nothing is "
                "measured beside it: give one of the two"
            )
        for name in ("save_profile", "trace"):
            if getattr(self, name) is not None:
                check_writable(name, getattr(self, name))

    def _check_threads(self, number: int) -> None:
        check_count("threads_per_device", number, "or None (the host's threads shared evenly)")
        most = max(_MAX_THREADS, os.cpu_count() or 1)
        if number > most:
            raise ValueError(
                f"threads_per_device={number!r}: use at most {most}, or None (the host's threads shared evenly). Every "
                "micro-batch gets so many threads, and more of them than the host has cores wait for each other"
            )

    def _check_devices(self) -> None:
        if not isinstance(self.virtual_copies, (bool, VirtualLink)):
            raise TypeError(
                f"virtual_copies={self.virtual_copies!r}: use True, False, or VirtualLink(gb_per_s=..., latency_us=...)"
            )
        speeds = self.virtual_speeds
        if speeds is not None and (
            isinstance(speeds, str) or not speeds or not all(_is_number(speed) and 0 < speed <= 1 for speed in speeds)
        ):
            raise ValueError(
                f"virtual_speeds={speeds!r}: pass a number above 0 and at most 1 for each virtual device, for instance "
                "[1.0, 0.5], or None (all are alike)"
            )
        if self.device_memory_bytes is not None and self.device_memory_bytes < _LEAST_MEMORY_BYTES:
            raise ValueError(
                f"device_memory_limit={self.device_memory_limit!r} is {self.device_memory_bytes} bytes, on which "
                "nothing can run: an integer counts bytes, and '24GiB' says which unit is meant"
            )

    def _check_compiling(self) -> None:
        given = self.compile_units
        if isinstance(given, bool):
            return
        if not isinstance(given, Mapping):
            raise TypeError(f"compile_units={given!r}: use True, False, or a dict of arguments of torch.compile")
        if unknown := sorted(map(str, given.keys() - _COMPILE_ARGUMENTS)):
            raise ValueError(
                f"compile_units={given!r}: {', '.join(unknown)} cannot be given. Units are compiled whole "
                f"(fullgraph=True), and the arguments to choose are {', '.join(sorted(_COMPILE_ARGUMENTS))}"
            )
        mode, options, dynamic = given.get("mode"), given.get("options") or {}, given.get("dynamic")
        if not isinstance(options, Mapping):
            raise TypeError(f"compile_units={given!r}: options must be a dict, as for torch.compile")
        if not (dynamic is None or isinstance(dynamic, bool)):
            raise TypeError(f"compile_units={given!r}: dynamic must be True, False or None")
        if mode is not None and options:
            raise ValueError(f"compile_units={given!r}: torch.compile takes either mode or options")
        if mode in _CUDA_GRAPH_MODES or options.get("triton.cudagraphs"):
            raise ValueError(
                f"compile_units={given!r} uses CUDA graphs, which find weights where they were when the graph was "
                "recorded. Here they come and go: use mode='max-autotune-no-cudagraphs', or no mode"
            )

    @property
    def compile_arguments(self) -> dict[str, Any] | None:
        """Arguments of ``torch.compile`` for units; None if they are not compiled."""
        if isinstance(self.compile_units, bool):
            return {} if self.compile_units else None
        return dict(self.compile_units)

    @property
    def device_memory_bytes(self) -> int | None:
        """``device_memory_limit`` in bytes."""
        limit = self.device_memory_limit
        if limit is None:
            return None
        if isinstance(limit, str):
            try:
                return parse_bytes(limit)
            except ValueError as error:
                raise ValueError(f"device_memory_limit: {error}") from error
        if isinstance(limit, bool) or not isinstance(limit, int):
            raise TypeError(f"device_memory_limit={limit!r}: use a size like '24GiB', an integer of bytes, or None")
        return limit

    def microbatches_for(self, num_devices: int) -> int:
        """The wanted number of micro-batches on a pool of ``num_devices``."""
        return 2 * num_devices if isinstance(self.num_microbatches, str) else self.num_microbatches


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_count(name: str, value: object, otherwise: str = "", *, at_least: int = 1) -> None:
    """Checks that an option is an integer of at least ``at_least``.

    Raises:
        ValueError: if it is not, with ``otherwise`` added to what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        allowed = "a positive integer" if at_least == 1 else f"an integer >= {at_least}"
        raise ValueError(f"{name}={value!r}: use {allowed} {otherwise}".rstrip())


def read_profile(value: str | Path | CostProfile | None) -> CostProfile | None:
    """The profile that the option ``cost_profile`` means, read from its file if it is a path.

    Raises:
        TypeError: if it is something else.
        ValueError: if the file cannot be read or does not hold a profile, naming it.
    """
    if value is None or isinstance(value, CostProfile):
        return value
    if not isinstance(value, (str, Path)):
        raise TypeError(f"cost_profile={value!r}: pass a CostProfile or the path of a file that CostProfile.save wrote")
    try:
        return CostProfile.load(value)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cost_profile={os.fspath(value)!r} cannot be used: {str(error).rstrip('.')}. Such a file is written by "
            "RoundPipeStrategy(save_profile=...) or CostProfile.save."
        ) from error


def check_writable(name: str, value: object) -> None:
    """Checks that a file can be written later, long before it is.

    Args:
        name: of the option, for messages.
        value: its value, to be a path.

    Raises:
        TypeError: if it is no path.
        ValueError: if its folder does not exist, or the file cannot be written.
    """
    if not isinstance(value, (str, Path)) or not os.fspath(value):
        raise TypeError(f"{name}={value!r}: pass the path of the file to write")
    path = Path(value)
    given = f"{name}={os.fspath(value)!r}"
    if not path.parent.is_dir():
        raise ValueError(f"{given}: there is no folder {os.fspath(path.parent)!r}, make it first")
    if path.is_dir():
        raise ValueError(f"{given} is a folder: pass the path of the file to write")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{given} cannot be written: choose another place, or change its permissions")
