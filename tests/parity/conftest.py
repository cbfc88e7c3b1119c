"""Runs of the same training in plain Lightning and pipelined, and their comparison.

[Note: ways to copy]
Every test here runs on virtual devices in these ways, which ``--devices=NAME`` (or ``all``) chooses from:

- ``aliases``: weights are shared with the host and nothing travels, which is the default of the strategy.
- ``lazy``: everything travels, and a copy is made when somebody waits for it and no sooner. Where a wait is missing,
  the test reads poison, in every run.
- ``copies``: everything travels on the threads of lanes, as slowly as over PCIe.
- ``gpus``: workers of one GPU, on a stub of the driver whose copies happen as late as events allow; see
  :mod:`tests.support.cuda_stub`.

Without the option it is the first two: both, for tests of their own; one of them for tests marked with ``ways``,
because the other one is what other tests of the same code run in; and for tests on several pipelines each of these in
one way, see ``_PIPELINES``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from lightning_roundpipe.devices import cuda_driver
from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.virtual import Link, TimedLink
from tests.support.cuda_stub import StubDriver
from tests.support.lazy_link import LazyLink

MakeModule = Callable[[], L.LightningModule]
MakeData = Callable[[], Iterable[Any]]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# Adam divides by the root of the second moment. Where the true gradient is zero (the bias of an attention key, a bias
# in front of a normalisation) that is rounding noise over rounding noise, a full step of a random sign, unless eps is
# above the noise. Raising it keeps the tolerances tight for everything else.
default_optimizer: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
_TRAINER_OPTIONS = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
_SEED = 1234
# What the order of sums can do in float32, where its precision is 1e-7: an element that is small because large numbers
# cancel is as uncertain as they are, so the tolerance counts in the largest element, too. What a test is to notice, a
# micro-batch that is lost or counted wrongly, changes elements by a thousandth of that and more.
_RTOL, _ATOL, _OF_LARGEST = 1e-4, 1e-6, 1e-5
# See [Note: ways to copy]. 25 GB/s and 10 microseconds are what PCIe 4.0 x16 gives.
_LINKS: dict[str, Callable[[], Link | None]] = {
    "aliases": lambda: None,
    "lazy": LazyLink,
    "copies": lambda: TimedLink(bytes_per_ms=25e6, latency_ms=0.01),
    "gpus": lambda: None,
}
_BY_DEFAULT = ("aliases", "lazy")
# Devices and micro-batches that every kind of model is tried on, and the way by default. All of them in all ways is
# what test_parity_matrix.py and --devices are for.
_PIPELINES: dict[str, tuple[dict[str, Any], str]] = {
    "2x3": ({"devices": 2, "num_microbatches": 3}, "lazy"),
    "4x5": ({"devices": 4, "num_microbatches": 5}, "aliases"),
    "2x3-copies": ({"devices": 2, "num_microbatches": 3, "strategy_options": {"virtual_copies": True}}, "aliases"),
}


@dataclass
class Outcome:
    """What a run left behind.

    Attributes:
        losses: per batch, what callbacks see.
        state: parameters and buffers, by their names in ``state_dict``.
        gradients: the last ``.grad`` of each parameter, None included, as the optimizer step saw it.
        optimizer: ``state_dict`` of the optimizer.
        num_calls: unit calls of a micro-batch in the plan, per batch; empty for plain Lightning.
        num_microbatches: micro-batches per batch; empty for plain Lightning.
        num_devices: devices of the schedules that were run.
        num_off_plan: calls that the plan did not foresee, over all batches.
        module: the trained module.
    """

    losses: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    num_calls: list[int] = field(default_factory=list)
    num_microbatches: list[int] = field(default_factory=list)
    num_devices: set[int] = field(default_factory=set)
    num_off_plan: int = 0
    module: L.LightningModule | None = None


class _Recorder(L.Callback):
    def __init__(self) -> None:
        self.outcome = Outcome()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(outputs, Mapping)
        self.outcome.losses.append(outputs["loss"].detach().clone())
        if not isinstance(trainer.strategy, RoundPipeStrategy):
            return
        step = trainer.strategy.last_step
        assert step is not None
        assert step.partition is not None
        self.outcome.num_calls.append(step.partition.num_calls)
        self.outcome.num_microbatches.append(step.num_microbatches)
        self.outcome.num_off_plan += step.num_off_plan
        if step.schedule is not None:
            self.outcome.num_devices.add(step.schedule.num_devices)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.outcome.gradients = {
            name: None if p.grad is None else p.grad.detach().clone() for name, p in pl_module.named_parameters()
        }


def _train(
    make_module: MakeModule,
    make_data: MakeData,
    *,
    devices: int | None = None,
    num_microbatches: int | str = "auto",
    strategy_options: Mapping[str, Any] = {},
    trainer_options: Mapping[str, Any] = {},
    steps: int = 3,
    optimizer: MakeOptimizer | None = default_optimizer,
) -> Outcome:
    """Trains for ``steps`` optimizer steps: pipelined over ``devices``, or (None) plain, on one device."""
    torch.manual_seed(_SEED)
    module = make_module()
    if optimizer is not None:
        # On the instance, where Lightning looks first: one training, many optimizers, and modules without boilerplate.
        object.__setattr__(
            module, "configure_optimizers", lambda: optimizer(p for p in module.parameters() if p.requires_grad)
        )
    strategy: Any = "auto"
    if devices is not None:
        strategy = RoundPipeStrategy(
            **{"num_microbatches": num_microbatches, "threads_per_device": 1} | strategy_options
        )
    recorder = _Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if devices is None else devices,
        strategy=strategy,
        max_steps=steps,
        callbacks=[recorder],
        **_TRAINER_OPTIONS | dict(trainer_options),
    )
    torch.manual_seed(_SEED)
    trainer.fit(module, _loader(make_data()))
    outcome = recorder.outcome
    outcome.state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    outcome.optimizer = copy.deepcopy(trainer.optimizers[0].state_dict())
    outcome.module = module
    assert trainer.global_step == steps
    return outcome


def _loader(data: Iterable[Any]) -> Iterable[Any]:
    """A list of batches as a dataloader: Lightning would take the bare list for several of them."""
    return DataLoader(data, batch_size=None, collate_fn=_as_it_is) if isinstance(data, list) else data


def _as_it_is(batch: Any) -> Any:
    return batch


def _compare(actual: Any, expected: Any, where: str, compare: Callable[[Tensor, Tensor, str], None]) -> None:
    """Compares nested containers; tensors and floats by ``compare``, the rest exactly."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{where}: {actual!r} instead of a tensor"
        compare(actual, expected, where)
    elif isinstance(expected, float):
        compare(torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), where)
    elif isinstance(expected, Mapping):
        assert isinstance(actual, Mapping), where
        assert actual.keys() == expected.keys(), where
        for key in expected:
            _compare(actual[key], expected[key], f"{where}[{key!r}]", compare)
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        assert len(actual) == len(expected), where
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            _compare(one, other, f"{where}[{i}]", compare)
    else:
        assert actual == expected or actual is expected, f"{where}: {actual!r} instead of {expected!r}"


def _close(actual: Tensor, expected: Tensor, where: str) -> None:
    sizes = expected.detach().abs().nan_to_num(0.0, 0.0) if expected.is_floating_point() else torch.zeros(1)
    atol = max(_ATOL, _OF_LARGEST * float(sizes.max()) if sizes.numel() else 0.0)
    torch.testing.assert_close(actual, expected, rtol=_RTOL, atol=atol, msg=lambda text: f"{where}: {text}")


def _identical(actual: Tensor, expected: Tensor, where: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}")


def _assert_same(actual: Outcome, expected: Outcome, *, exact: bool = False) -> None:
    """Losses, parameters, buffers, last gradients and optimizer state agree; ``exact``: bit for bit."""
    compare = _identical if exact else _close
    _compare(actual.losses, expected.losses, "losses", compare)
    _compare(actual.gradients, expected.gradients, "gradients", compare)
    _compare(actual.state, expected.state, "state", compare)
    _compare(actual.optimizer, expected.optimizer, "optimizer", compare)


def _assert_pipelined(outcome: Outcome, *, devices: int, num_microbatches: int, min_calls: int) -> None:
    """The run was what it claims: so many devices and micro-batches, and units that were scheduled as planned."""
    assert max(outcome.num_microbatches) == num_microbatches
    assert min(outcome.num_calls) >= min_calls
    assert outcome.num_devices == {devices}
    assert outcome.num_off_plan == 0


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = [*_LINKS, "all"]
    parser.addoption("--devices", choices=choices, help="ways to copy in the parity tests; default: aliases and lazy")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ways(*names): the ways to copy by default, see tests/parity/conftest.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs every test in the chosen ways to copy, and on all pipelines if it asks for one."""
    chosen = metafunc.config.getoption("--devices", None)  # only there if pytest was given this folder
    marker = metafunc.definition.get_closest_marker("ways")
    by_default = _BY_DEFAULT if marker is None else marker.args
    ways = list(_LINKS) if chosen == "all" else [chosen] if chosen else by_default
    if "pipeline" not in metafunc.fixturenames:
        metafunc.parametrize("way_to_copy", ways, indirect=True)
        return
    both = [
        pytest.param(way, pipeline, id=f"{way}-{name}")
        for way in ways
        for name, (pipeline, way_by_default) in _PIPELINES.items()
        # Where everything is copied anyhow, a pipeline that copies is another one once more.
        if (way == "aliases" or "strategy_options" not in pipeline if chosen else way == way_by_default)
    ]
    metafunc.parametrize(("way_to_copy", "pipeline"), both, indirect=True)


@pytest.fixture(autouse=True)
def way_to_copy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """See [Note: ways to copy]."""
    link = _LINKS[request.param]()
    made: list[DevicePool] = []
    make = DevicePool.__init__

    def make_with_link(pool: DevicePool, *args: Any, **kwargs: Any) -> None:
        make(pool, *args, **{**kwargs, "link": link})
        made.append(pool)

    def make_of_gpus(pool: DevicePool, devices: Sequence[torch.device], **kwargs: Any) -> None:
        make(pool, [torch.device("cuda", 0)] * len(devices), memory_limit=kwargs.get("memory_limit"))
        for device in pool.devices:  # a single worker as well: its memory is the host's
            device.is_shared = True
        made.append(pool)

    driver = StubDriver()
    if link is not None:
        monkeypatch.setattr(DevicePool, "__init__", make_with_link)
    elif request.param == "gpus":
        monkeypatch.setattr(cuda_driver, "DRIVER", driver)
        monkeypatch.setattr(DevicePool, "__init__", make_of_gpus)
    yield str(request.param)
    assert driver.violations == []
    for device in (device for pool in made for device in pool.devices):
        assert device.h2d.num_bytes or not device.num_unit_runs, "units ran, and nothing had been copied for them"


@pytest.fixture(autouse=True)
def one_thread_per_operator() -> None:
    """Threads would split sums differently in the reference than in a virtual device, and these models are tiny."""
    torch.set_num_threads(1)


@pytest.fixture
def train() -> Callable[..., Outcome]:
    """See :func:`_train`."""
    return _train


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """See :func:`_assert_same`."""
    return _assert_same


@pytest.fixture
def assert_pipelined() -> Callable[..., None]:
    """See :func:`_assert_pipelined`."""
    return _assert_pipelined


@pytest.fixture
def pipeline(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Devices and micro-batches that every kind of model is tried on, as arguments of ``assert_parity``.

    ``copies``: real device copies of weights that are poisoned when freed, as the memory of a GPU would be.
    """
    return dict(request.param)


@pytest.fixture
def sequential() -> Callable[[MakeModule, int], MakeModule]:
    """A function that makes the reference for batch-coupled models.

    Its module runs ``training_step`` on the micro-batches one after the other and returns the mean of the losses,
    weighted by rows: what pipelining does, without any pipeline.
    """

    def make_sequential(make_module: MakeModule, num_microbatches: int) -> MakeModule:
        def make() -> L.LightningModule:
            module = make_module()
            step = module.training_step

            def training_step(batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
                rows = len(batch[0])
                parts = zip(*(t.tensor_split(min(num_microbatches, rows)) for t in batch), strict=True)
                return torch.stack([step(part, batch_idx) * (len(part[0]) / rows) for part in parts]).sum()

            object.__setattr__(module, "training_step", training_step)
            return module

        return make

    return make_sequential


@pytest.fixture(scope="session")
def references() -> dict[Hashable, Outcome]:
    """Plain runs that several tests compare with."""
    return {}


@pytest.fixture
def assert_parity(references: dict[Hashable, Outcome]) -> Callable[..., Outcome]:
    """A function that trains a module plain and pipelined, and compares all there is to compare."""

    def check(
        make_module: MakeModule,
        make_data: MakeData,
        *,
        devices: int,
        num_microbatches: int,
        strategy_options: Mapping[str, Any] = {},
        trainer_options: Mapping[str, Any] = {},
        steps: int = 3,
        optimizer: MakeOptimizer | None = default_optimizer,
        reference: MakeModule | None = None,
        min_calls: int = 2,
    ) -> Outcome:
        """Args:
        make_module: makes the module, called under a fixed seed; ``optimizer`` takes the place of its
            ``configure_optimizers`` unless it is None.
        make_data: makes the dataloader, or a list of batches.
        reference: makes the module of the plain run, where it must be another one (batch statistics).
        min_calls: unit calls that each micro-batch must make at least; guards against comparing plain with plain.

        Returns:
            the outcome of the pipelined run.
        """
        plain = partial(
            _train,
            reference or make_module,
            make_data,
            trainer_options=trainer_options,
            steps=steps,
            optimizer=optimizer,
        )
        key = (reference or make_module, make_data, repr(trainer_options), steps, optimizer)
        if key not in references:
            references[key] = plain()
        outcome = _train(
            make_module,
            make_data,
            devices=devices,
            num_microbatches=num_microbatches,
            strategy_options=strategy_options,
            trainer_options=trainer_options,
            steps=steps,
            optimizer=optimizer,
        )
        _assert_same(outcome, references[key])
        assert min(outcome.num_calls) >= min_calls, f"only {outcome.num_calls} unit calls per micro-batch"
        if num_microbatches > 1:
            assert outcome.num_devices == {devices}
        return outcome

    return check
