"""What the compatibility table must have a row for: the public names of the Lightning that is installed.

[Note: inventory]
Names are read from Lightning itself, so that a new version with a new argument, hook or callback fails the test of the
table until there is a row for it. Kinds that are not in :func:`inventory` (``Library``, ``Misuse``) have rows as
their tests give them. Names that only some of the supported versions have are in :data:`ONLY_IN`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, get_args

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.precision import precision as fabric_precision
from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
from lightning.pytorch import callbacks, loggers, plugins, profilers
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from lightning.pytorch.plugins import environments

# Names that not all Lightning versions from 2.5 on have, by kind. Those that Lightning has given up need no row.
ONLY_IN: dict[str, dict[str, str]] = {
    "Trainer argument": {"enable_autolog_hparams": "from 2.6", "model_registry": "from 2.5.1"},
    "LightningModule method": {"toggled_optimizer": "from 2.5.1", "to_tensorrt": "from 2.6"},
    "Callback": {"WeightAveraging": "from 2.6", "EMAWeightAveraging": "from 2.6"},
    "Logger": {"LitLogger": "from 2.6", "NeptuneLogger": "until 2.5"},
}

# What a LightningModule overrides, besides the methods of the hook classes, ``configure_*`` and ``*_step``.
_OVERRIDDEN = ("forward", "backward", "optimizer_zero_grad")
# Public by name only: Lightning's own plumbing.
_PLUMBING = ("remove_ignored_hparams",)


def _methods(cls: type) -> list[str]:
    """Public functions, class methods and static methods of the class itself, in the order of its source."""
    return [
        name
        for name, value in vars(cls).items()
        if not name.startswith("_")
        and name not in _PLUMBING
        and (inspect.isfunction(value) or (not isinstance(value, property) and callable(getattr(cls, name))))
    ]


def _properties(*classes: type) -> list[str]:
    return [n for cls in classes for n, v in vars(cls).items() if isinstance(v, property) and not n.startswith("_")]


def _hooks() -> list[str]:
    """What users override in a LightningModule, mixins of their own included."""
    own = [
        name
        for name in _methods(pl.LightningModule)
        if name in _OVERRIDDEN or name.startswith("configure_") or name.endswith("_step")
    ]
    return _unique(own, *(_methods(cls) for cls in (ModelHooks, DataHooks, CheckpointHooks)))


def _module_methods() -> list[str]:
    hooks = set(_hooks())
    own = [name for name in _methods(pl.LightningModule) if name not in hooks]
    return _unique(own, _methods(HyperparametersMixin), _methods(_DeviceDtypeModuleMixin))


def _environments(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        if isinstance(value, type) and issubclass(value, ClusterEnvironment):
            yield name


def _unique(*names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for group in names for name in group))


@functools.cache
def inventory() -> dict[str, list[str]]:
    """Names of the installed Lightning, by kind of row; see [Note: inventory]."""
    arguments: Any = inspect.signature(pl.Trainer.__init__).parameters
    return {
        "Trainer argument": [name for name in arguments if name != "self"],
        "Trainer method": _methods(pl.Trainer),
        "Trainer attribute": _properties(pl.Trainer),
        "LightningModule hook": _hooks(),
        "LightningModule method": _module_methods(),
        "LightningModule attribute": _properties(pl.LightningModule, HyperparametersMixin, _DeviceDtypeModuleMixin),
        "LightningDataModule": _unique(
            *(_methods(cls) for cls in (DataHooks, pl.LightningDataModule, HyperparametersMixin))
        ),
        "Callback hook": [*_methods(pl.Callback), *_properties(pl.Callback)],
        "Callback": list(callbacks.__all__),
        "Logger": list(loggers.__all__),
        "Profiler": list(profilers.__all__),
        "Precision": list(get_args(fabric_precision._PRECISION_INPUT_STR)),
        "Plugin": _unique(plugins.__all__, _environments(environments)),
    }
