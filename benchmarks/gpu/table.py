"""All results as one table, and what was not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .results import INCOMPLETE, MEASURED

_GIB = 2**30


def table(stages: Mapping[str, dict[str, Any] | None]) -> str:
    """Of the files of all stages; a stage without a file was not run.

    Returns:
        A table in Markdown, and a list of what is missing in it, with the reasons.
    """
    rows, missing = [], []
    facts = ((stages.get("facts") or {}).get("steps") or {}).get("copies", {}).get("figures") or {}
    for stage, content in stages.items():
        if content is None:
            missing.append(f"- {stage}: not run")
            continue
        for name, record in content["steps"].items():
            if record["state"] in (MEASURED, INCOMPLETE):
                rows.append(f"| {stage} | {name} | {'; '.join(_shown(record['figures'], facts))} |")
            if record["state"] != MEASURED:
                missing.append(f"- {stage}, {name}: {record['state']}: {record['reason']}")
    lines = [_title(list(filter(None, stages.values()))), "", "| stage | what | found |", "|---|---|---|", *rows]
    if missing:
        lines += ["", "Not run, or not to the end:", *missing]
    return "\n".join(lines)


def _title(contents: Sequence[dict[str, Any]]) -> str:
    if not contents:
        return "Nothing was measured."
    newest = max(contents, key=lambda content: str(content["date"]))
    machine = newest["machine"]
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"] or ()) or "no GPU"
    parts = [gpus, f"torch {machine['torch']}", f"Lightning {machine['lightning']}", f"commit {newest['commit']}"]
    return "; ".join([*parts, newest["date"], *filter(None, [newest["note"]])])


def _shown(figures: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    """What is worth a look: of a training and of tests what is compared, of all else everything."""
    if "losses" in figures:
        yield from _training(figures, facts)
    elif "failures" in figures:
        yield f"{figures['passed']} passed, {figures['failed']} failed, {figures['skipped']} skipped"
        yield from (f"failed: {name}" for name in figures["failures"])
        yield from (f"not ended: {name}" for name in figures["began"])
    else:
        yield from _flat("", figures)


def _training(figures: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[str]:
    def median(name: str) -> float | None:
        found = figures.get(name)
        return None if found is None else float(found["median"])

    device = figures.get("device") or {}
    peak = figures.get("peak_device_bytes") or {}
    lock = figures.get("interpreter_lock") or {}
    link = facts.get("256 MiB, page-locked", {})
    yield from _known("{:.0f} tokens/s", median("tokens_per_second"))
    yield from _known("{:.4g} s per step", median("seconds_per_step"))
    yield from _known("first {:.3g} s", figures.get("first_step_s"))
    yield from _known("{:.3g} TFLOP/s", median("model_tflops"))
    yield from _known("peak {:.1f} GiB on the GPU", peak.get("reserved"), _GIB)
    yield from _known("{:.1f} GiB on the host", figures.get("peak_host_bytes"), _GIB)
    yield from _known("{:.0f} us per call", median("host_us_per_call"))
    yield from _known("lock taken {:.0%}", lock.get("share_taken"))
    yield from _known("GPU busy {:.0%}", device.get("busy_share"))
    for kind, copies in device.get("copies", {}).items():
        of = _known(" of {:.1f}", link.get(f"{kind.split()[0]}_gb_per_s"))
        yield from _known(f"{kind} {{:.1f}}{''.join(of)} GB/s", copies["gb_per_s"])
    yield from _known("pageable {:.1f} MiB", device.get("pageable_bytes"), 2**20)
    timeline = figures.get("timeline") or {}
    yield from _known("busy by stamps {:.0%}", timeline.get("busy_share"))
    yield from _known("{:.0%} of transfers under compute", timeline.get("transfers_under_compute"))


def _known(text: str, value: float | None, unit: float = 1.0) -> Iterator[str]:
    if value is not None:
        yield text.format(value / unit)


def _flat(prefix: str, figures: Mapping[str, Any]) -> Iterator[str]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}: ", value)
        elif value is not None:
            yield f"{prefix}{name} {value:.4g}" if isinstance(value, float) else f"{prefix}{name} {value}"
