"""Lightning, under either of its names. No other module of this package says them.

[Note: two packages]
The same code is published twice: as ``lightning`` (with ``lightning.pytorch`` and ``lightning.fabric``), and as
``pytorch_lightning`` with ``lightning_fabric``. A process may have either, or both and a Trainer of each::

    lightning.pytorch.Trainer ---.
                                  >--- one RoundPipeStrategy, one adapter
    pytorch_lightning.Trainer ---'

- What the adapter uses comes from here, and is of the *home* package: ``lightning`` where it is installed.
- A class that the adapter derives from has here a base of each package, so that the checks of both accept what is
  derived from it; so has each error and each warning, which the user may catch or filter by either name.
- What the user hands over is of either package: ``isinstance(plugin, everywhere(Precision))``.
- The code that a strategy inherits makes and checks classes of its own package (it wraps each optimizer in a
  ``LightningOptimizer``). So :class:`ParallelStrategy` runs that of the package whose Trainer has the strategy.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, Union

from lightning_utilities.core import rank_zero as _rank_zero

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.loggers.logger import _DummyExperiment
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning.fabric.plugins import CheckpointIO as AnyCheckpointIO
    from lightning.fabric.plugins import ClusterEnvironment as AnyClusterEnvironment
    from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
    from lightning.fabric.utilities.distributed import (
        _all_gather_ddp_if_available,
        _set_num_threads_if_needed,
        _sync_ddp_if_available,
    )
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.fabric.utilities.types import _PATH
    from lightning.fabric.utilities.warnings import PossibleUserWarning
    from lightning.pytorch.accelerators import Accelerator, cpu
    from lightning.pytorch.accelerators import Accelerator as AnyAccelerator
    from lightning.pytorch.callbacks import BatchSizeFinder, Callback
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.loggers.logger import DummyLogger, Logger
    from lightning.pytorch.loops.optimization.automatic import ClosureResult
    from lightning.pytorch.plugins import (
        BitsandbytesPrecision,
        DeepSpeedPrecision,
        FSDPPrecision,
        LayerSync,
        MixedPrecision,
        TransformerEnginePrecision,
        XLAPrecision,
    )
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.plugins.precision import Precision as AnyPrecision
    from lightning.pytorch.profilers import PassThroughProfiler, Profiler, PyTorchProfiler
    from lightning.pytorch.strategies import ParallelStrategy, Strategy
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
    from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from lightning.pytorch.utilities.types import STEP_OUTPUT

T = TypeVar("T")
_EVERYWHERE: dict[type, tuple[type[Any], ...]] = {}

_PACKAGES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
_OLDEST = (2, 5)
# What each of the packages sets in a library that both share.
_OF_ALL = ("log", "rank_zero_deprecation_category")


def _import_packages() -> list[tuple[str, str]]:
    """Imports those that are installed, the home package first.

    Raises:
        ImportError: if there is none, or none that is new enough.
    """
    before = {name: getattr(_rank_zero, name) for name in _OF_ALL}
    was_there = any(pytorch in sys.modules for pytorch, _ in _PACKAGES)
    found, problems = [], []
    for pytorch, fabric in _PACKAGES:
        try:
            version = str(import_module(pytorch).__version__)
            import_module(fabric)
        except ImportError as error:
            problems.append(f"{pytorch}: {error}")
            continue
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
            problems.append(f"{pytorch} is version {version}")
            continue
        found.append((pytorch, fabric))
        if not was_there:
            was_there, before = True, {name: getattr(_rank_zero, name) for name in _OF_ALL}
    if not found:
        raise ImportError(
            f"lightning_roundpipe needs the package lightning or pytorch-lightning, {_OLDEST[0]}.{_OLDEST[1]} or later "
            f"({'; '.join(problems)})"
        )
    vars(_rank_zero).update(before)  # messages keep the logger that the user may have set up
    return found


_FOUND = _import_packages()
FABRIC = _FOUND[0][1]


def of_each(module: str, name: str) -> list[Any]:
    """What has a name in a module of each package, that of the home package first.

    Args:
        module: such as ``"pytorch.strategies"`` or ``"fabric.plugins"``.
    """
    part, _, rest = module.partition(".")
    tops = [fabric if part == "fabric" else pytorch for pytorch, fabric in _FOUND]
    return [getattr(import_module(f"{top}.{rest}" if rest else top), name) for top in tops]


def everywhere(kind: type[T]) -> tuple[type[T], ...]:
    """A class of Lightning as each package has it, for ``isinstance``."""
    if kind not in _EVERYWHERE:
        pytorch, fabric = _FOUND[0]
        part, top = ("fabric", fabric) if kind.__module__.startswith(f"{fabric}.") else ("pytorch", pytorch)
        _EVERYWHERE[kind] = tuple(of_each(part + kind.__module__.removeprefix(top), kind.__name__))
    return _EVERYWHERE[kind]


def kind_of(value: object, kind: type[T]) -> type[T]:
    """A class of Lightning as the package of ``value`` has it: one that ``value`` is an instance of."""
    return next((one for one in everywhere(kind) if isinstance(value, one)), everywhere(kind)[0])


def _with_all_bases(kind: type, **members: Any) -> type:
    """``kind``, or where there are two packages a class with both as bases."""
    kinds: tuple[type[Any], ...] = everywhere(kind)
    if len(kinds) == 1:
        return kind
    made = type(kind)(kind.__name__, kinds, {"__module__": __name__, "__doc__": kind.__doc__, **members})
    _EVERYWHERE[made] = kinds
    return made


def _of_the_trainer(name: str, member: Any) -> Any:
    """A method or property that runs that of the class which is ``_lightning``, an attribute of the strategy."""
    if isinstance(member, property):
        return property(
            lambda self: getattr(self._lightning, name).fget(self),
            lambda self, value: getattr(self._lightning, name).fset(self, value),
        )
    return functools.wraps(member)(lambda self, *args, **kwargs: getattr(self._lightning, name)(self, *args, **kwargs))


def _parallel_strategy() -> type:
    """See [Note: two packages]. The Trainer is known by its precision plugin, which every Trainer sets."""
    plain, strategy = (of_each("pytorch.strategies", name)[0] for name in ("ParallelStrategy", "Strategy"))
    kinds = everywhere(plain)
    members = {
        name: _of_the_trainer(name, member)
        for name, member in {**vars(strategy), **vars(plain)}.items()
        if isinstance(member, (FunctionType, property)) and all(hasattr(kind, name) for kind in kinds)
        if name != "model_sharded_context"  # the Trainer looks whether a strategy has one of its own
    }

    def _configure_launcher(self: Any) -> None:
        precision = of_each("pytorch.plugins.precision", "Precision")[0]
        place = everywhere(precision).index(kind_of(self._precision_plugin, precision))
        self._lightning = kinds[place]
        vars(_rank_zero)["log"] = logging.getLogger(f"{_FOUND[place][0]}.utilities.rank_zero")
        self._lightning._configure_launcher(self)

    return _with_all_bases(plain, **{**members, "_lightning": plain, "_configure_launcher": _configure_launcher})


if not TYPE_CHECKING:
    for _module, _names in {
        "fabric.loggers.logger": "_DummyExperiment",
        "fabric.plugins": "CheckpointIO ClusterEnvironment TorchCheckpointIO",
        "fabric.utilities.data": "has_iterable_dataset sized_len",
        "fabric.utilities.distributed": "_all_gather_ddp_if_available _set_num_threads_if_needed "
        "_sync_ddp_if_available",
        "fabric.utilities.seed": "reset_seed",
        "fabric.utilities.types": "_PATH",
        "pytorch.accelerators": "cpu",
        "pytorch.callbacks": "BatchSizeFinder",
        "pytorch.core.optimizer": "LightningOptimizer",
        "pytorch.loggers.logger": "DummyLogger Logger",
        "pytorch.loops.optimization.automatic": "ClosureResult",
        "pytorch.plugins": "BitsandbytesPrecision DeepSpeedPrecision FSDPPrecision LayerSync MixedPrecision "
        "TransformerEnginePrecision XLAPrecision",
        "pytorch.plugins.io.wrapper": "_WrappingCheckpointIO",
        "pytorch.plugins.precision": "Precision",
        "pytorch.profilers": "PassThroughProfiler Profiler PyTorchProfiler",
        "pytorch.strategies": "Strategy",
        "pytorch.trainer.states": "TrainerFn TrainerStatus",
        "pytorch.utilities": "rank_zero_info rank_zero_only rank_zero_warn",
        "pytorch.utilities.combined_loader": "CombinedLoader",
        "pytorch.utilities.model_helpers": "is_overridden",
        "pytorch.utilities.signature_utils": "is_param_in_hook_signature",
        "pytorch.utilities.types": "STEP_OUTPUT",
    }.items():
        globals().update({_name: of_each(_module, _name)[0] for _name in _names.split()})
    # For parsers of signatures.
    for _name in ("Accelerator", "CheckpointIO", "ClusterEnvironment", "Precision"):
        _module = "pytorch.accelerators" if _name == "Accelerator" else "pytorch.plugins"
        globals()[f"Any{_name}"] = Union[everywhere(of_each(_module, _name)[0])]  # noqa: UP007
    # What the adapter derives from.
    for _module, _name in (
        ("fabric.utilities.exceptions", "MisconfigurationException"),
        ("fabric.utilities.warnings", "PossibleUserWarning"),
        ("pytorch.accelerators", "Accelerator"),
        ("pytorch.callbacks", "Callback"),
    ):
        globals()[_name] = _with_all_bases(of_each(_module, _name)[0])
    # The first calls the constructor of its base without arguments, which would be that of the second.
    _SubprocessScriptLauncher, *_others = of_each("pytorch.strategies.launchers", "_SubprocessScriptLauncher")
    for _other in _others:
        _other.register(_SubprocessScriptLauncher)
    ParallelStrategy = _parallel_strategy()
    pl = import_module(_FOUND[0][0])
