"""Several ranks on this machine, over loopback, each in a process of its own.

:func:`run_ranks` calls a function of a test module on every rank, and returns what each has returned, its exit status
and its output. A rank that hangs shows its stacks and ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support.forks import Forks
from tests.support.rank_runs.hosts import Host

# Far above what ranks take to notice that another one has failed, far below any time limit of a wait.
SOON_S = 60.0
_SCRIPT = Path(__file__).with_name("script.py")
# What ranks would import one by one, each for as long as it trains.
_IMPORTED = ("transformers.modeling_utils", "tests.support.parity")


def place() -> tuple[int, int]:
    """On a rank: which one it is, and the number of ranks."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@dataclass(frozen=True)
class RankEnd:
    """How a rank has ended.

    Attributes:
        value: what the function has returned; None if it has raised.
        status: of the process; negative for a signal.
        output: what it has printed.
        late_s: seconds after the end of the first rank that did not end well.
    """

    value: Any
    status: int
    output: str
    late_s: float


def run_ranks(
    forks: Forks,
    folder: Path,
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    per_node: int | None = None,
    hosts: Sequence[Host] = (),
    limit_s: float = 200.0,
) -> list[RankEnd]:
    """Runs ``function(*arguments)`` on each of ``size`` ranks.

    Args:
        folder: where the ranks run, and leave files.
        function: of the top of a module, which may be imported by a process that has computed nothing.
        arguments: as JSON has them.
        per_node: ranks that take themselves for those of one machine; None for all, or one on each of ``hosts``.
        hosts: that the ranks are on; empty for this one.
        limit_s: after which a rank is taken for hanging.
    """
    folder.mkdir(parents=True, exist_ok=True)
    order = {
        "module": function.__module__,
        "function": function.__name__,
        "arguments": arguments,
        "size": size,
        "per_node": per_node or (1 if hosts else size),
        "hosts": [asdict(host) for host in hosts],
        "limit_s": limit_s,
    }
    forks.run(_SCRIPT, json.dumps(order), folder=folder, needs=_IMPORTED)
    ends = json.loads((folder / "ends.json").read_text())
    return [_end_of(folder, rank, *end) for rank, end in enumerate(ends)]


def _end_of(folder: Path, rank: int, status: int, late_s: float) -> RankEnd:
    path = folder / f"rank-{rank}.pt"
    value = torch.load(path, weights_only=False) if path.exists() else None
    return RankEnd(value, status, (folder / f"rank-{rank}.out").read_text(), late_s)


def values_of_ranks(
    forks: Forks,
    folder: Path,
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    hosts: Sequence[Host] = (),
    limit_s: float = 200.0,
) -> list[Any]:
    """What the function has returned on each of ``size`` ranks, all of which must end well."""
    ends = run_ranks(forks, folder, size, function, *arguments, hosts=hosts, limit_s=limit_s)
    failed = {rank: f"status {end.status}:\n{end.output}" for rank, end in enumerate(ends) if end.status}
    assert not failed, "\n\n".join(f"rank {rank} has ended with {text}" for rank, text in failed.items())
    return [end.value for end in ends]
