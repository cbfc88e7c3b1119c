"""The command ``roundpipe-lightning``: LightningCLI for classes of the user, who need not import this package.

    roundpipe-lightning fit -c config.yaml

Model and data are named by their class paths, and the strategy is RoundPipe's unless the configuration names another.
"""

from __future__ import annotations

import os
import sys

from lightning.pytorch.cli import ArgsType, LightningCLI
from lightning_utilities.core.imports import RequirementCache

# Importing any module of the package has registered the strategy and the accelerator.
from .__about__ import __version__

__all__ = ["main"]

_PROGRAM = "roundpipe-lightning"
_USER_ERROR = 2
_PARSER = RequirementCache("jsonargparse[signatures]")

# By class, not by name, so that --trainer.strategy.num_microbatches=4 has something to set.
_STRATEGY = {"class_path": "lightning_roundpipe.RoundPipeStrategy"}


def main(args: ArgsType = None) -> int:
    """Runs one subcommand (``fit``, ``validate``, ``test``, ``predict``) and returns its exit status.

    Args:
        args: the arguments, without the program's name; None for those of the process.

    Returns:
        0; 2 if the parser is not installed.

    Raises:
        SystemExit: after ``--help``, ``--print_config`` and the like (status 0), and for wrong arguments (status 2).
    """
    if not _PARSER:
        print(f"{_PROGRAM}: error: it needs jsonargparse: pip install 'lightning-roundpipe[cli]'", file=sys.stderr)
        return _USER_ERROR
    _make_current_folder_importable()
    LightningCLI(
        args=args,
        trainer_defaults={"strategy": _STRATEGY},
        parser_kwargs={
            "prog": _PROGRAM,
            "description": "Trains and evaluates a LightningModule of yours with RoundPipe.",
            "version": __version__,
        },
    )
    return 0


def _make_current_folder_importable() -> None:
    """As for ``python -m``: a console script has its own folder in the first place."""
    folder = os.getcwd()
    if folder not in sys.path and not getattr(sys.flags, "safe_path", False):  # python -P, since 3.11
        sys.path.insert(0, folder)
