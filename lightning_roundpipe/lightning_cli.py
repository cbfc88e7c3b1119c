"""The command ``roundpipe-lightning``: LightningCLI for classes of the user, who need not import this package.

    roundpipe-lightning fit -c config.yaml

Model and data are named by their class paths, and the strategy is RoundPipe's unless the configuration names another.
LightningCLI is that of the package which the class of the model comes from, or that of the data.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_utilities.core.imports import RequirementCache

# Importing any module of the package has registered the strategy and the accelerator.
from .__about__ import __version__
from .lightning_packages import of_each

__all__ = ["main"]

_PROGRAM = "roundpipe-lightning"
_USER_ERROR = 2
_PARSER = RequirementCache("jsonargparse[signatures]")

# By class, not by name, so that --trainer.strategy.num_microbatches=4 has something to set.
_STRATEGY = {"class_path": "lightning_roundpipe.RoundPipeStrategy"}


def main(args: list[str] | dict[str, Any] | None = None) -> int:
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
    _cli_for(sys.argv[1:] if args is None else args)(
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


def _cli_for(args: Any) -> Any:
    """``LightningCLI`` of the package of the classes that the arguments and their files name; else the home one's."""
    choices = of_each("pytorch.cli", "LightningCLI")
    modules, data = (of_each("pytorch", name) for name in ("LightningModule", "LightningDataModule"))
    for path in _class_paths(args) if len(choices) > 1 else ():
        module, _, name = path.rpartition(".")
        try:
            named = getattr(import_module(module), name)
        except Exception:  # the parser says what is wrong with it
            continue
        for choice, *kinds in zip(choices, modules, data, strict=True):
            if isinstance(named, type) and issubclass(named, tuple(kinds)):
                return choice
    return choices[0]


def _class_paths(args: Any) -> Iterator[str]:
    """The classes of the model and the data, as far as they are named."""
    import yaml

    if isinstance(args, Mapping):
        for key, value in args.items():
            if key in ("model", "data"):
                yield str(value.get("class_path", "") if isinstance(value, Mapping) else value)
            elif isinstance(value, Mapping):  # of a subcommand
                yield from _class_paths(value)
        return
    words = re.split(r"[=\n]", "\n".join(map(str, args if isinstance(args, (list, tuple)) else [])))
    for option, value in itertools.pairwise(words):
        if option in ("--model", "--model.class_path", "--data", "--data.class_path"):
            yield value
        elif option in ("-c", "--config") and Path(value).is_file():
            with contextlib.suppress(yaml.YAMLError):
                yield from _class_paths(yaml.safe_load(Path(value).read_text(encoding="utf-8")))
