"""``roundpipe estimate``: would a model train on a machine, how fast, and with how long sequences.

``resolve`` finds a model's configuration, ``models`` reads its shape or ``built`` builds the model, ``workload`` turns
shape and GPU (``gpus``) into costs, ``feasibility`` says whether and how fast it runs, ``report`` and ``assumptions``
say so in words.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace

from lightning_roundpipe.planning.quantities import parse_bandwidth, parse_bytes

from ..arguments import (
    Subparsers,
    add_command,
    add_json,
    add_no_split,
    add_option,
    parse_count,
    parse_devices,
    parse_tflops,
)
from ..memory import BYTES_PER_WEIGHT
from ..output import show
from .assumptions import assumed, assumptions
from .feasibility import Cluster
from .gpus import Gpu, find_gpu
from .report import assess, report
from .resolve import load_shape
from .workload import FAST, SLOW, Pace, Workload

_DESCRIPTION = """
Say, from the model's config.json alone, whether full fine-tuning and LoRA fit on a machine, what speed to expect, and
how long sequences may become. Speeds are a range, because they depend on kernels and hosts: see the assumptions that
are printed with them.
"""
_EXAMPLES = """
examples:
  roundpipe estimate --model qwen3-8b --gpu rtx4090 --devices 8 --seq-len 4096 --host-memory 512GB
  roundpipe estimate --model qwen3-32b --gpu rtx5090 --devices 2 --seq-len 2048 --host-memory 256GiB
  roundpipe estimate --model config.json --gpu a100-80 --devices 4 --seq-len 8192 --batch-size 128 --chunked-loss
  roundpipe estimate --model config.json --gpu custom --gpu-memory 24GiB --tflops 100 --gpu-bandwidth 900GB/s \\
      --pcie 12GB/s --seq-len 2048
"""
# What CUDA, cuBLAS and the allocator's rounding take of a device, and the system and data loaders of a host.
_DEVICE_RESERVE = (2**30, 0.05)
_HOST_RESERVE = 16 * 2**30


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's arguments."""
    summary = "say whether a model fits on a machine, how fast, with how long sequences"
    parser = add_command(subparsers, "estimate", summary, _DESCRIPTION, _EXAMPLES)
    models = "config.json, a folder with one, or a name: of the package (qwen3-32b) or of the Hugging Face cache"
    parser.add_argument("--model", required=True, metavar="MODEL", help=models)
    add_option(parser, "--seq-len", parse_count, "T", "tokens per sequence", required=True)
    add_option(parser, "--batch-size", parse_count, "B", "sequences per optimizer step (default: 64)", default=64)
    sequences = "sequences per micro-batch, or auto: as many as fit and leave two micro-batches per device (default)"
    add_option(parser, "--microbatch-size", _parse_microbatch_size, "b", sequences)
    add_option(parser, "--round-size", parse_count, "R", "micro-batches per round (default: two per device)")
    add_no_split(parser)
    add_option(parser, "--lora-rank", parse_count, "r", "rank of the adapters (default: 32)", default=32)
    dtypes = tuple(BYTES_PER_WEIGHT)
    parser.add_argument("--dtype", choices=dtypes, default="bf16", help="type to compute in (default: bf16)")
    fp16 = "with --dtype fp16: torch.backends.cuda.matmul.allow_fp16_accumulation is on (GeForce: twice the peak)"
    parser.add_argument("--fp16-accumulation", action="store_true", help=fp16)
    chunks = "head and loss run in chunks (Liger), logits are never whole"
    parser.add_argument("--chunked-loss", action="store_true", help=chunks)
    updates = "asynchronous: updates overlap the next step, which uses weights one step old, as in the paper"
    kinds = ("synchronous", "asynchronous")
    parser.add_argument("--optimizer", choices=kinds, default="synchronous", help=updates)
    machine = parser.add_argument_group("machine")
    machine.add_argument("--gpu", required=True, metavar="NAME", help="such as rtx4090, a100-80, h200; or custom")
    add_option(machine, "--devices", parse_devices, "N", "number of GPUs (default: 1)", default=1)
    add_option(machine, "--host-memory", parse_bytes, "SIZE", "such as 800GB (default: no limit, only said)")
    copies = "what copies from and to all GPUs reach together, and the optimizer on the host, where it was measured"
    add_option(machine, "--host-bandwidth", parse_bandwidth, "RATE", copies)
    add_option(machine, "--gpu-memory", parse_bytes, "SIZE", "in place of the table's")
    add_option(machine, "--gpu-bandwidth", parse_bandwidth, "RATE", "of the GPU's memory, in place of the table's")
    add_option(machine, "--tflops", parse_tflops, "X", "dense peak at --dtype, in place of the table's")
    add_option(machine, "--pcie", parse_bandwidth, "RATE", "what a copy reaches, each way, such as 12GB/s")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Estimate and print."""
    if args.fp16_accumulation and args.dtype != "fp16":
        raise ValueError(f"--fp16-accumulation is for --dtype fp16, got {args.dtype}: leave one of the two out.")
    if args.microbatch_size is not None and args.microbatch_size > args.batch_size:
        raise ValueError(
            f"--microbatch-size {args.microbatch_size} is more than --batch-size {args.batch_size}: lower the one or "
            "raise the other."
        )
    gpu = _gpu_of(args)
    workload = Workload(
        load_shape(args.model),
        gpu,
        args.seq_len,
        dtype=args.dtype,
        fp16_accumulation=args.fp16_accumulation,
        chunked_loss=args.chunked_loss,
    )
    lora = replace(workload, lora_rank=args.lora_rank)
    shape = workload.shape
    cluster = _cluster_of(args, gpu)
    document = {
        "command": "estimate",
        "model": {
            "name": shape.name,
            "model_type": shape.model_type,
            "weights": shape.num_weights,
            "active_weights": shape.num_active,
            "layers": len(shape.layers),
            "max_length": shape.max_length,
        },
        "gpu": asdict(gpu),
        "devices": args.devices,
        "seq_len": args.seq_len,
        "batch_size": args.batch_size,
        "round_size": cluster.round_size,
        "dtype": args.dtype,
        "optimizer": args.optimizer,
        "device_reserve_bytes": gpu.memory_bytes - cluster.device_bytes,
        "host_reserve_bytes": _HOST_RESERVE,
        "host_memory_bytes": args.host_memory,
        "methods": {
            name: assess(method, cluster, args.microbatch_size) for name, method in (("full", workload), ("lora", lora))
        },
        "assumed": assumed(lora, cluster),
        "assumptions": assumptions(lora, cluster),
    }
    show(document, *report(document), as_json=args.json)
    return 0


def _gpu_of(args: argparse.Namespace) -> Gpu:
    """The GPU of the table, with the figures that the user gives in place of its own; for "custom" all of them."""
    given = {
        "--gpu-memory": args.gpu_memory,
        "--tflops": args.tflops,
        "--gpu-bandwidth": args.gpu_bandwidth,
        "--pcie": args.pcie,
    }
    # It is the peak at --dtype; tables give that of the 16-bit types, twice that of fp32 (TF32). 0 if it is not given.
    tflops = (args.tflops or 0.0) * BYTES_PER_WEIGHT[args.dtype] / 2
    if args.gpu == "custom":
        if missing := [option for option, value in given.items() if value is None]:
            raise ValueError(f"--gpu custom lacks {', '.join(missing)}: add what its data sheet says.")
        return Gpu("custom", args.gpu_memory, tflops, tflops, args.gpu_bandwidth, args.pcie)
    gpu = find_gpu(args.gpu)
    return replace(
        gpu,
        memory_bytes=args.gpu_memory or gpu.memory_bytes,
        tflops=tflops or gpu.tflops,
        fp16_accumulate_tflops=tflops or gpu.fp16_accumulate_tflops,
        bytes_per_ms=args.gpu_bandwidth or gpu.bytes_per_ms,
        pcie_bytes_per_ms=args.pcie or gpu.pcie_bytes_per_ms,
    )


def _cluster_of(args: argparse.Namespace, gpu: Gpu) -> Cluster:
    """The machine."""
    fixed, share = _DEVICE_RESERVE
    device_bytes = int(gpu.memory_bytes * (1 - share)) - fixed
    if device_bytes <= 0:
        raise ValueError(f"--gpu-memory {args.gpu_memory} bytes is less than what CUDA itself takes: pass more.")
    return Cluster(
        args.devices,
        device_bytes,
        None if args.host_memory is None else max(0, args.host_memory - _HOST_RESERVE),
        args.batch_size,
        args.round_size or 2 * args.devices,
        optimizer=args.optimizer,
        may_split=args.may_split,
        paces=(_known_better(SLOW, gpu, args), _known_better(FAST, gpu, args)),
    )


def _known_better(pace: Pace, gpu: Gpu, args: argparse.Namespace) -> Pace:
    """The pace with figures of the user in place of ranges: of a link, and of the host; see [Note: one host]."""
    if args.pcie is not None:
        pace = replace(pace, pcie=1.0)
    if args.host_bandwidth is not None:
        return replace(pace, copies_bytes_per_ms=args.host_bandwidth, host_bytes_per_ms=args.host_bandwidth)
    return replace(pace, copies_bytes_per_ms=max(pace.copies_bytes_per_ms, gpu.pcie_bytes_per_ms * pace.pcie))


def _parse_microbatch_size(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return parse_count(text)
    except ValueError as error:
        raise ValueError(f"{error} Or write auto.") from error
