"""RoundPipe for PyTorch Lightning.

Importing this package registers the strategy and the accelerator ``"roundpipe"``; it needs no GPU and starts no thread.

    import lightning as L, lightning_roundpipe
    L.Trainer(strategy="roundpipe", devices="auto").fit(model, data)
"""

from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from .__about__ import __version__
from .accelerator import RoundPipeAccelerator
from .autograd.recompute import GradientCutError
from .devices.devices import DeviceLostError
from .devices.memory import DeviceOutOfMemoryError
from .engine.gate import PipelineStalled
from .engine.runner import UnitEscapeError
from .integration.batches.microbatches import BatchSplitError
from .options import VirtualLink
from .planning.plan import StageMemoryError
from .reporting.timeline_callback import RoundPipeTimeline
from .strategy import RoundPipeStrategy

__all__ = [
    "BatchSplitError",
    "DeviceLostError",
    "DeviceOutOfMemoryError",
    "GradientCutError",
    "PipelineStalled",
    "RoundPipeAccelerator",
    "RoundPipeStrategy",
    "RoundPipeTimeline",
    "StageMemoryError",
    "UnitEscapeError",
    "VirtualLink",
    "__version__",
]

# LightningCLI hands the name or the path of a class on as text. The Trainer looks it up here, strategies in lower case.
for _name in (RoundPipeStrategy.strategy_name, "RoundPipeStrategy", "lightning_roundpipe.RoundPipeStrategy"):
    StrategyRegistry.register(
        _name.lower(),
        RoundPipeStrategy,
        description="Round-robin pipeline over a pool of devices, weights on the host",
    )
for _name in (RoundPipeAccelerator.name(), "RoundPipeAccelerator", "lightning_roundpipe.RoundPipeAccelerator"):
    AcceleratorRegistry.register(
        _name,
        RoundPipeAccelerator,
        description="All GPUs if there are any, else virtual CPU devices",
    )
