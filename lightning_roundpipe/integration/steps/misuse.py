"""Mistakes in user code that would train something else without a word: refused, as a rule in the very first step.

[Note: misuse]
The user's step runs once per micro-batch. So a weight that it changes in place is changed once per micro-batch, while
others compute with it; a unit that changes its own weights does so again when it is recomputed, and loses the change
where it runs on a copy. Looked at are

- **weights**: their versions around every step. A write through ``.data`` leaves no trace in the version, so the first
  steps of a kind compare some elements of every weight as well. Those of every evaluation do: in the sanity check an
  average of the weights that a step swaps in is still equal to them. In the very first step the first micro-batch runs
  alone: what it changes is found behind the unit, or behind the user's step, that did it, before anything is trained.
- **gradients**: the engine adds them up elsewhere. In the step user code may look at those that are in ``.grad``, but
  would change them once per micro-batch.
- **tensors of the batch** that all micro-batches share, in the first steps: a change would happen M times.
- **schedulers**, in automatic optimization: stepped in the step, they would be stepped M times.
- **the place of the weights**: user code that moves a module takes the masters away from the host.

A step with a single micro-batch may change weights in user code. Later than in the first steps a mistake is an error as
well: from which step on the weights are wrong could not be told. Changes that belong into a step (optimizers that are
stepped by hand) are made inside :meth:`StepGuard.allowed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...common.fingerprints import Versions, sample_of
from ...common.trees import tensors_in
from ...devices.pool import DevicePool
from ...lightning_packages import MisconfigurationException, pl
from ...usercode.lock import current
from ..batches.splitting import Batches
from .hints import note_sizes
from .modules import ModuleScan

Function = Callable[[Any], Any]

_NUM_SAMPLED_STEPS = 2
_LOOK_UP_STEPS = 64  # parameters come and go, and to walk through all modules is dear


def _hooks(kind: str) -> str:
    """Where to do once per batch what a step of this kind does."""
    name = "train" if kind == "training_step" else kind.removesuffix("_step")
    return f"on_{name}_batch_start, on_{name}_batch_end or another hook that runs once per batch"


class StepGuard:
    """Watches the steps of one run; see [Note: misuse]."""

    def __init__(
        self,
        root: pl.LightningModule,
        pool: DevicePool,
        scan: ModuleScan,
    ) -> None:
        self._root = root
        self._scan = scan
        self._aliases_host = pool[0].aliases_host
        self._num_steps: dict[str, int] = {}
        self._kind, self._num_in_row = "", 0  # of the last step, and how many of them came one after another
        self._named: list[tuple[str, nn.Parameter]] = []
        self._weights: list[nn.Parameter] = []
        self._before = _Weights([], is_sampled=False)
        self._gradients: Versions[nn.Parameter] | None = None  # None: not watched
        self._count = 1  # micro-batches of the step

    @contextlib.contextmanager
    def watching(self, kind: str, batches: Batches) -> Iterator[None]:
        """Around an attempt to run a step.

        Raises:
            MisconfigurationException: for a mistake, naming what was changed and what to do instead.
        """
        step = self._num_steps.get(kind, 0)
        if kind != self._kind:
            self._kind, self._num_in_row = kind, 0
        is_early = (step if kind == "training_step" else self._num_in_row) < _NUM_SAMPLED_STEPS
        count = self._count = len(batches.microbatches)
        looks_closely = is_early or step % _LOOK_UP_STEPS == 0
        if looks_closely:
            self._look_up()
            self._check_places()
        shared = _shared_tensors(batches.microbatches) if is_early and count > 1 else None
        self._before = _Weights(self._weights, is_sampled=is_early)
        num_scheduler_steps = self._num_scheduler_steps(kind)
        try:
            yield
        except Exception as error:
            self._look_up()  # to move a module may have put new parameters in the place of the old ones
            self._check_places(error)
            if "modified by an inplace operation" in str(error):  # autograd may notice first what is looked for below
                self._check_weights(kind)
                self._check_shared(kind, shared)
            note_sizes(error, batches)
            raise
        if looks_closely:
            self._check_places()
        self._check_weights(kind)
        if self._num_scheduler_steps(kind) != num_scheduler_steps:
            raise MisconfigurationException(
                f"{kind} steps a learning rate scheduler, {count} times per batch: once in every micro-batch. Let "
                'Lightning do it ("interval": "step" in configure_optimizers, lr_scheduler_step), or do it in '
                f"{_hooks(kind)}, or use manual optimization"
            )
        self._check_shared(kind, shared)
        self._num_steps[kind] = step + 1
        self._num_in_row += 1

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Around changes that are made once in the middle of a step by hand, while no micro-batch runs.

        Raises:
            MisconfigurationException: if weights or gradients have changed before, in the same step.
        """
        self._check_weights("training_step")
        self._check_complete_gradients()
        try:
            yield
        finally:
            self._before = _Weights(self._weights, is_sampled=self._before.samples is not None)
            self._gradients = self._gradients_now() if self._count > 1 else None

    def _look_up(self) -> None:
        self._scan.refresh()
        exempt: set[int] = set()
        if self._aliases_host:  # what is scaled to a maximal norm twice is the same as once
            norms = (nn.Embedding, nn.EmbeddingBag)
            exempt = {id(m.weight) for _, m in self._scan.named if isinstance(m, norms) and m.max_norm is not None}
        named = [(name, p) for name, p in self._scan.parameters() if not (is_lazy(p) or p.is_inference())]
        self._named = named
        self._weights = [p for _, p in named if id(p) not in exempt]

    # --- the first micro-batch -----------------------------------------------------------------------------------

    def followed(self, kind: str, function: Function) -> Function:
        """``function``, the user's step; in the first step of a kind its first call, which is alone, is looked into."""
        if self._num_steps.get(kind, 0):
            return function
        called = iter((True,))

        def first(microbatch: Any) -> Any:
            state = current()
            if not next(called, False) or state is None or state.call_unit is None:
                return function(microbatch)
            call_unit = state.call_unit
            state.call_unit = self._watched(call_unit, kind)
            gradients = self._gradients_now()
            try:
                output = function(microbatch)
            finally:
                state.call_unit = call_unit
            self._check_weights(kind)
            if kind == "training_step" and self._root.automatic_optimization:
                self._check_gradients(gradients)
            return output

        return first

    def _watched(self, call_unit: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """``call_unit``, with a comparison of the unit's weights before and after."""
        known = set(map(id, self._weights))

        def call(unit: Any, *arguments: Any) -> Any:
            weights = _Weights([p for p in unit.module.parameters() if id(p) in known], is_sampled=True)
            result = call_unit(unit, *arguments)
            changed = weights.changed()
            if changed:
                raise MisconfigurationException(
                    f"the forward of unit {unit.name!r} ({type(unit.module).__name__}) changes its weight "
                    f"{self._names(changed)} in place. A unit runs once per micro-batch and again in the backward, and "
                    f"where it runs on a copy of its weights the change is lost: make it in {_hooks(kind)}"
                )
            return result

        return call

    # --- checks ----------------------------------------------------------------------------------------------------

    def _check_shared(self, kind: str, shared: Versions[str] | None) -> None:
        if shared is not None and (names := shared.written()):
            raise MisconfigurationException(
                f"{kind} changes the tensor {names[0]} in place. All {self._count} micro-batches share it, so that it "
                f"has been changed {self._count} times: change a copy, for instance x = x.clone()"
            )

    def _check_weights(self, kind: str) -> None:
        count = self._count
        changed = self._before.changed(with_samples=count > 1 or not self._aliases_host)
        if count == 1:  # user code may; the engine notices by the version
            written = set(map(id, self._before.written()))
            changed = [weight for weight in changed if id(weight) not in written]
        if not changed:
            return
        what = f"{kind}, or code that it calls, changes the weight {self._names(changed)} in place"
        if count == 1:
            raise MisconfigurationException(
                f"{what}, in a way that torch does not see (such as through numpy): the copies of the weight on the "
                f"devices are not made anew then. Change it by functions of torch, or in {_hooks(kind)}"
            )
        raise MisconfigurationException(
            f"{what}. It runs once per micro-batch, so that the change is made {count} times per batch, while other "
            f"micro-batches compute with the weight: make it in {_hooks(kind)}, or use num_microbatches=1"
        )

    def _num_scheduler_steps(self, kind: str) -> list[Any]:
        """How often schedulers were stepped, as far as a step must not do it."""
        if self._count == 1 or kind != "training_step" or not self._root.automatic_optimization:
            return []
        configs = self._root.trainer.lr_scheduler_configs
        return [getattr(config.scheduler, "last_epoch", None) for config in configs]

    def _check_gradients(self, before: Versions[nn.Parameter]) -> None:
        if written := self._written_since(before):
            raise MisconfigurationException(
                f"training_step writes the gradient (.grad) of {self._names(written)}, by itself or by a backward of "
                "its own. Gradients of the micro-batches are added up elsewhere while the step runs: change them in "
                "on_after_backward or on_before_optimizer_step, and return the loss without running its backward"
            )

    def _gradients_now(self) -> Versions[nn.Parameter]:
        """What is in ``.grad`` of weights, and its version."""
        return Versions((p, p.grad) for p in self._weights if p.grad is not None)

    def _written_since(self, before: Versions[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in self._weights if p.grad is not None and not before.has(p, p.grad)]

    def _check_complete_gradients(self) -> None:
        if self._gradients is not None and (written := self._written_since(self._gradients)):
            raise MisconfigurationException(
                f"training_step writes the gradient (.grad) of {self._names(written)}. It runs once per micro-batch, "
                f"so that the change is made {self._count} times: clip with self.clip_gradients(...), or call "
                "torch.nn.utils.clip_grad_norm_(...) by this whole name; set gradients to None instead of zero; make "
                "other changes in on_after_backward or on_before_optimizer_step, or use num_microbatches=1"
            )

    def _check_places(self, cause: Exception | None = None) -> None:
        for weight in self._weights:
            if not weight.is_cpu:
                raise MisconfigurationException(
                    f"the weight {self._names([weight])} was moved to the device {str(weight.device)!r} by hand "
                    "(.to(), .cuda() or the like). Weights stay on the host, and RoundPipe brings them to the devices "
                    "by itself: remove that call from the module, its hooks and callbacks"
                ) from cause

    def _names(self, weights: Iterable[nn.Parameter]) -> str:
        first, *others = weights
        name = repr(next((name for name, weight in self._named if weight is first), "?"))
        return f"{name} (and {len(others)} more)" if others else name


class _Weights:
    """Weights at one moment: versions, and some elements if asked for."""

    def __init__(self, weights: Sequence[nn.Parameter], *, is_sampled: bool) -> None:
        self._weights = weights
        self._versions = Versions(zip(weights, weights, strict=True))
        self.samples = [_sample(weight) for weight in weights] if is_sampled else None

    def written(self) -> list[nn.Parameter]:
        """Those with another version now: ``.data`` has none."""
        return self._versions.written()

    def changed(self, *, with_samples: bool = True) -> list[nn.Parameter]:
        """The weights that are different now."""
        found = self.written()
        if found or self.samples is None or not with_samples:
            return found
        pairs = zip(self._weights, self.samples, strict=True)
        return [weight for weight, sample in pairs if not torch.equal(_sample(weight), sample)]


def _sample(weight: nn.Parameter) -> Tensor:
    """A copy of evenly spread elements, as bytes: NaN equals NaN. Nothing of tensors with a layout of their own."""
    data = weight.detach()  # waits for an update that is under way; until then the weight is of another class
    if type(weight) is not nn.Parameter or data.layout is not torch.strided:
        return torch.empty(0)
    return sample_of(data).view(torch.uint8)


def _shared_tensors(microbatches: Sequence[Any]) -> Versions[str]:
    """Tensors that several micro-batches hold, by their paths, and their versions."""
    first, second = (dict(tensors_in(microbatch, "batch")) for microbatch in microbatches[:2])
    known = set(map(id, second.values()))
    return Versions((name, tensor) for name, tensor in first.items() if id(tensor) in known)
