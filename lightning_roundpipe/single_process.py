"""The collective operations of a strategy that is one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from lightning.pytorch.strategies import Strategy
from torch import Tensor
from typing_extensions import override

if TYPE_CHECKING:
    from torch.distributed import ReduceOp

T = TypeVar("T")


class SingleProcessStrategy(Strategy):
    """A strategy without other processes to agree with."""

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
