"""Training on GPUs equals plain Lightning on the CPU, on one GPU, on two devices of it, and on several."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.training import (
    WIDTH,
    Convolutions,
    Dropping,
    Outcome,
    Transformer,
    assert_alike,
    mlp,
    tokens,
    train,
    vectors,
)

pytestmark = pytest.mark.gpu

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]]]] = {
    "mlp": (mlp, vectors),
    "transformer": (Transformer, tokens),
    "tied": (functools.partial(Transformer, tied=True), tokens),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """Trains a model on the CPU, once for all tests."""

    @functools.cache
    def trained(model: str) -> Outcome:
        make_network, make_batches = MODELS[model]
        return train(make_network, make_batches(), tmp_path_factory.mktemp(model))

    return trained


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_equal_to_plain_on_the_cpu(
    model: str, devices: list[int], num_microbatches: int, reference: Callable[[str], Outcome], tmp_path: Path
) -> None:
    make_network, make_batches = MODELS[model]
    options = {"num_microbatches": num_microbatches}
    found = train(make_network, make_batches(), tmp_path, devices=devices, options=options)
    assert_alike(found, reference(model))


@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
def test_the_accelerator_that_lightning_chooses_itself(
    accelerator: str, reference: Callable[[str], Outcome], tmp_path: Path
) -> None:
    def num_allocated() -> int:
        return int(torch.cuda.memory_stats(0).get("allocation.all.allocated", 0))

    before = num_allocated()
    found = train(mlp, vectors(), tmp_path, devices=[0], accelerator=accelerator)
    assert num_allocated() > before, "the GPU was not used"
    assert_alike(found, reference("mlp"))


def test_norms_with_one_micro_batch(devices: list[int], tmp_path: Path) -> None:
    """Batch norm is exact then; its buffers come home."""
    found = train(Convolutions, vectors(), tmp_path, devices=devices, options={"num_microbatches": 1})
    assert_alike(found, train(Convolutions, vectors(), tmp_path))


def test_raw_weights_of_the_head_used_outside_units(devices: list[int], tmp_path: Path) -> None:
    class Functional(Transformer):
        def forward(self, given: Tensor) -> Tensor:
            hidden, self_head = self.embedding(given) + self.positions, self.head.weight
            for layer in self.layers:
                hidden = layer(hidden)
            return nn.functional.linear(hidden, self_head)

    found = train(Functional, tokens(), tmp_path, devices=devices, options={"num_microbatches": 3})
    assert_alike(found, train(Functional, tokens(), tmp_path))


def test_dropout_does_not_depend_on_the_pool(devices: list[int], tmp_path: Path) -> None:
    """Masks differ from the CPU's, but they are the same in every recomputation and on every number of devices."""
    options = {"num_microbatches": 4}
    one = train(Dropping, vectors(), tmp_path, devices=[0], options=options)
    found = train(Dropping, vectors(), tmp_path, devices=devices, options=options)
    assert_alike(found, one)


def test_mixed_precision_within_its_own_noise(devices: list[int], tmp_path: Path) -> None:
    """No further from plain bf16-mixed on the same GPU than that is from float32."""
    make_network, batches = functools.partial(Transformer, width=64), tokens((16, 16, 16))
    settings: dict[str, Any] = {"precision": "bf16-mixed", "predicts": False}
    exact = train(make_network, batches, tmp_path, predicts=False)
    plain = train(make_network, batches, tmp_path, accelerator="cuda", **settings)
    found = train(make_network, batches, tmp_path, devices=devices, options={"num_microbatches": 4}, **settings)

    def distance(one: Outcome, other: Outcome) -> float:
        parts = [(one.state[name].cpu() - other.state[name].cpu()).flatten() for name in exact.state]
        return float(torch.cat(parts).norm())

    assert distance(found, plain) <= 2 * distance(plain, exact)
    assert all(value.dtype is torch.float32 for value in found.state.values())


def test_loss_scaling_skips_the_same_steps(devices: list[int], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "16-mixed", "epochs": 4, "predicts": False}
    plain = train(Transformer, tokens(), tmp_path, accelerator="cuda", **settings)
    found = train(Transformer, tokens(), tmp_path, devices=devices, options={"num_microbatches": 2}, **settings)
    assert found.module.scales == plain.module.scales


def test_lora(devices: list[int], tmp_path: Path) -> None:
    """Frozen weights stay on the GPU from step to step, only adapters travel."""
    peft = pytest.importorskip("peft")

    def with_adapters(network: nn.Module) -> nn.Module:
        torch.manual_seed(5)
        config = peft.LoraConfig(r=4, target_modules=["linear1", "linear2"], init_lora_weights=False)
        return peft.get_peft_model(network, config)  # type: ignore[no-any-return]

    # Torch's fast path of evaluation reads the weights of the layer past the adapters, where it is taken.
    settings: dict[str, Any] = {"prepare": with_adapters, "predicts": False}
    found = train(Transformer, tokens(), tmp_path, devices=devices, options={"num_microbatches": 3}, **settings)
    assert_alike(found, train(Transformer, tokens(), tmp_path, **settings))


def test_evaluation_between_training_steps(devices: list[int], tmp_path: Path) -> None:
    """Every epoch validates with the weights that its training has left."""
    settings: dict[str, Any] = {"epochs": 3, "validates": True}
    found = train(Transformer, tokens(), tmp_path, devices=devices, options={"num_microbatches": 2}, **settings)
    wanted = train(Transformer, tokens(), tmp_path, **settings)
    assert len(wanted.module.validation) == 3
    assert_alike(found, wanted)


def test_200_steps_of_random_sizes(devices: list[int], tmp_path: Path) -> None:
    """Rows and lengths change from step to step: buffers, plans and memory of other sizes every time."""
    rng = random.Random(11)
    rows = [rng.randint(1, 24) for _ in range(200)]
    lengths = [rng.randint(1, 8) for _ in range(200)]
    network, batches = functools.partial(Transformer, width=2 * WIDTH), tokens(rows, lengths)
    # In double precision, so that 200 steps of Adam do not blow rounding up to what a race would look like.
    settings: dict[str, Any] = {"epochs": 1, "predicts": False, "prepare": nn.Module.double}
    found = train(network, batches, tmp_path, devices=devices, options={"num_microbatches": 4}, **settings)
    wanted = train(network, batches, tmp_path, **settings)
    assert len(wanted.module.losses) == 200
    assert_alike(found, wanted, rtol=1e-6, atol=1e-9)
