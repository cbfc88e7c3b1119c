"""Builds the C++ part of the simulated accelerator, once for all processes, and loads it.

    sources, torch, flags --hash--> folder for temporary files/roundpipe_accelerator_<torch>_<hash>/
                                       lock              held by the process that builds; the others wait for it
                                       native.so         appears at once and whole

The compiler is run directly: neither ninja nor setuptools is needed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

_SOURCES = Path(__file__).resolve().parent / "source"
_TORCH = Path(torch.__file__).resolve().parent
_NAME = "native"


def why_not() -> str | None:
    """The reason why the accelerator cannot be built or used here; None if it can."""
    if sys.platform != "linux":
        return f"the simulated accelerator needs Linux, and this is {sys.platform}"
    if not _knows_memory_of_devices():
        return f"the simulated accelerator needs a newer torch (getMemoryInfo of allocators), and this is {_version()}"
    if shutil.which(_compiler()) is None:
        return (
            f"the simulated accelerator needs a C++ compiler, and there is no '{_compiler()}' (CXX names another one)"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"the simulated accelerator needs the headers of Python, and there is no Python.h for {sys.executable}"
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", "sim"):
        return f"the simulated accelerator needs the device type that '{taken}' has registered for itself"
    return None


@functools.cache
def load() -> ModuleType:
    """Builds what is not built yet, and returns the module written in C++."""
    import fcntl  # not on every system

    library = _folder() / f"{_NAME}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with (library.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system lets go of it when the process ends, however it ends
            if not library.exists():
                _build(library)
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _version() -> str:
    return str(torch.__version__)


def _knows_memory_of_devices() -> bool:
    """What came last of all that the sources use."""
    header = _TORCH / "include/c10/core/CachingDeviceAllocator.h"
    return header.exists() and "getMemoryInfo" in header.read_text(encoding="utf-8")


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _flags() -> list[str]:
    includes = [_TORCH / "include", _TORCH / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    return [
        *("-std=c++20", "-O1", "-g0", "-w", "-fPIC", f"-DTORCH_EXTENSION_NAME={_NAME}"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in includes),
    ]


def _folder() -> Path:
    content = hashlib.sha256(" ".join([_compiler(), sys.version, *_flags()]).encode())
    for path in sorted(_SOURCES.iterdir()):
        content.update(path.name.encode() + path.read_bytes())
    return Path(tempfile.gettempdir(), f"roundpipe_accelerator_{_version()}_{content.hexdigest()[:16]}")


def _build(library: Path) -> None:
    """Compiles each source, as many at a time as there are cores, and links them."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:

        def compiled(source: Path) -> str:
            target = str(Path(folder, source.stem + ".o"))
            _run([_compiler(), *_flags(), "-c", str(source), "-o", target])
            return target

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compiled, sorted(_SOURCES.glob("*.cpp"))))
        libraries = [f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-ldl", "-lpthread"]
        part = Path(folder, library.name)
        _run([_compiler(), "-shared", *objects, *libraries, "-o", str(part)])
        part.replace(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated accelerator could not be built: {' '.join(command)}\n{done.stderr}")
