"""Whole steps on a pool, and everything that they give, to be compared bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_roundpipe.devices.pool import DevicePool
from tests.support.engine.lazy_link import cpu_pool
from tests.support.engine.partitions import two_calls_fused
from tests.support.engine.plain_loop import ROWS, WIDTH, Network
from tests.support.engine.steps import Steps

NUM_DEVICES, NUM_MICROBATCHES, NUM_CALLS = 2, 3, 4
FEATURES = frozenset({"buffers", "dropout", "skip", "tied"})


def batches() -> list[Any]:
    """Micro-batches that skip no unit."""
    rows = torch.randn(ROWS * NUM_MICROBATCHES, WIDTH, dtype=torch.float64)
    return [(part, frozenset()) for part in rows.chunk(NUM_MICROBATCHES)]


def results(
    pool: DevicePool,
    *,
    features: frozenset[str] = FEATURES,
    trace: bool = False,
    watch: Callable[[Tensor], None] | None = None,
) -> dict[str, Any]:
    """Losses, gradients, outputs and buffers of two steps of training and one of evaluation, by name.

    Args:
        trace: whether to trace the steps; "spans" are those of the second one then.
        watch: called by one of the units in training.
    """
    torch.manual_seed(1)
    model = Network(range(NUM_CALLS), features)
    steps = Steps(model, two_calls_fused, pool=pool, trace=trace)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {}
    for step in range(2):
        if watch is not None:
            model.layers[2].watch = [watch]  # type: ignore[assignment]
        result = steps.train(batches(), step)
        found |= {f"loss {i} of step {step}": loss.detach() for i, loss in enumerate(result.outputs)}
        found |= {f"gradient of {names[p]} in step {step}": gradient for p, gradient in result.gradients.items()}
        if trace:
            found["spans"] = result.timeline.spans
    model.eval()
    outputs = steps.evaluate(batches()).outputs
    steps.engine.close()
    found |= {f"output {i}": output for i, output in enumerate(outputs)}
    return found | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}


@functools.cache
def right_results(features: frozenset[str] = FEATURES) -> dict[str, Any]:
    """Those of devices that share the host's memory, where nothing travels."""
    return results(cpu_pool(NUM_DEVICES), features=features)


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    """The first thing that is not the same, bit for bit; None if there is none."""
    assert found.keys() == wanted.keys()
    return next((name for name in wanted if not torch.equal(found[name], wanted[name])), None)
