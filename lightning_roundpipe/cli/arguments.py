"""Arguments that several commands share, and how what was typed becomes what the planner takes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from lightning_roundpipe.planning import CostProfile, Machine, Partition, Timeline, files
from lightning_roundpipe.planning.quantities import parse_bandwidth, parse_bytes, parse_duration
from lightning_roundpipe.reporting.pictures import check_picture, draw_timelines

from .memory import BYTES_PER_WEIGHT

T = TypeVar("T")
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def argument_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser of text for argparse, so that the message of its ValueError reaches the user."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument


def parse_count(text: str) -> int:
    """Read a whole number of at least 1.

    Raises:
        ValueError: If the text is something else.
    """
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1.")
    return int(text)


def parse_ms(text: str) -> float:
    """Read a bare number of ms, at least 0.

    Raises:
        ValueError: If the text is something else.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{text!r} is not a number of milliseconds: write one like 1.6.")
    return value


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else (bytes, ms)")


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe the run: profile, devices, micro-batches, rounds."""
    parser.add_argument(
        "--profile", required=True, metavar="FILE", help="cost profile: milliseconds and bytes per call, as JSON"
    )
    count = argument_type(parse_count)
    parser.add_argument("--devices", required=True, type=count, metavar="N", help="number of devices")
    parser.add_argument("--microbatches", required=True, type=count, metavar="M", help="micro-batches per step")
    parser.add_argument(
        "--round-size",
        type=count,
        metavar="R",
        help="micro-batches that walk through the stages together (default: two per device, as in training)",
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe the machine."""
    group = parser.add_argument_group("machine", "What is left out is unlimited, or takes no time.")
    bandwidth = argument_type(parse_bandwidth)
    group.add_argument(
        "--device-memory",
        type=argument_type(parse_bytes),
        metavar="SIZE",
        help="what the engine may use on a device, such as 24GiB",
    )
    group.add_argument(
        "--h2d", type=bandwidth, default=math.inf, metavar="RATE", help="upload per device, such as 25GB/s"
    )
    group.add_argument("--d2h", type=bandwidth, default=math.inf, metavar="RATE", help="download per device")
    group.add_argument(
        "--latency",
        type=argument_type(parse_duration),
        default=0.0,
        metavar="TIME",
        help="until a copy begins to move, such as 10us",
    )
    group.add_argument(
        "--host-bandwidth",
        type=bandwidth,
        default=math.inf,
        metavar="RATE",
        help="host memory, shared by the copies of all devices, such as 200GB/s",
    )
    group.add_argument(
        "--optimizer-rate",
        type=bandwidth,
        default=math.inf,
        metavar="RATE",
        help="bytes of gradients that the optimizer on the host works off, such as 4GB/s",
    )
    group.add_argument(
        "--hop-ms",
        type=argument_type(parse_ms),
        default=0.0,
        metavar="MS",
        help="how long a micro-batch is under way from one device to the next, beside the copies above",
    )


def add_png(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--png``."""
    parser.add_argument(
        "--png", metavar="FILE", help=f"draw {what} (.png, .svg or .pdf; needs lightning-roundpipe[plot])"
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add ``--dtype``, which turns the bytes of the profile into numbers of weights."""
    parser.add_argument(
        "--dtype",
        choices=tuple(BYTES_PER_WEIGHT),
        default="bf16",
        help="type of the weights in the profile, for the memory of masters and optimizer (default: bf16)",
    )


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine that `add_machine` and ``--devices`` describe."""
    return Machine(
        num_devices=args.devices,
        device_memory_bytes=args.device_memory,
        h2d_bytes_per_ms=args.h2d,
        d2h_bytes_per_ms=args.d2h,
        transfer_latency_ms=args.latency,
        host_bytes_per_ms=args.host_bandwidth,
        optimizer_bytes_per_ms=args.optimizer_rate,
    )


def round_size_of(args: argparse.Namespace) -> int:
    """``--round-size``, or two per device as in training."""
    round_size: int = min(args.round_size or 2 * args.devices, args.microbatches)
    return round_size


def load_profile(path: str) -> CostProfile:
    """Read ``--profile``.

    Raises:
        ValueError: If the file cannot be read, holds no cost profile, or one without calls.
    """
    try:
        profile = CostProfile.load(path)
    except OSError as error:
        raise ValueError(
            f"cannot read the profile {path} ({error.strerror}): RoundPipeStrategy(save_profile=...) writes one."
        ) from error
    if not profile.calls:
        raise ValueError(f"the profile {path} has no calls: there is nothing to plan.")
    return profile


def write_text(path: str, text: str) -> None:
    """Write a file that an option asked for.

    Raises:
        ValueError: If it cannot be written.
    """
    try:
        files.write_text(path, text)
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error.strerror}): choose another place.") from error


def read_text(path: str, what: str) -> str:
    """Read a file that the user named.

    Raises:
        ValueError: If it cannot be read, or is not text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the {what} {path} ({error.strerror}): check the path.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the {what} {path} is not text: is it compressed, or another file?") from error


def check_picture_path(path: str | None) -> None:
    """Check ``--png`` before the work is done.

    Raises:
        ValueError: If the suffix is not that of a picture, or matplotlib is missing.
    """
    if path is not None:
        try:
            check_picture(path)
        except ModuleNotFoundError as error:
            raise ValueError(str(error)) from error


def save_picture(path: str, panels: Sequence[tuple[str, Timeline, Partition | None]]) -> None:
    """Draw timelines with their titles, one above the other; `check_picture_path` comes first.

    Raises:
        ValueError: If the file cannot be written.
    """
    try:
        draw_timelines(panels, path)
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error.strerror}): choose another place.") from error
