"""How the others learn that a rank has failed, and of what.

::

    rank 1 raises ValueError         rank 0 waits for rank 1               rank 2 computes
      letter --------------------->  mailbox: reads it, at the latest
      letter --------------------------- after a fifth of a second ----->  mailbox keeps it
      connections close               RankError: "rank 1 ... ValueError"   next wait: the same RankError

Every rank has a *mailbox*: a listening socket whose address all know. Nothing listens there: the kernel keeps what
arrives until the rank waits for others the next time, so that there is no thread and no heartbeat. A rank that fails
sends its error to all; one that fails because of another passes on that one's. A rank that was killed sends nothing,
but its kernel then refuses connections to its mailbox: so the others find out who it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# How long a rank that has lost a connection waits for a letter that says why.
_PATIENCE_S = 3.0
_RECHECK_S = 0.05
# Until another host answers, or does not; and where nothing else tells that it is gone.
_CONNECT_S = 2.0
_SILENT_S = 10.0
_LETTER_BYTES = 64 * 1024
_TRACE_LINES = 12
# Of the error and of the trace: as JSON, in which a character takes up to 12 bytes, both fit into a letter.
_TEXT_LENGTH = 2500


@dataclass(frozen=True)
class Failure:
    """What has gone wrong on a rank, as the others show it."""

    rank: int
    place: str
    error: str
    trace: str = ""

    def __str__(self) -> str:
        trace = f"\n\nThere:\n{self.trace}" if self.trace else ""
        return f"rank {self.rank} ({self.place}) {self.error}{trace}"


class RankError(RuntimeError):
    """Another rank has failed, or ranks do not agree; the message names the rank, and its error.

    Attributes:
        failure: of the other rank; None if it is not known.
    """

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


def is_lost_connection(error: BaseException) -> bool:
    """Whether ``torch.distributed`` has raised it, for others than the group of ranks."""
    return isinstance(error, RuntimeError) and not isinstance(error, RankError) and "gloo" in str(error)


def place_of_this_process() -> str:
    """Host and process, as messages name them."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def failure_of(rank: int, error: BaseException) -> Failure:
    """What the others are to be told: the error of this rank, or that of the one which it has failed of."""
    if isinstance(error, RankError) and error.failure is not None:
        return error.failure
    text = "".join(traceback.format_exception_only(error)).strip()
    lines = "".join(traceback.format_tb(error.__traceback__)).splitlines()[-_TRACE_LINES:]
    return Failure(rank, place_of_this_process(), f"has failed: {_shortened(text)}", _shortened("\n".join(lines)))


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT_LENGTH else f"{text[:_TEXT_LENGTH]} ..."


class Mailbox:
    """Where other ranks leave their last words. Used by the threads that wait for others.

    Args:
        host: under which others reach this process; empty to let the one that is nearest to ``towards`` be found.
        towards: host of rank 0.
    """

    def __init__(self, host: str, towards: str) -> None:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=is_dual)
        self._socket.setblocking(False)
        self.address = [host or own_address(towards), str(self._socket.getsockname()[1])]
        self._found: Failure | None = None
        self._waits: dict[int, str] = {}
        self._lock = threading.Lock()
        _open_mailboxes.add(self)

    def connect(self, rank: int, addresses: Sequence[Sequence[str]], places: Sequence[str], secret: str) -> None:
        """The rank of this process, all mailboxes, by rank, who has them, and what letters of this run begin with."""
        self._addresses, self._places, self._secret = addresses, places, secret
        self._rank = rank
        self._others = [other for other in range(len(addresses)) if other != rank]

    def look(self) -> Failure | None:
        """The failure of another rank that has arrived; the first one stays."""
        with self._lock:
            while self._found is None:
                try:
                    connection, _ = self._socket.accept()
                except OSError:  # nothing there, or closed
                    break
                with connection:
                    letter = self._read(connection)
                if "failure" in letter:
                    self._found = Failure(**letter["failure"])
                elif letter:
                    self._waits[letter["rank"]] = letter["waits_for"]
            return self._found

    def _read(self, connection: socket.socket) -> dict[str, Any]:
        connection.settimeout(_CONNECT_S)
        text = b""
        with contextlib.suppress(OSError):
            while len(text) < _LETTER_BYTES and (piece := connection.recv(_LETTER_BYTES)):
                text += piece
        try:
            letter: dict[str, Any] = json.loads(text)
            return letter if letter["secret"] == self._secret else {}
        except (ValueError, KeyError, TypeError):  # of a stranger, or a look whether this rank lives
            return {}

    def send(self, failure: Failure) -> None:
        """Tells all but this rank, and the one that has failed."""
        self._post({"failure": asdict(failure)}, [other for other in self._others if other != failure.rank])

    def send_wait(self, what: str) -> None:
        """Tells all others what this rank waits for."""
        self._post({"rank": self._rank, "waits_for": what}, self._others)

    def waiting_for(self, what: str) -> set[int]:
        """The ranks that have told that they wait for this."""
        self.look()
        return {rank for rank, awaited in self._waits.items() if awaited == what}

    def _post(self, letter: dict[str, Any], ranks: Iterable[int]) -> None:
        text = json.dumps({"secret": self._secret, **letter}).encode()
        for rank in ranks:
            with contextlib.suppress(OSError), _connection(self._addresses[rank]) as connection:
                connection.sendall(text)

    def find_out(self) -> Failure | None:
        """Who has failed, when a connection is lost: what a letter says, or else that a process is gone."""
        deadline = time.monotonic() + _PATIENCE_S
        while (found := self.look()) is None and time.monotonic() < deadline:
            for other in self._others:
                if (found := self._look_whether_gone(other)) is not None:
                    return found
            time.sleep(_RECHECK_S)
        return found

    def look_after(self) -> Failure | None:
        """The failure of the next rank, which this one looks after while it waits, if it is gone.

        A connection that is lost tells by itself, unless the machine at its other end is gone, too: then it is silent.
        """
        return self._look_whether_gone((self._rank + 1) % len(self._addresses), _SILENT_S)

    def _look_whether_gone(self, rank: int, patience_s: float = 0.0) -> Failure | None:
        """The failure of a rank that refuses a connection, or with which there has been none for this time."""
        deadline = time.monotonic() + patience_s
        while (found := self.look()) is None:
            try:
                _connection(self._addresses[rank]).close()
            except OSError as error:
                if isinstance(error, ConnectionRefusedError) or time.monotonic() >= deadline:
                    break
                time.sleep(_RECHECK_S)
            else:
                return None
        text = "has ended without an error message: it was killed, its script is over, or its machine is out of reach"
        return found or self.look() or Failure(rank, self._places[rank], text)

    def close(self) -> None:
        """No letter can come any more, and who asks whether this rank lives is told that it does not."""
        self._socket.close()
        _open_mailboxes.discard(self)


_open_mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()


def _close_all() -> None:
    for mailbox in list(_open_mailboxes):
        mailbox.close()


# A worker of a loader, which may outlive a rank that is killed, would keep the mailbox open.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


def _connection(address: Sequence[str]) -> socket.socket:
    return socket.create_connection((address[0], int(address[1])), _CONNECT_S)


def own_address(towards: str) -> str:
    """The address of this host that is used on the way to another one; nothing is sent."""
    for family, kind, protocol, _, address in socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
            # On the machine of rank 0 that may be the loopback, which is another one elsewhere.
            return towards if own.startswith("127.") or own == "::1" else own
    return socket.gethostname()
