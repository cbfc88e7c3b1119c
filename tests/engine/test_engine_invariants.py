"""What holds after every step and on every way out of it: see "invariants" in the design."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.autograd.recompute import Call
from lightning_roundpipe.devices.virtual import VirtualDevice
from lightning_roundpipe.engine.runner import StepResult
from tests.support.engine.partitions import everything_recomputed
from tests.support.engine.steps import Steps
from tests.support.engine.taps import Tap

WIDTH = 3
WAIT_S = 60.0
_SPINS = 2000


class Interruption(BaseException):
    """An error that no ``except Exception`` may swallow, as KeyboardInterrupt."""


# A point of user code: of which micro-batch (its first row), and the how manieth that its thread passes.
Place = tuple[int, int]


class Probe:
    """Knows the points that user code passes, calls ``watch`` at each, and raises at the chosen one.

    Each micro-batch passes the same points in every step, whatever the others do.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self.watch: Callable[[str], None] = lambda point: None
        self.reset(None)

    def reset(self, raise_at: Place | None, error: type[BaseException] = ValueError) -> None:
        self.passed: dict[Place, str] = {}
        self.raise_at = raise_at
        self.error = error
        self.raised: BaseException | None = None

    def begin(self, x: Tensor) -> None:
        """The micro-batch with these rows begins on this thread."""
        self._local.row, self._local.count = int(x[0, 0]), 0

    def __call__(self, point: str) -> None:
        place = getattr(self._local, "row", -1), getattr(self._local, "count", 0)
        self._local.count = place[1] + 1
        self.passed[place] = point
        if place == self.raise_at:
            self.raised = self.error(f"injected at {point}")
            raise self.raised
        self.watch(point)

    def tap(self, name: str, x: Tensor) -> Tensor:
        """Passes a point in forward and in backward."""
        y: Tensor = Tap.apply(x, partial(self, f"{name} forward"), partial(self, f"{name} backward"))
        return y


class Block(nn.Module):
    def __init__(self, probe: Probe, dropout: float) -> None:
        super().__init__()
        self.probe = [probe]  # in a list: shared, not an attribute to isolate
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.probe[0].tap("unit", x)
        self.seen = x.mean()
        return x + self.dropout(torch.tanh(self.linear(x)))


class Model(nn.Module):
    def __init__(self, probe: Probe, num_blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.probe = [probe]
        self.blocks = nn.ModuleList(Block(probe, dropout) for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.current: Tensor | None = None

    def step(self, x: Tensor) -> Tensor:
        self.probe[0].begin(x)
        self.current = x
        for block in self.blocks:
            self.probe[0]("user code")
            x = self.probe[0].tap("user code", block(x) * self.scale)
            x = x + block.seen
        self.probe[0]("loss")
        return x.square().mean()


class Training(Steps):
    """Steps in which blocks are units, all of them recomputed."""

    def __init__(self, model: nn.Module, *, devices: int = 2, copies: bool = False) -> None:
        super().__init__(model, everything_recomputed, num_devices=devices, copies=copies, unit_classes=[Block])

    def step(self, rows: Tensor, num_microbatches: int = 3, seed: int = 0) -> StepResult:
        return self.train(rows.tensor_split(num_microbatches), seed, merge=list)


def numbered_rows() -> Tensor:
    """The same in every step; the first number of a row is its index, by which the probe knows micro-batches."""
    rows = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(5))
    rows[:, 0] = torch.arange(6)
    return rows


def surroundings(model: nn.Module) -> dict[str, Any]:
    """Everything a step may change while it runs and must put back, as values that compare by ``==``."""
    return {
        "attributes": {
            (name, key): id(value)
            for name, module in model.named_modules()
            for key, value in module.__dict__.items()
            # What user code writes on modules remains after a step that succeeds, as in a plain run.
            if key not in ("current", "seen")
        },
        "gradients": {name: id(p.grad) for name, p in model.named_parameters()},
        "gradient values": {n: p.grad.tolist() for n, p in model.named_parameters() if p.grad is not None},
        "hooks": {
            name: (dict(p._backward_hooks or {}), dict(p._post_accumulate_grad_hooks or {}))
            for name, p in model.named_parameters()
        },
        "random state": torch.get_rng_state().tolist(),
        "python random state": random.getstate(),
        "default dtype": torch.get_default_dtype(),
        "setattr": nn.Module.__setattr__,
        "delattr": nn.Module.__delattr__,
        "num_threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "warnings": list(warnings.filters),
        "threads": {thread.ident for thread in threading.enumerate()},
    }


def assert_unchanged(before: dict[str, Any], after: dict[str, Any], where: str) -> None:
    changed = {key: value for key, value in before.items() if after[key] != value}
    if "attributes" in changed:
        one, other = before["attributes"], after["attributes"]
        changed["attributes"] = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
    assert not changed, f"after an exception at {where}: {changed}"


def with_gradients_and_hooks(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)


# ---------------------------------------------------------------------------------------------------------------------
# Ways out


@pytest.mark.parametrize(("recorded", "copies"), [(False, False), (True, True)], ids=["first-step", "planned-step"])
def test_an_exception_anywhere_leaves_nothing_behind(recorded: bool, copies: bool) -> None:
    """At every user code point, unit call, recomputation and backward in turn; one error and the other by turns."""
    probe = Probe()
    model = Model(probe, dropout=0.3)
    with_gradients_and_hooks(model)
    reference = Training(model, devices=1)
    reference.step(numbered_rows())
    expected = reference.step(numbered_rows())
    training = Training(model, copies=copies)
    if recorded:
        training.step(numbered_rows())
    probe.reset(None)
    (training if recorded else Training(model, copies=copies)).step(numbered_rows())
    points = probe.passed
    # Per micro-batch: 3 blocks with 4 points around and one backward each, but the first one's input needs no gradient.
    # Two of three blocks are recomputed, while the plan is recorded all of them.
    assert len(points) == 3 * (3 * 5 - 1 + 1 + 2) + (0 if recorded else 1)
    kinds = {"unit forward", "unit backward", "user code", "user code forward", "user code backward", "loss"}
    assert set(points.values()) == kinds
    # The one in the middle does what the others do.
    points = {place: point for place, point in points.items() if place[0] != 2}
    before = surroundings(model)
    for place, point in sorted(points.items()):
        if not recorded:
            training = Training(model, copies=copies)
        # With copies the other way round, so that both errors come at every point.
        error = (ValueError, Interruption)[(place[1] + copies) % 2]
        probe.reset(place, error)
        with pytest.raises(error) as caught:
            training.step(numbered_rows())
        assert caught.value is probe.raised
        assert_unchanged(before, surroundings(model), point)
        probe.reset(None)
        result = training.step(numbered_rows())
        assert_unchanged(before, surroundings(model), point)
        for parameter, gradient in expected.gradients.items():
            torch.testing.assert_close(result.gradients[parameter], gradient, rtol=1e-5, atol=1e-7)


def test_the_traceback_is_the_users() -> None:
    probe = Probe()
    model = Model(probe)
    training = Training(model)
    training.step(numbered_rows())
    probe.reset((2, 0))
    with pytest.raises(ValueError, match="injected at user code") as caught:
        training.step(numbered_rows())
    assert any(entry.name == "step" and str(entry.path) == __file__ for entry in caught.traceback)


# ---------------------------------------------------------------------------------------------------------------------
# Devices


class _Lanes:
    """Knows which devices are computing, and on which device the calling thread is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here = threading.local()
        self.inside: dict[int, int] = {}
        self.most = 0
        self.outside = 0

    @contextlib.contextmanager
    def on_device(self, device: VirtualDevice) -> Iterator[None]:
        with self._lock:
            self.inside[device.index] = self.inside.get(device.index, 0) + 1
            self.most = max(self.most, self.inside[device.index])
        before = getattr(self._here, "device", None)
        self._here.device = device.index
        try:
            yield
        finally:
            self._here.device = before
            with self._lock:
                self.inside[device.index] -= 1

    def watch(self, point: str) -> None:
        for _ in range(_SPINS):  # long enough for another thread to come in, were it let in
            pass
        if point.startswith("unit") and getattr(self._here, "device", None) is None:
            with self._lock:
                self.outside += 1


class OffThePlan(Model):
    """Every micro-batch takes another path, so most calls are off the plan."""

    def step(self, x: Tensor) -> Tensor:
        chance = random.Random(int(x.abs().sum().item() * 1e4))
        for index in chance.choices(range(len(self.blocks)), k=chance.randint(2, 9)):
            x = self.blocks[index](x) * self.scale
        return x.square().mean()


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize(("case", "devices"), [("on the plan", 2), ("off the plan", 1), ("off the plan", 3)])
def test_at_most_one_unit_is_on_a_device(monkeypatch: pytest.MonkeyPatch, case: str, devices: int) -> None:
    """It is the gate that admits one at a time: no lock is around the computation."""
    lanes, probe = _Lanes(), Probe()
    monkeypatch.setattr(VirtualDevice, "computing", lambda device: lanes.on_device(device))
    probe.watch = lanes.watch
    model = (OffThePlan if case == "off the plan" else Model)(probe, num_blocks=4)
    training = Training(model, devices=devices)
    for seed in range(4):
        training.step(torch.randn(8, WIDTH), 6, seed)
    assert lanes.most == 1
    assert lanes.outside == 0, "a unit ran, forward or backward, without holding a device"
    assert lanes.inside == dict.fromkeys(range(devices), 0)


def test_two_devices_compute_at_the_same_time() -> None:
    """Both sides of a barrier are inside a unit: the step ends only if they get there together."""
    probe, other = Probe(), Probe()
    model = Model(probe, num_blocks=2)
    model.blocks[1].probe = [other]
    training = Training(model, devices=2)
    rows = torch.randn(6, WIDTH)
    training.step(rows)
    barrier = threading.Barrier(2, timeout=WAIT_S)
    num_met = 0

    def barrier_at(number: int) -> Callable[[str], None]:
        count = 0

        def meet(point: str) -> None:
            nonlocal count, num_met
            count += point == "unit forward"
            if count == number and point == "unit forward":
                barrier.wait()
                num_met += 1

        return meet

    probe.watch = barrier_at(2)  # micro-batch 1 in the first block, on one device,
    other.watch = barrier_at(1)  # with micro-batch 0 in the second block, on the other one
    training.step(rows)
    assert num_met == 2


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def num_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def forget_writes(model: Model) -> None:
    """Of what user code writes on modules the last value remains, as in a plain run; here it would be in the way."""
    model.current = None
    for block in model.blocks:
        block.seen = None


@pytest.mark.parametrize("copies", [False, True], ids=["alias", "copies"])
@pytest.mark.usefixtures("without_collector")
def test_no_tensor_survives_a_step(copies: bool) -> None:
    model = Model(Probe(), num_blocks=4, dropout=0.2)
    training = Training(model, copies=copies)

    def one_step(seed: int) -> list[weakref.ref[Tensor]]:
        parts = torch.randn(6, WIDTH).tensor_split(3)
        result = training.train(parts, seed, merge=list)
        assert len(result.gradients) == 9
        forget_writes(model)
        kept = [*parts, *result.outputs, *result.gradients.values()]
        return [weakref.ref(tensor) for tensor in kept]

    for seed in range(2):  # recording, and whatever is cached for later steps
        one_step(seed)
    gc.collect()
    before = num_tensors()
    for seed in range(2, 5):
        references = one_step(seed)
        assert sum(reference() is not None for reference in references) == 0, "batch, outputs or gradients are held"
    assert num_tensors() == before


class Checkpointed(Model):
    is_reentrant = False

    def between(self, block: nn.Module, x: Tensor) -> Tensor:
        return torch.sin(block(torch.cos(x))) * self.scale

    def step(self, x: Tensor) -> Tensor:
        self.probe[0].begin(x)
        for block in self.blocks:
            x = checkpoint(self.between, block, x, use_reentrant=self.is_reentrant)
        return x.square().mean()


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize(("copies", "is_reentrant"), [(False, False), (True, False), (True, True)])
def test_nothing_survives_a_step_that_calls_units_again_in_checkpoints_of_user_code(
    copies: bool, is_reentrant: bool
) -> None:
    model = Checkpointed(Probe())
    model.is_reentrant = is_reentrant
    training = Training(model, copies=copies)

    def left_by_step(seed: int) -> tuple[int, int]:
        training.step(torch.randn(6, WIDTH), seed=seed)
        forget_writes(model)
        gc.collect()
        return num_tensors(), sum(type(thing) is Call for thing in gc.get_objects())

    left_by_step(0)  # whatever is cached for later steps
    before = left_by_step(1)
    assert [left_by_step(seed) for seed in (2, 3)] == [before] * 2


@pytest.mark.usefixtures("without_collector")
def test_no_tensor_survives_a_failed_step() -> None:
    probe = Probe()
    model = Model(probe, num_blocks=3)
    training = Training(model)
    for seed in range(2):
        probe.reset(None)
        training.step(numbered_rows(), seed=seed)
    points = sorted(probe.passed)
    forget_writes(model)

    def failed_step(place: Place) -> list[weakref.ref[Tensor]]:
        probe.reset(place)
        parts = numbered_rows().tensor_split(3)
        with contextlib.suppress(ValueError):
            training.train(parts, merge=list)
        assert probe.raised is not None
        probe.raised.__traceback__ = None  # its frames hold the user's and the engine's locals
        probe.raised = None
        return [weakref.ref(tensor) for tensor in parts]

    failed_step(points[20])
    gc.collect()
    before = num_tensors()
    for place in points[3::9]:
        assert all(reference() is None for reference in failed_step(place))
        assert num_tensors() <= before


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_statistics_that_a_step_has_written_show_it(copies: bool, fails: bool) -> None:
    """Batch norm alone would not raise their version; neither where calls are recorded nor where they are recomputed.

    On devices with copies of their own they come home when a step has succeeded.
    """
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)])
    steps = Steps(model, everything_recomputed, num_devices=2, copies=copies)

    def loss_of(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if fails:
            raise ValueError("after all units")
        return loss

    for _ in range(2):
        before = {name: (buffer.clone(), buffer._version) for name, buffer in model.named_buffers()}
        with pytest.raises(ValueError, match="after all units") if fails else contextlib.nullcontext():
            steps.train([torch.randn(4, WIDTH)] * 2, function=loss_of)
        for name, buffer in model.named_buffers():
            value, version = before[name]
            assert torch.equal(buffer, value) == (copies and fails), name
            assert (buffer._version == version) == (copies and fails), name
