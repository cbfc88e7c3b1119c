"""Hosts on this machine: network namespaces joined by a cable of a rate and, where the kernel can, of a delay.

```
namespace roundpipe-PID-0                        namespace roundpipe-PID-1
10.77.0.1  cable  <---- 1 Gbit/s, 1 ms each way ---->  cable  10.77.0.2
```

Addresses are known inside of the namespaces alone. Only Linux has them, and only root may make them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

CABLE = "cable"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """One of two hosts.

    Attributes:
        name: of its namespace.
        address: under which the other one reaches it.
        cable: what it is like, in words.
    """

    name: str
    address: str
    cable: str = ""

    def run(self, *command: str) -> str:
        """Runs a command of ``ip`` or ``tc`` there; what it has printed."""
        return _run("ip", "netns", "exec", self.name, *command)

    @property
    def num_bytes_sent(self) -> int:
        """That have left it by cable, headers included."""
        return int(self.run("cat", f"/sys/class/net/{CABLE}/statistics/tx_bytes"))


def enter(name: str) -> None:
    """The calling process, which has one thread, is on this host from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")


def why_not() -> str | None:
    """What is missing for hosts; None for nothing."""
    if not sys.platform.startswith("linux"):
        return "needs network namespaces, which Linux has"
    if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        return f"needs {' and '.join(missing)} (iproute2)"
    name = f"roundpipe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"needs the right to make network namespaces: {error.stderr.strip()}"
    return None


@contextlib.contextmanager
def two_hosts(rate: str = "1gbit", delay: str = "1ms") -> Iterator[tuple[Host, Host]]:
    """Two hosts, until it closes.

    Args:
        rate, delay: of the cable in each direction, as ``tc`` reads them. A kernel without ``netem`` has no delay.
    """
    hosts = Host(f"roundpipe-{os.getpid()}-0", "10.77.0.1"), Host(f"roundpipe-{os.getpid()}-1", "10.77.0.2")
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _run("ip", "netns", "add", host.name)
            stack.callback(_run, "ip", "netns", "del", host.name)
        ends = [name for host in hosts for name in ("name", CABLE, "netns", host.name)]
        _run("ip", "link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        told = []
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                host.run("ip", "link", "set", device, "up")
            host.run("tc", "qdisc", "add", "dev", CABLE, "root", "handle", "1:", *_slowed(rate))
            try:
                host.run("tc", "qdisc", "add", "dev", CABLE, "parent", "1:", "netem", "delay", delay, "limit", "10000")
                told.append(f"{rate}, {delay} each way")
            except subprocess.CalledProcessError:
                told.append(f"{rate}, no delay (the kernel has no netem)")
        yield replace(hosts[0], cable=told[0]), replace(hosts[1], cable=told[1])


def _slowed(rate: str) -> tuple[str, ...]:
    return ("tbf", "rate", rate, "burst", "1mb", "latency", "200ms")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
