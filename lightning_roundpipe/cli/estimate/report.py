"""What ``roundpipe estimate`` finds out about a workload, as numbers for JSON and as text for people."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_roundpipe.planning.quantities import format_bytes, format_share

from ..output import Table
from .assumptions import assumed_table
from .feasibility import (
    Cluster,
    choose_microbatch_size,
    device_needs,
    fits_device,
    fits_host,
    host_bytes,
    largest_seq_len,
    largest_that,
    speed,
)
from .workload import Workload

_TITLES = {"full": "Full fine-tuning", "lora": "LoRA"}


def assess(workload: Workload, cluster: Cluster, microbatch_size: int | None) -> dict[str, Any]:
    """Return the figures of one way to train, with a key for each paragraph of the report; a `microbatch_size` of None
    is to be chosen."""
    size = microbatch_size or choose_microbatch_size(workload, cluster)
    call, total = device_needs(workload, cluster, size)
    host = host_bytes(workload, cluster, size)
    problems = []
    if total > cluster.device_bytes:
        needed = total - cluster.device_bytes + workload.gpu.memory_bytes
        helps = _helps(workload, cluster, size, fits_device, f"GPUs with more than {format_bytes(needed)}")
        problems.append(_problem(f"device memory for {call.name}", total, cluster.device_bytes, helps))
    if cluster.host_bytes is not None and sum(host.values()) > cluster.host_bytes:
        needed = sum(host.values())
        more = f"{format_bytes(needed - cluster.host_bytes)} more host memory"
        helps = _helps(workload, cluster, size, fits_host, more)
        problems.append(_problem("host memory", needed, cluster.host_bytes, helps))
    speeds = {} if problems else {pace.name: speed(workload, cluster, size, pace) for pace in cluster.paces}
    longest, bound = largest_seq_len(workload, cluster)
    return {
        "lora_rank": workload.lora_rank,
        "trained_weights": workload.num_trained,
        "fits": not problems,
        "problems": problems,
        "microbatch_size": size,
        "speed": speeds or None,
        "largest_seq_len": longest,
        "largest_seq_len_bound_by": bound,
        "device_memory": {
            "available": cluster.device_bytes,
            "largest_call": call.name,
            "weights": call.weight_bytes,
            "gradients": call.gradient_bytes,
            "activations": total - call.weight_bytes - call.gradient_bytes,
            "total": total,
            "peak_of_plan": max((rate["device_memory_bytes"] for rate in speeds.values()), default=None),
        },
        "host_memory": {"available": cluster.host_bytes, **host, "total": sum(host.values())},
    }


def _problem(what: str, needed: int, available: int, helps: list[str]) -> dict[str, Any]:
    """What is short, by how much, and what helps."""
    return {"what": what, "needed": needed, "available": available, "short_by": needed - available, "helps": helps}


def _helps(
    workload: Workload, cluster: Cluster, size: int, fits: Callable[[Workload, Cluster, int], bool], more: str
) -> list[str]:
    """Each of what would be enough by itself; `more` memory always is."""
    helps = []
    if smaller := largest_that(lambda count: fits(workload, cluster, count), size):
        helps.append(f"--microbatch-size {smaller}")
    elif smaller := largest_that(
        lambda count: fits(workload, replace(cluster, batch_size=count, accumulates=True), 1), cluster.batch_size
    ):
        helps.append(f"--batch-size {smaller} with gradient accumulation")
    elif longest := largest_that(lambda count: fits(replace(workload, seq_len=count), cluster, 1), workload.seq_len):
        helps.append(f"sequences of at most {longest:,} tokens")
    helps += _round_sizes(workload, cluster, size)
    if not workload.chunked_loss and fits(replace(workload, chunked_loss=True), cluster, size):
        helps.append("a loss in chunks (--chunked-loss)")
    if workload.lora_rank is None and fits(replace(workload, lora_rank=32), cluster, size):
        helps.append("LoRA")
    return [*helps, more]


def _round_sizes(workload: Workload, cluster: Cluster, size: int) -> list[str]:
    """One round for all has one set of gradients, small ones have fewer activations: what is enough, if any is."""

    def fits(count: int) -> bool:
        other = replace(cluster, round_size=count)
        return fits_device(workload, other, size) and fits_host(workload, other, size)

    everything = cluster.num_microbatches(size)
    count = everything if fits(everything) else largest_that(fits, cluster.round_size - 1)
    return [f"--round-size {count}"] if count else []


def report(document: dict[str, Any]) -> list[str | Table]:
    """Return the document for people."""
    model = document["model"]
    active = f" ({_billions(model['active_weights'])} active)" if model["active_weights"] != model["weights"] else ""
    heading = (
        f"{model['name']}: {_billions(model['weights'])} weights{active} in {model['layers']} layers, on "
        f"{document['devices']} x {document['gpu']['name']} ({format_bytes(document['gpu']['memory_bytes'])} each), "
        f"{document['dtype']}, {document['batch_size']} sequences of {document['seq_len']:,} tokens per step"
    )
    methods = document["methods"]
    verdicts = [_verdict(_TITLES[name], method, document["host_reserve_bytes"]) for name, method in methods.items()]
    parts: list[str | Table] = [heading, "\n".join(verdicts)]
    if any(method["speed"] for method in methods.values()):
        parts.append(_speed_table(methods))
    parts += [_device_table(document), _host_table(document), assumed_table(document["assumed"], document["gpu"])]
    return [*parts, "Assumptions\n" + "\n".join(f"- {line}" for line in document["assumptions"])]


def _range(method: dict[str, Any]) -> str:
    slow, fast = (method["speed"][end]["tokens_per_s"] for end in ("slow", "fast"))
    return f"{_rounded(slow)} to {_rounded(fast)}"


def _verdict(title: str, method: dict[str, Any], host_reserve: int) -> str:
    if method["fits"]:
        host = method["host_memory"]
        to_have = math.ceil((host["total"] + host_reserve) / 2**30)  # so much is enough for --host-memory
        condition = f" a host with {to_have:,} GiB" if host["available"] is None else ""
        return (
            f"{title} fits{condition}: {_range(method)} tokens/s, sequences up to {method['largest_seq_len']:,} tokens."
        )
    reasons = [
        f"{problem['what']} is short by {format_bytes(problem['short_by'])} (needs {format_bytes(problem['needed'])}, "
        f"there are {format_bytes(problem['available'])}; what helps: {', or '.join(problem['helps'])})"
        for problem in method["problems"]
    ]
    return f"{title} does not fit: {'; and '.join(reasons)}."


def _speed_table(methods: dict[str, Any]) -> Table:
    rows = []
    for name, method in methods.items():
        for end, rate in (method["speed"] or {}).items():
            rows.append(
                (
                    _TITLES[name],
                    end,
                    rate["bound_by"],
                    f"{rate['num_microbatches']} x {method['microbatch_size']}",
                    f"{rate['step_ms'] / 1e3:,.1f} s",
                    format_share(rate["bubble_ratio"]),
                    _rounded(rate["tokens_per_s"]),
                )
            )
    columns = ("speed", "end", "bound by", "micro-batches", "step", "bubble", "tokens/s")
    return Table("Speed (number of micro-batches x sequences in each)", columns, rows, num_text=3)


def _device_table(document: dict[str, Any]) -> Table:
    memories = [method["device_memory"] for method in document["methods"].values()]
    rows = [("largest call", *(memory["largest_call"] for memory in memories))]
    rows += [
        (key, *(format_bytes(memory[key]) for memory in memories))
        for key in ("weights", "gradients", "activations", "total")
    ]
    peaks = [memory["peak_of_plan"] for memory in memories]
    rows.append(("peak of the plan", *("-" if peak is None else format_bytes(peak) for peak in peaks)))
    rows.append(("longest sequence", *(f"{m['largest_seq_len']:,}" for m in document["methods"].values())))
    rows.append(("its limit", *(m["largest_seq_len_bound_by"] for m in document["methods"].values())))
    reserve = format_bytes(document["device_reserve_bytes"])
    title = f"Device memory (there are {format_bytes(memories[0]['available'])} after {reserve} for CUDA)"
    return Table(title, ("device", *_TITLES.values()), rows)


def _host_table(document: dict[str, Any]) -> Table:
    memories = [method["host_memory"] for method in document["methods"].values()]
    rows = [(key, *(format_bytes(memory[key]) for memory in memories)) for key in memories[0] if key != "available"]
    available = memories[0]["available"]
    reserve = format_bytes(document["host_reserve_bytes"])
    there = f"there are {format_bytes(available)} after" if available is not None else "besides"
    return Table(f"Host memory ({there} {reserve} for the system)", ("host", *_TITLES.values()), rows)


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.2f} million"


def _rounded(rate: float) -> str:
    """Three digits: the range is too wide for more."""
    return f"{float(f'{rate:.3g}'):,.0f}" if rate >= 10 else f"{rate:.2g}"
