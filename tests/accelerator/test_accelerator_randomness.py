"""What user code and units draw on a GPU: the same in every run, on any number of devices, and in a recomputation."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.autograd import randomness, unit_backward
from lightning_roundpipe.common.errors import StepAborted
from lightning_roundpipe.engine import execution
from lightning_roundpipe.usercode import gpu_draws
from lightning_roundpipe.usercode import lock as lock_module
from lightning_roundpipe.usercode.gpu_draws import drawing, gpu_generator_seeded
from lightning_roundpipe.usercode.lock import UserCodeLock, UserCodeState
from tests.support.engine.modelled import recomputed
from tests.support.engine.partitions import recomputed_elsewhere
from tests.support.engine.steps import Steps
from tests.support.identical import assert_identical

pytestmark = pytest.mark.accelerator

WIDTH = 6

# Ways to draw on the device of a tensor, which are taken one after the other.
DRAWS: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "dropout": [
        lambda x: F.dropout(x, 0.4),
        lambda x: F.dropout1d(x[:, :, None], 0.4)[:, :, 0],
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], None, 0.3)[0, 0],
    ],
    "made by torch": [
        lambda x: x * torch.rand_like(x),
        lambda x: x * torch.rand(WIDTH, device=x.device),
        lambda x: x * torch.rand(WIDTH, device="sim").to(x.device),
        lambda x: x * torch.rand(WIDTH),
        lambda x: x * torch.empty_like(x).uniform_(),
    ],
    "made by Python": [
        lambda x: F.gumbel_softmax(x),
        lambda x: x + torch.distributions.Normal(x.detach(), 1.0).sample(),
    ],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.tanh(self.linear(x)), 0.3)


class Model(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.draw = [draw]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.draw[0](block(x))
        return x.square().mean()


def parts() -> list[Tensor]:
    torch.manual_seed(3)
    return list(torch.randn(18, WIDTH).chunk(6))


def results_of(
    draw: Callable[[Tensor], Tensor], num_devices: int, delay: int = 0, num_steps: int = 2, **options: Any
) -> list[Any]:
    """Losses and gradients of all steps."""
    torch.sim.set_delay(delay)
    torch.manual_seed(0)
    model = Model(draw)
    steps = Steps(model, options.pop("planner", recomputed_elsewhere), num_devices=num_devices, device_type="sim")
    found: list[Any] = []
    for seed in range(num_steps):
        result = steps.train(parts(), seed)
        found += [*map(float, result.outputs), *(result.gradients[p] for p in model.parameters())]
    return found


@pytest.fixture(autouse=True)
def no_delay_afterwards() -> Iterator[None]:
    torch.sim.reset_stats()
    yield
    torch.sim.set_delay(0)
    assert torch.sim.stats()["races"] == 0


@pytest.mark.parametrize("name", DRAWS)
def test_draws_of_user_code_depend_neither_on_devices_nor_on_timing(name: str) -> None:
    def draw(x: Tensor) -> Tensor:
        for one in DRAWS[name]:
            x = one(x)
        return x

    expected = results_of(draw, 1)
    assert len(set(expected[: len(parts())])) == len(parts())
    assert_identical(results_of(draw, 4, 100), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_in_user_code_draws_the_same_again(use_reentrant: bool) -> None:
    def draw(x: Tensor) -> Tensor:
        return F.dropout(torch.sin(x), 0.3) * torch.rand_like(x)

    def draw_again(x: Tensor) -> Tensor:
        return checkpoint(draw, x, use_reentrant=use_reentrant)

    assert_identical(results_of(draw_again, 2, 30), results_of(draw, 1))


def test_the_seed_of_the_user_decides_what_user_code_draws() -> None:
    masks: list[Tensor] = []

    def draw(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        mask = torch.rand(WIDTH, device=x.device)
        masks.append(mask.cpu())
        return x * mask

    results_of(draw, 2, num_steps=1)
    assert len({tuple(mask.tolist()) for mask in masks}) == 1


def test_the_generators_are_afterwards_what_they_were() -> None:
    steps = Steps(Model(F.dropout), recomputed_elsewhere, num_devices=2, device_type="sim")
    data = parts()
    before = torch.sim.get_rng_state_all()
    steps.train(data, 0)
    assert_identical(torch.sim.get_rng_state_all(), before)


def test_a_unit_that_draws_pays_no_dispatch_mode_and_excludes_no_user_code_after_its_first_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    make = randomness.PrivateRandomness.__init__

    def noting(self: Any, seed: int, *args: Any) -> None:
        made.append(seed)
        make(self, seed, *args)

    def excluding(lock: UserCodeLock, **options: Any) -> Any:
        made.append(-1)
        return exclusive(lock, **options)

    exclusive = UserCodeLock.exclusive
    monkeypatch.setattr(UserCodeLock, "exclusive", excluding)
    monkeypatch.setattr(randomness.PrivateRandomness, "__init__", noting)
    torch.manual_seed(0)
    steps = Steps(Model(torch.sin), recomputed_elsewhere, num_devices=2, device_type="sim")
    steps.train(parts(), 0)
    assert len(set(made)) > 1
    assert -1 in made
    made.clear()
    steps.train(parts(), 1)
    assert made == []


class Hidden(Block):
    """Draws in a kernel of another library, and notes in which grad mode it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.noted.append(torch.is_grad_enabled())
        with torch._C._DisableTorchDispatch():
            mask = torch.rand_like(x) < 0.5
        return self.linear(x) * mask


def hiding(**options: Any) -> tuple[Steps, list[Hidden]]:
    torch.manual_seed(0)
    model, blocks = Model(torch.sin), [Hidden() for _ in range(6)]
    model.blocks = nn.ModuleList(blocks)
    return Steps(model, device_type="sim", **options), blocks


def test_what_a_unit_draws_in_another_library_is_drawn_again_and_in_the_same_grad_mode() -> None:
    """Which kernel computes may depend on that, and the numbers on the kernel."""
    found = []
    for num_devices in (1, 3):
        steps, blocks = hiding(num_devices=num_devices)
        found.append([steps.gradients(parts(), seed) for seed in range(2)])
        for block in blocks:
            assert block.noted
            assert all(block.noted)
    assert_identical(found[1], found[0])


def test_a_recomputation_on_a_gpu_of_another_model_is_refused() -> None:
    steps, _ = hiding(planner=recomputed_elsewhere, num_devices=2)
    for device in steps.pool.devices:
        device.draws_as = f"model {device.index}", 1
    with pytest.raises(RuntimeError, match=r"unit 'blocks\.\d' draws random numbers.*on another model.*'model [01]'"):
        steps.train(parts())


class Shifted:
    """A backend whose graphs draw other numbers than the code they are made of."""

    num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            torch.rand((), device="sim")
            return graph(*args)

        return run


def test_a_unit_that_draws_is_compiled_and_recomputed_as_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: dict[Any, list[Tensor]] = defaultdict(list)

    def noting(context: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        result = run_unit(context, call, *args, **kwargs)
        outputs[call].append(result.leaves[0].detach())
        return result

    run_unit = execution.run_unit
    backend = Shifted()
    torch.manual_seed(0)
    steps = Steps(Model(torch.sin), recomputed, device_type="sim", compile_units={"backend": backend})
    for module in (execution, unit_backward):
        monkeypatch.setattr(module, "run_unit", noting)
    steps.train(parts(), 0)
    assert {call.is_compiled for call in outputs} == {False, True}  # what is called first is watched
    repeated = [values for values in outputs.values() if len(values) > 1]
    assert backend.num_graphs
    assert repeated
    for first, second in repeated:
        assert_identical(second.cpu(), first.cpu())


def test_who_draws_on_a_gpu_waits_for_who_does() -> None:
    device, drawn = torch.device("sim", 0), []
    inside, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with gpu_generator_seeded(device, 1):
            inside.set()
            go_on.wait()
            drawn.append(torch.rand(3, device=device).cpu())

    with gpu_generator_seeded(device, 1):
        alone = torch.rand(3, device=device).cpu()
    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    third = threading.Thread(target=_draw_into, args=(device, drawn))
    third.start()
    go_on.set()
    thread.join()
    third.join()
    assert_identical(drawn[0], alone)
    assert not torch.equal(drawn[1], alone)


def _draw_into(device: torch.device, drawn: list[Tensor]) -> None:
    with gpu_generator_seeded(device, 2):
        drawn.append(torch.rand(3, device=device).cpu())


def test_a_draw_that_is_given_up_leaves_the_generator_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails while user code waits for its turn, and then for the user-code lock."""
    monkeypatch.setattr(lock_module, "RECHECK_S", 0.01)
    lock, state, device = UserCodeLock((), lambda: True), UserCodeState(0, 0), torch.device("sim", 0)
    state.lock = lock
    errors: list[BaseException] = []
    x, is_in_user_code = torch.ones(3, device=device), threading.Event()

    def draw() -> None:
        lock.acquire(state)
        is_in_user_code.set()
        with pytest.raises(StepAborted) as error, drawing(state, "rand_like", [x], (x,), {}):
            torch.rand_like(x)
        errors.append(error.value)

    thread = threading.Thread(target=draw)
    with gpu_generator_seeded(device, 1):
        thread.start()
        is_in_user_code.wait()
        lock._lock.acquire()  # when the thread has given it up, to wait
    thread.join()
    assert errors
    assert gpu_draws._turn(device).acquire(blocking=False)
    gpu_draws._turn(device).release()
