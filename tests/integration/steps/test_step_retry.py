"""Steps that do not fit are run again: when, with how many micro-batches, and from which state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn

from lightning_roundpipe.devices.device import DeviceLostError
from lightning_roundpipe.devices.memory import DeviceOutOfMemoryError
from lightning_roundpipe.engine.execution import LateWriteError
from lightning_roundpipe.integration.batches.microbatches import split_batch
from lightning_roundpipe.integration.batches.splitting import Batches
from lightning_roundpipe.integration.steps.modules import ModuleScan
from lightning_roundpipe.integration.steps.retry import Retry
from lightning_roundpipe.integration.steps.step_state import StepState
from lightning_roundpipe.planning import CallCost, CostProfile
from lightning_roundpipe.planning.plan import StageMemoryError
from tests.support.engine.lazy_link import cpu_pool
from tests.support.models import Statistics

HOST = torch.device("cpu")
FULL = DeviceOutOfMemoryError("device 0 is full")
FULL_OF_WEIGHTS = DeviceOutOfMemoryError("device 0 is full", fits_if_split=False)
DRIVER = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
LIBRARY = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
LATE = LateWriteError("unit 'u' has begun to write a")


def split(batch: Any, num_microbatches: int) -> Batches:
    done = split_batch(batch, num_microbatches)
    shares = tuple(size / sum(done.sizes) for size in done.sizes)
    return Batches(done.microbatches, done.sizes, shares, shares, done.batch_size)


class Attempts:
    """A step that fits from a number of micro-batches on."""

    def __init__(self, fits_from: int, error: Exception = FULL, effect: Callable[[], None] = lambda: None) -> None:
        self.fits_from, self.error, self.effect = fits_from, error, effect
        self.tried: list[int] = []

    def __call__(self, batches: Batches) -> str:
        self.tried.append(len(batches.microbatches))
        self.effect()
        if self.tried[-1] < self.fits_from:
            raise self.error
        return "result"


@pytest.fixture
def forgotten() -> list[str]:
    return []


@pytest.fixture
def make_retry(forgotten: list[str]) -> Callable[..., Retry]:
    def make(num_microbatches: int = 2, root: nn.Module | None = None, **kwargs: Any) -> Retry:
        options: dict[str, Any] = {"is_auto": True, "pool": cpu_pool(1, memory_limit=100), "forget": forgotten.append}
        options |= {"costs": lambda kind: None, **kwargs}
        return Retry(ModuleScan(root or nn.Linear(1, 1)), num_microbatches, **options)

    return make


def test_auto_doubles_until_it_fits_and_keeps_the_number(make_retry: Any, forgotten: list[str]) -> None:
    retry, attempts = make_retry(), Attempts(fits_from=7)
    batches, result = retry.run("training_step", torch.zeros(20, 1), split, attempts)
    assert result == "result"
    assert attempts.tried == [2, 4, 8]
    assert len(batches.microbatches) == 8
    assert forgotten == ["training_step"] * 2
    retry.run("training_step", torch.zeros(20, 1), split, attempts)
    assert attempts.tried[3:] == [8]


def test_a_step_that_is_run_again_counts_statistics_of_a_wide_batch_norm_once(make_retry: Any) -> None:
    """Batch norm writes them without a new version: what is not copied before the step is not put back."""
    norm, expected = nn.BatchNorm1d(2**16), nn.BatchNorm1d(2**16)
    rows = torch.randn(4, 2**16, generator=torch.Generator().manual_seed(1))
    expected(rows)
    attempts = Attempts(fits_from=8, effect=lambda: norm(rows))
    make_retry(root=norm).run("training_step", torch.zeros(20, 1), split, attempts)
    assert attempts.tried == [2, 4, 8]
    for name, buffer in expected.named_buffers():
        assert torch.equal(norm.get_buffer(name), buffer), name


def test_each_kind_of_step_has_a_number_of_its_own(make_retry: Any) -> None:
    retry = make_retry()
    retry.run("training_step", torch.zeros(20, 1), split, Attempts(fits_from=4))
    retry.run("validation_step", torch.zeros(20, 1), split, Attempts(fits_from=1))
    assert retry.num_microbatches == {"training_step": 4, "validation_step": 2}


def test_a_small_batch_does_not_lower_the_number(make_retry: Any) -> None:
    retry, attempts = make_retry(8), Attempts(fits_from=1)
    retry.run("training_step", torch.zeros(3, 1), split, attempts)
    retry.run("training_step", torch.zeros(20, 1), split, attempts)
    assert attempts.tried == [3, 8]


@pytest.mark.parametrize(("error", "tried"), [(FULL, [2, 4, 5]), (DRIVER, [2, 2, 4, 5]), (LIBRARY, [2, 2, 4, 5])])
def test_auto_ends_with_one_row_each(make_retry: Any, error: Exception, tried: list[int]) -> None:
    attempts = Attempts(99, error)
    message = f"with 5 micro-batches per batch, and the batch cannot be split further. {error} What helps"
    with pytest.raises(DeviceOutOfMemoryError, match=message) as caught:
        make_retry().run("training_step", torch.zeros(5, 1), split, attempts)
    assert attempts.tried == tried
    assert caught.value.__cause__ is error


def test_the_last_error_names_the_largest_unit(make_retry: Any) -> None:
    mib = 2**20
    small = CallCost("small", 1.0, 2.0, weight_bytes=mib, gradient_bytes=mib, input_bytes=mib)
    large = CallCost("large", 1.0, 2.0, weight_bytes=2 * mib, workspace_bytes=5 * mib)
    retry = make_retry(costs=lambda kind: CostProfile((small, large)))
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        retry.run("training_step", torch.zeros(1, 1), split, Attempts(fits_from=99))
    assert str(caught.value) == (
        "training_step does not fit on the devices with 1 micro-batch per batch, and the batch cannot be split "
        "further. device 0 is full Of all units 'large' needs 7.00 MiB on a device: weights 2.00 MiB, gradients 0 B, "
        "activations of one micro-batch 5.00 MiB, which is the most. What helps: smaller micro-batches (a larger "
        "num_microbatches) for activations, finer units (units=[...]) for weights and gradients, a higher "
        "device_memory_limit for all of them."
    )


def test_a_given_number_is_doubled_once_in_a_step(make_retry: Any) -> None:
    retry = make_retry(3, is_auto=False)
    attempts = Attempts(fits_from=6)
    with pytest.warns(UserWarning, match="with 3 micro-batches per batch, and is run again with 6"):
        retry.run("training_step", torch.zeros(20, 1), split, attempts)
    assert attempts.tried == [3, 6]
    attempts.fits_from = 20
    with (
        pytest.warns(UserWarning, match="with 6 micro-batches per batch, and is run again with 12"),
        pytest.raises(DeviceOutOfMemoryError, match="with 12 micro-batches per batch, and it was run again once"),
    ):
        retry.run("training_step", torch.zeros(20, 1), split, attempts)
    assert attempts.tried == [3, 6, 6, 12]
    assert retry.num_microbatches == {"training_step": 6}  # what has worked


@pytest.mark.parametrize(
    ("num_microbatches", "root", "message"),
    [
        (1, nn.Linear(1, 1), "num_microbatches=1 is kept, because the loss may depend on all rows"),
        (2, nn.BatchNorm1d(1), "num_microbatches is kept, because the statistics of batch norm depend on it"),
    ],
)
def test_a_given_number_is_kept_where_it_decides_about_results(
    make_retry: Any, num_microbatches: int, root: nn.Module, message: str
) -> None:
    attempts = Attempts(fits_from=3)
    with pytest.raises(DeviceOutOfMemoryError, match=message):
        make_retry(num_microbatches, root, is_auto=False).run("training_step", torch.zeros(8, 1), split, attempts)
    assert attempts.tried == [num_microbatches]


def test_batch_norm_in_evaluation_is_no_obstacle(make_retry: Any) -> None:
    attempts = Attempts(fits_from=3)
    with pytest.warns(UserWarning, match="run again with 4"):
        make_retry(2, nn.BatchNorm1d(1).eval(), is_auto=False).run("test_step", torch.zeros(8, 1), split, attempts)
    assert attempts.tried == [2, 4]


def test_errors_of_the_planner_are_known(make_retry: Any) -> None:
    attempts = Attempts(4, StageMemoryError("call 0 needs more", fits_if_split=True))
    make_retry().run("training_step", torch.zeros(8, 1), split, attempts)
    assert attempts.tried == [2, 4]


@pytest.mark.parametrize("error", [StageMemoryError("call 0 needs more", fits_if_split=False), FULL_OF_WEIGHTS])
def test_errors_that_smaller_microbatches_do_not_change(make_retry: Any, error: Exception) -> None:
    attempts = Attempts(4, error)
    with pytest.raises(type(error), match=rf"weights and gradients alone take too much\. {error}"):
        make_retry().run("training_step", torch.zeros(8, 1), split, attempts)
    assert attempts.tried == [2]


def test_where_the_allocator_has_no_room_some_is_made_before_the_batch_is_split_further(make_retry: Any) -> None:
    pool, attempts = cpu_pool(2, memory_limit=100), Attempts(8, DRIVER)
    make_retry(pool=pool).run("training_step", torch.zeros(20, 1), split, attempts)
    assert attempts.tried == [2, 2, 4, 8]
    assert [device.memory.spare for device in pool.devices] == [1, 1], "half as much with each split"


@pytest.mark.parametrize(
    ("booked", "copies_run_short", "expected"),
    [
        (90, False, [(2, 0, 0), (2, 5, 0), (2, 10, 0), (2, 20, 1), (2, 40, 1), (2, 50, 1), (4, 25, 2)]),
        (90, True, [(2, 0, 0), (2, 5, 0), (2, 50, 1), (4, 25, 2)]),
        (50, False, [(2, 0, 0), (2, 5, 1), (4, 2, 2)]),
    ],
    ids=["weights make way", "they have for copies", "they cannot"],
)
def test_room_is_made_before_micro_batches_get_smaller(
    make_retry: Any, forgotten: list[str], booked: int, copies_run_short: bool, expected: list[tuple[int, int, int]]
) -> None:
    """Of weights first; the third time, and where that is no use, of activations as well, in new plans."""
    pool, tried = cpu_pool(1, memory_limit=100), []
    pool[0].memory.reserve("weights", booked)

    def attempt(batches: Batches) -> None:
        tried.append((len(batches.microbatches), pool[0].memory.spare, len(forgotten)))
        while copies_run_short and len(tried) == 2 and pool[0].memory.has_room_to_make:
            pool[0].make_room()
        if len(tried) < len(expected):
            raise DRIVER

    make_retry(2, pool=pool).run("training_step", torch.zeros(8, 1), split, attempt)
    assert tried == expected


def test_room_is_made_for_a_number_that_must_be_kept_and_not_where_a_step_cannot_be_run_again(make_retry: Any) -> None:
    root = Statistics()
    retry, errors = make_retry(1, root, is_auto=False), [DRIVER]

    def attempt(batches: Batches) -> int:
        root.mean.add_(1.0)
        if errors:
            raise errors.pop()
        return len(batches.microbatches)

    assert retry.run("training_step", torch.zeros(8, 1), split, attempt)[1] == 1
    assert root.mean.tolist() == [1.0] * 3
    attempts = Attempts(99, DRIVER, effect=lambda: retry.forbid("it is by hand"))
    with pytest.raises(DeviceOutOfMemoryError, match="it is by hand"):
        retry.run("training_step", torch.zeros(8, 1), split, attempts)
    assert attempts.tried == [1]


def test_a_step_with_a_late_write_is_run_again_as_it_was_and_all_kinds_are_planned_anew(
    make_retry: Any, forgotten: list[str]
) -> None:
    """Also where nothing else can fail: what has buffers may write them."""
    root, tried = Statistics(), []
    retry = make_retry(3, root, pool=cpu_pool(1), is_auto=False)
    retry.run("validation_step", torch.zeros(8, 1), split, Attempts(1))

    def attempt(batches: Batches) -> None:
        tried.append((len(batches.microbatches), root.mean.tolist()))
        root.mean.add_(1.0)
        if len(tried) == 1:
            raise LATE

    retry.run("training_step", torch.zeros(8, 1), split, attempt)
    assert tried == [(3, [0.0] * 3)] * 2
    assert forgotten == ["validation_step", "training_step"]


def _change_weight(root: nn.Module) -> None:
    with torch.no_grad():
        next(root.parameters()).add_(1.0)


@pytest.mark.parametrize(
    ("batch", "effect", "why"),
    [
        (torch.zeros(8, 1), lambda retry, root: retry.forbid("it is by hand"), "it is by hand"),
        (torch.zeros(8, 1), lambda retry, root: _change_weight(root), "the weight 'weight' has changed meanwhile"),
        (iter([1, 2]), lambda retry, root: None, "the iterator that it takes its batches from has gone on"),
    ],
)
def test_a_late_write_in_a_step_that_cannot_be_run_again_is_an_error_with_a_way_out(
    make_retry: Any, batch: Any, effect: Any, why: str
) -> None:
    root = Statistics()
    retry = make_retry(2, root)
    with pytest.raises(LateWriteError, match=rf"begun to write a\. .* because {why}\. What helps: ") as caught:
        retry.run("training_step", batch, split, Attempts(9, LATE, effect=lambda: effect(retry, root)))
    assert caught.value.__cause__ is LATE


@pytest.mark.parametrize(
    ("rows", "error", "is_understood"),
    [
        (8, FULL, True),
        (8, StageMemoryError("too small", fits_if_split=True), True),
        (8, DRIVER, True),
        (8, FULL_OF_WEIGHTS, False),
        (1, FULL, False),
    ],
)
def test_the_batch_size_finder_meets_the_limit(
    make_retry: Any, forgotten: list[str], rows: int, error: Exception, is_understood: bool
) -> None:
    """Nothing is split further, and Lightning goes on with a smaller batch; but not if no batch would fit."""
    retry, attempts = make_retry(is_trial=lambda: True), Attempts(4, error)
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        retry.run("training_step", torch.zeros(rows, 1), split, attempts)
    assert is_oom_error(caught.value) is is_understood
    assert str(error) in str(caught.value)
    num_attempts = 2 if error is DRIVER else 1  # room is made, and planned for
    assert attempts.tried == [min(2, rows)] * num_attempts
    retry.run("training_step", torch.zeros(rows, 1), split, Attempts(1))
    assert forgotten == ["training_step"] * num_attempts, "once per size: every trial begins like a training"
    retry.run("training_step", torch.zeros(rows + 1, 1), split, Attempts(1))
    assert len(forgotten) == num_attempts + 1


def test_training_after_the_batch_size_finder_starts_as_if_nothing_had_been_tried(
    make_retry: Any, forgotten: list[str]
) -> None:
    """With other plans, and with the memory that a failed trial has kept free."""
    is_trial, pool = True, cpu_pool(1, memory_limit=100)
    retry = make_retry(is_trial=lambda: is_trial, pool=pool)
    with pytest.raises(DeviceOutOfMemoryError):
        retry.run("training_step", torch.zeros(8, 1), split, Attempts(4, DRIVER))
    assert pool.is_short
    is_trial = False
    forgotten.clear()
    for _ in range(2):
        retry.run("training_step", torch.zeros(4, 1), split, Attempts(1))
    assert pool[0].memory.spare == 0
    assert forgotten == ["training_step"]


@pytest.mark.parametrize("error", [ValueError("mine"), RuntimeError("mine"), KeyboardInterrupt()])
def test_other_errors_pass(make_retry: Any, error: Any) -> None:
    attempts = Attempts(99, error)
    with pytest.raises(type(error)) as caught:
        make_retry().run("training_step", torch.zeros(8, 1), split, attempts)
    assert caught.value is error
    assert attempts.tried == [2]


def test_the_tensors_of_a_failed_attempt_are_gone_before_the_next_one(make_retry: Any) -> None:
    alive: list[int] = []

    class Watched:
        def __init__(self) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    seen: list[int] = []

    def attempt(batches: Batches) -> None:
        seen.append(len(alive))
        held = Watched()
        held.self = held  # type: ignore[attr-defined]
        if len(batches.microbatches) < 4:
            raise DeviceOutOfMemoryError("full")

    make_retry().run("training_step", torch.zeros(8, 1), split, attempt)
    assert seen == [0, 0]


def test_a_step_that_loses_a_device_ends_and_its_state_is_put_back(make_retry: Any) -> None:
    """Whatever the error says."""
    pool, root = cpu_pool(2, copies=True), Statistics()
    error = ValueError("what became of the error of the driver")

    def lose() -> None:
        root.mean.add_(1.0)
        root.metrics.update(torch.ones(1))
        pool[0].lost = "gone"

    attempts = Attempts(9, error, effect=lose)
    with pytest.raises(DeviceLostError) as caught:
        make_retry(pool=pool, root=root).run("training_step", torch.zeros(20, 1), split, attempts)
    assert str(caught.value) == (
        "training_step has lost virtual device 0 (gone). What helps: begin again in a new process, from the last "
        "checkpoint, without the device if it does not come back."
    )
    assert caught.value.__cause__ is error
    assert root.mean.tolist() == [0.0] * 3
    assert root.metrics["loss"].update_count == 0
    assert attempts.tried == [2]


def test_entries_that_the_step_takes_out_of_its_batch_are_there_each_time(make_retry: Any) -> None:
    seen = []

    def attempt(batches: Batches) -> None:
        (microbatch,) = batches.microbatches
        seen.append(microbatch.pop("x").shape)
        if len(seen) < 3:
            raise LATE

    make_retry(1).run("test_step", {"x": torch.zeros(4, 1)}, split, attempt)
    assert seen == [(4, 1)] * 3


class Changed:
    """A module in a state, and the same after a step has changed everything that can be put back."""

    def __init__(self) -> None:
        self.root = Statistics()
        self.batch = {"x": torch.arange(8.0), "more": [torch.ones(8), "text"]}
        self.change(1.0)
        self.state = StepState(ModuleScan(self.root), self.batch, [HOST])

    def change(self, value: float) -> None:
        self.root.mean += value
        self.root.metrics.update(torch.tensor(value))
        self.root.seen(torch.tensor([value, value]))


def _clamp(changed: Changed) -> None:
    with torch.no_grad():
        changed.root.weight.clamp_(0.0, 0.5)


LOST: dict[str, tuple[Callable[[Changed], Any], str]] = {
    "weight": (_clamp, "the weight 'weight'"),
    "batch": (lambda changed: changed.batch["x"].narrow(0, 2, 1).add_(1.0), "a tensor of the batch"),
    "large buffer": (lambda changed: changed.root.table.add_(1.0), "the buffer 'table'"),
    "nested batch": (lambda changed: changed.batch["more"][0].zero_(), "a tensor of the batch"),
}


@pytest.mark.parametrize("kind", LOST)
def test_what_cannot_be_put_back_is_noticed(make_retry: Any, kind: str) -> None:
    changed = Changed()
    change, lost = LOST[kind]
    change(changed)
    assert changed.state.lost() == lost
    attempts = Attempts(4, effect=lambda: change(changed))
    with pytest.raises(DeviceOutOfMemoryError, match=f"cannot be run again, because {lost} has changed"):
        make_retry(root=changed.root).run("training_step", changed.batch, split, attempts)
    assert attempts.tried == [2]


def test_a_batch_without_rows_is_run_once(make_retry: Any) -> None:
    attempts = Attempts(99)
    with pytest.raises(DeviceOutOfMemoryError, match="with 1 micro-batch per batch, and the batch cannot be split"):
        make_retry().run("training_step", iter([1, 2]), split, attempts)
    assert attempts.tried == [1]


def test_inference_tensors_have_no_versions(make_retry: Any) -> None:
    with torch.inference_mode():
        batch: Tensor = torch.arange(8.0)
        root = Statistics()
    attempts = Attempts(4)
    make_retry(root=root).run("predict_step", batch, split, attempts)
    assert attempts.tried == [2, 4]
