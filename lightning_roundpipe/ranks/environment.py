"""Which process of a run this one is, how processes meet, and which devices of its machine a rank owns.

::

    cluster environment (torchrun, SLURM, ...)  -->  Place  -->  connect: all have come  -->  ManyRanks
    devices that the ranks of a machine see     -->  own_devices: neighbours stay together
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .failures import RankError, own_address, place_of_this_process
from .group import ManyRanks, RankGroup

if sys.platform.startswith("linux"):
    import fcntl

# A rank that waits for others to come looks so often whether they still can.
_RECHECK_S = 0.1
# One attempt to reach rank 0, which may not have started.
_CONNECT = timedelta(seconds=5)

# Ranks may meet again after an error, over the same store.
_meetings = itertools.count()

# The variable of gloo, and how Linux is asked for the address of an interface: man 7 netdevice.
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR, _IFREQ_BYTES, _ADDRESS_IN_IFREQ = 0x8915, 40, slice(20, 24)

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Which process of a run this one is.

    Attributes:
        rank: among all.
        size: number of all.
        local_rank: among those of this machine.
        node_rank: of this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    node_rank: int = 0


def connect(
    place: Place, host: str, port: int, backend: str, timeout: timedelta, check: Callable[[], None]
) -> ManyRanks:
    """Meets the other ranks, unless the user has done so; blocks.

    Args:
        host, port: of rank 0.
        backend: of the default group.
        timeout: of this wait and all later ones.
        check: raises if others cannot come any more.

    Raises:
        RankError: naming the ranks that have not come in time.
    """
    if owns_default := not dist.is_initialized():
        store = _all_have_come(place, host, port, timeout, check)
        _choose_interface(host)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)
    return ManyRanks(timeout, host, owns_default=owns_default)


def _choose_interface(host: str) -> None:
    """Lets gloo use the interface by which this machine reaches rank 0, unless the user has chosen one.

    By itself it takes the one of the host's name, which many systems give the address 127.0.1.1.
    """
    if _INTERFACE not in os.environ and (name := interface_of(own_address(host))) is not None:
        os.environ[_INTERFACE] = name


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where that cannot be told, or for loopback."""
    if not sys.platform.startswith("linux") or address.startswith("127."):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(_IFREQ_BYTES, b"\0"))
                if socket.inet_ntoa(answer[_ADDRESS_IN_IFREQ]) == address:
                    return name
    return None


def _all_have_come(place: Place, host: str, port: int, timeout: timedelta, check: Callable[[], None]) -> Any:
    deadline = time.monotonic() + timeout.total_seconds()
    # Processes that torchrun starts again after a failure find those of before in its store.
    place_in_time = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{next(_meetings)}"
    kept = _store(place, host, port, timeout, deadline, check)
    store = dist.PrefixStore(f"roundpipe/{place_in_time}", kept)  # type: ignore[attr-defined]
    keys = [f"come/{rank}" for rank in range(place.size)]
    try:
        store.set(keys[place.rank], place_of_this_process())
        while not store.check(keys):
            check()
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise RankError(
                    f"rank {place.rank} has waited for {_named(missing)} of {place.size} to start for "
                    f"{timeout.total_seconds():g} s, the time limit (RoundPipeStrategy(timeout=...)). All must reach "
                    f"{host}:{port}"
                )
            time.sleep(_RECHECK_S)
    except dist.DistError as error:
        raise RankError(
            f"rank {place.rank} has lost {host}:{port}, where ranks meet: rank 0, or torchrun, has ended before all "
            "have come"
        ) from error
    return store


def _store(place: Place, host: str, port: int, timeout: timedelta, deadline: float, check: Callable[[], None]) -> Any:
    """The store that rank 0 keeps, or torchrun."""
    is_kept = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    while True:
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, None, is_kept, timeout if is_kept else min(timeout, _CONNECT), wait_for_workers=False
            )
            store.set_timeout(timeout)
            return store
        except dist.DistError as error:
            check()
            if is_kept or time.monotonic() > deadline:
                does = "open" if is_kept else "reach"
                raise RankError(f"rank {place.rank} cannot {does} {host}:{port}, where ranks meet: {error}") from error


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def own_devices(group: RankGroup, place: Place, devices: Sequence[torch.device]) -> list[torch.device]:
    """The devices of this rank, of those that it sees; a collective.

    Ranks of a machine that see the same devices divide them in their order, so that neighbours, which share links, stay
    together. A launcher may also let each see its own.

    Raises:
        ValueError: if there are fewer devices than ranks; devices on cores are shared in that case.
    """
    mine = (socket.gethostname(), place.node_rank, [_identity(device) for device in devices])
    others = group.gather(mine, "the devices of all ranks")
    sharing = [rank for rank, other in enumerate(others) if other == mine]
    if len(devices) < len(sharing):
        if all(device.type == "cpu" for device in devices):
            return list(devices)
        raise ValueError(
            f"{len(sharing)} ranks of this machine share {len(devices)} devices ({', '.join(map(str, devices))}): "
            "start at most as many ranks as there are devices; one for all of them is the default"
        )
    return share_of(devices, sharing.index(group.rank), len(sharing))


def share_of(items: Sequence[T], index: int, number: int) -> list[T]:
    """Part ``index`` of ``number`` parts, of neighbours, which differ by one item at most."""
    return list(items[index * len(items) // number : (index + 1) * len(items) // number])


def _identity(device: torch.device) -> str:
    """The same in all processes that see a device, and of no other device of the machine."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return str(device)
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
