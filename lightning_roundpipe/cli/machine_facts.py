"""What ``roundpipe doctor`` asks of the machine: one small function per fact.

Each returns what JSON can hold, or raises: `collect` writes down why, and goes on. Torch is imported in the functions,
since the other commands do without it, and because an installation that cannot be imported is something to report.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata, util
from pathlib import Path
from typing import Any

from lightning_roundpipe.__about__ import __version__

_PACKAGE = "lightning-roundpipe"
_OPTIONAL = ("transformers", "peft")
# What decides how torch, its ranks and this package run; none of them holds a secret.
_VARIABLES = re.compile(
    r"(OMP|MKL)_NUM_THREADS|MKL_CBWR|(CUDA|HIP|ROCR)_VISIBLE_DEVICES|CUDA_(LAUNCH_BLOCKING|DEVICE_ORDER|HOME)|CC|CXX|"
    r"PYTORCH_\w+|TORCHDYNAMO_DISABLE|(GLOO|NCCL)_SOCKET_IFNAME|(LOCAL_)?(RANK|WORLD_SIZE)|SLURM_N(TASKS|NODES)"
)
_QUERY = "name,driver_version,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
_BOARD = ("name", "driver", "pcie_generation", "lanes", "most_lanes")
_NODES = Path("/sys/devices/system/node")
_PLACEMENT = Path("/proc/self/numa_maps")
_SHARED = Path("/dev/shm")
# More than Linux lets a process lock by default.
_LOCKED_BYTES = 64 * 2**20


def requirements() -> dict[str, str]:
    """The libraries that this package cannot do without, and the least version of each."""
    lines = (line.replace(" ", "") for line in metadata.requires(_PACKAGE) or ())
    found = (re.fullmatch(r"([\w.-]+)(?:>=([\d.]+))?", line) for line in lines)
    return {match[1]: match[2] or "any" for match in found if match is not None}  # those of extras say more


def versions() -> dict[str, str | None]:
    """Of Python, this package, what it cannot do without, and what it works with; None if not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), _PACKAGE: __version__}
    for name in (*requirements(), *_OPTIONAL):
        found[name] = next((d.version for d in metadata.distributions(name=name)), None)
    return found


def package_import() -> bool:
    """Whether this package can be imported with all that it needs: in a process of its own, as a training does it."""
    command = [sys.executable, "-c", "import lightning_roundpipe"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if result.returncode:
        last_line = result.stderr.strip().rpartition("\n")[2]
        raise ImportError(last_line.partition(": ")[2] or last_line)
    return True


def torch_build() -> dict[str, Any]:
    """What the torch that is imported was built for, and what its ranks can send with."""
    import torch
    import torch.distributed as dist

    names = ("gloo", "nccl", "mpi", "xccl") if dist.is_available() else ()
    backends = [name for name in names if getattr(dist, f"is_{name}_available", bool)()]
    return {"version": torch.__version__, "cuda": torch.version.cuda, "rocm": torch.version.hip, "backends": backends}


def boards() -> list[dict[str, str]]:
    """The GPUs that NVIDIA's driver has, also those that torch does not see."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return [dict(zip(_BOARD, map(str.strip, line.split(",")), strict=True)) for line in lines if line]


def _gpu_devices() -> list[Any]:
    import torch

    from lightning_roundpipe.devices.gpu.driver import gpu_type

    kind = gpu_type()
    return [] if kind is None else [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def gpus() -> list[dict[str, Any]]:
    """The GPUs that training would use, with the error of those that cannot compute with this build of torch.

    Peers reach each other's memory; a training copies by way of the host all the same.
    """
    import torch

    from lightning_roundpipe.devices.gpu.driver import driver_of

    found = []
    for device in _gpu_devices():
        api, index, memory = torch.get_device_module(device), device.index, driver_of(device.type).memory(device)
        gpu: dict[str, Any] = {"device": str(device), "memory_bytes": memory.total, "free_bytes": memory.free}
        if device.type == "cuda":
            major, minor = api.get_device_capability(index)
            others = [other for other in range(api.device_count()) if other != index]
            gpu |= {"name": api.get_device_name(index), "compute_capability": f"{major}.{minor}"}
            gpu |= {"peers": [other for other in others if api.can_device_access_peer(index, other)]}
        try:
            torch.ones((), device=device).add_(1).item()
            found.append({**gpu, "error": None})
        except RuntimeError as error:
            found.append({**gpu, "error": _reason(error)})
    return found


def links() -> dict[str, Any]:
    """How fast copies travel between the host and each GPU, as a training measures it; empty without a GPU."""
    from lightning_roundpipe.devices.links import measured
    from lightning_roundpipe.devices.pool import DevicePool

    if not (devices := _gpu_devices()):
        return {}
    pool = DevicePool(devices)
    try:
        machine = measured(pool)
    finally:
        pool.dispose()
    ways = ("h2d_bytes_per_ms", "d2h_bytes_per_ms")
    shared = [{"gpus": list(link.devices), "bytes_per_ms": link.bytes_per_ms} for link in machine.shared_links]
    return {**{way: [getattr(gpu, way) for gpu in machine.traits] for way in ways}, "shared": shared}


def page_locking() -> dict[str, int | None]:
    """The limit for locked memory (None: unlimited), and the error of the GPU's driver when so much is locked."""
    import resource

    import torch

    from lightning_roundpipe.common.pages import OwnPages
    from lightning_roundpipe.devices.gpu.cuda import PageLocker

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found: dict[str, int | None] = {"limit_bytes": None if limit == resource.RLIM_INFINITY else limit}
    devices = _gpu_devices()
    # Of accelerators without this, torch does not show how they lock memory.
    if not devices or not hasattr(torch.get_device_module(devices[0]), "cudart"):
        return {**found, "tried_bytes": None, "error": None}
    locker, pages = PageLocker(devices[0].type), OwnPages(_LOCKED_BYTES)
    error = locker.page_lock(pages.address, pages.num_bytes)
    if not error:
        locker.page_unlock(pages.address)
    return {**found, "tried_bytes": pages.num_bytes, "error": error}


def host_memory() -> dict[str, int | None]:
    """Of the host: all, what can be allocated, the limit of this container, space to swap, and what is left for memory
    that processes share, such as workers of a DataLoader with their parent; None if unknown."""
    from lightning_roundpipe.common.pages import available_bytes, container_bytes, system_bytes

    return {
        "total_bytes": system_bytes("MemTotal"),
        "available_bytes": available_bytes(),
        "limit_bytes": container_bytes()[0],
        "swap_bytes": system_bytes("SwapTotal"),
        "shared_bytes": shutil.disk_usage(_SHARED).free if _SHARED.exists() else None,
    }


def cores() -> dict[str, Any]:
    """Cores that this process may use, threads that torch computes with, what ``devices="auto"`` is, nodes of memory
    (NUMA), and whether that of this process is spread over them."""
    import torch

    from lightning_roundpipe.devices.pool import num_auto_devices, num_host_cores

    nodes = len(list(_NODES.glob("node[0-9]*")))
    found = {"usable": num_host_cores(), "threads": torch.get_num_threads(), "auto_devices": num_auto_devices()}
    return {**found, "numa_nodes": nodes, "is_spread": "interleave" in _PLACEMENT.read_text() if nodes > 1 else None}


def environment() -> dict[str, str]:
    """Variables that matter, as far as they are set."""
    return {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}


def fused_adamw() -> bool:
    """Whether the update of AdamW runs in one kernel on the host."""
    import torch

    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight], fused=True).step()
    return True


def compilers() -> dict[str, str | bool | None]:
    """What torch.compile needs: a compiler for the host, and on GPUs Triton."""
    named = (os.environ.get("CXX"), "g++", "clang++")
    path = next((found for name in named if name and (found := shutil.which(name))), None)
    return {"host": path, "triton": util.find_spec("triton") is not None}


PROBES: tuple[Callable[[], Any], ...] = (
    *(versions, requirements, package_import, torch_build, boards, gpus, links, page_locking, host_memory, cores),
    *(environment, fused_adamw, compilers),
)


def collect(probes: Iterable[Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Ask for all facts, by their names. Return those that could be found out, and of the others why not."""
    facts, unknown = {}, {}
    for probe in probes:
        try:
            facts[probe.__name__] = probe()
        except Exception as error:  # whatever is broken here is what the user wants to know
            unknown[probe.__name__] = _reason(error)
    return facts, unknown


def _reason(error: Exception) -> str:
    """The class of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().partition("\n")[0].rstrip(": ")
