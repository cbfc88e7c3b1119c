"""Training steps beside plain autograd (``verify=N``): for those who debug, and for bug reports.

[Note: verified steps]
The micro-batches of a step run twice, and both runs are compared::

    state noted --> one after the other, plain modules on the host --> losses, .grad, buffers
         ^-------------------- put back ------------------------------'      compared
    the step itself, through the engine -----------------------------> losses, gradients, buffers

Both have the same micro-batches with the same weights. So what differs is a fault of the pipeline; what splitting a
batch changes is in both.

The plain run is on the thread of the Trainer while no step is under way, so that nothing of the engine is in its way.
What it logs goes nowhere, and hooks on gradients do not run. Spectral norms iterate once in a step, as in the engine.
Buffers are compared of units, which several micro-batches pass in their order.

In the pipeline, units draw random numbers from streams of their own. Two runs cannot be compared that draw: if the
generators have moved in the plain one, it ends, and a warning says so.

Without the option the proof on the first batch has the rows that it has tried looked at, if that is cheap: forward and
backward of one micro-batch, without dropout. Then nothing is said but of a difference, as a warning.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd.parametrizations import power_iterations_once
from ..common.attributes import attribute_set
from ..common.trees import mapped
from ..devices.pool import DevicePool
from ..engine.requests import StepResult
from ..engine.runner import Engine
from ..lightning_packages import MisconfigurationException, pl, rank_zero_info
from ..usercode.generators import ForeignStates
from .batches.splitting import Batches
from .proof.draws import dropout_off
from .proof.trial import Trials, tried
from .proof.watching import ProofMode
from .steps.log_merging import LogCapture
from .steps.loss import loss_of
from .steps.modules import ModuleScan
from .steps.notices import Notices

Call = Callable[[Any], Any]
Attempt = Callable[[str, Call, Batches, float], tuple[LogCapture, StepResult]]
_NUM_NAMED = 3
# What a micro-batch and all weights may take where the user has not asked for it.
_CHEAP_S = 0.5
_CHEAP_BYTES = 2**28
_FULL = (torch.float64, torch.complex128)
_SINGLE = (torch.float32, torch.complex64)


class VerificationError(RuntimeError):
    """A training step has other results than plain autograd."""


class _Rounding(NamedTuple):
    """What the order of sums and the kernels of another device can do.

    Attributes:
        of_largest: to an entry, as a share of the largest one of the tensor.
        of_all: the same, as a share of the largest entry of all gradients: the gradient of an attention key's bias is
            zero, and computed as the rounding of much larger numbers.
    """

    of_largest: float
    of_all: float


_DOUBLE_ROUNDING = _Rounding(1e-8, 1e-13)
_SINGLE_ROUNDING = _Rounding(1e-3, 1e-6)
_TF32_ROUNDING = _Rounding(1e-2, 1e-4)
_LOW_ROUNDING = _Rounding(5e-2, 2e-3)


@dataclass
class _Plain:
    """What plain autograd gave.

    Attributes:
        losses: of the micro-batches, None where a step returned none.
        gradients, buffers: by name; None where there is no gradient.
    """

    losses: list[Tensor | None]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


class Verification:
    """Compares the first training steps of a run with plain autograd; see [Note: verified steps].

    Args:
        num_steps: how many of them; None is one micro-batch alone, see :meth:`look_at_rows`.
        num_ranks: processes that add up their gradients.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        scan: ModuleScan,
        num_steps: int | None,
        *,
        pool: DevicePool,
        engine: Engine,
        notices: Notices,
        autocast_device: str,
        num_ranks: int,
    ) -> None:
        self._module = module
        self._scan = scan
        self._option = f"verify={num_steps}"
        self._looks_by_itself = num_steps is None and module.automatic_optimization and num_ranks == 1
        self._num_left = num_steps or 0
        self._engine = engine
        self._devices = [device.torch_device for device in pool.devices]
        self._notices = notices
        self._autocast_device = autocast_device
        self._num_ranks = num_ranks

    def look_at_rows(self, trials: Trials, call: Call, rows: Batches, taken_s: float) -> None:
        """Warns if the gradients of one micro-batch are not those of plain autograd.

        Args:
            rows: are one micro-batch.
            taken_s: seconds that a forward of them has taken.
        """
        trained, num_parameters = self._trained(), len(list(self._scan.parameters()))
        weights = sum(tensor.nbytes for tensor in trained.values())
        is_cheap = (
            len(trained) == num_parameters
            and taken_s < _CHEAP_S
            and weights <= _CHEAP_BYTES
            and all(d.type == "cpu" for d in self._devices)
        )
        if not (self._looks_by_itself and is_cheap):
            return
        with dropout_off():
            plain = self._run_plain(call, rows, 1.0)
        if not isinstance(plain, _Plain):
            return
        try:
            result = trials.run_backward(call, rows)
        except Exception:  # the step will meet it
            return
        rounding = self._rounding()
        off = self._gradients_off(plain.gradients, result.gradients, rounding, is_scaled=False)
        found = [*_first([*_losses_off(plain.losses, result.outputs, rounding)]), *_first([*off])]
        if found:
            self._notices.warn("verify", self._told(found, f"a micro-batch of {rows.sizes[0]} rows"))

    def run(
        self, kind: str, call: Call, batches: Batches, loss_scale: float, attempt: Attempt
    ) -> tuple[LogCapture, StepResult]:
        """Runs ``attempt``, and compares what it gives if the step is one of those to verify.

        Args:
            call: the user's step.

        Raises:
            VerificationError: if something differs, or the step cannot be run twice.
            MisconfigurationException: if steps like this one cannot be compared.
        """
        if kind != "training_step" or not self._num_left:
            return attempt(kind, call, batches, loss_scale)
        self._check_possible()
        plain = self._run_plain(call, batches, loss_scale)
        logs, result = attempt(kind, call, batches, loss_scale)
        self._num_left -= 1
        if isinstance(plain, Exception):
            raise VerificationError(
                f"{self._option}: {self._step} cannot be compared, because plain autograd on the host has failed, and "
                f"the pipeline has not: {type(plain).__name__}: {plain}. Leave verify out, if the modules need a GPU"
            ) from plain
        if isinstance(plain, str):
            self._notices.warn("verify", f"{self._option}: {self._step} is not compared with plain autograd: {plain}")
            return logs, result
        if result.has_met:
            why = "its micro-batches meet in whole_batch, and plain autograd on the host runs them one after the other"
            self._notices.warn("verify", f"{self._option}: {self._step} is not compared with plain autograd: {why}")
            return logs, result
        self._judge(plain, result, loss_scale)
        return logs, result

    @property
    def _step(self) -> str:
        return f"training step {self._module.trainer.fit_loop.batch_idx} of epoch {self._module.trainer.current_epoch}"

    def _check_possible(self) -> None:
        if not self._module.automatic_optimization:
            raise MisconfigurationException(
                f"{self._option}: steps with manual optimization cannot be compared with plain autograd, since they "
                "change weights on the way. Leave verify out"
            )
        if self._num_ranks > 1:
            raise MisconfigurationException(
                f"{self._option}: the gradients of {self._num_ranks} processes are added up, and cannot be compared "
                "with plain autograd in one of them. Train in one process, or leave verify out"
            )

    # --- the plain run ---------------------------------------------------------------------------------------------

    def _run_plain(self, call: Call, batches: Batches, loss_scale: float) -> _Plain | Exception | str:
        """What plain autograd gives; the error with which it ends, or in words why the step is not compared."""
        if any(isinstance(part, Iterator) for part in batches.microbatches):
            return "it takes its batches from an iterator"
        generator = torch.default_generator.get_state()
        plain: _Plain | Exception | str
        try:
            with contextlib.ExitStack() as stack:
                parts = batches.microbatches
                state = stack.enter_context(tried(self._module, self._scan, parts, self._devices))
                stack.enter_context(_gradients_apart(list(self._trained().values())))
                stack.enter_context(_unlogged(self._module.trainer))
                stack.enter_context(ProofMode(None, state.originals))
                plain = self._compute(call, batches, loss_scale)
        except Exception as error:  # of the user's code: the step itself is about to raise it as well
            plain = error
        finally:
            torch.default_generator.set_state(generator)
        return plain

    def _compute(self, call: Call, batches: Batches, loss_scale: float) -> _Plain | str:
        generator, foreign = torch.default_generator.get_state(), ForeignStates()
        losses: list[Tensor | None] = []
        flags = [tensor.requires_grad for tensor in self._trained().values()]
        for index, weight in enumerate(batches.loss_weights):
            with power_iterations_once(in_plain_code=index == 0), self._autocast():
                loss = loss_of(call(mapped(batches.microbatches[index], _copy, anew=object)))
            if index == 0 and any(tensor.grad is not None for tensor in self._trained().values()):
                return "it runs a backward of its own"
            if flags != [tensor.requires_grad for tensor in self._trained().values()]:
                return "it switches which weights are trained"
            if loss is not None and weight != 0.0:
                loss.backward(torch.ones_like(loss).mul_(weight * loss_scale))  # type: ignore[no-untyped-call]
            torch.clear_autocast_cache()  # which would add gradients up in its dtype
            if foreign.have_moved() or not torch.equal(torch.default_generator.get_state(), generator):
                return "it draws random numbers, which are others in the pipeline. Switch dropout and the like off"
            losses.append(None if loss is None else loss.detach())
        gradients = {name: tensor.grad for name, tensor in self._trained().items()}
        return _Plain(losses, gradients, {name: tensor.detach().clone() for name, tensor in self._buffers().items()})

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """On the host what the thread of the Trainer has for the devices."""
        device = self._autocast_device
        is_enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return torch.autocast("cpu", dtype) if is_enabled and device != "cpu" else contextlib.nullcontext()

    def _trained(self) -> dict[str, Tensor]:
        """The parameters of the module, and what else optimizers update, by name."""
        found: dict[str, Tensor] = dict(self._scan.parameters())
        known = set(map(id, found.values()))
        groups = [group for optimizer in self._module.trainer.optimizers for group in optimizer.param_groups]
        others = [tensor for group in groups for tensor in group["params"] if id(tensor) not in known]
        return found | {f"tensor {index} of the optimizers": tensor for index, tensor in enumerate(others)}

    def _buffers(self) -> dict[str, Tensor]:
        found = ((name, tensor) for name, _, _, tensor in self._scan.buffers())
        return {n: t for n, t in found if t.layout is torch.strided and not (t.is_meta or t.is_quantized)}

    # --- the comparison --------------------------------------------------------------------------------------------

    def _judge(self, plain: _Plain, result: StepResult, loss_scale: float) -> None:
        rounding = self._rounding()
        count = len(plain.losses)
        kinds = (
            _losses_off(plain.losses, result.outputs, rounding),
            self._gradients_off(plain.gradients, result.gradients, rounding, is_scaled=loss_scale != 1.0),
            self._buffers_off(plain.buffers, rounding, only_of_units=count > 1),
        )
        differences = [text for found in map(list, kinds) for text in _first(found)]
        if not differences:
            num_gradients = sum(gradient is not None for gradient in plain.gradients.values())
            rank_zero_info(
                f"{self._option}: {self._step} gives what plain autograd gives on the host with the same micro-batches "
                f"({count} losses, the gradients of {num_gradients} weights, {len(plain.buffers)} buffers)"
            )
            return
        what = f"{self._step} ({count} micro-batch{'es' if count > 1 else ''})"
        raise VerificationError(f"{self._option}: {self._told(differences, what)}")

    def _told(self, differences: Sequence[str], what: str) -> str:
        return (
            f"{what} differs from plain autograd on the host with the same rows: {'; '.join(differences)}. Please "
            "report it, with the output of `roundpipe doctor` and a program that shows it. Until then other units "
            "(units=[...]) or num_microbatches=1 may be right: verify=1 says whether they are"
        )

    def _rounding(self) -> _Rounding:
        dtypes = {tensor.dtype for tensor in self._trained().values()}
        if torch.is_autocast_enabled(self._autocast_device) or not dtypes.issubset((*_FULL, *_SINGLE)):
            return _LOW_ROUNDING
        has_gpus = any(device.type != "cpu" for device in self._devices)
        if torch.get_float32_matmul_precision() != "highest" or (has_gpus and torch.backends.cudnn.allow_tf32):
            return _TF32_ROUNDING
        return _DOUBLE_ROUNDING if dtypes.issubset(_FULL) else _SINGLE_ROUNDING

    def _gradients_off(
        self, plain: Mapping[str, Tensor | None], ours: Mapping[Any, Tensor], rounding: _Rounding, *, is_scaled: bool
    ) -> Iterator[str]:
        dense = {name: _dense(gradient) for name, gradient in plain.items() if gradient is not None}
        noise = rounding.of_all * max(map(_largest, dense.values()), default=0.0)
        for name, tensor in self._trained().items():
            actual, expected = ours.get(tensor), dense.get(name)
            if actual is None and expected is None:
                continue
            # A weight that has no gradient trains like one whose gradient is zero.
            one = torch.zeros_like(expected) if actual is None else _dense(actual)  # type: ignore[arg-type]
            other = torch.zeros_like(one) if expected is None else expected
            if is_scaled and not (one.isfinite().all() and other.isfinite().all()):
                continue  # the step is going to be skipped
            if off := _off(one, other, rounding, noise):
                yield f"the gradient of {name!r} {'is missing, and ' if actual is None else ''}{off}"

    def _buffers_off(self, plain: Mapping[str, Tensor], rounding: _Rounding, *, only_of_units: bool) -> Iterator[str]:
        """Those that are left out are written by code between units, in any order of the micro-batches."""
        ours, plan = self._buffers(), self._engine.plan_of("training_step")
        inside = {id(module) for unit in (() if plan is None else plan.sequence) for module in unit.module.modules()}
        outside = {name for name, module, _, _ in self._scan.buffers() if only_of_units and id(module) not in inside}
        for name in dict.fromkeys((*plain, *ours)):
            actual, expected = ours.get(name), plain.get(name)
            if name in outside:
                continue
            if actual is None or expected is None:
                yield f"the buffer {name!r} {'is missing' if actual is None else 'is new'}"
            elif off := _off(actual, expected, rounding, rounding.of_all):
                yield f"the buffer {name!r} {off}"


def _first(found: list[str]) -> list[str]:
    """Not a line for every weight of a model."""
    others = len(found) - _NUM_NAMED
    return [*found[:_NUM_NAMED], f"and {others} more of these"] if others > 0 else found


def _losses_off(plain: Sequence[Tensor | None], outputs: Sequence[Any], rounding: _Rounding) -> Iterator[str]:
    for index, (expected, loss) in enumerate(zip(plain, map(loss_of, outputs), strict=True)):
        if expected is None or loss is None:
            if expected is not loss:
                yield f"micro-batch {index} has {'no' if loss is None else 'a'} loss"
            continue
        actual = loss.detach().to(expected.device)
        if _off(actual, expected, rounding, rounding.of_all):
            yield f"the loss of micro-batch {index} is {actual.item():.6g}, and not {expected.item():.6g}"


def _off(actual: Tensor, expected: Tensor, rounding: _Rounding, noise: float) -> str | None:
    """How far ``actual`` is from ``expected``, in words; None if rounding may have done it.

    Args:
        noise: what may differ in any case.
    """
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"is {actual.dtype} of shape {tuple(actual.shape)}, and not {expected.dtype} {tuple(expected.shape)}"
    if torch.equal(actual, expected):
        return None
    if not (expected.is_floating_point() or expected.is_complex()):
        return "has other values"
    one, other = (value if value.dtype in (*_FULL, *_SINGLE) else value.float() for value in (actual, expected))
    is_same = (one == other) | (one.isnan() & other.isnan())
    difference = float(torch.where(is_same, 0.0, (one - other).abs()).nan_to_num(nan=torch.inf).max())
    largest = _largest(other)
    if difference <= max(rounding.of_largest * largest, noise):
        return None
    return f"is off by up to {difference:.3g}, where its largest entry is {largest:.3g}"


def _largest(tensor: Tensor) -> float:
    """The largest finite absolute value."""
    return float(tensor.detach().abs().nan_to_num(0.0, 0.0).max()) if tensor.numel() else 0.0


def _dense(gradient: Tensor) -> Tensor:
    return gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach()


def _copy(tensor: Tensor) -> Tensor:
    """One that the step may change in place."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _gradients_apart(tensors: Sequence[Tensor]) -> Iterator[None]:
    """While open, ``tensors`` have gradients of their own, and no hooks on them."""
    # Torch goes on with hooks of the last kind, if None takes their place.
    without: dict[str, Any] = {"grad": None, "_backward_hooks": None, "_post_accumulate_grad_hooks": OrderedDict()}
    found = ((tensor, name, getattr(tensor, name)) for tensor in tensors for name in without)
    before = [(tensor, name, value) for tensor, name, value in found if value is not None]
    try:
        for tensor, name, _ in before:
            setattr(tensor, name, without[name])
        yield
    finally:
        for tensor in tensors:
            tensor.grad = None
        for tensor, name, value in before:
            setattr(tensor, name, value)


def _unlogged(trainer: pl.Trainer) -> contextlib.AbstractContextManager[None]:
    """While open, what is logged goes nowhere."""
    results = trainer._results
    return contextlib.nullcontext() if results is None else attribute_set(results, "log", lambda *_, **__: None)
