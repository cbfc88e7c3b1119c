"""Runs of the same training in plain Lightning and pipelined, and their comparison.

[Note: ways to copy]
Every test here runs on virtual devices in these ways, which ``--devices=NAME`` (or ``all``) chooses from:

- ``aliases``: weights are shared with the host and nothing travels, which is the default of the strategy.
- ``lazy``: everything travels, and a copy is made when a reader waits for it and no sooner. Where a wait is missing,
  the test reads poison, in every run.
- ``copies``: everything travels on the threads of lanes, as slowly as over PCIe.
- ``accelerator``: GPUs that are simulated, see :mod:`tests.support.accelerator`; ``--accelerator`` makes them.

Without the option it is the first two: both, for tests of their own; one of them for tests marked with ``ways``,
because the other one is what other tests of the same code run in; and for tests on several pipelines each of these in
one way, see ``_PIPELINES``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.virtual import Link, TimedLink
from tests.support.accelerator.plain import on_simulated_gpu
from tests.support.engine.lazy_link import LazyLink
from tests.support.identical import assert_identical
from tests.support.parity import Run, assert_alike, fit

MakeModule = Callable[[], L.LightningModule]
MakeData = Callable[[], Iterable[Any]]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# Adam divides by the root of the second moment. Where the true gradient is zero (the bias of an attention key, a bias
# in front of a normalisation) that is rounding noise over rounding noise, a full step of a random sign, unless eps is
# above the noise. Raising it keeps the tolerances tight for everything else.
default_optimizer: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
_SEED = 1234
# What the order of sums can do in float32, where its precision is 1e-7: an element that is small because large numbers
# cancel is as uncertain as they are, so the tolerance counts in the largest element, too. What a test is to notice, a
# micro-batch that is lost or counted wrongly, changes elements by a thousandth of that and more.
_TOLERANCES = {"rtol": 1e-4, "atol": 1e-6, "of_largest": 1e-5}
# See [Note: ways to copy]. 25 GB/s and 10 microseconds are what PCIe 4.0 x16 gives.
_LINKS: dict[str, Callable[[], Link | None]] = {
    "aliases": lambda: None,
    "lazy": LazyLink,
    "copies": lambda: TimedLink(bytes_per_ms=25e6, latency_ms=0.01),
    "accelerator": lambda: None,
}
# Settings of the Trainer for pipelined runs, which a way to copy may add to.
_pipelined: dict[str, Any] = {}
_BY_DEFAULT = ("aliases", "lazy")
# Devices and micro-batches that every kind of model is tried on, and the way by default. All of them in all ways is
# what test_parity_matrix.py and --devices are for.
_PIPELINES: dict[str, tuple[dict[str, Any], str]] = {
    "2x3": ({"devices": 2, "num_microbatches": 3}, "lazy"),
    "4x5": ({"devices": 4, "num_microbatches": 5}, "aliases"),
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
) -> Run:
    """Trains for ``steps`` optimizer steps: pipelined over ``devices``, or (None) plain, on one device."""

    def make() -> L.LightningModule:
        module = make_module()
        if optimizer is not None:
            # On the instance, where Lightning looks first: one training, many optimizers, no boilerplate in modules.
            trained = partial(filter, lambda p: p.requires_grad)
            object.__setattr__(module, "configure_optimizers", lambda: optimizer(trained(module.parameters())))
        return module

    pipelined = {"devices": devices, "num_microbatches": num_microbatches, "options": strategy_options, **_pipelined}
    if _pipelined and devices is not None:  # GPUs that are not enough are in the pool several times
        pipelined["devices"] = [i % torch.accelerator.device_count() for i in range(devices)]
    elif _pipelined and ({"precision", "plugins"} & set(trainer_options)):
        trainer_options = on_simulated_gpu(trainer_options)
    run = fit(
        "plain" if devices is None else "roundpipe",
        make,
        make_data,
        seed=_SEED,
        **{"max_epochs": -1, "max_steps": steps, **trainer_options, **({} if devices is None else pipelined)},
    )
    assert run.trainer.global_step == steps
    return run


def _assert_same(actual: Run, expected: Run, *, exact: bool = False) -> None:
    """Losses, gradients, parameters, buffers and optimizer state agree; ``exact``: bit for bit."""
    if exact:
        assert_identical(actual.results, expected.results)
    else:
        assert_alike(actual.results, expected.results, **_TOLERANCES)


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
        if chosen or way == way_by_default
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

    if link is not None:
        monkeypatch.setattr(DevicePool, "__init__", make_with_link)
    elif request.param == "accelerator":
        monkeypatch.setitem(_pipelined, "accelerator", "roundpipe")
    yield str(request.param)
    for device in (device for pool in made for device in pool.devices):
        assert device.h2d.num_bytes or not device.num_unit_runs, "units ran, and nothing had been copied for them"


@pytest.fixture
def train() -> Callable[..., Run]:
    """See :func:`_train`."""
    return _train


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """See :func:`_assert_same`."""
    return _assert_same


@pytest.fixture
def pipeline(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Devices and micro-batches that every kind of model is tried on, as arguments of ``assert_parity``."""
    return dict(request.param)


@pytest.fixture
def sequential() -> Callable[..., MakeModule]:
    """A function that makes the reference for batch-coupled models.

    Its module runs ``training_step`` on the micro-batches one after the other and returns the mean of the losses,
    weighted by rows or by ``weight``: what pipelining does, without any pipeline.
    """

    def make_sequential(
        make_module: MakeModule, num_microbatches: int, weight: Callable[[Any], float] | None = None
    ) -> MakeModule:
        def make() -> L.LightningModule:
            module = make_module()
            step = module.training_step

            def training_step(batch: Any, batch_idx: int) -> Tensor:
                tensors = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
                count = min(num_microbatches, len(tensors[0]))
                parts: list[Any] = list(zip(*(t.tensor_split(count) for t in tensors), strict=True))
                rows = [len(part[0]) for part in parts]
                if isinstance(batch, Mapping):
                    parts = [dict(zip(batch, part, strict=True)) for part in parts]
                weights = rows if weight is None else [weight(part) for part in parts]
                losses = []
                for part, part_weight in zip(parts, weights, strict=True):
                    losses.append(step(part, batch_idx) * (part_weight / sum(weights)))
                    torch.clear_autocast_cache()  # Lightning 2.5 fills it: gradients would add up in the low dtype
                return torch.stack(losses).sum()

            object.__setattr__(module, "training_step", training_step)
            return module

        return make

    return make_sequential


@pytest.fixture(scope="session")
def references() -> dict[Hashable, Run]:
    """Plain runs that several tests compare with."""
    return {}


@pytest.fixture
def assert_parity(references: dict[Hashable, Run]) -> Callable[..., Run]:
    """A function that trains a module plain and pipelined, and compares all there is to compare."""

    def check(
        make_module: MakeModule,
        make_data: MakeData,
        *,
        devices: int,
        num_microbatches: int,
        strategy_options: Mapping[str, Any] = {},
        reference: MakeModule | None = None,
        min_calls: int = 2,
        **common: Any,
    ) -> Run:
        """Args:
        make_module: makes the module, called under a fixed seed; ``optimizer`` takes the place of its
            ``configure_optimizers`` unless it is None.
        make_data: makes the dataloader, or a list of batches.
        reference: makes the module of the plain run, where it must be another one (batch statistics).
        min_calls: unit calls that each micro-batch must make at least; guards against comparing plain with plain.
        common: arguments of both runs: ``trainer_options``, ``steps``, ``optimizer``.

        Returns:
            the pipelined run.
        """
        made_by = reference or make_module
        key = (made_by, make_data, *((name, repr(value)) for name, value in sorted(common.items())))
        if key not in references:
            references[key] = _train(made_by, make_data, **common)
            references[key].assert_moved()
        chosen = {"devices": devices, "num_microbatches": num_microbatches, "strategy_options": strategy_options}
        run = _train(make_module, make_data, **chosen, **common)
        _assert_same(run, references[key])
        assert min(run.watch.num_calls) >= min_calls, f"only {run.watch.num_calls} unit calls per micro-batch"
        if num_microbatches > 1:
            assert run.watch.num_devices == {devices}
        return run

    return check
