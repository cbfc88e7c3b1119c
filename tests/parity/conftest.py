"""The ways in which tests of parity run.

[Note: ways to copy]
Every test here runs on virtual devices in these ways, which ``--devices=NAME`` (or ``all``) chooses from:

- ``aliases``: weights are shared with the host and nothing travels, which is the default of the strategy.
- ``lazy``: everything travels, and a copy is made when a reader waits for it and no sooner. Where a wait is missing,
  the test reads poison, in every run.
- ``copies``: everything travels on the threads of lanes, as slowly as over PCIe.
- ``accelerator``: the GPUs that there are; or GPUs that are simulated, see :mod:`tests.support.accelerator`, which
  ``--accelerator`` makes.

Without the option it is the first two: both, for tests of their own; one of them for tests marked with ``ways``,
because the other one is what other tests of the same code run in. Tests on several pipelines run each of these in one
way, see ``_PIPELINES``; marked with ``ways("lazy")`` only the one in which every wait is tested. They are on both where
units write what they share with the host: buffers, tensors in place, lists that are merged or emptied.

The optimizer overlaps in all of them, as it does for users, and no update begins before something waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.virtual import TimedLink
from tests.parity import driver
from tests.support.engine.lazy_link import LazyLink
from tests.support.late_updates import late, late_updates, small_updates  # noqa: F401

# See [Note: ways to copy]. 25 GB/s and 10 microseconds are what PCIe 4.0 x16 gives.
_LINKS: dict[str, Callable[[], TimedLink | None]] = {
    "aliases": lambda: None,
    "lazy": LazyLink,
    "copies": lambda: TimedLink(bytes_per_ms=25e6, latency_ms=0.01),
    "accelerator": lambda: None,
}
_BY_DEFAULT = ("aliases", "lazy")
# Devices and micro-batches that every kind of model is tried on, and the way by default. More of them are in
# test_parity_training.py, and all of them in all ways with --devices.
_PIPELINES: dict[str, tuple[dict[str, Any], str]] = {
    "2x3": ({"devices": 2, "num_microbatches": 3}, "lazy"),
    "4x5": ({"devices": 4, "num_microbatches": 5}, "aliases"),
}


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
        monkeypatch.setitem(driver.pipelined, "accelerator", "roundpipe")
        # Convolutions of a GPU would be compared with the full precision of the host.
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield str(request.param)
    for device in (device for pool in made for device in pool.devices):
        assert device.h2d.num_bytes or not device.num_unit_runs, "units ran, and nothing had been copied for them"


@pytest.fixture
def pipeline(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Devices and micro-batches that every kind of model is tried on, as arguments of ``assert_parity``."""
    return dict(request.param)
