"""Both forms of units in the engine: what travels, what is learned, and that no result changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.engine.plain_loop import cut_at, each_call_its_stage
from tests.weights.autocast_training import LOW, TOKENS, WIDTH, Block, Model, Training, assert_same


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_training_is_the_same_bit_for_bit_with_low_copies_of_what_autocast_casts() -> None:
    model = Model()
    ours, plain, aliases = (Training(model), Training(model, uses_copies=False), Training(model, link=False))
    results = [(ours.train(), plain.train(), aliases.train()) for _ in range(3)]
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
    training = Training(model, num_devices=1)
    training.planner = each_call_its_stage
    training.train()
    training.train()
    num_elements = sum(p.numel() for p in model.parameters())
    moved = weight_bytes(training, training.train, monkeypatch)
    assert moved == 2 * num_elements + 2 * model.embedding.weight.numel()  # the embedding is not cast


def test_gradients_of_low_parameters_add_up_in_the_masters_dtype() -> None:
    """Sixteen parts, most of which the low dtype would swallow: each is 2**-9 of the largest, or less."""
    model = Model()

    def scaled(block: Block, x: Tensor) -> Tensor:
        return x * 0.0

    for block in model.blocks:
        block.inside = scaled
    ours, aliases = Training(model), Training(model, link=False)
    results = [(ours.train(num_microbatches=8), aliases.train(num_microbatches=8)) for _ in range(2)]
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


def test_what_is_used_in_another_way_stays_as_it_is() -> None:
    """In training, and in evaluation as far as it is so there."""
    model = Model()
    uses = (looks_at_dtype, uses_weight_itself, without_autocast, uses_weight_later)
    for block, use in zip(model.blocks, uses, strict=True):
        block.inside = use
    ours, aliases = Training(model), Training(model, link=False)

    def low_names() -> list[set[str]]:
        return [ours.low_names(f"blocks.{index}") for index in range(4)]

    down = {"down.weight", "down.bias"}
    expected = [{"up.bias"} | down, {"up.bias"} | down, down, {"up.weight", "up.bias"} | down]
    results = [(ours.train(), aliases.train()), (ours.evaluate(), aliases.evaluate())]
    results += [(ours.train(), aliases.train()) for _ in range(2)]
    assert low_names() == expected
    results += [(ours.evaluate(), aliases.evaluate()) for _ in range(2)]
    assert low_names() == [*expected[:3], {"up.bias"} | down]
    assert_same(ours, aliases, results)


def test_evaluation_in_full_precision() -> None:
    model = Model()
    ours, aliases = Training(model), Training(model, link=False)
    results = []
    for num_trained, evaluations in ((2, [True, True]), (1, [False, True])):
        results += [(ours.train(), aliases.train()) for _ in range(num_trained)]
        results += [(ours.evaluate(autocast=on), aliases.evaluate(autocast=on)) for on in evaluations]
    assert_same(ours, aliases, results)
    assert not ours.weights.is_low(ours.unit("blocks.0"))
    ours.train()  # facts of the training mode are learned anew
    ours.train()
    assert ours.weights.is_low(ours.unit("blocks.0"))


def test_training_with_and_without_autocast_by_turns() -> None:
    model = Model()
    ours, aliases = Training(model), Training(model, link=False)
    results = [(ours.train(autocast=on), aliases.train(autocast=on)) for on in (True, True, False, True, True)]
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
        def call(self, block: nn.Module, x: Tensor) -> Tensor:
            return torch.stack(block(x)).sum(0)

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
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        x, weight = block(x)
        return x * weight.mean()


class Twice(Model):
    """From some step on, every block is called once more, with an argument that is new to it."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        x = block(x, "once")
        return block(x, "again") if self.is_later else x


class Told(Block):
    def forward(self, x: Tensor, what: str) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Checkpointed(Model):
    """In both ways, by turns."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=block in list(self.blocks)[::2])


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
    for step in range(5):
        for training in (ours, aliases):
            training.model.is_later = step >= 2
        left, right = ours.train(), aliases.train()
        assert (left.num_off_plan > 0) == (step == 2)
        torch.testing.assert_close(left.outputs, right.outputs, rtol=1e-5, atol=1e-6)
        wanted = dict(aliases.model.named_parameters())
        for name, parameter in ours.model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-6)
    assert ours.weights.is_low(ours.unit("blocks.1"))


def test_checkpoints_in_user_code() -> None:
    model = Checkpointed()
    ours, aliases = Training(model), Training(model, link=False)
    results = [(ours.train(), aliases.train()) for _ in range(3)]
    assert_same(ours, aliases, results)
    for name in ("blocks.0", "blocks.1"):
        assert ours.low_names(name), "inline runs take the full form, and say nothing about the low one"


def test_attention_of_torch_is_full_in_evaluation() -> None:
    """There it takes a fast path, which is not taken while it is watched, and so was not seen."""
    model = Model()
    model.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True) for _ in range(3))
    ours, aliases = Training(model), Training(model, link=False)
    for _ in range(2):
        left, right = ours.train(), aliases.train()
        assert [loss.item() for loss in left.outputs] == [loss.item() for loss in right.outputs]
    assert "linear1.weight" in ours.low_names("blocks.1")
    for _ in range(2):
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


def adapted_case(num_blocks: int, memory_limit: int | None = None, **options: Any) -> Training:
    torch.manual_seed(0)
    model = Model()
    model.embedding = nn.Embedding(TOKENS, 16 * WIDTH)
    model.blocks = nn.ModuleList(Adapted() for _ in range(num_blocks))
    model.head = nn.Linear(16 * WIDTH, TOKENS)
    training = Training(model, num_devices=1, memory_limit=memory_limit, lr=1e-3, **options)
    training.planner = each_call_its_stage
    return training


def trained_bytes(model: nn.Module) -> int:
    """What has to travel: the embedding and the adapters, in the forward and the backward, and the head."""
    low = sum(p.numel() for n, p in model.named_parameters() if "adapter" in n or "head" in n)
    return 2 * low + 4 * model.embedding.weight.numel()


def test_frozen_weights_travel_once_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    training = adapted_case(3)
    for _ in range(3):
        training.train()
    assert weight_bytes(training, training.train, monkeypatch) == trained_bytes(training.model)
    assert weight_bytes(training, training.evaluate, monkeypatch) > 3 * 2 * BASE, "another kind of step: all is stale"
    frozen = training.model.blocks[1].base.weight
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
    tight, aliases = adapted_case(6, limit), adapted_case(6, link=False)
    assert_same(tight, aliases, [(tight.train(), aliases.train()) for _ in range(3)])
    moved = weight_bytes(tight, tight.train, monkeypatch)
    assert moved - trained_bytes(tight.model) >= 2 * BASE, "of six, four fit at most"
    assert moved - trained_bytes(tight.model) < 2 * 6 * BASE, "some stay"
    assert tight.engine._pool[0].memory.peak <= limit
