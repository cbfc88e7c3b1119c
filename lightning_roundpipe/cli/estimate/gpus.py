"""GPUs by name: what a plan needs to know of them, from the vendor's data sheets and architecture white papers."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 2**30
# GB/s and direction of one lane: 8, 16 and 32 GT/s with 128b/130b encoding.
_LANE_GB_PER_S = {3: 0.985, 4: 1.969, 5: 3.938}


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: As given to ``--gpu``.
        memory_bytes: Device memory, in bytes.
        tflops: Peak of dense bf16 or fp16 matrix products that accumulate in fp32, in TFLOP/s (no sparsity).
        fp16_accumulate_tflops: The same for fp16 products that accumulate in fp16, twice as fast on GeForce boards.
        bytes_per_ms: Bandwidth of the device memory, in bytes per ms.
        pcie_bytes_per_ms: Raw bandwidth of the link to the host, each way, in bytes per ms.
    """

    name: str
    memory_bytes: int
    tflops: float
    fp16_accumulate_tflops: float
    bytes_per_ms: float
    pcie_bytes_per_ms: float


def _gpu(
    name: str, gib: float, tflops: float, memory_gb_per_s: float, pcie: int, fp16_accumulate: float | None = None
) -> Gpu:
    link = 16 * _LANE_GB_PER_S[pcie] * 1e6
    return Gpu(name, int(gib * _GIB), tflops, fp16_accumulate or tflops, memory_gb_per_s * 1e6, link)


# All have 16 lanes. The H200's 141 GB are powers of ten.
_GPUS = (
    _gpu("rtx3090", 24, 71.0, 936, 4, fp16_accumulate=142.0),
    _gpu("rtx4090", 24, 165.2, 1008, 4, fp16_accumulate=330.3),
    _gpu("rtx5090", 32, 209.5, 1792, 5, fp16_accumulate=419.0),
    _gpu("a6000", 48, 154.8, 768, 4),
    _gpu("rtx6000-ada", 48, 364.2, 960, 4),
    _gpu("l40s", 48, 362.0, 864, 4),
    _gpu("a100-40", 40, 312.0, 1555, 4),
    _gpu("a100-80", 80, 312.0, 1935, 4),
    _gpu("a800", 80, 312.0, 1935, 4),
    _gpu("h100-pcie", 80, 756.0, 2000, 5),
    _gpu("h100-sxm", 80, 989.4, 3350, 5),
    _gpu("h200", 141e9 / _GIB, 989.4, 4800, 5),
)
GPUS = {gpu.name: gpu for gpu in _GPUS}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name; upper and lower case, spaces, ``_`` and ``-`` are the same."""
    for known, gpu in GPUS.items():
        if _plain(known) == _plain(name):
            return gpu
    raise ValueError(
        f"--gpu {name} is not in the table, which has {', '.join(GPUS)}: take the closest one, or describe yours with "
        "--gpu custom --gpu-memory 24GiB --tflops 165 --gpu-bandwidth 1000GB/s --pcie 25GB/s."
    )


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
