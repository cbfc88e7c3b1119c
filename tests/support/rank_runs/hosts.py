"""Hosts on this machine: network namespaces joined by a cable of a rate and a delay.

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
from dataclasses import dataclass

CABLE = "cable"
PACKET_BYTES = 9000  # jumbo frames: a tenth of the packets, each of which is carried by Python
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
        """Runs a command there; what it has printed."""
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
    if shutil.which("ip") is None:
        return "needs ip (iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "needs the right to use /dev/net/tun"
    name = f"roundpipe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"needs the right to make network namespaces: {error.stderr.strip()}"
    return None


@contextlib.contextmanager
def two_hosts(gbit_per_s: float = 1.0, delay_ms: float = 1.0) -> Iterator[tuple[Host, Host]]:
    """Two hosts, until it closes.

    Args:
        gbit_per_s, delay_ms: of the cable, in each direction.
    """
    told = f"{gbit_per_s:g} Gbit/s, {delay_ms:g} ms each way"
    first, second = (Host(f"roundpipe-{os.getpid()}-{i}", f"10.77.0.{i + 1}", told) for i in range(2))
    with contextlib.ExitStack() as stack:
        for host in (first, second):
            _run("ip", "netns", "add", host.name)
            stack.callback(_run, "ip", "netns", "del", host.name)
        module = "tests.support.rank_runs.cable"
        command = [sys.executable, "-m", module, first.name, second.name, str(gbit_per_s), str(delay_ms)]
        cable = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        stack.callback(cable.kill)
        assert cable.stdout is not None
        if not cable.stdout.readline():
            raise RuntimeError("the cable has ended")
        for host in (first, second):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                host.run("ip", "link", "set", device, "up", "mtu", str(PACKET_BYTES))
        yield first, second


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
