"""Clipping of gradients by their norm, as far as it can be quick.

[Note: clipping by norm]
``torch.nn.utils.clip_grad_norm_`` reads all gradients, and then multiplies all of them, before the update begins. The
result here is the same to the last bit, with less before the update:

- torch takes the norm of a tensor on the host with one thread. Here several gradients are read side by side, each by
  one thread.
- The update multiplies: bucket by bucket, shortly before it reads the gradients anyhow. Code that looks at a gradient
  waits for the update ([Note: parameter futures] in :mod:`weights.futures`), and so sees the product.
- Where the norm is within the limit nothing is multiplied: the factor is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ..common.sizes import num_bytes_of

# Threads are not worth starting for less.
MIN_BYTES = 16 * 2**20


def clip_factor(gradients: Sequence[Tensor], max_norm: float, num_threads: int) -> Tensor | None:
    """What ``torch.nn.utils.clip_grad_norm_`` would multiply ``gradients`` by; None where it has to do it itself.

    Args:
        num_threads: read gradients side by side.
    """
    kinds = {(gradient.dtype, gradient.device.type, gradient.layout) for gradient in gradients}
    if len(kinds) != 1 or len({gradient.data_ptr() for gradient in gradients}) < len(gradients):
        return None
    ((dtype, device_type, layout),) = kinds
    if not dtype.is_floating_point or device_type != "cpu" or layout is not torch.strided:
        return None
    total = torch.linalg.vector_norm(torch.stack(norms(gradients, num_threads)), 2.0)
    return torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)


def norms(gradients: Sequence[Tensor], num_threads: int) -> list[Tensor]:
    """The 2-norm of each of ``gradients``, which are dense."""
    num_threads = min(num_threads, len(gradients))
    if num_threads < 2 or num_bytes_of(gradients) < MIN_BYTES:
        return [_norm(gradient) for gradient in gradients]
    order = sorted(range(len(gradients)), key=lambda index: -gradients[index].nbytes)  # none is left for the end
    with ThreadPoolExecutor(num_threads, thread_name_prefix="roundpipe-norm") as pool:
        found = dict(zip(order, pool.map(_norm, [gradients[index] for index in order]), strict=True))
    return [found[index] for index in range(len(gradients))]


def _norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient.detach(), 2.0)
    return norm
