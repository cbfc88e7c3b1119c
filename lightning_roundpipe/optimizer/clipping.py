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

# Threads are not worth starting for less.
MIN_BYTES = 16 * 2**20


def clip_factor(gradients: Sequence[Tensor], max_norm: float, num_threads: int) -> Tensor | None:
    """What ``torch.nn.utils.clip_grad_norm_`` would multiply ``gradients`` by; None where it has to do it itself.

    Args:
        num_threads: read gradients side by side.
    """
    if not _are_alike(gradients) or len({gradient.data_ptr() for gradient in gradients}) < len(gradients):
        return None
    with torch.no_grad():
        total = torch.linalg.vector_norm(torch.stack(norms(gradients, num_threads)), 2.0)
        return torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)


def norms_of(gradients: Sequence[Tensor], num_threads: int) -> list[Tensor]:
    """The 2-norm of each of ``gradients``, whatever they are."""
    if _are_alike(gradients):
        return norms(gradients, num_threads)
    return [torch.linalg.vector_norm(gradient.detach(), 2.0) for gradient in gradients]


def _are_alike(gradients: Sequence[Tensor]) -> bool:
    """Whether :func:`norms` takes them."""
    kinds = {(gradient.dtype, gradient.device, gradient.layout) for gradient in gradients}
    if len(kinds) != 1:
        return False
    ((dtype, device, layout),) = kinds
    return dtype.is_floating_point and device.type == "cpu" and layout is torch.strided


def norms(gradients: Sequence[Tensor], num_threads: int) -> list[Tensor]:
    """The 2-norm of each of ``gradients``: dense, on the host, of one dtype."""
    num_bytes = sum(gradient.nbytes for gradient in gradients)
    num_threads = min(num_threads, len(gradients))
    if num_threads < 2 or num_bytes < MIN_BYTES:
        return list(torch._foreach_norm(list(gradients), 2.0))
    # The largest first, each to the thread that has least to read.
    hands: list[list[int]] = [[] for _ in range(num_threads)]
    loads = [0] * num_threads
    for index in sorted(range(len(gradients)), key=lambda i: -gradients[i].nbytes):
        thread = loads.index(min(loads))
        hands[thread].append(index)
        loads[thread] += gradients[index].nbytes

    @torch.no_grad()
    def take(hand: list[int]) -> tuple[Tensor, ...]:
        return torch._foreach_norm([gradients[index] for index in hand], 2.0)

    found: dict[int, Tensor] = {}
    with ThreadPoolExecutor(num_threads, thread_name_prefix="roundpipe-norm") as pool:
        for hand, taken in zip(hands, pool.map(take, hands), strict=True):
            found.update(zip(hand, taken, strict=True))
    return [found[index] for index in range(len(gradients))]
