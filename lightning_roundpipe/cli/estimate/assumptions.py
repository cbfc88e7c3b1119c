"""What the figures of ``roundpipe estimate`` rest on: numbers for JSON, a table and sentences for people."""

from __future__ import annotations

from typing import Any

from lightning_roundpipe.planning.quantities import format_bandwidth, format_bytes

from ..output import Table
from .feasibility import Cluster
from .workload import LOSS_CHUNK, Workload, logit_bytes


def assumed(workload: Workload, cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Return what GPUs, links and host are taken to reach, at the slow and at the fast end: TFLOP/s, bytes per ms."""
    gpu = workload.gpu
    has_experts = any(layer.num_experts for layer in workload.shape.layers)
    return {
        pace.name: {
            "products_tflops": workload.peak_tflops * pace.matmul,
            "expert_products_tflops": workload.peak_tflops * pace.experts if has_experts else None,
            "attention_tflops": workload.attention_peak_tflops * pace.attention,
            "peak_tflops": workload.peak_tflops,
            "attention_peak_tflops": workload.attention_peak_tflops,
            "device_bytes_per_ms": gpu.bytes_per_ms * pace.memory,
            "link_bytes_per_ms": gpu.pcie_bytes_per_ms * pace.pcie,
            "copies_bytes_per_ms": pace.copies_bytes_per_ms,
            "optimizer_bytes_per_ms": pace.host_bytes_per_ms,
        }
        for pace in cluster.paces
    }


def assumed_table(ends: dict[str, dict[str, Any]], gpu: dict[str, Any]) -> Table:
    """Return `assumed` for people; `gpu` is the GPU as a dictionary."""
    slow, fast = ends["slow"], ends["fast"]

    def tflops(title: str, key: str, peak: str) -> tuple[str, ...]:
        cells = [f"{end[key]:.0f} TFLOP/s ({end[key] / end[peak]:.0%})" for end in (slow, fast)]
        return (title, *cells, f"{slow[peak]:g} TFLOP/s")

    def rate(title: str, key: str, limit: float | None = None) -> tuple[str, ...]:
        cells = [format_bandwidth(end[key]) for end in (slow, fast)]
        return (title, *cells, "" if limit is None else format_bandwidth(limit))

    rows = [tflops("GPU, matrix products", "products_tflops", "peak_tflops")]
    if slow["expert_products_tflops"] is not None:
        rows.append(tflops("GPU, products of routed experts", "expert_products_tflops", "peak_tflops"))
    rows += [
        tflops("GPU, attention", "attention_tflops", "attention_peak_tflops"),
        rate("GPU memory", "device_bytes_per_ms", gpu["bytes_per_ms"]),
        rate("link of one GPU, each way", "link_bytes_per_ms", gpu["pcie_bytes_per_ms"]),
        rate("host, copies of all GPUs together", "copies_bytes_per_ms"),
        rate("host memory, for the optimizer", "optimizer_bytes_per_ms"),
    ]
    return Table("Assumed to be reached", ("what", "slow end", "fast end", "data sheet"), rows)


def assumptions(workload: Workload, cluster: Cluster) -> list[str]:
    """Return what the figures rest on beside `assumed`, one paragraph each: speeds, then memory."""
    (slow, fast), shape = cluster.paces, workload.shape
    windows = {layer.window for layer in shape.layers if layer.window}
    attended = "half of the square of a sequence"
    attended += f" (in some layers a window of {min(windows):,} tokens)" if windows else ""
    accumulation = "fp16" if workload.fp16_accumulation else "fp32"
    per_token = format_bytes(shape.vocab * logit_bytes(workload.element_bytes))
    loss = f"The loss takes {per_token} per token for logits and their gradients; --chunked-loss says that it does not."
    if workload.chunked_loss:
        loss = f"Head and loss run in chunks of {LOSS_CHUNK:,} tokens."
    built = (
        f"The type {shape.model_type} has no formulas: transformers built the model without its weights. Their number "
        "is exact; every layer is taken to run on all tokens, with attention and an MLP of its widths, every model to "
        "have a head."
    )
    length = f" The model is configured for {shape.max_length:,}." if shape.max_length else ""
    return [
        "Where two figures stand side by side, the slow end of the range takes the first, the fast end the second.",
        f"Matrix products accumulate in {accumulation}, attention in fp32; attention keeps no scores and works on "
        f"{attended}. A backward takes twice the forward (frozen matrices: once), after a recomputed forward.",
        "Between the products move the bytes of plain Hugging Face code, or a third of them (fused kernels). A call "
        f"takes {slow.launch_ms} or {fast.launch_ms} ms or more.",
        "Copies hide behind the computation where they can. Those of all GPUs together reach, unless --host-bandwidth "
        "says it, what explains the RoundPipe paper's figures for its two machines (PCIe 4.0), or what one link "
        "reaches, if that is more.",
        f"AdamW on the host moves {slow.optimizer_bytes} or {fast.optimizer_bytes} bytes per trained weight (one "
        f"operator after the other, or fused); it is {cluster.optimizer}.",
        f"{format_bytes(workload.gpu.memory_bytes - cluster.device_bytes)} of a GPU go to CUDA and to the allocator. "
        "Inputs and outputs of a call are there twice, for the copies under way.",
        "The host keeps fp32 masters and gradients (two sets where a step has several rounds), AdamW's two moments and "
        "a working copy of what is trained, one copy of what is frozen, and the inputs of all layers for up to "
        f"{2 * cluster.round_size} micro-batches, in fp32 where weights are fp32 masters.",
        f"LoRA has rank {workload.lora_rank} on the matrices of attention and dense MLP; routed experts are frozen.",
        loss,
        f"The longest sequence is an upper limit, with one sequence per micro-batch.{length}",
        *([built] if shape.is_built else []),
    ]
