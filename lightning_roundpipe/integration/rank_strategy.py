"""What Lightning asks of a strategy about other processes: the ranks of the run.

[Note: ranks of a run]
A run has one process, unless a launcher has started several (torchrun, srun, ...), ``num_nodes`` is more than one, or
``ranks_per_node`` is given. Each process is a *rank*, as Lightning's cluster environments number them, with all of the
model and some of the devices. They meet when the first run begins, and stay connected until one fails or ends: between
two runs ``trainer.strategy.broadcast`` works as with DDP. Rank 0 gives the others its weights and buffers when a run
begins, and its buffers, if they have changed, before each training step and each validation, as DDP does.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero as rank_zero_of_utilities
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ..lightning_packages import (
    LightningOptimizer,
    MisconfigurationException,
    ParallelStrategy,
    Strategy,
    _all_gather_ddp_if_available,
    _sync_ddp_if_available,
    everywhere,
    rank_zero_only,
    reset_seed,
)
from ..options import RoundPipeOptions, check_count
from ..ranks.buckets import EACH_FOR_ITSELF, Owners
from ..ranks.environment import Place, connect, own_devices
from ..ranks.failures import RankError, is_lost_connection
from ..ranks.group import ALONE, ManyRanks, RankGroup
from ..ranks.model import SharedBuffers, share_state
from ..usercode.lock import current
from .launcher import RankLauncher, place_in, ranks_here
from .sharding import Sharding
from .uneven_loaders import UnevenLoaders

if TYPE_CHECKING:
    from torch.distributed import ReduceOp

T = TypeVar("T")

# That of DDP.
_TIMEOUT = timedelta(minutes=30)


class RankStrategy(ParallelStrategy):
    """A strategy for one rank of a run, or its only process; see [Note: ranks of a run].

    Args:
        ranks_per_node: processes on each machine; None for those that a launcher has started, and else one.
        process_group_backend: of the default group of ``torch.distributed``, and of sums of gradients.
        timeout: of each wait for other ranks; None for 30 minutes.
        given: for Lightning's class.
    """

    options: RoundPipeOptions

    def __init__(
        self,
        *,
        ranks_per_node: int | None,
        process_group_backend: str | None,
        timeout: timedelta | None,
        **given: Any,
    ) -> None:
        super().__init__(**given)
        if ranks_per_node is not None:
            check_count("ranks_per_node", ranks_per_node, "or None (those that a launcher has started, and else one)")
        self._ranks_per_node = ranks_per_node
        self._backend = process_group_backend or "gloo"
        self._timeout = timeout or _TIMEOUT
        self.num_nodes = 1
        self._group: RankGroup = ALONE
        self._forget_runs()

    def _forget_runs(self) -> None:
        """What runs have left is gone: a Trainer that is made later finds the strategy as new."""
        self._lightning_module = self._model = self._launcher = None
        self._reset_optimizers_and_schedulers()
        group, self._group = self._group, ALONE
        group.close()
        self._place = Place()
        self._own_devices: list[torch.device] | None = None
        self._buffers = SharedBuffers()
        self._num_reductions = itertools.count()
        self._loaders = UnevenLoaders()
        self._is_training_loader = False
        self._sharding: Sharding | None = None  # of the last fit

    # --- ranks ---------------------------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        """Called by the Trainer when devices and plugins are known: finds this rank's place, and makes a launcher for
        several processes.

        Raises:
            MisconfigurationException: if what tells of other processes does not agree.
        """
        super()._configure_launcher()
        self._place = place_in(self.cluster_environment, self.num_nodes, self._ranks_per_node)
        if self.is_distributed:
            for only in (rank_zero_only, rank_zero_of_utilities.rank_zero_only):
                vars(only)["rank"] = self._place.rank
            assert self.cluster_environment is not None
            here = ranks_here(self._place, self.num_nodes)
            self._launcher = RankLauncher(self.cluster_environment, here, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        """Meets the other ranks, if there are any and this has not been done.

        Raises:
            RankError: if they do not come.
            ValueError: if this machine has fewer devices than ranks.
        """
        if not self.is_distributed:
            return
        reset_seed()
        if self._group is not ALONE:
            return
        environment = self.cluster_environment
        assert environment is not None
        check = self._launcher.check if isinstance(self._launcher, RankLauncher) else lambda: None
        host, port = environment.main_address, environment.main_port
        self._group = group = connect(self._place, host, port, self.process_group_backend, self._timeout, check)
        self._own_devices = own_devices(group, self._place, self.parallel_devices or [self.root_device])
        self._stage_sums(group, self._own_devices[0])

    def _stage_sums(self, group: ManyRanks, device: torch.device) -> None:
        """Lets gradients go by way of ``device`` if the user has named a backend for devices."""
        backend = dict(part.split(":") for part in self.process_group_backend.split(",") if ":" in part)
        name = backend.get(device.type, self._backend)
        if self._backend != "gloo":
            group.stage_sums(name, None if device.type == "cpu" or name == "gloo" else device)

    @property
    @override
    def root_device(self) -> torch.device:
        """The host: parameters, optimizers, metrics and checkpoints live there."""
        return torch.device("cpu")

    @property
    def is_distributed(self) -> bool:
        """Whether there are other ranks."""
        return self._place.size > 1

    @property
    def process_group_backend(self) -> str:
        """Of the default group; tensors on the host travel over gloo in any case."""
        return "cpu:gloo,cuda:nccl" if self._backend == "nccl" else self._backend

    @property
    def global_rank(self) -> int:
        """This process among all."""
        return self._place.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its machine."""
        return self._place.local_rank

    @property
    def node_rank(self) -> int:
        """This machine among all."""
        return self._place.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._place.size

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For the sampler that Lightning gives loaders; None if it gives them none."""
        kwargs = {"num_replicas": self._place.size, "rank": self._place.rank} if self.is_distributed else None
        return cast("dict[str, Any]", kwargs)

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """A tensor over all ranks; anything else as it is."""
        if self._group is ALONE or not isinstance(tensor, Tensor):
            return tensor
        self._check_is_once("reduce")
        what = f"reduction {next(self._num_reductions)} of a value over ranks"
        if group is not None:
            with self._group.explained(what):
                return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        is_mean = str(reduce_op).lower() in ("mean", "avg")
        operation = "SUM" if is_mean else reduce_op
        if isinstance(operation, str):
            operation = getattr(dist.ReduceOp, operation.upper())
        self._group.wait(lambda: dist.all_reduce(tensor, op=operation, async_op=True), what)
        return tensor.copy_(tensor / self.world_size) if is_mean else tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked; the tensor itself in a run of one process."""
        if self._group is ALONE:
            return tensor
        self._check_is_once("all_gather")
        with self._group.explained("a tensor that is gathered from all ranks"):
            return _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Returns when all ranks have come here. Lightning announces new loaders so."""
        self._check_is_once("barrier")
        self._group.barrier(f"the barrier {name!r}")
        if name is not None and name.endswith("_dataloader()"):
            self._is_training_loader = name == "train_dataloader()"
            if self._is_training_loader:
                self._loaders = UnevenLoaders()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """The loader, which for training gives as many batches on all ranks; see [Note: uneven inputs]."""
        if self._group is ALONE or not self._is_training_loader:
            return dataloader
        return self._loaders.wrapped(dataloader, self._group)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank ``src``."""
        self._check_is_once("broadcast")
        is_mine = self._group is ALONE or self.global_rank == src
        found = self._group.gather(obj if is_mine else None, f"an object of rank {src}")
        return obj if is_mine else cast(T, found[src])

    def _check_is_once(self, name: str) -> None:
        """Micro-batches of a step run side by side, in an order that differs from rank to rank.

        Raises:
            MisconfigurationException: for what waits for other ranks in the step of a micro-batch.
        """
        if self._group is not ALONE and current() is not None and self.options.num_microbatches != 1:
            raise MisconfigurationException(
                f"{name} waits for the other ranks, and is called in a step, which runs once for each micro-batch, in "
                "an order that differs from rank to rank. Call it in a hook around the step, such as "
                "on_train_batch_end or on_validation_batch_end, or use RoundPipeStrategy(num_microbatches=1)"
            )

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_group": ALONE, "_loaders": UnevenLoaders()}

    def _leave_ranks(self, error: BaseException) -> None:
        """Tells the others of an error. The next run would have to meet them again.

        An error of ``torch.distributed`` gets a text that says which rank has failed.
        """
        group, self._group = self._group, ALONE
        if group is not ALONE and is_lost_connection(error):
            told = group.explain(error, "something that is no part of the strategy")
            error.args = (f"{error}\n\n{told}",)
            error = told
        group.close(error)

    @override
    def on_validation_start(self) -> None:
        """All ranks evaluate with the buffers of rank 0."""
        self.share_buffers()

    def share_buffers(self) -> None:
        """Gives the other ranks the buffers of rank 0 that have changed; all ranks call this at the same time."""
        if self._group is not ALONE:
            assert self.lightning_module is not None
            self._buffers.share(self._group, self.lightning_module)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        """The module with the weights and buffers of rank 0.

        Raises:
            RankError: if another rank has a module with other weights.
        """
        share_state(self._group, model)
        self._buffers.start(model)
        return model

    @override
    def teardown(self) -> None:
        """Ends the run; the ranks stay connected."""
        if self.is_distributed:
            super().teardown()
        else:  # the variables of its environment stay
            Strategy.teardown(self)

    # --- sharded optimizers, see :mod:`integration.sharding` -------------------------------------------------------

    def _make_sharding(self) -> Sharding | None:
        """For the fit that is being set up; None if each rank has whole optimizers."""
        if self._group is ALONE or not self.options.shard_optimizer:
            return None
        assert self.lightning_module is not None
        return Sharding(self._group, self.lightning_module, lambda: self.optimizers)

    @property
    def _owners(self) -> Owners:
        return EACH_FOR_ITSELF if self._sharding is None else self._sharding.shards

    def _updates_here(self, weight: nn.Parameter) -> bool:
        """Whether this rank updates ``weight``."""
        return self._owners.owner_of(weight) in (None, self._place.rank)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """For a checkpoint: of all ranks on rank 0, which writes it.

        Raises:
            RankError: if ranks have parted, and have the state of their own weights only.
        """
        if self._sharding is None:
            return super().optimizer_state(optimizer)
        if self._group is ALONE:
            raise RankError(
                "ranks are not connected any more after an error, and the state of a sharded optimizer is on all of "
                "them: no checkpoint can be written. Resume from the last one"
            )
        if isinstance(optimizer, everywhere(LightningOptimizer)):
            optimizer = optimizer.optimizer
        return self._sharding.state_of(optimizer)
