"""Scripts in processes of their own, as forks of one process that has imported torch and Lightning already.

That import takes longer than most scripts. Everything else is as in a process of its own: its folder, its environment,
``sys.argv``, ``sys.path``, ``__main__``, its output and its exit status; and nothing of this package is there before
the script imports it, but for modules that it is said to need, which may be there: it is a fork of a fork then, which
has imported them, and stays. Processes that are forked have no threads: they have imported, and computed nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

# What the process runs that is forked. Each line of its input is a script to run, each line of its output an exit
# status. The child leaves the loop, so that its script ends as any script does, with what Python does at an exit.
_PROGRAM = """
import gc, importlib, json, os, runpy, sys, threading
import lightning.pytorch, torch


def settle():
    assert threading.active_count() == 1, threading.enumerate()
    # At its exit, Python looks through all objects again: for what is imported here, that takes most of a second.
    gc.collect()
    gc.freeze()


def fork_with(modules):
    # Where the fork reads and writes; None in the fork, which serves the orders from now on that need the modules.
    orders, ends = os.pipe(), os.pipe()
    if os.fork():
        os.close(orders[0]), os.close(ends[1])
        return os.fdopen(orders[1], "w"), os.fdopen(ends[0])
    os.close(orders[1]), os.close(ends[0])
    os.dup2(orders[0], 0), os.dup2(ends[1], 1)
    for module in modules:
        importlib.import_module(module)
    settle()


imported = [name for name in sys.modules if name.partition(".")[0] == "lightning_roundpipe"]
assert not imported, imported
settle()
has, servers = (), {}
while line := sys.stdin.readline():
    order = json.loads(line)
    needs = tuple(order["needs"])
    if needs != has and needs not in servers:
        servers[needs] = fork_with(needs)
        if servers[needs] is None:
            has, servers = needs, {}
            continue
    if needs != has:
        orders, ends = servers[needs]
        print(line, end="", file=orders, flush=True)
        print(ends.readline(), end="", flush=True)
        continue
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    for orders, _ in servers.values():
        orders.close()
    for _ in servers:
        os.wait()
    sys.exit()
os.chdir(order["folder"])
nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
for source, target in ((nothing, 0), (output, 1), (output, 2)):
    os.dup2(source, target)
sys.argv = [order["script"], *order["arguments"]]
sys.path[0] = os.path.dirname(order["script"])
del line, child, needs, has, servers, nothing, output, source, target, imported
runpy.run_path(order["script"], run_name="__main__")
"""


ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONIOENCODING": "utf-8",
    "COLUMNS": "120",
}


class Forks:
    """Runs scripts one after the other, with the variables of ``ENVIRONMENT``; a context manager.

    Args:
        folder: for the output of the scripts.
    """

    def __init__(self, folder: Path) -> None:
        self._output = folder / "output"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )
        self._is_running = False

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_running:  # its caller has given up waiting for it
            os.killpg(self._process.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout):
            _opened(stream).close()
        self._process.wait()

    def run(self, script: Path, *arguments: str, folder: Path, needs: Sequence[str] = ()) -> str:
        """Runs a script in ``folder``, where it must succeed; what it printed."""
        status, output = self.end(script, *arguments, folder=folder, needs=needs)
        assert status == 0, f"{script.name} has ended with status {status}:\n{output}"
        return output

    def end(self, script: Path, *arguments: str, folder: Path, needs: Sequence[str] = ()) -> tuple[int, str]:
        """Runs a script in ``folder``; its exit status, and what it printed.

        Args:
            needs: modules that may have been imported before.
        """
        order = {
            "script": str(script),
            "arguments": arguments,
            "folder": str(folder),
            "needs": needs,
            "output": str(self._output),
        }
        orders = _opened(self._process.stdin)
        self._is_running = True
        orders.write(json.dumps(order) + "\n")
        orders.flush()
        status = _opened(self._process.stdout).readline()
        self._is_running = False
        return int(status), self._output.read_text(encoding="utf-8")


def _opened(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
