"""The cable between two hosts: a process that takes packets at one end and hands them out at the other.

```
host 0          this process                                             host 1
tun  -- read -->  sent one after the other at the rate  -- delay -->  write  tun
tun  <-- write  <-- delay --  sent one after the other at the rate  <-- read --  tun
```

Each direction has the whole rate. Packets that come while a direction is busy stay with the kernel of the host, which
drops what is too much, as a network card does. Needs /dev/net/tun, and no module of the kernel for slow networks.

    python -m tests.support.rank_runs.cable HOST HOST GBIT_PER_S DELAY_MS
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

from tests.support.rank_runs.hosts import CABLE, PACKET_BYTES, enter

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
# Packets that are taken from a host before they can be sent: reading one by one would leave gaps.
_AHEAD_S = 0.002


def open_end(host: str) -> int:
    """A new interface of ``host``; its packets are read from, and written to, the file that is returned."""
    enter(host)
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", CABLE.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


class Direction:
    """Packets on their way from one end to the other."""

    def __init__(self, source: int, target: int, bytes_per_s: float, delay_s: float) -> None:
        self.source, self._target = source, target
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._packets: deque[tuple[float, bytes]] = deque()  # when they arrive
        self._free_at = 0.0

    def is_ready(self, now: float) -> bool:
        """Whether it takes another packet."""
        return self._free_at < now + _AHEAD_S

    def take(self, now: float) -> None:
        """Takes a packet of the host."""
        packet = os.read(self.source, PACKET_BYTES)
        self._free_at = max(self._free_at, now) + len(packet) / self._bytes_per_s
        self._packets.append((self._free_at + self._delay_s, packet))

    def hand_out(self, now: float) -> float:
        """Hands out what has arrived; when to come again."""
        while self._packets and self._packets[0][0] <= now:
            with contextlib.suppress(OSError):  # an interface that is down takes none
                os.write(self._target, self._packets.popleft()[1])
        next_at = self._packets[0][0] if self._packets else now + 1.0
        return next_at if self.is_ready(now) else min(next_at, self._free_at - _AHEAD_S)


def main(first: str, second: str, gbit_per_s: float, delay_ms: float) -> None:
    """Carries packets until it is ended."""
    ends = [open_end(first), open_end(second)]
    print("ready", flush=True)
    directions = [Direction(a, b, gbit_per_s * 1.25e8, delay_ms / 1e3) for a, b in (ends, reversed(ends))]
    while True:
        now = time.monotonic()
        wake_at = min(direction.hand_out(now) for direction in directions)
        ready = [direction.source for direction in directions if direction.is_ready(now)]
        readable = select.select(ready, [], [], max(0.0, wake_at - now))[0]
        for direction in directions:
            if direction.source in readable:
                with contextlib.suppress(OSError):  # an interface that is down has none
                    direction.take(time.monotonic())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
