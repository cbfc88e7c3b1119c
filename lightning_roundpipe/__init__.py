"""RoundPipe for PyTorch Lightning.

Importing this package registers the strategy and the accelerator ``"roundpipe"``; it needs no GPU and starts no thread.

    import lightning as L, lightning_roundpipe
    L.Trainer(strategy="roundpipe", devices="auto").fit(model, data)

What is stable changes only after one minor version that warns of it; what is experimental may change with any version.
The changelog names both kinds of changes.

Stable:
    ``RoundPipeStrategy``, ``RoundPipeAccelerator``, ``RoundPipeTimeline``, ``__version__``, and the errors
    ``BatchSplitError``, ``DeviceLostError``, ``DeviceOutOfMemoryError``, ``GradientCutError``, ``PipelineStalled``,
    ``StageMemoryError``, ``UnitEscapeError``.

    Options of the strategy: ``num_microbatches``, ``round_size``, ``units``, ``loss_weight``, ``split_batch``,
    ``threads_per_device``, ``device_memory_limit``, ``save_profile``, ``trace``, ``optimizer_overlap``,
    ``check_split``, ``ranks_per_node``, ``cluster_environment``, ``process_group_backend``, ``timeout``,
    ``accelerator``, ``checkpoint_io``, ``precision_plugin``.

Experimental:
    ``whole_batch``; ``VirtualLink``; the packages ``lightning_roundpipe.planning`` and
    ``lightning_roundpipe.reporting.pictures``; what the command ``roundpipe`` prints, also as JSON; the form of saved
    profiles and traces.

    Options of the strategy: ``virtual_copies``, ``virtual_speeds``, ``compile_units``, ``cost_profile``,
    ``stale_after_steps`` (and ``optimizer_overlap="stale"``), ``shard_optimizer``, ``reduce_dtype``, ``verify``.

Modules and attributes that are named in neither list are internal.
"""

from .__about__ import __version__
from .accelerator import RoundPipeAccelerator
from .autograd.recompute import GradientCutError
from .devices.device import DeviceLostError
from .devices.memory import DeviceOutOfMemoryError
from .engine.gate import PipelineStalled
from .engine.runner import UnitEscapeError
from .integration.batches.reading import BatchSplitError
from .integration.checks import refuse_fabric
from .integration.steps.whole_batch import whole_batch
from .lightning_packages import of_each
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
    "whole_batch",
]

# LightningCLI hands the name or the path of a class on as text. The Trainer looks it up here, strategies in lower case.
for _name in (RoundPipeStrategy.strategy_name, "RoundPipeStrategy", "lightning_roundpipe.RoundPipeStrategy"):
    for _registry in of_each("pytorch.strategies", "StrategyRegistry"):
        _registry.register(
            _name.lower(),
            RoundPipeStrategy,
            description="Round-robin pipeline over a pool of devices, weights on the host",
        )
    for _registry in of_each("fabric.strategies", "STRATEGY_REGISTRY"):
        _registry.register(_name.lower(), refuse_fabric, description="For the Trainer only")
for _name in (RoundPipeAccelerator.name(), "RoundPipeAccelerator", "lightning_roundpipe.RoundPipeAccelerator"):
    for _registry in (
        *of_each("pytorch.accelerators", "AcceleratorRegistry"),
        *of_each("fabric.accelerators", "ACCELERATOR_REGISTRY"),
    ):
        _registry.register(
            _name,
            RoundPipeAccelerator,
            description="All GPUs if there are any, else virtual CPU devices",
        )
for _strategy in of_each("fabric.strategies", "Strategy"):
    _strategy.register(RoundPipeStrategy)  # Fabric lets it in, and is told what to do
