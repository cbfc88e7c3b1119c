"""The command ``roundpipe``: plans and pictures without a Trainer, a model or a device.

Every command is a module with two functions: ``add_parser(subparsers)`` says what it takes, and ``run(args)`` does it
and returns the exit status. What the user can mend is a ValueError, whose message names the thing and the remedy: any
function of the commands may raise one, `main` prints it without a traceback, and the status is 2.

Reading order: a command (``plan``, ``simulate``, ``timeline``, ``estimate``, ``doctor``), then what it shares with
others: ``arguments`` (options, files), ``output`` (tables, JSON), ``memory`` (what host and devices hold).
``contenders`` runs the schedules that ``simulate`` compares, ``machine_facts`` finds what ``doctor`` tells.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from typing_extensions import override

from lightning_roundpipe.__about__ import __version__

from . import doctor, estimate, plan, simulate, timeline
from .arguments import Subparsers, with_negative_values

__all__ = ["main"]


_COMMANDS = {"plan": plan, "simulate": simulate, "estimate": estimate, "timeline": timeline, "doctor": doctor}
_USER_ERROR = 2
_INTERRUPTED = 130
_READER_GONE = 141


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line; argparse would print the whole usage before it."""

    @override
    def error(self, message: str) -> NoReturn:
        self.exit(_USER_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _make_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="roundpipe",
        description="Plan, compare and look at RoundPipe training steps; look at this machine. No GPU is needed.",
        epilog="Every command prints one JSON object instead of text with --json.",
    )
    parser.add_argument("--version", action="version", version=f"roundpipe {__version__}")
    subparsers: Subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS.values():
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: The arguments, without the program's name; None for those of the process.

    Returns:
        0; 1 if ``doctor`` finds what stops training; 2 after an error that the user can mend; 130 after Ctrl-C; 141 if
        the reader closed the output before its end.

    Raises:
        SystemExit: From argparse, for ``--help``, ``--version`` and wrong arguments (status 2).
    """
    args = _make_parser().parse_args(with_negative_values(sys.argv[1:] if argv is None else argv))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # units may have names that the terminal cannot show
    try:
        status: int = _COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return status
    except ValueError as error:
        print(f"roundpipe {args.command}: error: {error}", file=sys.stderr)
        return _USER_ERROR
    except KeyboardInterrupt:
        print(f"roundpipe {args.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
