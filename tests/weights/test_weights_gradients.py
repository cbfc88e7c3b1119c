"""Gradients on their way home: who adds them, in which order, what the host holds meanwhile, and what errors become."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.common.threads import Worker
from lightning_roundpipe.devices.transfer import Done, Transfer
from lightning_roundpipe.weights import gradients as gradients_module
from lightning_roundpipe.weights.gradients import GradientStore, sum_up

TIMEOUT_S = 60.0
SOURCE = (3,)


class Arriving(Transfer):
    """A download that has come when it is told so; who waited for it."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(list(tensors))
        self.waited_by: list[str] = []

    def await_done(self) -> None:
        self.waited_by.append(threading.current_thread().name)
        super().await_done()


@pytest.fixture
def adder() -> Iterator[Worker]:
    made = Worker(1)
    made.start()
    yield made
    made.close()


@pytest.fixture
def master() -> nn.Parameter:
    return nn.Parameter(torch.zeros(5))


def parts(count: int) -> list[Tensor]:
    """Whose sum depends on their order."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, generator=generator) * 10.0 ** (i % 3) for i in range(count)]


def in_background(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_what_has_to_be_waited_for_is_added_by_the_accumulation_thread(adder: Worker, master: nn.Parameter) -> None:
    store = GradientStore(adder=adder)
    one, other = (Arriving(part) for part in parts(2))
    store.add_later([master], one, SOURCE, 0)  # returns although it has not come
    one.end()
    store.add_later([master], other, SOURCE, 1)
    other.end()
    assert torch.equal(store.take()[master], parts(2)[0] + parts(2)[1])
    assert one.waited_by == other.waited_by == ["roundpipe-accumulation"]


def test_what_is_there_is_added_at_once_by_who_brings_it(master: nn.Parameter) -> None:
    worker = Worker(1)
    store = GradientStore(adder=worker)
    for ordinal, part in enumerate(parts(3)):
        store.add_later([master], Done([part]), SOURCE, ordinal)
    assert torch.equal(store.take()[master], sum(parts(3), torch.zeros(5)))
    assert not worker.is_alive, "a thread was started for nothing"


@pytest.mark.parametrize("comes", list(itertools.permutations(range(4)))[::3])
@pytest.mark.parametrize("brings", [(0, 1, 2, 3), (3, 1, 2, 0), (1, 0, 3, 2)], ids=str)
def test_sums_are_the_same_whatever_comes_first(
    adder: Worker, master: nn.Parameter, comes: tuple[int, ...], brings: tuple[int, ...]
) -> None:
    """Also where some parts need not be waited for, and some bring nothing."""
    wanted = None
    for part in parts(4):
        wanted = sum_up(wanted, part, torch.float32)
    store = GradientStore(adder=adder)
    arriving = [Arriving(part) for part in parts(4)]
    arriving[2] = Done([parts(4)[2]])  # type: ignore[call-overload]
    threads = [
        in_background(lambda i=i: store.add_later([master], arriving[i], SOURCE, i))  # type: ignore[misc]
        for i in brings
    ]
    for i in comes:
        if i != 2:
            arriving[i].end()
    for thread in threads:
        thread.join(TIMEOUT_S)
    store.add_later((), None, SOURCE, 4)
    assert torch.equal(store.take()[master], wanted)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_the_host_holds_one_part_of_a_source_more_than_there_are_devices(
    adder: Worker, master: nn.Parameter, num_devices: int
) -> None:
    """Who brings another one waits until the first is in the sum; who brings parts of other sources does not."""
    store = GradientStore(adder=adder, num_devices=num_devices)
    *held, last = (Arriving(part) for part in parts(num_devices + 1))
    for ordinal, arriving in enumerate(held):  # none of these calls waits: nothing has come yet
        store.add_later([master], arriving, SOURCE, ordinal)
    bringing = in_background(lambda: store.add_later([master], last, SOURCE, num_devices))
    store.add_later([master], Done([parts(3)[2]]), (7,), 0)
    while not held[0].waited_by:  # until it is the turn of the first
        bringing.join(0.001)
    assert bringing.is_alive()
    held[0].end()
    bringing.join(TIMEOUT_S)
    assert not bringing.is_alive()
    for arriving in (*held[1:], last):
        arriving.end()
    assert store.take()[master].isfinite().all()


def test_nothing_is_held_while_a_download_is_waited_for(adder: Worker, master: nn.Parameter) -> None:
    store = GradientStore(adder=adder)
    late = Arriving(parts(1)[0])
    store.add_later([master], late, SOURCE, 0)
    other = nn.Parameter(torch.zeros(5))
    adding = in_background(lambda: store.add_later([other], Done(parts(1)), (9,), 0))
    adding.join(TIMEOUT_S)
    assert not adding.is_alive()
    late.end()
    assert set(store.take()) == {master, other}


def test_the_error_of_a_transfer_reaches_who_takes(adder: Worker, master: nn.Parameter) -> None:
    store = GradientStore(adder=adder)
    transfers = [Arriving(part) for part in parts(3)]
    transfers[0].end(ValueError("broken"))
    for ordinal, transfer in enumerate(transfers):
        store.add_later([master], transfer, SOURCE, ordinal)
    with pytest.raises(ValueError, match="broken"):
        store.take()
    assert not transfers[2].waited_by, "waited for what is lost"
    assert store.take() == {}


def test_a_step_that_has_failed_leaves_the_thread_with_nothing_to_do(adder: Worker, master: nn.Parameter) -> None:
    store = GradientStore(adder=adder)
    late = Arriving(parts(1)[0])
    store.add_later([master], late, SOURCE, 0)
    late.end(ValueError("given up"))
    store.close()
    assert adder.done().wait(TIMEOUT_S)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_gradients_of_a_shared_weight_add_up_in_the_order_of_their_sources(order: tuple[int, ...]) -> None:
    parameter, store = nn.Parameter(torch.zeros(1)), GradientStore()
    for source in order:
        store.add([parameter], Done([torch.tensor([[1e8, 1.0, -1e8][source]])]), (source,))
    assert store.take()[parameter].item() == 0.0, "as 1e8 swallows what is added to it"
    assert store.take() == {}


def test_a_gradient_that_float16_cannot_hold_is_infinite() -> None:
    masters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    store = GradientStore(lambda: dict.fromkeys(masters[:2], torch.float16))
    for master in masters:
        store.add([master], Done([torch.tensor([4e4, -4e4])]), (0,))
        store.add([master], Done([torch.tensor([2.5519e4, -2.5521e4])]), (0,))
    store.add([masters[1]], Done([torch.ones(2)]), (1,))  # of another unit: added up in float32
    found = store.take()
    assert found[masters[0]].tolist() == [65504.0, float("-inf")]
    assert found[masters[1]].tolist() == [65520.0, -65520.0]
    assert found[masters[2]].tolist() == [65519.0, -65521.0]


# --- one pass over memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["contiguous", "turned", "spread", "scalar", "empty"])
def test_parts_in_a_low_dtype_are_added_as_torch_adds_them(
    low: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients_module, "_BLOCK", 7)
    shape = {"scalar": (), "empty": (0, 3)}.get(form, (40, 31))
    known, part = torch.randn(shape), torch.randn(shape).to(low)
    if form == "turned":
        known, part = known.t(), part.t()
    elif form == "spread":
        known = torch.randn(40, 62)[:, ::2]
    wanted = known + part.float()
    made = sum_up(known, part, torch.float32)
    assert made is known
    assert torch.equal(made, wanted)
    assert sum_up(None, part, torch.float32).dtype is torch.float32


def test_no_copy_of_a_part_is_made_in_the_dtype_of_the_sum(fixed_global_state: None) -> None:
    torch.set_num_threads(1)
    known, part = torch.zeros(2**22), torch.ones(2**22, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        sum_up(known, part, torch.float32)
    assert profile.profiler is not None
    results = profile.profiler.kineto_results
    assert results is not None
    changes = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    assert changes
    assert max(itertools.accumulate(changes)) <= known.nbytes / 8
    assert torch.equal(known, torch.ones(2**22))
