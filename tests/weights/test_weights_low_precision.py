"""Working copies: when they are made anew, which form a unit takes, what travels, and that no result changes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_roundpipe.devices.pool import DevicePool
from lightning_roundpipe.devices.virtual import LazyLink
from lightning_roundpipe.engine.runner import Engine, StepRequest, StepResult
from lightning_roundpipe.planning import CostProfile, Partition, partition, partition_forward
from lightning_roundpipe.weights.casts import Use
from lightning_roundpipe.weights.gradients import GradientStore
from lightning_roundpipe.weights.low_precision import WorkingCopies
from lightning_roundpipe.weights.units import Unit
from tests.support.plain_loop import cut_at, each_call_its_stage

LOW = torch.bfloat16
AUTOCAST = (True, LOW)
WIDTH = 8
TOKENS = 11


class Block(nn.Module):
    """Two weights that autocast casts, two with their biases that it does not."""

    def __init__(self, inside: Callable[[Block, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y if self.inside is None else x + y + self.inside(self, x)


class Model(nn.Module):
    def __init__(self, inside: Callable[[Block, Tensor], Tensor] | None = None, trained: str = "") -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(inside) for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(trained in name)

    def step(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


class Training:
    """A model in an engine on devices that copy lazily, with SGD."""

    def __init__(
        self,
        model: Model,
        *,
        uses_copies: bool = True,
        link: bool = True,
        num_devices: int = 2,
        memory_limit: int | None = None,
        lr: float = 0.1,
    ) -> None:
        self.model = copy.deepcopy(model)
        pool = DevicePool(
            [torch.device("cpu")] * num_devices, link=LazyLink() if link else None, memory_limit=memory_limit
        )
        self.engine = Engine(self.model, pool, self._plan, num_threads=1)
        self._num_devices = num_devices
        self.planner: Callable[[int, bool], Partition] | None = None
        self.weights: WorkingCopies = self.engine._replicas.weights
        if not uses_copies:
            self.weights.is_low = lambda unit, autocast=None: False  # type: ignore[method-assign]
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=lr)
        self.num_steps = 0

    def _plan(self, costs: CostProfile, num_microbatches: int, training: bool) -> Partition:
        if self.planner is not None:
            return self.planner(len(costs.calls), training)
        make: Any = partition if training else partition_forward
        made: Partition = make(costs, num_devices=self._num_devices, num_microbatches=num_microbatches)
        return made

    def train(self, *, autocast: bool = True, num_microbatches: int = 4) -> StepResult:
        self.num_steps += 1
        result = self._run("train", num_microbatches, autocast, lambda loss: loss)
        self.optimizer.zero_grad()
        for parameter, gradient in result.gradients.items():
            assert gradient.isfinite().all()
            parameter.grad = gradient
        self.optimizer.step()
        return result

    def evaluate(self, *, autocast: bool = True, num_microbatches: int = 4, key: str = "evaluate") -> StepResult:
        self.model.eval()
        with torch.no_grad():
            result = self._run(key, num_microbatches, autocast, None)
        self.model.train()
        return result

    def _run(self, key: str, num_microbatches: int, autocast: bool, loss_of: Any) -> StepResult:
        tokens = torch.randint(TOKENS, (8, 6), generator=torch.Generator().manual_seed(self.num_steps))
        request = StepRequest(
            self.model.step,
            tokens.chunk(num_microbatches),
            [1 / num_microbatches] * num_microbatches,
            key,
            self.num_steps,
            loss_of=loss_of,
        )
        with torch.autocast("cpu", dtype=LOW, cache_enabled=False) if autocast else nullcontext():
            return self.engine.run(request)

    def unit(self, name: str) -> Unit:
        table = self.engine._table
        assert table is not None
        return table.units[self.model.get_submodule(name)]

    def low_names(self, name: str) -> set[str]:
        """Parameters of a unit that travel in the low dtype."""
        unit = self.unit(name)
        return {n for n, p in unit.module.named_parameters() if self.weights.dtype_of(unit, p) is LOW}


def assert_same(one: Training, other: Training, results: list[tuple[StepResult, StepResult]]) -> None:
    """Losses, last gradients and parameters, bit for bit."""
    for left, right in results:
        assert [loss.item() for loss in left.outputs] == [loss.item() for loss in right.outputs]
    wanted = dict(other.model.named_parameters())
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
        assert (parameter.grad is None) == (wanted[name].grad is None)
        if parameter.grad is not None:
            assert parameter.grad.dtype is torch.float32
            assert torch.equal(parameter.grad, wanted[name].grad), name


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# --- copies on the host ----------------------------------------------------------------------------------------------


class Counting:
    """Memory for copies, and how often it was asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        self.sizes.append(num_elements)
        return torch.empty(num_elements, dtype=dtype)


def test_a_trainable_master_is_converted_once_per_step_into_the_same_memory() -> None:
    allocate = Counting()
    weights = WorkingCopies(allocate)
    master = nn.Parameter(torch.randn(3, 5))
    before: Any = None
    for step in range(3):
        weights.begin_step("train", training=True)
        source, version = weights.source(master, LOW), weights.version(master, LOW)
        assert version != before
        assert torch.equal(source, master.to(LOW))
        address = source.data_ptr()
        master.data.add_(1.0)  # leaves no trace
        assert weights.source(master, LOW).data_ptr() == address
        assert not torch.equal(source, master.to(LOW)), f"converted twice in step {step}"
        assert weights.version(master, LOW) == version
        before = version
    assert allocate.sizes == [15]
    assert weights.host_bytes == 30


def test_a_frozen_master_is_converted_once_until_it_changes() -> None:
    weights = WorkingCopies()
    master = nn.Parameter(torch.randn(3), requires_grad=False)
    weights.begin_step("train", training=True)
    source, version = weights.source(master, LOW), weights.version(master, LOW)
    source.zero_()  # to see whether it is written again
    weights.begin_step("train", training=True)
    assert not weights.source(master, LOW).any()
    assert weights.version(master, LOW) == version
    master.data.add_(1.0)  # leaves no trace but the values
    weights.begin_step("train", training=True)
    assert torch.equal(weights.source(master, LOW), master.to(LOW))
    master.mul_(2.0)  # raises the version
    assert torch.equal(weights.source(master, LOW), master.to(LOW))
    master.data = torch.randn(3)
    assert torch.equal(weights.source(master, LOW), master.to(LOW))
    master.data = torch.randn(5)
    assert torch.equal(weights.source(master, LOW), master.to(LOW))


def test_what_validation_has_converted_first_is_converted_anew_in_training() -> None:
    master = nn.Parameter(torch.randn(3, 4))
    weights = WorkingCopies()
    with torch.inference_mode():
        weights.begin_step("validate", training=False)
        weights.source(master, LOW)
    weights.begin_step("train", training=True)
    with torch.no_grad():
        master.mul_(2)
    assert torch.equal(weights.source(master, LOW), master.to(LOW))


def test_a_write_without_trace_is_seen_when_another_kind_of_step_begins() -> None:
    weights = WorkingCopies()
    master = nn.Parameter(torch.randn(3), requires_grad=False)
    kinds = ["train", "validate", "train"]
    for kind in kinds:
        weights.begin_step(kind, training=kind == "train")
        before = weights.version(master, LOW)
        weights.source(master, LOW)
        master.data.add_(1.0)
        weights.begin_step("other", training=False)
        assert weights.version(master, LOW) != before
        assert torch.equal(weights.source(master, LOW), master.to(LOW))


def test_what_copies_take_is_known_before_they_are_made() -> None:
    ours = Training(Model())
    ours.train()
    assert ours.weights.host_bytes == 0
    expected = ours.weights.expected_bytes
    ours.train()
    assert ours.weights.host_bytes == expected > 0


def test_trainable_masters_are_trusted_between_steps_without_an_update() -> None:
    weights = WorkingCopies()
    master = nn.Parameter(torch.randn(3))
    weights.begin_step("validate", training=False)
    assert weights.outlast_step([master])
    version = weights.version(master, LOW)
    weights.begin_step("validate", training=False)
    assert weights.version(master, LOW) == version
    weights.begin_step("train", training=True)
    assert not weights.outlast_step([master])
    assert weights.outlast_step([nn.Parameter(torch.randn(3), requires_grad=False)])


def test_in_its_own_dtype_the_master_itself_travels() -> None:
    weights = WorkingCopies()
    master = nn.Parameter(torch.randn(3))
    source = weights.source(master, master.dtype)
    assert source.data_ptr() == master.data_ptr()
    assert not source.requires_grad
    assert weights.host_bytes == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 4).t(),
        lambda: torch.randn(4, 6)[:, ::2],
        lambda: torch.randn(()),
        lambda: torch.randn(0, 3),
        lambda: torch.randn(3, 1).expand(3, 4),
    ],
    ids=["channels-last", "transposed", "strided", "scalar", "empty", "expanded"],
)
def test_a_copy_has_the_strides_of_autocasts_cast(make: Callable[[], Tensor]) -> None:
    master = nn.Parameter(make())
    source = WorkingCopies().source(master, LOW)
    assert source.stride() == master.to(LOW).stride()
    assert torch.equal(source, master.to(LOW))


def test_many_threads_get_the_same_copy() -> None:
    weights = WorkingCopies()
    masters = [nn.Parameter(torch.randn(257, 63)) for _ in range(4)]
    found: list[list[Tensor]] = [[] for _ in range(8)]
    start = threading.Barrier(8)

    def ask(mine: list[Tensor]) -> None:
        start.wait()
        mine.extend(weights.source(master, LOW).clone() for master in masters)

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine in found:
        assert all(torch.equal(source, master.to(LOW)) for source, master in zip(mine, masters, strict=True))
    assert weights.host_bytes == 4 * 257 * 63 * 2


# --- which form a unit takes -----------------------------------------------------------------------------------------


def known_unit(weights: WorkingCopies, uses: dict[str, Use], autocast: Any = AUTOCAST) -> Unit:
    unit = Unit("block", Block(), 0, facts={"some": "facts"})
    parameters = dict(unit.module.named_parameters())
    weights.note_run(unit, autocast, {parameters[name]: use for name, use in uses.items()})
    return unit


def test_a_unit_is_low_from_the_step_after_it_was_learned() -> None:
    weights = WorkingCopies()
    weights.begin_step("train", training=True)
    unit = known_unit(weights, {"up.weight": Use.CAST, "norm.weight": Use.OTHER, "up.bias": Use.CAST_AGAIN})
    unit.module.norm.bias.requires_grad_(False)
    assert not weights.is_low(unit, AUTOCAST)
    weights.begin_step("train", training=True)
    assert weights.is_low(unit)
    assert weights.is_low(unit, AUTOCAST)
    assert weights.dtype_of(unit, unit.module.up.weight) is LOW
    assert weights.dtype_of(unit, unit.module.norm.weight) is torch.float32
    assert weights.dtype_of(unit, unit.module.up.bias) is torch.float32
    unit.module.up.bias.requires_grad_(False)  # nothing is added up
    assert weights.dtype_of(unit, unit.module.up.bias) is LOW
    assert weights.dtype_of(unit, unit.module.down.weight) is torch.float32, "it was not used"
    weights.begin_step("validate", training=False)
    assert not weights.is_low(unit), "nothing is known about evaluation"


def test_the_worst_use_of_all_runs_counts() -> None:
    weights = WorkingCopies()
    weights.begin_step("train", training=True)
    unit = known_unit(weights, {"up.weight": Use.CAST, "down.weight": Use.CAST})
    weights.note_run(unit, AUTOCAST, {unit.module.up.weight: Use.OTHER})
    weights.note_run(unit, AUTOCAST, {unit.module.up.weight: Use.CAST})
    weights.begin_step("train", training=True)
    assert weights.dtype_of(unit, unit.module.up.weight) is torch.float32
    assert weights.dtype_of(unit, unit.module.down.weight) is LOW


def test_a_unit_without_facts_is_full() -> None:
    weights = WorkingCopies()
    weights.begin_step("train", training=True)
    unit = known_unit(weights, {"up.weight": Use.CAST})
    unit.facts.clear()
    weights.begin_step("train", training=True)
    assert not weights.is_low(unit)


def test_a_unit_that_is_called_in_two_states_of_autocast_stays_full() -> None:
    weights = WorkingCopies()
    weights.begin_step("train", training=True)
    units = [known_unit(weights, {"up.weight": Use.CAST}) for _ in range(2)]
    weights.note_run(units[1], (True, torch.float16), {units[1].module.up.weight: Use.CAST})
    for _ in range(2):
        weights.begin_step("train", training=True)
        assert not weights.is_low(units[0], (False, LOW))
        assert not weights.is_low(units[0], AUTOCAST)
        assert not weights.is_low(units[1], AUTOCAST)


def test_gradients_that_autocast_computes_in_float16() -> None:
    weights = WorkingCopies()
    half = (True, torch.float16)
    weights.begin_step("train", training=True)
    unit = known_unit(weights, {"up.weight": Use.CAST, "down.weight": Use.CAST_AGAIN, "up.bias": Use.OTHER}, half)
    other = known_unit(weights, {"up.weight": Use.CAST})  # in bfloat16
    assert weights.gradient_dtypes() == {unit.module.up.weight: torch.float16}
    weights.note_run(other, half, {unit.module.up.weight: Use.CAST})
    shared = known_unit(weights, {}, half)
    weights.note_run(shared, half, {unit.module.up.weight: Use.CAST})
    assert weights.gradient_dtypes() == {}, "two gradients are added up in float32"


def test_a_gradient_that_float16_cannot_hold_is_infinite() -> None:
    masters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    store = GradientStore(lambda: dict.fromkeys(masters[:2], torch.float16))
    for master in masters:
        store.add(master, torch.tensor([4e4, -4e4]), (0,))
        store.add(master, torch.tensor([2.5519e4, -2.5521e4]), (0,))
    store.add(masters[1], torch.ones(2), (1,))  # of another unit: added up in float32
    found = store.take()
    assert found[masters[0]].tolist() == [65504.0, float("-inf")]
    assert found[masters[1]].tolist() == [65520.0, -65520.0]
    assert found[masters[2]].tolist() == [65519.0, -65521.0]


# --- in the engine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_devices", [1, 2])
def test_training_is_the_same_bit_for_bit_and_half_as_much_travels(num_devices: int) -> None:
    model = Model()
    ours, plain, aliases = (
        Training(model, num_devices=num_devices, **options)  # type: ignore[arg-type]
        for options in ({}, {"uses_copies": False}, {"link": False})
    )
    results = [(ours.train(), plain.train(), aliases.train()) for _ in range(4)]
    assert_same(ours, plain, [(a, b) for a, b, _ in results])
    assert_same(ours, aliases, [(a, c) for a, _, c in results])
    assert ours.low_names("blocks.1") == {"up.weight", "up.bias", "down.weight", "down.bias"}
    assert ours.low_names("embedding") == set()
    assert aliases.weights.host_bytes == aliases.weights.expected_bytes == 0
    low = [p for n, p in ours.model.named_parameters() if "norm" not in n and "embedding" not in n]
    assert ours.weights.host_bytes == ours.weights.expected_bytes == 2 * sum(p.numel() for p in low)


def weight_bytes(training: Training, run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of weights that travel while ``run`` runs."""
    total = 0
    for device in training.engine._pool.devices:
        upload = device.upload

        def counted(tensors: Any, what: str, upload: Any = upload, **options: Any) -> Any:
            nonlocal total
            if what.startswith("weights"):
                total += sum(t.numel() * t.element_size() for t in tensors)
            return upload(tensors, what, **options)

        monkeypatch.setattr(device, "upload", counted)
    run()
    monkeypatch.undo()
    return total


def test_half_of_the_weight_bytes_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
    ours, plain = Training(model, num_devices=1), Training(model, num_devices=1, uses_copies=False)
    for training in (ours, plain):
        training.planner = each_call_its_stage
        training.train()
        training.train()
    full, low = (weight_bytes(training, training.train, monkeypatch) for training in (plain, ours))
    assert full == 4 * sum(p.numel() for p in model.parameters())
    assert low == full // 2 + 2 * model.embedding.weight.numel()  # the embedding is not cast


def test_gradients_of_low_parameters_add_up_in_the_masters_dtype() -> None:
    """Sixteen parts, most of which the low dtype would swallow: each is 2**-9 of the largest, or less."""
    model = Model()

    def scaled(block: Block, x: Tensor) -> Tensor:
        return x * 0.0

    for block in model.blocks:
        block.inside = scaled
    ours, aliases = Training(model), Training(model, link=False)
    results = []
    for _ in range(3):
        results.append((ours.train(num_microbatches=8), aliases.train(num_microbatches=8)))
    assert_same(ours, aliases, results)
    gradient = ours.model.blocks[1].up.weight.grad
    assert gradient is not None
    assert not torch.equal(gradient.to(LOW).float(), gradient)


def looks_at_dtype(block: Block, x: Tensor) -> Tensor:
    return (x.to(block.up.weight.dtype) * 1.001).float()


def uses_weight_itself(block: Block, x: Tensor) -> Tensor:
    return x * block.up.weight.mean()


def uses_weight_later(block: Block, x: Tensor) -> Tensor:
    """In evaluation only."""
    return x * 0.0 if block.training else x * block.up.weight.mean()


def without_autocast(block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return block.up(x).float().mean(-1, keepdim=True)


@pytest.mark.parametrize(
    ("inside", "low"),
    [
        (looks_at_dtype, {"up.bias", "down.weight", "down.bias"}),
        (uses_weight_itself, {"up.bias", "down.weight", "down.bias"}),
        (without_autocast, {"down.weight", "down.bias"}),
        (uses_weight_later, {"up.weight", "up.bias", "down.weight", "down.bias"}),
    ],
)
def test_what_is_used_in_another_way_stays_as_it_is(inside: Callable[[Block, Tensor], Tensor], low: set[str]) -> None:
    model = Model(inside)
    ours, aliases = Training(model), Training(model, link=False)
    results = []
    for _ in range(3):
        results += [(ours.train(), aliases.train()), (ours.evaluate(), aliases.evaluate())]
    results.append((ours.train(), aliases.train()))
    assert ours.low_names("blocks.0") == low
    results.append((ours.evaluate(), aliases.evaluate()))
    results.append((ours.evaluate(), aliases.evaluate()))
    assert ours.low_names("blocks.0") == low - ({"up.weight"} if inside is uses_weight_later else set())
    assert_same(ours, aliases, results)


def test_evaluation_in_full_precision() -> None:
    model = Model()
    ours, aliases = Training(model), Training(model, link=False)
    results = []
    for autocast in (True, False, True, False):
        results += [(t, a) for t, a in [(ours.train(), aliases.train()) for _ in range(2)]]
        results.append((ours.evaluate(autocast=autocast), aliases.evaluate(autocast=autocast)))
        results.append((ours.evaluate(autocast=autocast), aliases.evaluate(autocast=autocast)))
    assert_same(ours, aliases, results)
    assert not ours.weights.is_low(ours.unit("blocks.0"))
    ours.train()  # facts of the training mode are learned anew
    ours.train()
    assert ours.weights.is_low(ours.unit("blocks.0"))


def test_training_with_and_without_autocast_by_turns() -> None:
    model = Model()
    ours, aliases = Training(model), Training(model, link=False)
    results = [
        (ours.train(autocast=autocast), aliases.train(autocast=autocast))
        for autocast in (True, True, False, True, False, True)
    ]
    assert_same(ours, aliases, results)
    assert not ours.weights.is_low(ours.unit("blocks.0"))


class Moody(nn.Module):
    """Returns one tensor or two, as it likes; with two, it uses its weight in another way as well."""

    def __init__(self, moods: list[str]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.moods = moods

    def forward(self, x: Tensor) -> Any:
        y = x + self.up(x)
        return (y, y.detach() * self.up.weight.mean()) if "good" in self.moods else (y,)


def test_a_unit_that_returns_something_else_is_learned_in_its_full_form() -> None:
    class Changing(Model):
        def step(self, tokens: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = torch.stack(block(x)).sum(0)
            return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())

    model = Changing()
    moods: list[str] = []  # in place: nothing tells the engine of a change
    model.blocks = nn.ModuleList(Moody(moods) for _ in range(3))
    runs = [Training(model), Training(model, link=False)]
    results = []
    for step in range(4):
        for training in runs:
            training.model.blocks[0].moods[:] = ["good"] if step == 3 else []
        results.append((runs[0].train(), runs[1].train()))
        if step == 2:
            assert runs[0].low_names("blocks.1") == {"up.weight", "up.bias"}
    assert runs[0].low_names("blocks.1") == {"up.bias"}
    assert_same(runs[0], runs[1], results)


class Returning(nn.Module):
    """Gives its weight away, and computes with it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.up(x), self.up.weight


class Scaled(Model):
    def step(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x, weight = block(x)
            x = x * weight.mean()
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


class Twice(Model):
    """From some step on, every block is called once more, with an argument that is new to it."""

    def step(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, "once")
            if self.is_later:
                x = block(x, "again")
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


class Told(Block):
    def forward(self, x: Tensor, what: str) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Checkpointed(Model):
    def step(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


def test_a_unit_that_gives_its_weight_away() -> None:
    model = Scaled()
    model.blocks = nn.ModuleList(Returning() for _ in range(3))
    ours, aliases = Training(model), Training(model, link=False)
    results = [(ours.train(), aliases.train()) for _ in range(3)]
    assert ours.low_names("blocks.1") == {"up.bias"}
    assert_same(ours, aliases, results)


@pytest.mark.parametrize("fused", [0, 3], ids=["all-fused", "some-fused"])
def test_both_forms_of_a_unit_in_one_stage(fused: int) -> None:
    """A call learns while the graph of another call of the unit, in the low form, waits for its backward."""
    model = Twice()
    model.blocks = nn.ModuleList(Told() for _ in range(3))
    model.is_later = False
    ours, aliases = Training(model), Training(model, link=False)
    for training in (ours, aliases):
        training.planner = lambda count, is_training: cut_at(count, is_training, [2], [2], fused)
    for step in range(7):
        for training in (ours, aliases):
            training.model.is_later = step >= 3
        left, right = ours.train(), aliases.train()
        assert (left.num_off_plan > 0) == (step == 3)
        torch.testing.assert_close(left.outputs, right.outputs, rtol=1e-5, atol=1e-6)
        wanted = dict(aliases.model.named_parameters())
        for name, parameter in ours.model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-6)
    assert ours.weights.is_low(ours.unit("blocks.1"))


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpoints_in_user_code(is_reentrant: bool) -> None:
    model = Checkpointed()
    model.is_reentrant = is_reentrant
    ours, aliases = Training(model), Training(model, link=False)
    results = [(ours.train(), aliases.train()) for _ in range(3)]
    assert_same(ours, aliases, results)
    assert ours.low_names("blocks.1"), "inline runs take the full form, and say nothing about the low one"


def test_attention_of_torch_is_full_in_evaluation() -> None:
    """There it takes a fast path, which is not taken while it is watched, and so was not seen."""
    model = Model()
    model.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True) for _ in range(3))
    ours, aliases = Training(model), Training(model, link=False)
    for _ in range(3):
        left, right = ours.train(), aliases.train()
        assert [loss.item() for loss in left.outputs] == [loss.item() for loss in right.outputs]
    assert "linear1.weight" in ours.low_names("blocks.1")
    for _ in range(3):
        # The run that learns takes the slow path: other roundings, as far as the low dtype is exact.
        torch.testing.assert_close(ours.evaluate().outputs, aliases.evaluate().outputs, rtol=2**-7, atol=2**-7)
    assert ours.low_names("blocks.1") == set()
    assert ours.low_names("head") == {"weight", "bias"}


# --- frozen weights --------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """Nearly all bytes are frozen; what is trained is in the same units."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16 * WIDTH, 16 * WIDTH, bias=False).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(16 * WIDTH, 2, bias=False), nn.Linear(2, 16 * WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + self.adapter(x)


BASE = (16 * WIDTH) ** 2 * 2  # bytes of a frozen matrix in the low dtype


def adapted_case(memory_limit: int | None = None, **options: Any) -> Training:
    torch.manual_seed(0)
    model = Model()
    model.embedding = nn.Embedding(TOKENS, 16 * WIDTH)
    model.blocks = nn.ModuleList(Adapted() for _ in range(6))
    model.head = nn.Linear(16 * WIDTH, TOKENS)
    training = Training(model, num_devices=1, memory_limit=memory_limit, lr=1e-3, **options)
    training.planner = each_call_its_stage
    return training


def trained_bytes(model: nn.Module) -> int:
    """What has to travel: the embedding and the adapters, in the forward and the backward, and the head."""
    low = sum(p.numel() for n, p in model.named_parameters() if "adapter" in n or "head" in n)
    return 2 * low + 4 * model.embedding.weight.numel()


def test_frozen_weights_travel_once_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    training = adapted_case()
    for _ in range(4):
        training.train()
    assert weight_bytes(training, training.train, monkeypatch) == trained_bytes(training.model)
    assert weight_bytes(training, training.evaluate, monkeypatch) > 6 * 2 * BASE, "another kind of step: all is stale"
    frozen = training.model.blocks[2].base.weight
    for _ in range(3):
        training.train()
    with torch.no_grad():
        frozen.mul_(0.5)
    assert weight_bytes(training, training.train, monkeypatch) == trained_bytes(training.model) + BASE
    frozen.requires_grad_(True)
    for _ in range(2):
        training.train()
    assert weight_bytes(training, training.train, monkeypatch) == trained_bytes(training.model) + BASE
    frozen.requires_grad_(False)
    for _ in range(2):
        training.train()
    assert weight_bytes(training, training.train, monkeypatch) == trained_bytes(training.model)


def test_frozen_weights_travel_again_as_far_as_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 5 * BASE
    tight, free, aliases = adapted_case(limit), adapted_case(), adapted_case(link=False)
    results = [(tight.train(), free.train(), aliases.train()) for _ in range(4)]
    assert_same(tight, free, [(a, b) for a, b, _ in results])
    assert_same(tight, aliases, [(a, c) for a, _, c in results])
    moved = weight_bytes(tight, tight.train, monkeypatch)
    assert moved - trained_bytes(tight.model) >= 2 * BASE, "of six, four fit at most"
    assert moved - trained_bytes(tight.model) < 2 * 6 * BASE, "some stay"
    assert tight.engine._pool[0].memory.peak <= limit


def test_evaluation_leaves_all_weights_on_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(Model())
    training.planner = each_call_its_stage  # in every step the same stages on the same devices
    training.train()
    for _ in range(2):
        training.evaluate()
    training.evaluate()
    assert weight_bytes(training, training.evaluate, monkeypatch) == 0
    before = training.evaluate().outputs
    with torch.no_grad():
        training.model.head.weight.mul_(2.0)
    assert weight_bytes(training, training.evaluate, monkeypatch) > 0
    assert training.evaluate().outputs[0] != before[0]


def test_a_closed_engine_has_no_working_copies() -> None:
    training = Training(Model())
    for _ in range(2):
        training.train()
    assert training.weights.host_bytes > 0
    training.engine.close()
    assert training.weights.host_bytes == 0
    training.train()
