"""The processes of a run: which one this is, and the start of the others where no launcher has started them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from ..lightning_packages import (
    ClusterEnvironment,
    MisconfigurationException,
    _set_num_threads_if_needed,
    _SubprocessScriptLauncher,
    pl,
)
from ..ranks.environment import Place
from ..ranks.failures import RankError

# Variable with the process that has started this one.
_STARTED_BY = "LIGHTNING_ROUNDPIPE_STARTED_BY"


def place_in(environment: ClusterEnvironment | None, num_nodes: int, ranks_per_node: int | None) -> Place:
    """This process among those of the run, as Lightning's environments tell it.

    Args:
        ranks_per_node: that the user wants; None for those that a launcher has started, and else one.

    Raises:
        MisconfigurationException: if what the user wants and what was started do not agree.
    """
    if environment is None:
        return Place()
    try:
        node, local = environment.node_rank(), environment.local_rank()
        by_launcher = _number("WORLD_SIZE") if environment.creates_processes_externally else 1
        per_node = ranks_per_node or max(1, by_launcher // num_nodes)
        # Most environments know better, and do not listen.
        environment.set_world_size(num_nodes * per_node)
        environment.set_global_rank(node * per_node + local)
        place = Place(environment.global_rank(), environment.world_size(), local, node)
    except (KeyError, ValueError):  # variables of the launcher are missing: it has not started this process
        place = Place()
    name = type(environment).__name__
    started = max(place.size, _number("WORLD_SIZE"))
    wanted = num_nodes * (ranks_per_node or 1)
    if place.rank >= place.size or started > place.size:
        raise MisconfigurationException(
            f"this is process {max(place.rank, _number('RANK'))} of {started} as the environment tells it ({name} and "
            f"WORLD_SIZE, RANK, LOCAL_RANK), but strategy='roundpipe' is set to {place.size}: use "
            "RoundPipeStrategy(ranks_per_node=...) and Trainer(num_nodes=...), or let torchrun start the processes. "
            "If no launcher was used, unset WORLD_SIZE, RANK and LOCAL_RANK"
        )
    if place.size != wanted if ranks_per_node else place.size % num_nodes:
        per_node_text = f"ranks_per_node={ranks_per_node}" if ranks_per_node else "one process or more on each"
        raise MisconfigurationException(
            f"num_nodes={num_nodes} and {per_node_text} do not make the {place.size} processes that the launcher has "
            f"started ({name}): leave ranks_per_node out, and set num_nodes to the number of machines"
        )
    return place


def ranks_here(place: Place, num_nodes: int) -> int:
    """Number of ranks on this machine."""
    machines = max(num_nodes, _number("SLURM_NNODES"), _number("GROUP_WORLD_SIZE"))
    return _number("LOCAL_WORLD_SIZE") or max(1, place.size // machines)


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0


class RankLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which runs the script once more per rank, without the thread that kills this process.

    That thread ends all processes without a word when one has failed. Here the others find out by themselves, and say
    so; until they have met, :meth:`check` looks.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Starts the others, unless they were started, and calls the function.

        Args:
            args, kwargs: for the function.
            trainer: unused.
        """
        if not self.cluster_environment.creates_processes_externally:
            os.environ[_STARTED_BY] = str(os.getpid())
            self._call_children_scripts()
        if self.num_processes > 1:
            _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def check(self) -> None:
        """Raises:
        RankError: if a process that was started here, or the one that has started this one, has ended before it has
            met the others.
        """
        if os.environ.get(_STARTED_BY, str(os.getpid())) not in (str(os.getpid()), str(os.getppid())):
            raise RankError("the process that has started this rank has ended before it has met the others")
        for local_rank, process in enumerate(self.procs, 1):
            if process.poll() is not None:
                raise RankError(
                    f"local rank {local_rank} (process {process.pid}) has ended with status {process.returncode} "
                    "before it has met the others: its output says why"
                )
