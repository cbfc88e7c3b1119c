"""A strategy that is one process: collective operations, and what it cannot honour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins import LayerSync
from torch import Tensor, nn
from typing_extensions import override

from .checks import check_only_process, check_precision, note_layer_sync
from .foreign_checkpoints import LoadingStrategy
from .misuse import check_has_data

if TYPE_CHECKING:
    from torch.distributed import ReduceOp

T = TypeVar("T")


class SingleProcessStrategy(LoadingStrategy):
    """A strategy without other processes to agree with."""

    # Set by the Trainer, which asks whether a strategy has such attributes.
    cluster_environment: ClusterEnvironment | None = None
    _layer_sync: LayerSync | None = None

    def set_world_ranks(self) -> None:
        """Called by the Trainer when launcher and plugins are known: checks them.

        Raises:
            MisconfigurationException: if there are other processes, or the precision plugin needs another strategy.
        """
        check_only_process(self.cluster_environment)
        check_precision(self.precision_plugin)
        note_layer_sync(self._layer_sync)

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
        if module is not None and any(weight.is_meta for weight in module.parameters()):
            self._lightning_module = None
        try:
            super().teardown()
        finally:
            self._lightning_module = module

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
