"""The script that :mod:`tests.support.rank_runs.launch` runs: it forks the ranks of one run, and waits for them.

Each rank finds the variables that torchrun would set. One that does not end in time prints where its threads stand and
ends; should that fail, it is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from lightning_roundpipe.ranks import environment
from tests.support.engine.partitions import search_briefly
from tests.support.rank_runs import hosts

_KILLED_AFTER_S = 10.0
_RECHECK_S = 0.01


def free_port() -> int:
    """A port that nothing listens on, below those that a system gives to sockets which ask for any: until it is used,
    no connection of another test can get it."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def variables(rank: int, size: int, per_node: int, address: str, port: int) -> dict[str, str]:
    """What torchrun sets for a rank."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "GROUP_RANK": rank // per_node,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": per_node,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "test",
    }
    return {name: str(value) for name, value in place.items()}


def prepare() -> None:
    """Plans are searched for in fewer attempts, and ranks look for each other more often: results are the same."""
    search_briefly(setattr)
    environment._RECHECK_S = _RECHECK_S


def run_rank(rank: int, order: dict[str, Any], port: int, folder: Path) -> None:
    """What one rank does: calls the function, and keeps what it returns."""
    output = os.open(folder / f"rank-{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target in (1, 2):
        os.dup2(output, target)
    faulthandler.dump_traceback_later(order["limit_s"], exit=True)
    # What a shell has started in the background ignores it, and Python then, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    per_node, address = order["per_node"], "127.0.0.1"
    if order["hosts"]:
        address = order["hosts"][0]["address"]
        hosts.enter(order["hosts"][rank // per_node]["name"])
    os.environ.update(variables(rank, order["size"], per_node, address, port))
    torch.set_num_threads(1)
    prepare()
    function = getattr(importlib.import_module(order["module"]), order["function"])
    value = function(*order["arguments"])
    torch.save(value, folder / f"rank-{rank}.pt")
    faulthandler.cancel_dump_traceback_later()


def start(rank: int, order: dict[str, Any], port: int, folder: Path) -> int:
    """Forks a rank; its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run_rank(rank, order, port, folder)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(order: dict[str, Any], folder: Path) -> None:
    """Runs all ranks; leaves their exit statuses, and when they came after the first that was not 0."""
    importlib.import_module(order["module"])
    port = free_port()
    running = {start(rank, order, port, folder): rank for rank in range(order["size"])}
    (folder / "pids.json").write_text(json.dumps(list(running)))
    deadline = time.monotonic() + order["limit_s"] + _KILLED_AFTER_S
    ends: dict[int, tuple[int, float]] = {}
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            ends[running.pop(child)] = os.waitstatus_to_exitcode(status), time.monotonic()
        elif time.monotonic() > deadline:
            for pid in running:
                os.kill(pid, 9)
        else:
            time.sleep(_RECHECK_S)
    first = min((when for status, when in ends.values() if status), default=0.0)
    (folder / "ends.json").write_text(
        json.dumps([(status, when - first) for _, (status, when) in sorted(ends.items())])
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path.cwd())
    os._exit(0)  # forgetting all that was imported takes longer than many a training
