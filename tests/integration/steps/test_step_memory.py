"""Memory of devices and host: the options, what the planner is told, what the user is told, and what fits."""

from __future__ import annotations

import functools
import math
import random
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_roundpipe import DeviceOutOfMemoryError, StageMemoryError, VirtualLink
from lightning_roundpipe.devices.virtual import TimedLink
from lightning_roundpipe.integration.batches.microbatches import split_batch
from lightning_roundpipe.integration.pool import machine_of, make_pool
from lightning_roundpipe.options import RoundPipeOptions
from lightning_roundpipe.planning import Machine
from lightning_roundpipe.reporting import host_report
from tests.support.parity import compare, make_loader, make_trainer
from tests.support.small import Small

HOST = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "num_bytes"), [(None, None), (4 * GIB, 4 * GIB), ("24GiB", 24 * GIB), ("8 GB", 8 * 10**9)]
)
def test_a_memory_limit_is_bytes_or_a_size(limit: Any, num_bytes: int | None) -> None:
    options = RoundPipeOptions(device_memory_limit=limit, virtual_copies=True)
    assert options.device_memory_bytes == num_bytes
    pool = make_pool([HOST, HOST], options)
    assert [device.memory.limit for device in pool.devices] == [num_bytes] * 2
    assert machine_of(pool, options) == Machine(2, num_bytes)


def test_a_limit_without_copies_is_said_to_have_no_effect() -> None:
    options = RoundPipeOptions(device_memory_limit="1GiB")
    with pytest.warns(UserWarning, match=r"device_memory_limit='1GiB' has no effect.*virtual_copies=True"):
        pool = make_pool([HOST], options)
    assert pool.memory_limit is None


def test_a_virtual_link_is_that_of_devices_and_planner() -> None:
    options = RoundPipeOptions(virtual_copies=VirtualLink(gb_per_s=2.0, latency_us=500.0))
    pool = make_pool([HOST, HOST], options)
    # 2 MB at 2 GB/s, after half a millisecond.
    expected = Machine(2, None, h2d_bytes_per_ms=2e6, d2h_bytes_per_ms=2e6, transfer_latency_ms=0.5)
    assert machine_of(pool, options) == expected
    assert not pool[0].aliases_host


@pytest.mark.parametrize(("copies", "aliases"), [(False, True), (True, False)])
def test_without_numbers_links_are_fast(copies: bool, aliases: bool) -> None:
    options = RoundPipeOptions(virtual_copies=copies)
    pool = make_pool([HOST], options)
    assert pool[0].aliases_host is aliases
    assert machine_of(pool, options) == Machine(1)


def test_the_defaults_of_a_link_are_a_gpu_s() -> None:
    link = VirtualLink()
    assert TimedLink(link.bytes_per_ms, link.latency_ms).duration_ms(25_000_000) == pytest.approx(1.01)
    assert VirtualLink(gb_per_s=math.inf).bytes_per_ms == math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("gb_per_s", 0.0), ("gb_per_s", math.nan), ("gb_per_s", "25"), ("gb_per_s", True)),
        *(("latency_us", -0.1), ("latency_us", math.inf), ("latency_us", math.nan)),
    ],
)
def test_impossible_links_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"VirtualLink\({field}={value!r}\): pass a number"):
        VirtualLink(**{field: value})


@pytest.mark.parametrize(
    ("left", "spare", "deterministic", "num_rounds"),
    [(GIB, 0, False, 1), (0, 0, False, 4), (GIB, 700, False, 4), (GIB, 0, True, 4)],
    ids=["room", "no room on the host", "an allocator that has run short", "independent of the room"],
)
def test_gradients_travel_once_per_round(
    left: int, spare: int, deterministic: bool, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RunsShort(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer.strategy.pool[0].memory.spare = spare  # type: ignore[attr-defined]

    monkeypatch.setattr(host_report, "available_bytes", lambda: left)
    # Not the whole model fits, so that there are several stages.
    options = {"num_microbatches": 8, "virtual_copies": VirtualLink(), "device_memory_limit": 1600}
    trainer = make_trainer(
        devices=1, max_epochs=1, options=options, callbacks=[RunsShort()], deterministic=deterministic
    )
    trainer.fit(Small(), make_loader(rows=16, batch_size=8))
    step = trainer.strategy.last_step
    gradients = sum(p.numel() * p.element_size() for p in trainer.lightning_module.parameters())
    activations = step.bytes_down[0] - num_rounds * gradients
    assert 0 <= activations < gradients


# ---------------------------------------------------------------------------------------------------------------------
# Training with too little memory

WIDTH, ROWS = 16, 32
STATES = 2 * 4 * (WIDTH * WIDTH + WIDTH)  # weights and gradients of a block
# What a row of a micro-batch needs there: input and output, the gradients of both, and the outputs of the two
# micro-batches of the smallest round that wait for their next stage.
ROW = 4 * WIDTH * (4 + 2)
# Between 4 and 8, and 8 and 16.
FITS_4_ROWS, FITS_8_ROWS = STATES + 6 * ROW, STATES + 12 * ROW
TOO_LITTLE = (DeviceOutOfMemoryError, StageMemoryError)


class Calls:
    """Counts the calls of a step; shared by all micro-batches and attempts."""

    def __init__(self) -> None:
        self.num = 0


class Watched(L.LightningModule):
    """Notes all that could be lost or counted twice when a step is run again."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
            if norm:
                blocks[1].append(nn.BatchNorm1d(WIDTH))
            self.layers = nn.Sequential(nn.Linear(4, WIDTH), nn.Dropout(0.2), *blocks)
            self.head = nn.Linear(WIDTH, 3)
        self.accuracy = MulticlassAccuracy(3)
        self.seen = SumMetric()
        self.outputs: list[Tensor] = []
        self.calls = Calls()
        self.facts: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.num += 1
        x, y = batch
        logits = self.head(self.layers(x))
        self.accuracy(logits, y)
        self.seen.update(len(y))
        self.outputs.append(logits.detach())
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss)
        self.log("draw", random.random() + float(np.random.rand()), reduce_fx=min)
        self.log("noise", torch.rand(()))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("validation", F.cross_entropy(self.head(self.layers(x)), y))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.facts += [logged, float(self.seen.compute()), len(self.outputs), [tuple(t.shape) for t in self.outputs]]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def make_rows(rows: int = 3 * ROWS, batch_size: int = ROWS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 4, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(3, (rows,), generator=generator)), batch_size=batch_size)


def train(module: Any, limit: int | None, num_microbatches: Any = "auto", loader: Any = None, **kwargs: Any) -> Any:
    """Trains on two virtual devices with a memory of their own: "auto" begins with 4 micro-batches of 8 rows."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    options = {"virtual_copies": True, "device_memory_limit": limit, "check_split": "off"}
    trainer = make_trainer(num_microbatches=num_microbatches, options=options, **kwargs)
    trainer.fit(module, loader or make_rows())
    return module, trainer


def assert_equal_runs(ours: tuple[Any, L.Trainer], expected: tuple[Any, L.Trainer], rtol: float = 0.0) -> None:
    """Bit for bit, by default: weights, buffers, optimizer, metrics, what was logged and collected."""
    (left, left_trainer), (right, right_trainer) = ours, expected
    torch.testing.assert_close(left.facts, right.facts, rtol=rtol, atol=rtol / 100)
    pairs = [(left.state_dict(), right.state_dict())]
    pairs.append((left_trainer.optimizers[0].state_dict()["state"], right_trainer.optimizers[0].state_dict()["state"]))
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol / 100)
    torch.testing.assert_close(left.outputs, right.outputs, rtol=rtol, atol=rtol / 100)
    assert left.accuracy.compute() == right.accuracy.compute()


@functools.cache
def trained_with_8() -> Any:
    """What a training with batch norm comes to whose batches are split into 8, without a limit."""
    return train(Watched(norm=True), None, 8)


def test_auto_finds_a_number_that_fits_and_nothing_is_lost() -> None:
    ours = train(Watched(norm=True), FITS_4_ROWS)
    assert ours[1].strategy.last_step.num_microbatches == 8
    assert ours[0].calls.num > 3 * 8, "the first attempt has called the step as well"
    devices = ours[1].strategy.pool.devices
    assert all(0 < device.peak_memory_bytes <= FITS_4_ROWS and device.memory.used == 0 for device in devices)
    assert ours[1].strategy.last_step.peak_memory_bytes == tuple(device.memory.peak for device in devices)
    assert_equal_runs(ours, trained_with_8(), rtol=1e-5)  # which has larger rounds


def test_enough_memory_changes_nothing() -> None:
    ours = train(Watched(), FITS_8_ROWS, loader=make_rows(2 * ROWS))
    assert ours[1].strategy.last_step.num_microbatches == 4
    assert ours[0].calls.num == 2 * 4
    assert_equal_runs(ours, train(Watched(), None, 4, make_rows(2 * ROWS)))


def test_gradients_that_wait_are_not_lost() -> None:
    """A later, larger batch does not fit: gradients accumulated before it, momentum and metrics must survive."""
    batches = [range(16), range(26, 90), range(64, 80), range(70, 90)]
    loaders = [DataLoader(make_rows().dataset, batch_sampler=[list(rows) for rows in batches]) for _ in range(2)]
    settings = {"accumulate_grad_batches": 4}
    ours = train(Watched(), FITS_4_ROWS, "auto", loaders[0], **settings)
    # 16 rows never fit; whether 8 do depends on which micro-batches are on a device at a time.
    number = ours[1].strategy.last_step.num_microbatches
    assert number in (8, 16)
    reference, counts = Watched(), iter([4, number, number, number])
    reference.roundpipe_split_batch = lambda batch, num: split_batch(batch, next(counts)).microbatches
    # The step that was run again has recorded its first micro-batch, whose gradient is added to that of the others.
    assert_equal_runs(ours, train(reference, None, 4, loaders[1], **settings), rtol=1e-4)


def test_training_goes_on_after_the_error() -> None:
    module = Watched(norm=True)
    with pytest.raises(TOO_LITTLE):
        train(module, FITS_4_ROWS, 1)
    module.seen.reset()
    module.accuracy.reset()
    module.outputs.clear()
    assert_equal_runs(train(module, None, 8), trained_with_8())


def test_what_can_never_fit_says_what_takes_the_memory() -> None:
    with pytest.raises(TOO_LITTLE) as caught:
        train(Watched(), 2048)
    text = str(caught.value)
    for part in ("training_step does not fit", "weights", "gradients", "activations", "units", "num_microbatches"):
        assert part in text


def test_evaluation_is_run_again_as_well() -> None:
    options = {"virtual_copies": True, "device_memory_limit": STATES // 2 + 6 * 4 * WIDTH * (2 + 2)}
    found = []
    for given, number in ((options, "auto"), ({}, 8)):
        trainer = make_trainer(num_microbatches=number, options=given)
        found.append(trainer.validate(Watched(), make_rows(), verbose=False))
        assert trainer.strategy.last_step.num_microbatches == 8
    assert found[0] == found[1]


class Bulge(L.LightningModule):
    """The output of the first layer has 1 KiB for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 256), nn.Linear(256, 4))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch)  # type: ignore[no-any-return]


def test_what_was_learned_from_larger_micro_batches_is_forgotten() -> None:
    module, rows = Bulge(), torch.randn(256, 4)
    options = {"virtual_copies": True, "device_memory_limit": "64KiB"}
    trainer = make_trainer(num_microbatches="auto", options=options)
    (found,) = trainer.predict(module, DataLoader(rows, batch_size=256))  # type: ignore[arg-type]
    assert trainer.strategy.last_step.num_microbatches in (8, 16, 32)
    torch.testing.assert_close(found, module.layers(rows).detach())


def test_larger_batches_than_the_first_one_are_on_the_books() -> None:
    peaks = []
    for sizes in ([8, 256], [256]):
        options = {"virtual_copies": True, "check_split": "off"}
        trainer = make_trainer(devices=1, num_microbatches=2, options=options)
        trainer.predict(Bulge(), DataLoader([torch.randn(size, 4) for size in sizes], batch_size=None))  # type: ignore[arg-type]
        peaks.append(trainer.strategy.pool[0].statistics()["peak_activations_bytes"])
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)  # half as much if it were that of 8 rows


WIDE = 512
LAYER = 2 * 4 * (4 * WIDE + WIDE)


class Wide(L.LightningModule):
    """One block that is larger than a device, made of two layers that are not."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, WIDE), nn.Linear(WIDE, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.blocks = nn.Sequential(Wide.Block(), Wide.Block())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.blocks(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_blocks_that_are_too_large_are_divided() -> None:
    # The layer in front gives rows of 512 numbers: one and its gradient, and those of four micro-batches that wait.
    options = {"virtual_copies": True, "device_memory_limit": LAYER + 4 * (WIDE + 4) * (2 + 4)}
    _, ours = compare(Wide, make_rows(2 * ROWS), ours={"options": options, "num_microbatches": ROWS})
    assert ours.trainer.strategy.last_step.partition.num_calls == 4


def test_units_that_the_user_has_chosen_stay_whole() -> None:
    options = {"virtual_copies": True, "device_memory_limit": LAYER, "units": ["Block"]}
    with pytest.raises(TOO_LITTLE, match="does not fit"):
        make_trainer(options=options, num_microbatches=8).fit(Wide(), make_rows())


def test_what_the_host_needs_is_reported_and_missed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_report, "available_bytes", lambda: 100)
    warned = pytest.warns(UserWarning, match=r"this run may need .* on the host.* 100 B are available")
    with warned, caplog.at_level("INFO"):
        make_trainer(max_epochs=2).fit(Small(), make_loader())
    (report,) = [record.message for record in caplog.records if "on the host" in record.message]
    for part in ("activations", "weights", "gradients", "optimizer state"):
        assert part in report


@pytest.mark.parametrize(("sizes", "are_alike"), [((100, 105), True), ((100, 150), False)])
def test_devices_of_unequal_memory_are_planned_for_as_they_are(sizes: tuple[int, int], are_alike: bool) -> None:
    options = RoundPipeOptions(virtual_copies=True, device_memory_limit="1MiB")
    pool = make_pool([HOST, HOST], options)
    for device, size in zip(pool.devices, sizes, strict=True):
        device.memory.limit = size
    machine = machine_of(pool, options)
    assert machine.is_uniform is are_alike
    assert machine.memories == (sizes[:1] if are_alike else sizes)
