"""Models of transformers with compiled units: the same training as without, bit for bit with a backend that fuses
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
VOCABULARY = 64
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, **HEADS}


def qwen() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=8))


def mixtral() -> nn.Module:
    """Routes tokens to experts."""
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4))


def t5() -> nn.Module:
    """Its layers hand on a position bias beside the hidden states."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes, **ids))


class Task(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        (ids,) = batch
        return self.model(input_ids=ids, labels=ids).loss


def batches() -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(3, VOCABULARY, (6, 8), generator=generator),) for _ in range(2)]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("error:compile_units")
@pytest.mark.parametrize(("make", "precision"), [(qwen, "bf16-mixed"), (mixtral, "32-true"), (t5, "32-true")])
@pytest.mark.ways("lazy")
def test_training_is_that_of_units_as_they_are(
    train: Callable[..., Any],
    assert_same: Callable[..., None],
    make: Callable[[], nn.Module],
    precision: str,
) -> None:
    torch._dynamo.utils.counters.clear()
    outcomes = [
        train(
            lambda: Task(make()),
            batches,
            devices=2,
            num_microbatches=3,
            strategy_options={"compile_units": compile_units},
            trainer_options={"precision": precision},
            steps=2,
        )
        for compile_units in (False, {"backend": "aot_eager"})
    ]
    assert_same(outcomes[1], outcomes[0], exact=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 2
