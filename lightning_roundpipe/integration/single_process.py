"""What Lightning asks of a strategy beside its steps: one process, checkpoint files, profilers, checks before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from .checks import check_has_data, check_modes, check_only_process, check_precision, note_layer_sync
from .foreign_checkpoints import as_lightning_checkpoint, by_position, refuse_folder, with_names_of
from .profiling import adapt, profiler_of, restore

if TYPE_CHECKING:
    from torch.distributed import ReduceOp

T = TypeVar("T")


class SingleProcessStrategy(Strategy):
    """A strategy without other processes to agree with, whose steps run on several threads."""

    # Set by the Trainer, which asks whether a strategy has such attributes.
    cluster_environment: ClusterEnvironment | None = None
    _layer_sync: LayerSync | None = None

    # --- set-up and tear-down ----------------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        """Called by the Trainer when launcher and plugins are known: checks them.

        Raises:
            MisconfigurationException: if there are other processes, or the precision plugin needs another strategy.
        """
        check_only_process(self.cluster_environment)
        check_precision(self.precision_plugin)
        note_layer_sync(self._layer_sync)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        """The first hook of a run, before anything is profiled.

        Raises:
            MisconfigurationException: if the run is inside a mode of torch that steps would not see.
        """
        check_modes()
        if (profiler := profiler_of(model)) is not None:
            adapt(profiler)
        super().connect(model)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        """The module as the precision plugin has converted it.

        Raises:
            MisconfigurationException: if it is another module: steps would go around it.
        """
        if model is not self.lightning_module:
            raise MisconfigurationException(
                f"{type(self.precision_plugin).__name__}.convert_module returned a {type(model).__name__} in place of "
                "the LightningModule: with strategy='roundpipe' change the module in place, and return it"
            )
        return model

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Sets up, if every weight has data.

        Raises:
            MisconfigurationException: naming a weight that has none.
        """
        assert self.lightning_module is not None
        check_has_data(self.lightning_module)
        super().setup(trainer)

    @override
    def teardown(self) -> None:
        """Ends the run. Weights without data stay where they are: an error has said so, and must not be hidden."""
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
        """Loads the state of the optimizers, also if parameters have names in it."""
        module = self.lightning_module
        assert module is not None
        pairs = zip(checkpoint["optimizer_states"], self.optimizers, strict=False)
        states = [by_position(state, module, optimizer) for state, optimizer in pairs]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    # --- one process ---------------------------------------------------------------------------------------------

    @property
    @override
    def is_global_zero(self) -> bool:
        """Always: there is one process."""
        return True

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """The value itself: there is one process."""
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """The value itself: there is one process."""
        return tensor

    @override
    def barrier(self, name: str | None = None) -> None:
        """Returns at once: there is one process."""

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object itself: there is one process."""
        return obj
