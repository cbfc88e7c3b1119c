"""The same training in plain Lightning and pipelined, and the comparison of all there is to compare.

[Note: parity]
:func:`compare` trains two fresh modules with the same settings: plain on one device, and pipelined. What callbacks see
of losses and gradients, the parameters and buffers, the optimizers, schedulers and logged values must agree, and the
plain run must have moved. :func:`both` is for anything else that can be done with either kind of trainer. Tests then
say only what is theirs: the module, the settings, and what shows that the plain run has met the case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, TensorDataset

from lightning_roundpipe import RoundPipeStrategy
from tests.support.loaders import Loader
from tests.support.small import CLASSES, WIDTH

KINDS = ("plain", "roundpipe")
# Settings of :func:`compare` for devices that have copies of their own, poisoned when they are freed.
COPIES: dict[str, Any] = {"options": {"virtual_copies": True}}
# How far a weight at least must go in a training that is compared: far above what rounding can do.
_WAY = 1e-3
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def make_trainer(
    kind: str = "roundpipe",
    *,
    devices: int = 2,
    num_microbatches: int | str = 3,
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> L.Trainer:
    """A quiet trainer: plain Lightning on one CPU device, or RoundPipe on virtual ones, with so many micro-batches."""
    if kind == "plain":
        return L.Trainer(**{**_QUIET, "devices": 1, **settings})
    strategy = RoundPipeStrategy(
        **{"num_microbatches": num_microbatches, "threads_per_device": 1, **(options or {})}  # type: ignore[arg-type]
    )
    return L.Trainer(**{**_QUIET, "strategy": strategy, "devices": devices, **settings})


def make_loader(rows: int = 20, batch_size: int = 8, **kwargs: Any) -> DataLoader[Any]:
    """Batches of ``(x, y)``; 20 rows in batches of 8 leave a last batch of 4, and 3 divides none of them."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (rows,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, **kwargs)


def ready(batches: Any) -> Any:
    """A list of batches as a loader of them: Lightning would take the bare list for several loaders."""
    is_list = isinstance(batches, list) and not isinstance(batches[0], (DataLoader, Loader))
    return DataLoader(batches, batch_size=None, collate_fn=_as_it_is) if is_list else batches


def _as_it_is(batch: Any) -> Any:
    return batch


class Watch(L.Callback):
    """Keeps what callbacks see of a training, and what the pipelined one says about its steps."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.gradients: list[dict[str, Tensor | None]] = []
        self.logged: list[dict[str, Any]] = []
        self.num_calls: list[int] = []
        self.num_microbatches: list[int] = []
        self.num_devices: set[int] = set()
        self.num_off_plan = 0

    @property
    def state_key(self) -> str:
        return "watch"

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        # A sparse one may name a row twice.
        found = {name: None if p.grad is None else p.grad.detach() for name, p in pl_module.named_parameters()}
        self.gradients.append(
            {n: g.to_dense() if g is not None and g.is_sparse else _copied(g) for n, g in found.items()}
        )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(_copied(outputs))
        self.logged.append(_copied(trainer.logged_metrics))
        step = getattr(trainer.strategy, "last_step", None)
        if step is None or step.partition is None:
            return
        self.num_calls.append(step.partition.num_calls)
        self.num_microbatches.append(step.num_microbatches)
        self.num_off_plan += step.num_off_plan
        if step.schedule is not None:
            self.num_devices.add(step.schedule.num_devices)


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(entry) for entry in value]
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


@dataclass
class Run:
    """A module, the trainer that has trained it, and what was seen.

    Attributes:
        kind: of the trainer.
        start: parameters and buffers before the training.
        state: the same after it.
        optimizers: their state dicts.
    """

    kind: str
    module: Any
    trainer: L.Trainer
    watch: Watch
    start: dict[str, Tensor]
    state: dict[str, Tensor]
    optimizers: list[dict[str, Any]]

    @property
    def results(self) -> dict[str, Any]:
        """All there is to compare."""
        schedulers = [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs]
        return {
            "losses": self.watch.losses,
            "gradients": self.watch.gradients,
            "logged": self.watch.logged,
            "state": self.state,
            "trained": {name: p.requires_grad for name, p in self.module.named_parameters()},
            "optimizers": self.optimizers,
            "schedulers": [{k: v for k, v in state.items() if isinstance(v, (int, float))} for state in schedulers],
            "metrics": dict(self.trainer.callback_metrics),
            "progress": (self.trainer.current_epoch, self.trainer.global_step),
        }

    @property
    def moved(self) -> set[str]:
        """Names of the parameters that the training has changed."""
        names = [name for name, _ in self.module.named_parameters()]
        return {name for name in names if not torch.equal(self.start[name], self.state[name])}

    def assert_moved(self) -> None:
        """By more than rounding: otherwise a comparison with this run would prove nothing."""
        kept = {name: value for name, value in self.start.items() if value.is_floating_point() and value.numel()}
        pairs = [(value, self.state[name]) for name, value in kept.items() if name in self.state]
        ways = [float((now - value).abs().max()) for value, now in pairs if value.shape == now.shape]
        assert max(ways) > _WAY, "the plain run has trained nothing: the comparison would prove nothing"


def fit(
    kind: str,
    make_module: Callable[[], Any],
    train: Any = None,
    val: Any = None,
    *,
    callbacks: Sequence[L.Callback] = (),
    seed: int = 0,
    fit_options: Mapping[str, Any] = {},
    **settings: Any,
) -> Run:
    """Trains a fresh module; module and data (if ``train`` makes them) are made, and trained, under the seed."""
    torch.manual_seed(seed)
    module, watch = make_module(), Watch()
    start = _state(module)
    trainer = make_trainer(kind, callbacks=[*callbacks, watch], **settings)
    torch.manual_seed(seed)
    data = train() if callable(train) else train
    trainer.fit(module, ready(data), ready(val), **fit_options)
    optimizers = _copied([optimizer.state_dict() for optimizer in trainer.optimizers])
    return Run(kind, module, trainer, watch, start, _state(module), optimizers)


def _state(module: nn.Module) -> dict[str, Tensor]:
    found = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    return {name: value.detach().clone() for name, value in found.items() if not is_lazy(value)}


def compare(
    make_module: Callable[[], Any],
    train: Any = None,
    val: Any = None,
    *,
    callbacks: Callable[[], Iterable[L.Callback]] = list,
    plain: Mapping[str, Any] | None = None,
    ours: Mapping[str, Any] | None = None,
    tolerances: Mapping[str, float] | None = None,
    also: Callable[[Run], Any] | None = None,
    but_for: Iterable[str] = (),
    **settings: Any,
) -> tuple[Run, Run]:
    """Trains plain and pipelined, and compares both runs; see [Note: parity].

    Args:
        make_module: makes the module; the one of the plain run as well.
        train: the loader, or a list of batches; by default that of :func:`make_loader`.
        val: the same for the validation.
        callbacks: makes the callbacks of one run.
        plain: settings of the plain run alone.
        ours: settings of the pipelined run alone.
        tolerances: of :func:`assert_alike`.
        also: more to compare, of a run.
        but_for: results that differ by design; the test says why.

    Returns:
        both runs, the plain one first.
    """
    train = make_loader() if train is None else train
    runs = [
        fit(kind, make_module, train, val, callbacks=list(callbacks()), **{**settings, **(own or {})})
        for kind, own in zip(KINDS, (plain, ours), strict=True)
    ]
    runs[0].assert_moved()
    results = [{k: v for k, v in run.results.items() if k not in but_for} for run in runs]
    assert_alike(results[1], results[0], **(tolerances or {}))
    if also is not None:
        assert_alike(also(runs[1]), also(runs[0]), **(tolerances or {}))
    return runs[0], runs[1]


def both(act: Callable[[str], Any], **tolerances: float) -> Any:
    """Does something with either kind of trainer, compares what it gives, and returns that of plain Lightning."""
    plain, ours = (act(kind) for kind in KINDS)
    assert_alike(ours, plain, **tolerances)
    return plain


def both_refuse(act: Callable[[str], Any], error: type[Exception] | tuple[type[Exception], ...], match: str) -> None:
    """What is done with either kind of trainer ends in the same error."""

    def message(kind: str) -> Any:
        with pytest.raises(error, match=match) as caught:
            act(kind)
        # Up to the address of an object.
        return caught.type.__name__, str(caught.value).split(" object at ")[0]

    both(message)


def _is_close(actual: Tensor, expected: Tensor, **options: Any) -> bool:
    """What ``assert_close`` finds of dense floats, in a tenth of the time; false also where it does not know."""
    kinds = [(value.dtype, value.device, value.layout, value.shape) for value in (actual, expected)]
    is_known = kinds[0] == kinds[1] and expected.dtype in _FLOATS and expected.layout == torch.strided
    return is_known and torch.allclose(actual.detach(), expected.detach(), **options)


def assert_alike(
    actual: Any,
    expected: Any,
    where: str = "",
    *,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    of_largest: float = 0.0,
    equal_nan: bool = False,
) -> None:
    """Compares nestings leaf by leaf: tensors and floats to the tolerances, anything else exactly.

    Args:
        of_largest: adds to ``atol`` so much of the largest element of the tensor.
        equal_nan: whether what is not a number equals what is not a number.
    """
    options: dict[str, Any] = {"rtol": rtol, "atol": atol, "of_largest": of_largest, "equal_nan": equal_nan}
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{where}: {actual!r} instead of a tensor"
        if of_largest and expected.is_floating_point() and expected.numel():
            atol = max(atol, of_largest * float(expected.detach().abs().nan_to_num(0.0, 0.0).max()))
        close: dict[str, Any] = {"rtol": rtol, "atol": atol, "equal_nan": equal_nan}
        if _is_close(actual, expected, **close):
            return
        torch.testing.assert_close(actual, expected, **close, msg=lambda text: f"{where}: {text}")
    elif isinstance(expected, float):
        one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
        assert_alike(one, other, where, **options)
    elif isinstance(expected, Mapping):
        assert isinstance(actual, Mapping), where
        assert list(actual) == list(expected), where
        for key in expected:
            assert_alike(actual[key], expected[key], f"{where}.{key}", **options)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_alike(one, other, f"{where}[{index}]", **options)
    else:
        assert actual == expected or actual is expected, f"{where}: {actual!r} instead of {expected!r}"
