"""The Lightning strategy: hooks of the Trainer on one side, the engine on the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from .engine.requests import StepResult
from .engine.runner import Engine
from .integration.batches.splitting import Batches
from .integration.checks import check_model, check_precision, note_layer_sync
from .integration.host_strategy import HostStrategy
from .integration.launcher import ranks_here
from .integration.links import Links
from .integration.overlap import NO_OVERLAP, OptimizerOverlap
from .integration.pool import host_threads
from .integration.steps.loss import checked_precision, expected_scale, hand_over, merged_step
from .integration.steps.run import Steps
from .lightning_packages import (
    STEP_OUTPUT,
    AnyAccelerator,
    AnyCheckpointIO,
    AnyClusterEnvironment,
    AnyPrecision,
    BatchSizeFinder,
    Strategy,
    everywhere,
    pl,
)
from .options import RoundPipeOptions, VirtualLink, read_profile
from .planning.costs import CostProfile
from .reporting.host_memory import HostMemory
from .reporting.host_report import HostReport
from .reporting.tracing import Recordings, TraceWriter
from .usercode.lock import current


class RoundPipeStrategy(HostStrategy):
    """Trains any LightningModule over a pool of devices whose weights live on the host.

    The method is RoundPipe's (arXiv 2604.27085): a batch is split into micro-batches, the model into stages, and stages
    are handed to the devices round-robin. Losses, gradients and parameters equal those of one device with the full
    batch, up to floating-point order, for losses that are means over samples.

    Args:
        num_microbatches: micro-batches per batch; ``"auto"`` is two per device, and more if a step does not fit on
            the devices otherwise. A number that is given is doubled where that does not change what is computed, see
            the tuning guide. A batch with fewer rows is split into as many micro-batches as it has rows. 1 makes
            batch-coupled modules (BatchNorm, in-batch negatives) exact.
        round_size: micro-batches that walk through the stages together (the paper's ``M_R``), at least the number of
            devices for full use; None is two per device, or more where weights travel and memory has room for it.
        units: classes (or class names) of the modules to run whole; by default the repeated blocks of the model and
            what surrounds them, divided where they are too large for a device.
        loss_weight: what weighs a micro-batch in the loss: ``"samples"`` (for means over samples), ``"label_tokens"``
            (entries of ``labels`` that are not -100), ``"causal_label_tokens"`` (the same without the first position,
            which causal language models do not predict), ``"nodes"`` (of graphs, or what else samples have numbers of
            their own of), ``"sum"`` (for losses that are sums over samples: every
            micro-batch counts fully), or a function from a micro-batch to a number. ``"auto"`` is samples, unless the
            batch has integer ``labels`` of which some are -100, where their tokens weigh; the log says so once.
        split_batch: ``(batch, num_microbatches) -> list of micro-batches``, for batches whose layout cannot be told
            with certainty. A method ``roundpipe_split_batch(batch, num_microbatches)`` of the LightningModule does the
            same. ``"packed"`` cuts a row of packed sequences between sequences; other batches are read as ever.
        threads_per_device: intra-op threads per virtual device, at most 64 or all cores; None shares the host's evenly.
        device_memory_limit: what may be used on each device: a size such as ``"24GiB"``, or bytes. None is what the GPU
            has free; virtual devices have no limit then. On a GPU the step gets that less a reserve, and less what is
            allocated already.
        virtual_copies: virtual devices have a memory of their own, to which everything is copied as to a GPU, and
            which is poisoned when it is freed: a check of the engine, slower. A ``VirtualLink`` lets the copies
            take as long as over a link of that speed.
        virtual_speeds: lets virtual devices differ as GPUs may, one number for each, at most 1: a device of speed 0.5
            is busy for twice as long as the host computes. The slower ones get fewer micro-batches.
        compile_units: compile units with ``torch.compile``, once for all of the same structure. A dict holds arguments
            of ``torch.compile``: ``backend``, ``mode``, ``options``, ``dynamic``. Units that cannot be compiled run as
            they are, with a warning.
        cost_profile: plan training steps by these costs, not by measured ones: a ``CostProfile``, or the path of
            a file with one. They are those of one micro-batch: measure them with micro-batches of the same size.
        save_profile: file into which the measured costs of training steps, and the machine as it is known then, are
            written, as JSON, when ``fit`` ends.
        trace: file into which a few training steps are written as a trace, as JSON for chrome://tracing and
            https://ui.perfetto.dev. For more choice see ``RoundPipeTimeline``.
        optimizer_overlap: ``"exact"`` runs the update of the weights behind the next forward, which waits for the
            weights that it needs, with the same results; so does everything else that looks at weights or optimizer
            state. ``"off"`` runs it when the optimizer is called. ``"stale"`` is **another algorithm**: a training step
            waits for no update, and computes with the weights from before the last one.
        stale_after_steps: with ``"stale"``: so many optimizer steps are exact at first.
        shard_optimizer: each of several ranks keeps the optimizer state of a part of the weights, and updates these.
        reduce_dtype: of gradients on their way between ranks: ``"bf16"`` halves what travels; sums are made in float32,
            and rounded once. None is the dtype of the weights.
        check_split: what follows if splitting a batch changes what is trained, as is tried on the first one:
            ``"exact"`` runs batches whole where ``num_microbatches`` is ``"auto"``, and else warns; ``"warn"`` warns,
            ``"error"`` raises, for logged values and outputs as well; ``"off"`` does not try.
        verify: so many training steps are compared with plain autograd on the host: losses, gradients and buffers. They
            take several times as long; what differs is an error. For one process, automatic optimization, and steps
            that draw no random numbers. None looks at one micro-batch, if that is cheap, and warns.
        ranks_per_node: processes on each machine, which divide its devices; None is one, or as many as a launcher such
            as torchrun has started. See the page on several machines.
        cluster_environment: what tells the ranks of several processes; usually one of ``Trainer(plugins=...)``.
        process_group_backend: of the default group of ``torch.distributed``; None is ``"gloo"``. With ``"nccl"``
            gradients travel between ranks by way of their first GPUs, where they take about 100 MiB.
        timeout: of each wait for other ranks; None is 30 minutes.
        accelerator: an accelerator object; usually named by ``Trainer(accelerator=...)``.
        checkpoint_io: what reads and writes checkpoint files; usually one of ``Trainer(plugins=...)``.
        precision_plugin: a precision object; usually named by ``Trainer(precision=...)``.

    Raises:
        ValueError, TypeError: for options out of range, and for files that cannot be read or written, naming the
            option.
    """

    strategy_name = "roundpipe"
    last_step: StepResult | None = None  # without outputs and gradients; stays after fit
    _steps: Steps | None = None
    _overlap: OptimizerOverlap | None = None

    def __init__(
        self,
        num_microbatches: int | Literal["auto"] = "auto",
        round_size: int | None = None,
        units: list[type[nn.Module] | str] | None = None,
        loss_weight: Literal["auto", "samples", "label_tokens", "causal_label_tokens", "nodes", "sum"]
        | Callable[[Any], float] = "auto",
        split_batch: Callable[[Any, int], Sequence[Any]] | Literal["packed"] | None = None,
        threads_per_device: int | None = None,
        device_memory_limit: int | str | None = None,
        virtual_copies: bool | VirtualLink = False,
        virtual_speeds: Sequence[float] | None = None,
        compile_units: bool | dict[str, Any] = False,
        cost_profile: str | Path | CostProfile | None = None,
        save_profile: str | Path | None = None,
        trace: str | Path | None = None,
        optimizer_overlap: Literal["exact", "off", "stale"] = "exact",
        stale_after_steps: int = 0,
        shard_optimizer: bool = False,
        reduce_dtype: Literal["bf16"] | None = None,
        check_split: Literal["exact", "warn", "error", "off"] = "exact",
        verify: int | None = None,
        ranks_per_node: int | None = None,
        cluster_environment: AnyClusterEnvironment | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        accelerator: AnyAccelerator | None = None,
        checkpoint_io: AnyCheckpointIO | None = None,
        precision_plugin: AnyPrecision | None = None,
    ) -> None:
        self.options = RoundPipeOptions(
            num_microbatches=num_microbatches,
            round_size=round_size,
            units=units,
            loss_weight=loss_weight,
            split_batch=split_batch,
            threads_per_device=threads_per_device,
            device_memory_limit=device_memory_limit,
            virtual_copies=virtual_copies,
            virtual_speeds=virtual_speeds,
            compile_units=compile_units,
            cost_profile=read_profile(cost_profile),
            save_profile=save_profile,
            trace=trace,
            optimizer_overlap=optimizer_overlap,
            stale_after_steps=stale_after_steps,
            shard_optimizer=shard_optimizer,
            reduce_dtype=reduce_dtype,
            check_split=check_split,
            verify=verify,
        )
        self._links = Links()
        super().__init__(
            ranks_per_node=ranks_per_node, process_group_backend=process_group_backend, timeout=timeout,
            cluster_environment=cluster_environment, accelerator=accelerator, checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )  # fmt: skip

    @override
    def _forget_runs(self) -> None:
        super()._forget_runs()
        self._close_steps()
        self._overlap = self.last_step = None
        self._has_failed = self._seeks_batch_size = False
        self._recordings = Recordings(self.options.trace, self.options.save_profile)
        self._said: set[str] = set()

    # --- set-up and tear-down ----------------------------------------------------------------------------------

    @override
    def _configure_launcher(self) -> None:
        """Called when devices and plugins are known: checks them. Rank 0 alone writes recordings."""
        super()._configure_launcher()
        check_precision(self.precision_plugin)
        note_layer_sync(self._layer_sync)
        if not self.is_global_zero:
            self._recordings = Recordings(None, None)
        if self._precision_plugin is not None:
            self._precision_plugin = checked_precision(self._precision_plugin, self._autocast_device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Rejects what would not be trained correctly, then sets up like any strategy.

        Raises:
            MisconfigurationException: if the weights of training steps cannot be one update behind
                (``optimizer_overlap="stale"``), or not be divided among ranks.
        """
        self._close_steps()
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._seeks_batch_size = any(isinstance(callback, everywhere(BatchSizeFinder)) for callback in callbacks)
        if trainer.training:
            self._recordings.start()
            self._sharding = self._make_sharding()
            self._overlap = OptimizerOverlap(self.options, host_threads(self.pool), lambda: self.engine, self._sharding)
        super().setup(trainer)
        report = None
        if trainer.training:
            stale = self._updates.begin(self._module, self.optimizers)
            here = ranks_here(self._place, self.num_nodes)
            report = HostReport(self._module, self.optimizers, stale, self._updates_here, num_here=here)
            report.check()
            self._links.measure(self.pool, host_threads(self.pool))
        self._steps = self._make_steps(report)
        self.engine.open()

    @override
    def model_to_device(self) -> None:
        """The master weights stay on the host."""
        check_model(self._module, self.options.units, has_copies=not all(d.aliases_host for d in self.pool.devices))
        self._module.to(self.root_device)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Lightning is about to tear the run down, and to raise ``exception`` then."""
        super().on_exception(exception)
        self._has_failed = True
        self._leave_ranks(exception)

    @override
    def teardown(self) -> None:
        """Writes what was asked for and forgets the engine, whose threads end.

        An error that Lightning is about to raise is not replaced by those that follow from it, as on a GPU that raises
        whatever it is asked for.
        """
        has_failed, self._has_failed = self._has_failed, False
        try:
            with contextlib.ExitStack() as stack:  # all of it, even if a part raises
                stack.callback(self._tear_down)
                stack.callback(setattr, self, "_overlap", None)
                self._updates.finish()
        except Exception:
            if not has_failed:
                raise

    def _tear_down(self) -> None:
        steps = self._steps
        with contextlib.ExitStack() as stack:
            stack.callback(super().teardown)
            vars(self.accelerator).pop("get_device_stats", None)
            stack.callback(self.pool.dispose)  # stays, for its statistics
            stack.callback(self._close_steps)
            self._recordings.finish(None if steps is None else steps.engine)

    def _close_steps(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **dict.fromkeys(("_pool", "_steps", "_overlap", "_sharding"))}

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _updates(self) -> OptimizerOverlap:
        return self._overlap or NO_OVERLAP

    @property
    def steps(self) -> Steps:
        """What runs the steps of the connected module."""
        if self._steps is None:
            self._steps = self._make_steps(None)
        return self._steps

    def _make_steps(self, report: HostReport | None) -> Steps:
        module = self._module
        return Steps(
            module,
            self.pool,
            self.options,
            updates=self._updates,
            recordings=self._recordings,
            report=report,
            links=self._links.of(self.pool),
            autocast_device=self._autocast_device,
            said=self._said,
            group=self._group,
            owners=self._owners,
            # The finder puts all callbacks aside, itself included, while it tries a size.
            is_trial=lambda: self._seeks_batch_size and not module.trainer.callbacks,  # type: ignore[attr-defined]
        )

    @property
    def engine(self) -> Engine:
        """The engine of the connected module."""
        return self.steps.engine

    @property
    def host_memory(self) -> HostMemory | None:
        """What the ``fit`` that runs needs on the host, as far as it is known; None outside of ``fit``."""
        report = None if self._steps is None else self._steps.report
        return None if report is None else report.memory

    def trace_with(self, writer: TraceWriter | None, *, times_steps: bool) -> None:
        """Lets ``writer`` record steps of the ``fit`` that is being set up; times all of them if they are to have a
        timeline."""
        self._recordings.times_steps |= times_steps
        if writer is not None and self.is_global_zero:
            self._recordings.writers.append(writer)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The user's transfer hooks, on the host; what they are given tells how the batch is read."""
        # The Trainer calls it for each batch; hooks of the user may call it as well.
        if self._steps is not None and self._module._current_fx_name == "batch_to_device":
            self._steps.arrives(batch)
            if self._module.trainer.training:
                self._loaders.arrives()
        return super().batch_to_device(batch, device, dataloader_idx)

    # --- steps -------------------------------------------------------------------------------------------------

    @override
    def training_step(self, batch: Any, *rest: Any) -> STEP_OUTPUT:
        """The whole pipelined step, backward included; the gradients wait behind the returned loss."""
        self.share_buffers()
        self._loaders.check(batch)
        self.steps.ranks.has_data = self._loaders.has_data
        num_batches = self._module.trainer.accumulate_grad_batches
        scale = expected_scale(self.precision_plugin, num_batches, is_final=self.is_distributed)
        with self.precision_plugin.train_step_context():
            batches, result = self._run("training_step", batch, rest, scale)
        if not self._module.automatic_optimization:
            return cast(STEP_OUTPUT, batches.merged(result.outputs))
        final, many = self.steps.ranks.has_local, self.is_distributed
        return merged_step(result.outputs, batches, result.gradients, scale, is_final=final, must_go_on=many)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Hands out what the pipeline has computed; ``manual_backward`` of a micro-batch lets it compute first.

        Raises:
            MisconfigurationException: for arguments of ``manual_backward`` that cannot be followed through units.
        """
        manual = None if self._steps is None else self._steps.manual
        if manual is None or current() is None:
            self._updates.wait()
            if self._steps is not None:
                self._steps.ranks.before_hand_out()
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        scale = expected_scale(self.precision_plugin, 1)

        def whole(loss: Tensor, gradients: Mapping[nn.Parameter, Tensor]) -> None:
            total = hand_over(loss, gradients, scale, is_final=self.steps.ranks.has_local)
            Strategy.backward(self, total, optimizer, *args, **kwargs)

        return manual.backward(closure_loss, scale, whole, args, kwargs)

    @override
    def block_backward_sync(self) -> Any:
        """While open, gradients stay on this rank: Lightning's way to accumulate them."""
        return self.steps.ranks.blocked()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """A step of the optimizer, on the masters; what it does to them may come later, see ``optimizer_overlap``."""
        with self._updates.stepping(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def validation_step(self, batch: Any, *rest: Any) -> STEP_OUTPUT:
        """Forward only, through the same engine; outputs of the micro-batches merged in order."""
        with self.precision_plugin.val_step_context():
            return cast(STEP_OUTPUT, self._evaluate("validation_step", batch, rest))

    @override
    def test_step(self, batch: Any, *rest: Any) -> STEP_OUTPUT:
        """See :meth:`validation_step`."""
        with self.precision_plugin.test_step_context():
            return cast(STEP_OUTPUT, self._evaluate("test_step", batch, rest))

    @override
    def predict_step(self, batch: Any, *rest: Any) -> Any:
        """See :meth:`validation_step`."""
        with self.precision_plugin.predict_step_context():
            return self._evaluate("predict_step", batch, rest)

    def _evaluate(self, name: str, batch: Any, rest: tuple[Any, ...]) -> Any:
        batches, result = self._run(name, batch, rest)
        return batches.merged(result.outputs)

    def _run(self, name: str, batch: Any, rest: tuple[Any, ...], loss_scale: float = 1.0) -> tuple[Batches, StepResult]:
        batches, result = self.steps.run(name, batch, rest, loss_scale)
        self.last_step = replace(result, outputs=[], gradients={})
        return batches, result
