"""What a measurement must say about the machine that it was made on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning
import torch

from lightning_roundpipe.devices.pool import num_host_cores

ROOT = Path(__file__).resolve().parents[2]
# Not part of what is measured: written while it is.
_WRITTEN = "docs/measurements/gpu"
_LIBRARIES = ("transformers", "peft", "deepspeed", "roundpipe")
_GPUS = """
import json, torch
gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
print(json.dumps([{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus]))
"""
_QUERY = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max"


def describe() -> dict[str, Any]:
    """GPUs, host and versions; None for what cannot be found out."""
    return {
        "gpus": _gpus(),
        "nvidia_smi": _output(["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]),
        "cuda": torch.version.cuda,
        "host_cores": num_host_cores(),
        "host_memory_bytes": host_memory_bytes(),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
    }


def _gpus() -> list[dict[str, Any]] | None:
    """Asked for in another process: to ask takes memory of the GPU for as long as a process lives."""
    if not torch.cuda.is_available():
        return None
    found = _output([sys.executable, "-c", _GPUS])
    return None if found is None else list(json.loads(found))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def host_memory_bytes() -> int | None:
    """Of the machine."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def commit() -> str | None:
    """Of this repository, and whether something has changed since; None where there is none."""
    found = _output(["git", "rev-parse", "--short=12", "HEAD"])
    if found is None:
        return None
    changed = _output(["git", "status", "--porcelain", "--", ".", f":!{_WRITTEN}"])
    return f"{found} and changes" if changed else found


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
