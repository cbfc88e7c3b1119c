"""What torchrun does with a script, in processes that are forks: ``restarted.py MAX_RESTARTS SCRIPT ARGUMENT ...``.

Two ranks, which are started again so often if one fails. An interpreter for each of the four processes would import for
longer than they train.
"""

from __future__ import annotations

import runpy
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run() -> None:
    """What each rank does."""
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    max_restarts = int(sys.argv[1])
    sys.argv = sys.argv[2:]
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.05,
        start_method="fork",
    )
    elastic_launch(launch, run)()
