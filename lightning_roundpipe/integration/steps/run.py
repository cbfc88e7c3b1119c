"""The steps of one run of the Trainer: from the batch to what the step returns, by way of the engine.

::

    training_step(batch)       split the batch                                    batches/
                               run the user's step on every micro-batch           engine.run
                                 hold back what it logs                           log_merging
                                 refuse mistakes                                  misuse
                                 manual optimization: meet                        manual
                               again, if it does not fit                          retry
                               log once, give the batch back its entries
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ...devices.pool import DevicePool
from ...engine.requests import StepRequest, StepResult
from ...lightning_packages import PossibleUserWarning, TrainerFn, pl
from ...options import RoundPipeOptions
from ...planning.costs import Machine
from ...ranks.buckets import EACH_FOR_ITSELF, Owners
from ...ranks.group import ALONE, RankGroup
from ...ranks.reduction import StepReduction
from ...reporting.host_report import HostReport
from ...reporting.tracing import Recordings
from ...usercode.lock import current
from ..batches.merging import apart_in, merge_outputs
from ..batches.reading import BatchSplitError
from ..batches.splitting import Batches, BatchSplitter
from ..checks import check_modes
from ..huggingface import training_settings
from ..overlap import OptimizerOverlap
from ..pool import make_engine
from ..proof.proof import Proof
from ..proof.trial import Trials
from ..verify import Verification
from .hints import hint_at_single
from .log_merging import LogCapture
from .loss import loss_of
from .manual import ManualOptimization
from .metrics import StepMetrics
from .misuse import StepGuard
from .modules import ModuleScan
from .notices import Notices, heard_once
from .ranks import WIRES, RankSteps
from .retry import Retry
from .user_step import dropping_old_gradients, seed_of_step
from .whole_batch import gathered_over


class Steps:
    """Runs the steps of one run; everything here ends with it.

    Args:
        updates: of the optimizers, which steps wait for where they need to.
        report: what a training needs on the host; None where there is none.
        links: of the devices; None if they are not measured.
        is_trial: whether Lightning is trying a batch size at the moment.
        said: notices of the runs before this one.
        group: the ranks, whose training steps these are a part of.
        owners: which of them get the gradients of which weights.

    Attributes:
        ranks: see [Note: steps over ranks] in :mod:`ranks`.
        manual: manual optimization of the training step that runs, if it has any.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pool: DevicePool,
        options: RoundPipeOptions,
        *,
        updates: OptimizerOverlap,
        recordings: Recordings,
        report: HostReport | None,
        links: Machine | None,
        autocast_device: str,
        is_trial: Callable[[], bool],
        said: set[str] | None = None,
        group: RankGroup = ALONE,
        owners: Owners = EACH_FOR_ITSELF,
    ) -> None:
        self._module = module
        self._updates = updates
        self._recordings = recordings
        self._autocast_device = autocast_device
        self._pool = pool
        self._has_trained = False
        self._scan = ModuleScan(module)
        self._notices = notices = Notices(said)
        self.report = report
        self.engine = make_engine(module, pool, options, report, links)
        self._splitter = BatchSplitter(module, options, self._scan, notices, has_others=group.size > 1)
        self.ranks = RankSteps(group, self._scan, self._splitter, WIRES[options.reduce_dtype], owners)
        self._guard = StepGuard(module, pool, self._scan)
        self._metrics = StepMetrics(self._scan)
        self._retry = Retry(
            self._scan,
            options.microbatches_for(len(pool)),
            is_auto=options.num_microbatches == "auto",
            pool=pool,
            forget=self.engine.forget,
            costs=self.engine.costs,
            is_trial=is_trial,
        )
        self._verification = Verification(
            module,
            self._scan,
            options.verify,
            pool=pool,
            engine=self.engine,
            notices=notices,
            autocast_device=autocast_device,
            num_ranks=group.size,
        )
        trials, look = Trials(module, self._scan, self.engine, pool, autocast_device), self._verification.look_at_rows
        self._proof = Proof(
            trials, self._scan, self._splitter, self._retry, notices, options, group, autocast_device, is_trial, look
        )
        self.manual: ManualOptimization | None = None

    def arrives(self, batch: Any) -> None:
        """A loader has given ``batch``; hooks of the user may change it before the step gets it."""
        self._splitter.readings.arrives(batch)

    def close(self) -> None:
        """The run has ended: the threads of the engine do, too. Other ranks are not waited for any more."""
        self.engine.close()
        self.ranks.close()

    def run(self, name: str, batch: Any, rest: Sequence[Any], loss_scale: float = 1.0) -> tuple[Batches, StepResult]:
        """Runs the user's step on every micro-batch of a batch, and logs what they have logged.

        Args:
            rest: what Lightning gives it besides.
            loss_scale: by which gradients are multiplied.

        Raises:
            MisconfigurationException: if the precision plugin's context is a mode that micro-batches would not see.
        """
        check_modes()
        self._updates.check()
        self._scan.refresh()
        function = getattr(self._module, name)
        decides = name == "training_step" or self._module.trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING)
        with self._splitter.weights.watching(name, warns=decides), heard_once(), contextlib.ExitStack() as training:
            if name == "training_step":
                training.enter_context(training_settings(self._scan, batch, self._notices))
                training.enter_context(self._updates.computing(self._module))
                training.enter_context(self.ranks.training_step(self._module))

            def call(part: Any) -> Any:
                return function(part, *rest)

            self._proof.before(name, call, batch, rest)
            batches, (logs, result) = self._retry.run(
                name,
                batch,
                self._splitting(name, batch, rest),
                lambda batches: self._verification.run(name, call, batches, loss_scale, self._attempt),
            )
            batches.changes.bring_back(batch)
            logs.replay(batches)
            self._look_at_first(name, batches)
            self._look_at_outputs(name, batches, result.outputs)
            if name == "training_step" and self.report is not None:
                plan = self.engine.plan_of(name)
                self.report.note_step(self.engine.working_copies.expected_bytes, None if plan is None else plan.step)
            self.ranks.note_gradients(result.gradients)
            self._proof.after()
        return batches, result

    def _splitting(self, name: str, batch: Any, rest: Sequence[Any]) -> Callable[[Any, int], Batches]:
        """What splits a batch. One whose rows are not certain stays whole where the user has not said otherwise."""
        split = self._splitter.of(name, batch, rest)

        def split_or_not(batch: Any, num_microbatches: int) -> Batches:
            try:
                return split(batch, num_microbatches)
            except BatchSplitError as error:
                if not self._proof.may_run_whole:
                    raise
                self._notices.warn(
                    f"rows of {name}",
                    f"{error} Until then batches of {name} that cannot be read are one micro-batch each: exact, on one "
                    "device after the other",
                )
                return split(batch, 1)

        return split_or_not

    def _look_at_first(self, name: str, batches: Batches) -> None:
        """After a step: if it is the first of a training, and one that could be split was not."""
        if name == "training_step" and not self._has_trained:
            self._has_trained = True
            if "rows of training_step" not in self._notices.given:
                hint_at_single(self._notices, batches, self._retry.wanted(name), len(self._pool))

    def _look_at_outputs(self, name: str, batches: Batches, outputs: Sequence[Any]) -> None:
        """After a step: if how many rows the micro-batches have is not known, some outputs may not be joined."""
        if batches.batch_size is not None or len(outputs) < 2 or f"outputs of {name}" in self._notices.given:
            return
        path = apart_in(outputs, batches.sizes)
        if path is not None:
            self._notices.warn(
                f"outputs of {name}",
                f"output{path} of {name} is a list of what each of the {len(outputs)} micro-batches gives, because how "
                "many rows these have cannot be told. Give micro-batches a __len__, or the number as "
                "RoundPipeStrategy(loss_weight=function from a micro-batch to its number of rows)",
                category=PossibleUserWarning,
            )

    def _attempt(
        self, name: str, call: Callable[[Any], Any], batches: Batches, loss_scale: float
    ) -> tuple[LogCapture, StepResult]:
        """Runs the step on these micro-batches; what they log is held back."""
        logs = LogCapture(self._module, len(batches.microbatches), self._metrics)
        is_training = name == "training_step"
        is_manual = is_training and not self._module.automatic_optimization
        barriers = self._barriers(batches) if is_manual else contextlib.nullcontext()
        if is_training and not is_manual:
            call = dropping_old_gradients(call, len(batches.microbatches), self._module.trainer)
        call = _naming_parts(self._guard.followed(name, call), batches, is_training=is_training)
        share = self.ranks.share_of(batches) if is_training else 1.0
        reduction = self.ranks.begin(self._module) if is_training else None
        gathering = gathered_over(self.ranks.group, has_rows=self.ranks.has_data or not is_training)
        with logs.capturing(), self._guard.watching(name, batches), barriers, gathering:
            request = StepRequest(
                function=call,
                microbatches=batches.microbatches,
                weights=[weight * loss_scale * share for weight in batches.loss_weights],
                key=name,
                seed=seed_of_step(self._module.trainer, name),
                loss_of=loss_of if is_training and not is_manual else None,
                merge=functools.partial(merge_outputs, sizes=batches.sizes, weights=batches.weights),
                autocast_device=self._autocast_device,
                meets=is_manual,
                reduction=reduction,
                is_trained=self._is_trained,
            )
            with self._final_if_sent(reduction):
                result = self._recordings.run(self.engine, request) if is_training else self.engine.run(request)
        return logs, result

    def _is_trained(self, tensor: Tensor) -> bool:
        """Whether an optimizer updates ``tensor``."""
        groups = [group for optimizer in self._module.trainer.optimizers for group in optimizer.param_groups]
        return any(weight is tensor for group in groups for weight in group["params"])

    @contextlib.contextmanager
    def _final_if_sent(self, reduction: StepReduction | None) -> Iterator[None]:
        """Around the run of a step: one that has failed is final if other ranks have gradients of it."""
        try:
            yield
        except BaseException:
            if reduction is not None and reduction.stop():
                self._retry.forbid("other ranks have some of its gradients already")
            raise

    @contextlib.contextmanager
    def _barriers(self, batches: Batches) -> Iterator[None]:
        """Around a step with manual optimization."""

        def holding() -> contextlib.AbstractContextManager[None]:
            self._retry.forbid("manual_backward or an optimizer has been called in it already")
            return self._guard.allowed()

        self.manual = ManualOptimization(self._module, self._scan, batches, holding, self._updates.wait, self.ranks)
        try:
            with self.manual.followed():
                yield
        finally:
            self.manual = None


def _naming_parts(call: Callable[[Any], Any], batches: Batches, *, is_training: bool) -> Callable[[Any], Any]:
    """``call``, with names in place of what it returns of its micro-batch."""

    def step(part: Any) -> Any:
        state = current()
        assert state is not None
        return batches.changes.named(state.index, call(part), is_training=is_training)

    return step
