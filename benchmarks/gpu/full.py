"""Training all weights of a model that does not fit, or adapters, beside other ways to do it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import processes
from .contenders import CONTENDERS
from .measuring import Job
from .models import FULL, LORA, TINY, Size
from .results import Options, Progress, Step

METHOD = """
A Llama of 3.4 billion weights (lora: of 13 billion, frozen, in bf16, with adapters of rank 16 by peft), made by
transformers from random numbers, trained on random tokens with AdamW, bf16-mixed, layers recomputed in the backward.
Every contender trains on the same tokens per optimizer step, in a process of its own with a time limit, under a limit
of torch's allocator (cap_gib), but for resident, which has none. roundpipe: RoundPipeStrategy through the Trainer, the
defaults but for num_microbatches, and (full) again in rounds of two and of eight micro-batches; the others: plain loops
over the micro-batches. resident: model and optimizer on the GPU. fsdp2: fully_shard on one GPU with CPUOffloadPolicy.
deepspeed: ZeRO-3 with parameters and optimizer on the host.
roundpipe_library: the library of the paper's authors in bf16, whose weights are one update behind. The first step, and
two more, are not counted. seconds_per_step: optimizer included. model_tflops: products and attention, no recomputation.
host_us_per_call: CPU time of the threads that issue work (main, micro-batches, autograd's; the main thread's optimizer
included where it runs there) over forwards and backwards of units. interpreter_lock: see probes.LockSampler. device:
kernels and copies of one more step, by torch's profiler, ordinary (pageable) host memory apart from page-locked.
timeline: of the last step of the warm-up, by stamps of the device; kept_free_bytes is above 0 if the allocator has run
short until then ([Note: device memory] in devices/memory.py). first_step_s, setup_s: the first step, and what came
before it.
"""
_LIMIT_S = {"roundpipe": 180.0, "fsdp2": 180.0}
_LIMIT_OTHERS_S = 120.0


def steps(options: Options) -> list[Step]:
    """All weights."""
    variants = {f"roundpipe, round_size={size}": {"round_size": size} for size in (2, 8)}
    return _contenders(options, TINY if options.is_tiny else FULL, variants)


def lora_steps(options: Options) -> list[Step]:
    """Adapters."""
    return _contenders(options, replace(TINY, lora=True) if options.is_tiny else LORA)


def _contenders(options: Options, size: Size, variants: Mapping[str, Mapping[str, Any]] = {}) -> list[Step]:
    """One for each, with the sizes that the user wants.

    Args:
        variants: of roundpipe, by name: options of the strategy. They come last.
    """
    wanted = {"sequence": options.sequence, "rows": options.rows, "microbatches": options.microbatches}
    size = replace(size, **{name: value for name, value in wanted.items() if value is not None})
    trained: list[tuple[str, str, Mapping[str, Any]]] = [(name, name, {}) for name in CONTENDERS]
    trained += [(name, "roundpipe", chosen) for name, chosen in variants.items()]
    return [Step(step, functools.partial(_train, name, size, options, chosen)) for step, name, chosen in trained]


def _train(name: str, size: Size, options: Options, chosen: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    cap_bytes = None if name == "resident" else processes.limits(options)
    job = Job(name, size, is_tiny=options.is_tiny, cap_bytes=cap_bytes, steps=options.steps, options=chosen)
    return processes.train(job, progress, _LIMIT_S.get(name, _LIMIT_OTHERS_S))
