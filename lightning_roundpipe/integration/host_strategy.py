"""What Lightning asks of a strategy beside steps and ranks: devices, checkpoint files, profilers, checks.

[Note: one strategy, several Trainers]
A cell of a notebook that runs twice gives the same strategy to a second Trainer. A Trainer takes what it finds set on a
strategy for the wish of the user, and then sets everything itself: what it finds would be the wish of the first one. So
what the user has given is kept::

    Trainer(strategy=...)   looks at strategy._accelerator      from now on all shows what the user has given
                            looks at what else is set
                            sets strategy.accelerator           the strategy is as new
                            sets everything else
    trainer.fit(...)        strategy.connect(module)            of a Trainer that was made before: an error

Lightning looks at ``_accelerator`` at this one place, before all else. A second Trainer that is not finished, since its
other arguments are wrong, leaves the strategy to the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import nn
from typing_extensions import override

from ..accelerator import host_statistics, pool_statistics
from ..devices.pool import DevicePool
from ..lightning_packages import _PATH, Accelerator, MisconfigurationException, TrainerFn, TrainerStatus, pl
from ..optimizer.sharded_state import own_part
from .checks import check_modes, is_callback, note_unused_gpus, refuse_callback, refuse_fabric
from .foreign_checkpoints import as_lightning_checkpoint, by_position, refuse_folder, with_names_of
from .pool import make_pool
from .profiling import adapt, profiler_of, restore
from .rank_strategy import RankStrategy

# What a Trainer may find set on a strategy besides the accelerator, and sets.
_SETTINGS = ("_precision_plugin", "_checkpoint_io", "cluster_environment", "_parallel_devices")


class HostStrategy(RankStrategy):
    """A strategy whose weights, optimizers and files are the host's, and whose steps run on a pool of devices."""

    _pool: DevicePool | None = None
    _given: dict[str, Any] | None = None
    _set_before: dict[str, Any] | None = None  # by one Trainer, while another is being made
    _accelerator_in_use: Accelerator | None = None
    _put_back: Callable[[], None] | None = None  # callbacks of the Trainer

    # --- Trainers, see [Note: one strategy, several Trainers] ----------------------------------------------------

    @property
    def _accelerator(self) -> Accelerator | None:
        """That of the user. Lightning reads it when a Trainer is made.

        Raises:
            MisconfigurationException: if it is made while another one runs.
        """
        trainer = getattr(self._lightning_module, "_trainer", None)
        if trainer is not None and trainer.state.status == TrainerStatus.RUNNING:
            raise MisconfigurationException(
                f"the {type(self).__name__} object at {id(self):#x} is in use by a Trainer that runs: give a Trainer "
                "that is made meanwhile a strategy of its own"
            )
        if self._given is None:
            self._given = {name: vars(self)[name] for name in _SETTINGS}
        elif self._set_before is None:
            self._set_before = {name: vars(self)[name] for name in _SETTINGS}
            vars(self).update(self._given)
        return cast("Accelerator | None", vars(self)["_accelerator"])

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        vars(self)["_accelerator"] = accelerator

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        """That of the Trainer; until there is one, that of the user."""
        return self._accelerator_in_use or cast("Accelerator | None", vars(self)["_accelerator"])

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        if self._set_before is not None:
            self._set_before = None
            self._forget_runs()
        self._accelerator_in_use = accelerator

    @override
    def _forget_runs(self) -> None:
        super()._forget_runs()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.dispose()

    @property
    def _precision(self) -> NoReturn:
        """Fabric asks for it, and nothing else does.

        Raises:
            MisconfigurationException: always.
        """
        refuse_fabric()

    def _check_trainer(self, trainer: pl.Trainer) -> None:
        if self._set_before is not None:
            vars(self).update(self._set_before)
            self._set_before = None
        if trainer._accelerator_connector.accelerator is not self.accelerator:
            raise MisconfigurationException(
                f"the {type(self).__name__} object at {id(self):#x} was given to another Trainer after this one, and "
                "has the devices of that now: go on with that one, or make a strategy for each"
            )
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if others := [callback for callback in callbacks if not is_callback(callback)]:
            # Lightning is going to tell all callbacks of the error, and then the strategy.
            self._put_back = partial(setattr, trainer, "callbacks", callbacks)
            vars(trainer)["callbacks"] = [callback for callback in callbacks if is_callback(callback)]
            refuse_callback(others[0])

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._put_back is not None:
            self._put_back()
            self._put_back = None

    # --- set-up and tear-down ----------------------------------------------------------------------------------

    @property
    def pool(self) -> DevicePool:
        """The devices that run the steps."""
        if self._pool is None:
            devices = self._own_devices or self.parallel_devices or [self.root_device]
            self._pool = make_pool(devices, self.options)
        return self._pool

    @property
    def _autocast_device(self) -> str:
        types = {device.type for device in self.parallel_devices or [self.root_device]}
        return (types - {"cpu"} or types).pop()

    @override
    def setup_environment(self) -> None:
        """Meets the other ranks, and makes the device pool."""
        super().setup_environment()
        if self._pool is not None:
            self._pool.dispose()
            self._pool = None
        note_unused_gpus([device.torch_device for device in self.pool.devices])
        # An attribute of the instance, as the accelerator may be any of Lightning's.
        vars(self.accelerator)["get_device_stats"] = self.device_statistics

    def device_statistics(self, device: str | int | torch.device) -> dict[str, Any]:
        """What ``DeviceStatsMonitor`` shows: for the host its own figures, if ``psutil`` is there, and the pool's."""
        assert self.accelerator is not None
        if torch.device(device).type != "cpu":
            return type(self.accelerator).get_device_stats(self.accelerator, device)
        return {**host_statistics(), **pool_statistics(self.pool)}

    @override
    def connect(self, model: pl.LightningModule) -> None:
        """The first hook of a run, before anything is profiled.

        Raises:
            MisconfigurationException: if the strategy belongs to another Trainer, callbacks are none of Lightning's, or
                the run is inside a mode of torch that steps would not see.
        """
        if model._trainer is not None:
            self._check_trainer(model._trainer)
        check_modes()
        if (profiler := profiler_of(model)) is not None:
            adapt(profiler)
        super().connect(model)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        """The module as the precision plugin has converted it, with the weights and buffers of rank 0.

        Raises:
            MisconfigurationException: if it is another module: steps would go around it.
            RankError: if another rank has a module with other weights.
        """
        if model is not self.lightning_module:
            raise MisconfigurationException(
                f"{type(self.precision_plugin).__name__}.convert_module returned a {type(model).__name__} in place of "
                "the LightningModule: with strategy='roundpipe' change the module in place, and return it"
            )
        return super()._setup_model(model)

    @override
    def teardown(self) -> None:
        """Ends the run. Weights without data stay where they are: an error has said so, and all else must be ended."""
        module = self._lightning_module
        if module is not None and (profiler := profiler_of(module)) is not None:
            restore(profiler)
        if module is not None and any(weight.is_meta for weight in module.parameters()):
            self._lightning_module = None
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    # --- checkpoints of other strategies, see [Note: foreign checkpoints] ----------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint file.

        Raises:
            IsADirectoryError: for a folder, as FSDP and DeepSpeed write it; the message says how it becomes a file.
            MisconfigurationException: for files that cannot be used, saying why and what to do.
        """
        refuse_folder(checkpoint_path, self.checkpoint_io)
        # Before Lightning 2.6 there is no such argument.
        given = {} if weights_only is None else {"weights_only": weights_only}
        checkpoint = super().load_checkpoint(checkpoint_path, **given)
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        is_resumed = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        return as_lightning_checkpoint(checkpoint, checkpoint_path, is_resumed=is_resumed)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the weights, also under names that wrappers have given them."""
        assert self.lightning_module is not None
        state = with_names_of(self.lightning_module, checkpoint["state_dict"])
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the state of the optimizers, or what this rank needs of it, also if parameters have names in it."""
        module, sharding = self.lightning_module, self._sharding
        assert module is not None
        states = []
        for saved, optimizer in zip(checkpoint["optimizer_states"], self.optimizers, strict=False):
            state = by_position(saved, module, optimizer)
            states.append(state if sharding is None else own_part(state, optimizer, sharding.shards))
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
