"""What cannot be honoured by one process whose steps run on several threads: refused before a run begins."""

from __future__ import annotations

import os

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    LayerSync,
    TransformerEnginePrecision,
    XLAPrecision,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_OTHER_STRATEGIES = {
    DeepSpeedPrecision: "DeepSpeedStrategy",
    FSDPPrecision: "FSDPStrategy",
    XLAPrecision: "XLAStrategy",
}
_NOT_FOLLOWED = {
    BitsandbytesPrecision: "quantizes weights when they are moved to a GPU, and here they stay on the host",
    TransformerEnginePrecision: "keeps scales outside parameters and buffers, which device copies would not share",
}


def check_only_process(environment: ClusterEnvironment | None) -> None:
    """Every process would train the whole model on all devices, and write the same files.

    Raises:
        MisconfigurationException: if a launcher has started others beside this one.
    """
    rank, world_size = _place(environment)
    if world_size > 1 or rank > 0:
        size = f" of {world_size}" if world_size > 1 else ""
        raise MisconfigurationException(
            f"strategy='roundpipe' is one process that uses all devices, but this is process {rank}{size}, started by "
            f"a launcher ({type(environment).__name__}). Start the script once: 'python train.py' in place of "
            "torchrun or mpirun, '--ntasks-per-node=1' under SLURM, and Trainer(devices=...) for the number of "
            "devices. If no launcher was used, unset WORLD_SIZE, RANK and LOCAL_RANK."
        )


def _place(environment: ClusterEnvironment | None) -> tuple[int, int]:
    """(rank, number of processes), as far as anything tells; (0, 1) without a launcher."""
    rank = max(_number("RANK"), _number("LOCAL_RANK"))
    world_size = _number("WORLD_SIZE")
    if environment is not None:
        try:
            rank = max(rank, environment.global_rank(), environment.local_rank())
            world_size = max(world_size, environment.world_size())
        except (KeyError, ValueError):  # variables of the launcher are missing: it has not started this process
            pass
    return rank, max(world_size, 1)


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0


def check_precision(plugin: Precision) -> None:
    """Raises:
    MisconfigurationException: for plugins that need another strategy, or weights that live on a device.
    """
    name = type(plugin).__name__
    for kind, strategy in _OTHER_STRATEGIES.items():
        if isinstance(plugin, kind):
            raise MisconfigurationException(
                f"{name} works with {strategy} only: with strategy='roundpipe' set Trainer(precision="
                f"{plugin.precision!r}) and leave the plugin out"
            )
    for kind, why in _NOT_FOLLOWED.items():
        if isinstance(plugin, kind):
            raise MisconfigurationException(
                f"{name} cannot be used with strategy='roundpipe': it {why}. Use precision='bf16-mixed' or "
                "'bf16-true', or another strategy"
            )


def note_layer_sync(layer_sync: LayerSync | None) -> None:
    """Warns that there is nobody to synchronize layers with."""
    if layer_sync is not None:
        rank_zero_warn(
            f"sync_batchnorm=True, or the plugin {type(layer_sync).__name__}, has no effect with "
            "strategy='roundpipe': there is one process. Batch norm takes its statistics from each micro-batch; with "
            "num_microbatches=1 from the whole batch."
        )


def check_modes() -> None:
    """Modes of torch are a matter of one thread: micro-batches would go around them.

    Raises:
        MisconfigurationException: for modes that see or change operators, and for hooks on what autograd saves. The
            default device is no such mode: tensors of a step are made on the host in any case.
    """
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [*functions, *_get_current_dispatch_mode_stack()]
    names = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        names.append("saved_tensors_hooks")
    if names:
        raise MisconfigurationException(
            f"steps would run inside {names[-1]}, which holds for the calling thread alone, and strategy='roundpipe' "
            "runs them on several: it would see nothing of them. Enter it in the modules whose operators it is for, or "
            "run without it"
        )
