"""Arguments that several commands share, and how what was typed becomes what the planner takes."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from lightning_roundpipe.planning import CostProfile, Machine, Timeline, files
from lightning_roundpipe.planning.costs import DeviceTraits, SharedLink
from lightning_roundpipe.planning.quantities import parse_bandwidth, parse_bytes, parse_duration
from lightning_roundpipe.reporting.pictures import check_picture, draw_timelines

from .memory import BYTES_PER_WEIGHT

# Of one machine; the time to plan grows with them.
_MOST_DEVICES = 64

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(subparsers: Subparsers, name: str, help: str, description: str, examples: str) -> Any:
    """Add a command and return its parser; the examples stand as they are below the options."""
    return subparsers.add_parser(
        name,
        help=help,
        description=description.strip(),
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_option(parser: Any, flag: str, parse: Callable[[str], object], metavar: str, help: str, **more: Any) -> None:
    """Add an option whose value `parse` reads; the message of its ValueError reaches the user."""

    def parse_argument(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parser.add_argument(flag, type=parse_argument, metavar=metavar, help=help, **more)


def parse_count(text: str) -> int:
    """Read a whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is not a whole number of at least 1.")
    return int(text)


def parse_devices(text: str) -> int:
    """Read a number of devices: as many as one process may have, whose step is planned in seconds."""
    number = parse_count(text)
    if number > _MOST_DEVICES:
        raise ValueError(f"{text!r} is more than {_MOST_DEVICES}: pass the devices of one machine.")
    return number


def parse_ms(text: str) -> float:
    """Read a bare number of ms, at least 0."""
    return _parse_number(text, "milliseconds", "1.6", lambda value: value >= 0)


def parse_tflops(text: str) -> float:
    """Read a bare number of TFLOP/s, above 0."""
    return _parse_number(text, "TFLOP/s", "165", lambda value: value > 0)


def _parse_number(text: str, unit: str, example: str, is_allowed: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and is_allowed(value)):
        raise ValueError(f"{text!r} is not a number of {unit}: write one like {example}.")
    return value


def with_negative_values(argv: Sequence[str]) -> list[str]:
    """Arguments in which a value like -64GB belongs to the option before it, whose own message says what is wrong with
    it: argparse would take it for an option."""
    joined: list[str] = []
    for word in argv:
        if joined and re.match(r"-[\d.]", word) and re.fullmatch(r"--[\w-]+", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else (bytes, ms)")


def add_png(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--png``."""
    parser.add_argument(
        "--png", metavar="FILE", help=f"draw {what} (.png, .svg or .pdf; needs lightning-roundpipe[plot])"
    )


def add_no_split(parser: argparse.ArgumentParser) -> None:
    """Add ``--no-split``."""
    words = "run every stage on one device at a time, as the RoundPipe paper does (default: on several where it pays)"
    parser.add_argument("--no-split", action="store_false", dest="may_split", help=words)


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe the run (profile, devices, micro-batches, rounds) and the machine."""
    parser.add_argument(
        "--profile", required=True, metavar="FILE", help="cost profile: milliseconds and bytes per call, as JSON"
    )
    add_option(parser, "--devices", parse_devices, "N", "number of devices", required=True, dest="num_devices")
    add_option(parser, "--microbatches", parse_count, "M", "micro-batches per step", required=True)
    rounds = "micro-batches that walk through the stages together (default: two per device, a training may take more)"
    add_option(parser, "--round-size", parse_count, "R", rounds)
    add_no_split(parser)
    group = parser.add_argument_group("machine", "What is left out is unlimited, or takes no time.")
    group.add_argument(
        "--machine",
        metavar="FILE",
        help="the machine of the run that has saved this profile; the other options take the place of what it says",
    )
    for flag, field, parse, metavar, help in _MACHINE:
        add_option(group, flag, parse, metavar, help, dest=field)
    parser.add_argument(
        "--dtype",
        choices=tuple(BYTES_PER_WEIGHT),
        default="bf16",
        help="type of the weights in the profile, for the memory of masters and optimizer (default: bf16)",
    )


# Option, field of `Machine`, how it is read, what is shown for it, help.
_MACHINE: tuple[tuple[str, str, Callable[[str], object], str, str], ...] = (
    (
        *("--device-memory", "device_memory_bytes", parse_bytes, "SIZE"),
        "what the engine may use on a device, such as 24GiB",
    ),
    ("--h2d", "h2d_bytes_per_ms", parse_bandwidth, "RATE", "upload per device, such as 25GB/s"),
    ("--d2h", "d2h_bytes_per_ms", parse_bandwidth, "RATE", "download per device"),
    ("--latency", "transfer_latency_ms", parse_duration, "TIME", "until a copy begins to move, such as 10us"),
    (
        *("--host-bandwidth", "host_bytes_per_ms", parse_bandwidth, "RATE"),
        "host memory, shared by the copies of all devices, such as 200GB/s",
    ),
    (
        *("--optimizer-rate", "optimizer_bytes_per_ms", parse_bandwidth, "RATE"),
        "bytes of gradients that the optimizer on the host works off, such as 4GB/s",
    ),
    ("--ranks", "num_ranks", parse_count, "N", "machines like this one that add up their gradients"),
    ("--network", "network_bytes_per_ms", parse_bandwidth, "RATE", "of a rank, each way, such as 1.25GB/s"),
    ("--network-latency", "network_latency_ms", parse_duration, "TIME", "from one rank to another, such as 50us"),
    (
        *("--hop-ms", "hop_ms", parse_ms, "MS"),
        "how long a micro-batch is under way from one device to the next, beside the copies above",
    ),
)

# Field of `Machine` -> field of `DeviceTraits`, which takes its place where devices differ.
_TRAITS = {
    "device_memory_bytes": "memory_bytes",
    "h2d_bytes_per_ms": "h2d_bytes_per_ms",
    "d2h_bytes_per_ms": "d2h_bytes_per_ms",
}


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine that the arguments of `add_pipeline` describe."""
    given = {name: value for _, name, *_ in _MACHINE if (value := getattr(args, name)) is not None}
    if args.machine is None:
        return Machine(args.num_devices, **given)
    machine = load_machine(args.machine, args.num_devices)
    own: dict[str, Any] = {_TRAITS[name]: value for name, value in given.items() if name in _TRAITS}
    return replace(machine, devices=tuple(replace(traits, **own) for traits in machine.devices), **given)


def load_machine(path: str, num_devices: int) -> Machine:
    """Read ``--machine``: the entry of a saved profile. One whose devices are all alike serves for any number."""
    text = read_text(path, "machine")
    try:
        document = json.loads(text)["machine"]
        alike = {trait: document[name] for name, trait in _TRAITS.items() if name in document}
        devices = tuple(DeviceTraits(**{**alike, **own}) for own in document.get("devices", ()))
        shared = tuple(SharedLink(**link) for link in document.get("shared_links", ()))
        machine = Machine(**{**document, "devices": devices, "shared_links": shared})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} holds no machine ({error}): RoundPipeStrategy(save_profile=...) writes one."
        ) from error
    if machine.num_devices == num_devices:
        return machine
    if devices or shared:
        raise ValueError(
            f"the machine of {path} has {machine.num_devices} devices that differ, and --devices is {num_devices}: "
            "give their number, or the machine by its other options."
        )
    return replace(machine, num_devices=num_devices)


def round_size_of(args: argparse.Namespace) -> int:
    """``--round-size``, or two per device: the command does not know what room the host of a training has."""
    round_size: int = min(args.round_size or 2 * args.num_devices, args.microbatches)
    return round_size


@contextlib.contextmanager
def _file_errors(what: str, remedy: str) -> Iterator[None]:
    """Turn an OSError into a ValueError, which is the user's to mend, with its reason in words."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot {what} ({error.strerror}): {remedy}.") from error


def load_profile(path: str) -> CostProfile:
    """Read ``--profile``."""
    with _file_errors(f"read the profile {path}", "RoundPipeStrategy(save_profile=...) writes one"):
        profile = CostProfile.load(path)
    if not profile.calls:
        raise ValueError(f"the profile {path} has no calls: there is nothing to plan.")
    return profile


def write_text(path: str, text: str) -> None:
    """Write a file that an option asked for."""
    with _file_errors(f"write {path}", "choose another place"):
        files.write_text(path, text)


def read_text(path: str, what: str) -> str:
    """Read a file that the user named."""
    try:
        with _file_errors(f"read the {what} {path}", "check the path"):
            return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the {what} {path} is not text: is it compressed, or another file?") from error


def check_picture_path(path: str | None) -> None:
    """Check ``--png`` before the work is done."""
    if path is not None:
        try:
            check_picture(path)
        except ModuleNotFoundError as error:
            raise ValueError(str(error)) from error


def save_picture(path: str, panels: Sequence[tuple[str, Timeline]]) -> None:
    """Draw timelines with their titles, one above the other; `check_picture_path` comes first."""
    with _file_errors(f"write {path}", "choose another place"):
        draw_timelines(panels, path)
