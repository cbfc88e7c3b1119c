"""``roundpipe doctor``: what this machine has for a training, what is wrong with it, and what to do about it.

``machine_facts`` asks the machine, without judging. A check reads facts, and says what is wrong with them: it knows of
nothing else, and passes over facts that are not known.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lightning_roundpipe.planning.quantities import format_bandwidth, format_bytes

from .arguments import Subparsers, add_command, add_json
from .machine_facts import PROBES, collect
from .output import Table, show

_EXAMPLES = """
examples:
  roundpipe doctor
  roundpipe doctor --json

The status is 1 if something stops training or leaves GPUs out, and 0 otherwise. With GPUs it takes some seconds more:
their links are measured as a training measures them.
"""
_LEAST_SHARED_BYTES = 2**30
_MOST_CHANGES = 3
Facts = Mapping[str, Any]
Reasons = Mapping[str, str]


class Finding(NamedTuple):
    """Something that is wrong.

    Attributes:
        stops: Whether training does not start, or leaves GPUs out.
        what, value, remedy: What is wrong, the value that says so, and what to do.
    """

    stops: bool
    what: str
    value: str
    remedy: str


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    parser = add_command(
        subparsers,
        "doctor",
        "what this machine has for a training, and what is wrong with it",
        "Versions, GPUs and their links, memory and its limits, a remedy for what is wrong, and a verdict.",
        _EXAMPLES,
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Ask, judge and print."""
    facts, unknown = collect(PROBES)
    found = findings(facts, unknown)
    judged = [finding._asdict() for finding in found]
    document = {"command": "doctor", "facts": facts, "unknown": unknown, "findings": judged}
    document["verdict"] = verdict(found)
    show(document, *_report(facts, unknown, found), as_json=args.json)
    return int(any(finding.stops for finding in found))


# --- what is wrong -------------------------------------------------------------------------------------------------


def findings(facts: Facts, unknown: Reasons) -> list[Finding]:
    """Judge the facts that are known, and why others are not; what stops training comes first."""
    return sorted((finding for check in _CHECKS for finding in check(facts, unknown)), key=lambda f: not f.stops)


def verdict(found: list[Finding]) -> str:
    """Say in one line whether this machine is ready, and else the first things to change."""
    if not found:
        return "ready."
    level = "not ready before you" if found[0].stops else "ready, and better if you"
    remedies = list(dict.fromkeys(finding.remedy for finding in found))
    things = "; ".join(remedies[:_MOST_CHANGES])
    left_out = f" (the first {_MOST_CHANGES} of {len(remedies)})" if len(remedies) > _MOST_CHANGES else ""
    return f"{level}: {things}{left_out}."


def _libraries(facts: Facts, unknown: Reasons) -> Iterator[Finding]:
    versions = facts.get("versions") or {}
    required = facts.get("requirements") or {} if versions else {}
    for name, least in required.items():
        if (installed := versions.get(name)) is None:
            yield Finding(True, f"{name} is not installed", "none", f"pip install {name}")
        elif _numbers(installed) < _numbers(least):
            yield Finding(True, f"{name} is too old", installed, f"pip install '{name}>={least}'")
    if "package_import" in unknown and None not in (versions.get(name) for name in required):
        remedy = "install torch and Lightning again, of versions that go together"
        yield Finding(True, "the package cannot be imported", unknown["package_import"], remedy)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def _gpus_left_out(facts: Facts, unknown: Reasons) -> Iterator[Finding]:
    """GPUs that the driver has and torch does not use, or cannot."""
    boards, build = facts.get("boards"), facts.get("torch_build")
    if "gpus" in unknown and build is not None:
        yield Finding(True, "torch fails to use a GPU", unknown["gpus"], "look at nvidia-smi; restart the machine")
    elif boards and build is not None and not facts.get("gpus"):
        hidden = (facts.get("environment") or {}).get("CUDA_VISIBLE_DEVICES")
        if build["cuda"] is None:
            what, value, remedy = "has no CUDA for", build["version"], "install a build of torch with CUDA"
        elif hidden is not None:
            what, value, remedy = "may not see", f"CUDA_VISIBLE_DEVICES={hidden}", "unset CUDA_VISIBLE_DEVICES"
        else:
            what, value = "does not see", f"driver {boards[0]['driver']}, torch with CUDA {build['cuda']}"
            remedy = "update the driver, or install a torch for an older CUDA"
        yield Finding(True, f"torch {what} {', '.join(board['name'] for board in boards)}", value, remedy)
    for gpu in facts.get("gpus") or ():
        if gpu["error"] is not None:
            remedy = f"install a torch with kernels for {gpu.get('name', 'it')}, or leave it out (CUDA_VISIBLE_DEVICES)"
            yield Finding(True, f"{gpu['device']} does not compute", gpu["error"], remedy)


def _gpus_slowed(facts: Facts, unknown: Reasons) -> Iterator[Finding]:
    gpus, locking = facts.get("gpus") or (), facts.get("page_locking")
    for gpu in gpus:
        if gpu["free_bytes"] < gpu["memory_bytes"] / 2:
            value = f"{format_bytes(gpu['free_bytes'])} of {format_bytes(gpu['memory_bytes'])} are free"
            yield Finding(False, f"{gpu['device']} is in use", value, "end the processes that nvidia-smi shows")
    for board in facts.get("boards") or ():
        lanes, most = board["lanes"], board["most_lanes"]
        if lanes.isdigit() and most.isdigit() and int(lanes) < int(most):
            remedy = "move it to a slot with all lanes: weights travel over them in every step"
            yield Finding(False, f"{board['name']} has fewer lanes than it could", f"x{lanes} of x{most}", remedy)
    for name in ("links", "page_locking"):
        if gpus and name in unknown:
            yield Finding(False, f"{_label(name)}: not to be found out", unknown[name], "free memory of the GPUs")
    if (facts.get("environment") or {}).get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        remedy = "unset CUDA_LAUNCH_BLOCKING"
        yield Finding(False, "nothing overlaps with what a GPU computes", "CUDA_LAUNCH_BLOCKING=1", remedy)
    if not gpus or locking is None or locking["tried_bytes"] is None:
        return
    limit, total = locking["limit_bytes"], (facts.get("host_memory") or {}).get("total_bytes")
    remedy = "ulimit -l unlimited, or in a container --ulimit memlock=-1"
    if locking["error"]:
        value = f"error {locking['error']}, limit {_text(limit, 'limit_bytes')}"
        yield Finding(False, "memory cannot be page-locked: copies are slow", value, remedy)
    # If more than the limit was locked, it does not hold for what this driver locks.
    elif limit is not None and total is not None and locking["tried_bytes"] <= limit < total:
        yield Finding(False, "less memory may be page-locked than there is", format_bytes(limit), remedy)


def _host(facts: Facts, unknown: Reasons) -> Iterator[Finding]:
    memory = facts.get("host_memory") or {"total_bytes": None, "limit_bytes": None, "shared_bytes": None}
    total, limit, shared = (memory[f"{name}_bytes"] for name in ("total", "limit", "shared"))
    if limit is not None and total is not None and limit < total:
        remedy = "raise the container's limit (--memory), or plan with it (roundpipe estimate --host-memory)"
        value = f"{format_bytes(limit)} of {format_bytes(total)}"
        yield Finding(False, "the container may use a part of the memory only", value, remedy)
    if shared is not None and shared < _LEAST_SHARED_BYTES:
        remedy = "start a container with --shm-size=8g; else num_workers=0 in DataLoaders"
        yield Finding(False, "there is little shared memory", f"{format_bytes(shared)} are free", remedy)
    cores = facts.get("cores") or {"threads": 1, "usable": 1, "is_spread": None}
    if cores["is_spread"] is False:
        remedy = "start trainings with numactl --interleave=all"
        yield Finding(False, "weights may all lie on one NUMA node", f"{cores['numa_nodes']} nodes", remedy)
    if 2 * cores["threads"] <= cores["usable"]:
        value = f"{cores['threads']} threads on {cores['usable']} cores"
        yield Finding(False, "the update of weights leaves cores idle", value, "unset OMP_NUM_THREADS, or raise it")


def _features(facts: Facts, unknown: Reasons) -> Iterator[Finding]:
    build, compilers = facts.get("torch_build"), facts.get("compilers")
    if "fused_adamw" in unknown and build is not None:
        remedy = "install a newer torch, or leave fused=True out"
        yield Finding(False, "AdamW(fused=True) does not run on the host", unknown["fused_adamw"], remedy)
    if build is not None and "gloo" not in build["backends"]:
        remedy = "install a build of torch with gloo, or train in one process"
        yield Finding(False, "several processes cannot train together", f"backends: {_text(build['backends'])}", remedy)
    if compilers is not None and compilers["host"] is None:
        remedy = "install g++ or clang++, or leave compile_units=True out"
        yield Finding(False, "torch.compile has no C++ compiler", "none of CXX, g++, clang++", remedy)
    if compilers is not None and facts.get("gpus") and not compilers["triton"]:
        yield Finding(False, "torch.compile has no Triton", "none", "install triton, or leave compile_units=True out")


_CHECKS = (_libraries, _gpus_left_out, _gpus_slowed, _host, _features)


# --- what is printed -----------------------------------------------------------------------------------------------


def _report(facts: Facts, unknown: Reasons, found: list[Finding]) -> Iterator[str | Table]:
    rows = []
    for name in (probe.__name__ for probe in PROBES):
        lines = [f"not known ({unknown[name]})"] if name in unknown else _text(facts[name]).split("\n")
        rows += [(label, line) for label, line in zip([_label(name), *[""] * len(lines)], lines, strict=False)]
    yield Table("", ("fact", "value"), rows, num_text=2)
    for finding in found:
        level = "STOPS TRAINING" if finding.stops else "WARNING"
        yield f"{level}: {finding.what} ({finding.value}).\n  Remedy: {finding.remedy}."
    if facts.get("gpus") == []:
        yield "There is no GPU to train on: devices are virtual, on the cores of the host."
    yield "Are results wrong? RoundPipeStrategy(verify=2) compares two training steps with plain autograd."
    yield f"Verdict: {verdict(found)}"


def _label(name: str) -> str:
    return name if name.isupper() else re.sub(r"^is_|_bytes(_per_ms)?$", "", name).replace("_", " ")


def _text(value: Any, name: str = "") -> str:
    """A fact for people, without what is not known of it; a line for each entry of a list of entries."""
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(
            f"{_label(key)} {_text(entry, key)}" for key, entry in value.items() if entry not in (None, [])
        )
    if isinstance(value, list):
        return ("\n" if isinstance(value[0], (dict, list)) else ", ").join(_text(entry, name) for entry in value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_bandwidth(value) if name.endswith("_bytes_per_ms") else str(value)
