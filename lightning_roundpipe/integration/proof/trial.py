"""A step that is tried: run through the engine without a backward, looked at, and put back.

[Note: trials]
A trial runs the user's step as any step is run, with the same limits of memory, but forward only; nothing is logged,
and the user's loggers hear nothing of it. What it has changed is looked at and then put back:

- attributes of modules and what they lead to (:mod:`snapshot`), buffers and metrics (:mod:`step_state`), generators;
- tensors that are written in place (weights, the batch, anything that modules hold): copied when an operator is about
  to write them (:mod:`watching`);
- schedulers and the settings of optimizers.

With manual optimization a trial ends with the first ``manual_backward``, whose loss is that of the step, or with the
first step of an optimizer. What it cannot put back are effects outside (prints, files) and objects whose state cannot
be seen.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ...common.attributes import ALL, assign, attribute_set, is_container, read
from ...common.seeds import derive_seed
from ...common.trees import mapped, tensors_in
from ...devices.pool import DevicePool
from ...engine.requests import StepRequest, StepResult
from ...engine.runner import Engine
from ...lightning_packages import DummyLogger, Logger, PassThroughProfiler, _DummyExperiment, pl, rank_zero_warn
from ...usercode.collected_lists import NOT_OF_USERS, is_unchanged, nested_copy
from ...usercode.generators import ForeignStates, seed_foreign
from ...usercode.hook_state import held_by_hooks
from ...usercode.lock import current
from ..batches.merging import merge_outputs
from ..batches.splitting import Batches
from ..steps.log_merging import LogCapture
from ..steps.loss import loss_of
from ..steps.manual import methods_for_the_batch
from ..steps.metrics import StepMetrics
from ..steps.modules import ModuleScan
from ..steps.step_state import StepState
from .draws import Draws, dropout_off
from .snapshot import Snapshot
from .watching import Originals, ProofMode

# What a step by hand may do before its first backward; it changes nothing that a forward sees.
_WITHOUT_EFFECT = ("zero_grad", "toggle_optimizer", "untoggle_optimizer", "clip_gradients", "update")


class StepEnds(BaseException):
    """A step by hand has come to the first call that concerns the whole batch; no error, and nothing of the user's
    catches it.

    Attributes:
        loss: if it is a backward.
    """

    def __init__(self, loss: Tensor | None = None) -> None:
        super().__init__()
        self.loss = loss


@dataclass
class Outcome:
    """What a trial has given.

    Attributes:
        outputs: what the step returned, by micro-batch.
        losses: that are trained on, by micro-batch; None where there is none.
        logs: what was logged.
        left: what the step has left on modules: name -> value.
        written: names of tensors that it has written in place: weights by their names, the batch's as ``batch...``.
        batch: the batch after it.
        num_scheduler_steps: how often it has stepped each scheduler.
        square: see :class:`watching.ProofMode`.
        buffers: names of those in ``left``.
        activations: names of attributes in it that had a graph.
        ends_early: whether it was a step by hand.
        are_draws_lost: see :class:`draws.Draws`.
        taken_s: seconds that it took.
    """

    outputs: list[Any]
    losses: list[Tensor | None]
    logs: LogCapture
    batch: Any
    left: dict[str, Any] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    num_scheduler_steps: tuple[int, ...] = ()
    square: int = 0
    buffers: frozenset[str] = frozenset()
    activations: frozenset[str] = frozenset()
    ends_early: bool = False
    are_draws_lost: bool = False
    taken_s: float = 0.0


class Trials:
    """Runs trials; see [Note: trials]."""

    def __init__(
        self, module: pl.LightningModule, scan: ModuleScan, engine: Engine, pool: DevicePool, autocast_device: str
    ) -> None:
        self._module = module
        self._scan = scan
        self._engine = engine
        self._devices = [device.torch_device for device in pool.devices]
        self._autocast_device = autocast_device

    def run(
        self, name: str, call: Callable[[Any], Any], batches: Batches, batch: Any, draws: Draws, *, times: int = 1
    ) -> Outcome:
        """Tries a step.

        Args:
            call: the user's step on a micro-batch.
            batch: what the micro-batches are parts of.
            draws: that are to be the same as in another trial.
            times: how often in a row, each going on with what the one before has left; the last one is looked at.

        Raises:
            Exception: what the step raises; everything was put back.
        """
        with tried(self._module, self._scan, batch, self._devices) as state, dropout_off():
            started = perf_counter()
            for _ in range(times):
                outcome = self._run(name, call, batches, batch, draws, state.originals)
            outcome.taken_s = perf_counter() - started
            state.look(outcome)
            return outcome

    def run_backward(self, call: Callable[[Any], Any], batches: Batches) -> StepResult:
        """Forward and backward of a training step, without dropout; all but what it returns is put back."""
        with tried(self._module, self._scan, batches.microbatches, self._devices) as state, dropout_off():

            def step(part: Any) -> Any:
                with ProofMode(None, state.originals):
                    return call(part)

            logs = LogCapture(self._module, 1, StepMetrics(self._scan))
            given = replace(batches, microbatches=tuple(mapped(part, anew=object) for part in batches.microbatches))
            return self._through_engine("backward", step, given, logs, loss_of=loss_of)

    def _through_engine(
        self, name: str, step: Callable[[Any], Any], batches: Batches, logs: LogCapture, **more: Any
    ) -> StepResult:
        """Runs a step; what it logs is kept.

        Args:
            more: of the :class:`StepRequest`.
        """
        key = ("trial", name, len(batches.microbatches))
        request = StepRequest(
            function=step,
            microbatches=batches.microbatches,
            weights=batches.loss_weights,
            key=key,
            merge=functools.partial(merge_outputs, sizes=batches.sizes, weights=batches.weights),
            autocast_device=self._autocast_device,
            is_trial=True,
            **{"seed": 0, **more},
        )
        try:
            with logs.capturing():
                return self._engine.run(request)
        finally:
            self._engine.forget(key)  # each begins with a recording, so that its micro-batches take turns

    def _run(
        self, name: str, call: Callable[[Any], Any], batches: Batches, batch: Any, draws: Draws, originals: Originals
    ) -> Outcome:
        count, is_training = len(batches.microbatches), name == "training_step"
        is_manual = is_training and not self._module.automatic_optimization
        logs = LogCapture(self._module, count, StepMetrics(self._scan))
        squares: list[int] = []
        activations: set[str] = set()
        before = ForeignStates()
        seed_foreign(derive_seed(derive_seed(draws.seed, 0), -1))  # as a micro-batch that is recorded
        seeded = ForeignStates()

        def step(part: Any) -> Any:
            state = current()
            assert state is not None
            index = state.index if count > 1 else None
            mode = ProofMode(draws, originals, index)
            draws.begin(index)
            try:
                with mode:
                    return call(part)
            except StepEnds as end:
                return {"loss": end.loss}
            finally:
                draws.end(index)
                draws.are_lost |= seeded.have_moved()
                squares.append(mode.square)
                activations.update(self._activations())

        try:
            with self._ending_early(is_manual):
                outputs = self._through_engine(name, step, batches, logs, seed=draws.seed).outputs
        finally:
            before.put_back()
        batches.changes.bring_back(batch)
        losses = [loss_of(output) for output in outputs] if is_training and not is_manual else []
        if is_manual:
            losses = [output["loss"] if _is_end(output) else None for output in outputs]
        return Outcome(
            outputs,
            losses,
            logs,
            batch,
            square=squares[0],
            ends_early=is_manual,
            activations=frozenset(activations),
        )

    def _activations(self) -> Iterator[str]:
        """Names of attributes of LightningModules that hold a tensor with a graph."""
        for prefix, module in self._scan.lightning_modules:
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    yield f"{prefix}.{name}".lstrip(".")

    @contextlib.contextmanager
    def _ending_early(self, is_manual: bool) -> Iterator[None]:
        """While open, a step by hand ends with its first call that concerns the whole batch."""
        if not is_manual:
            yield
            return

        def ending(name: str) -> Callable[..., Any]:
            def method(*args: Any, **kwargs: Any) -> None:
                if name not in _WITHOUT_EFFECT and not name.startswith("clip_grad"):
                    raise StepEnds

            return method

        def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            raise StepEnds(loss.detach())

        with contextlib.ExitStack() as stack:
            for owner, names, _ in methods_for_the_batch(self._module, self._scan):
                for name in names:
                    stack.enter_context(attribute_set(owner, name, ending(name)))
            stack.enter_context(attribute_set(self._module, "manual_backward", backward))
            original = Tensor.backward
            setattr(Tensor, "backward", backward)  # noqa: B010  # to a type checker methods are constant
            stack.callback(setattr, Tensor, "backward", original)
            yield


@contextlib.contextmanager
def tried(
    root: pl.LightningModule, scan: ModuleScan, batch: Any, devices: Sequence[torch.device]
) -> Iterator[TrialState]:
    """While open, steps are tried: nothing is heard of them, what the user has compiled runs as it is, and what they
    change is put back in the end."""
    state = TrialState(root, scan, batch, devices)
    try:
        with _unheard(root, scan), torch.compiler.set_stance("force_eager"):
            yield state
    finally:
        state.put_back()


@contextlib.contextmanager
def _unheard(root: pl.LightningModule, scan: ModuleScan) -> Iterator[None]:
    """While open, loggers, the profiler and ``self.print`` do nothing, and no warnings of the step are shown."""
    trainer: Any = root.trainer
    loggers, profiler = trainer.loggers, trainer.profiler
    trainer.loggers, trainer.profiler = [*map(silenced, loggers)], PassThroughProfiler()
    try:
        with contextlib.ExitStack() as stack:
            for _, module in scan.lightning_modules:
                stack.enter_context(attribute_set(module, "print", _do_nothing))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            yield
    finally:
        trainer.loggers, trainer.profiler = loggers, profiler


def silenced(logger: Logger) -> Logger:
    """A logger with the same folders that writes nothing; of its class, if that keeps its experiment as those of
    Lightning do."""
    if "_experiment" not in vars(logger):
        return DummyLogger()
    made: Logger = object.__new__(type(logger))
    methods = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint")
    vars(made).update({**vars(logger), **dict.fromkeys(methods, _do_nothing), "_experiment": _DummyExperiment()})
    return made


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _is_end(output: Any) -> bool:
    return isinstance(output, dict) and output.keys() == {"loss"}


class TrialState:
    """What a trial finds, and is put back after it.

    Attributes:
        originals: for what runs in a :class:`watching.ProofMode`.
    """

    def __init__(
        self, module: pl.LightningModule, scan: ModuleScan, batch: Any, devices: Sequence[torch.device]
    ) -> None:
        self._scan = scan
        modules = [one for _, one in scan.named]
        self._held = held_by_hooks(modules, modules)
        held = [("a hook", owner if name == ALL else value) for owner, name, value in self._held]
        self._snapshot = Snapshot([*scan.named[:1], *held])
        self._buffers = StepState(scan, None, devices)
        gradients = [(f"{name}.grad", p.grad) for name, p in scan.parameters() if p.grad is not None]
        found = [*scan.parameters(), *tensors_in(batch, "batch"), *gradients, *self._snapshot.named]
        self.originals = Originals(found)
        self._flags = [(parameter, parameter.requires_grad) for _, parameter in scan.parameters()]
        trainer = module.trainer
        self._schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._before = [dict(vars(scheduler)) for scheduler in self._schedulers]
        self._groups = [(group, dict(group)) for optimizer in trainer.optimizers for group in optimizer.param_groups]

    def look(self, outcome: Outcome) -> None:
        """Notes in ``outcome`` what the trial has changed."""
        outcome.written = tuple(self.originals.written)
        pairs = zip(self._schedulers, self._before, strict=True)
        outcome.num_scheduler_steps = tuple(
            getattr(now, "last_epoch", 0) - before.get("last_epoch", 0) for now, before in pairs
        )
        outcome.batch = mapped(outcome.batch, lambda tensor: tensor.detach().clone())
        buffers = {name: tensor.detach().clone() for name, tensor in self._buffers.changed_buffers()}
        outcome.buffers = frozenset(buffers)
        outcome.left = {**dict(self._left()), **buffers}

    def _left(self) -> Iterator[tuple[str, Any]]:
        for prefix, module in self._scan.named:
            before = self._snapshot.attributes_of(module)
            for name, value in vars(module).items():
                if name in NOT_OF_USERS or (before.get(name, TrialState) is value and not self._is_refilled(value)):
                    continue
                yield f"{prefix}.{name}".lstrip("."), nested_copy(value) if is_container(value) else value

    def _is_refilled(self, value: Any) -> bool:
        """Whether a list or dict holds something else now."""
        before = self._snapshot.content_of(value)
        return is_container(value) and before is not None and not is_unchanged(value, before)

    def put_back(self) -> None:
        """Everything is as before the trial."""
        for owner, name, value in self._held:
            if read(owner, name) is not value:
                assign(owner, name, value)
        self._snapshot.put_back()
        self._buffers.restore()
        restored = set(self.originals.written)
        self.originals.put_back()
        for name in self._buffers.too_large():
            if name not in restored:
                rank_zero_warn(
                    f"the buffer {name!r} has changed while it was tried whether batches can be split, and is too "
                    "large to be put back: with RoundPipeStrategy(check_split='off') nothing is tried"
                )
        for parameter, flag in self._flags:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
        for scheduler, before in zip(self._schedulers, self._before, strict=True):
            vars(scheduler).clear()
            vars(scheduler).update(before)
        for group, entries in self._groups:
            group.clear()
            group.update(entries)
