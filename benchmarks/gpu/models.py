"""Llama-like models with random weights, their data, and the LightningModule that trains them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

RANK = 16
_ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Size:
    """Of a model, and of its optimizer step.

    Attributes:
        rows: of a micro-batch.
        lora: whether the weights are frozen, in bf16, and adapters of rank 16 are trained.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int
    rows: int
    microbatches: int
    lora: bool = False

    @property
    def tokens(self) -> int:
        """Per optimizer step."""
        return self.sequence * self.rows * self.microbatches

    @property
    def unit_calls(self) -> int:
        """Forwards and backwards per optimizer step of the layers, the embedding, the last norm and the head."""
        return 2 * (self.layers + 3) * self.microbatches

    @property
    def flops(self) -> float:
        """Of an optimizer step, of the products alone and without recomputation: an LLM's usual 6 per weight and token,
        4 where weights are frozen, and the attention's below the diagonal."""
        weights = self.layers * (4 * self.width**2 + 3 * self.width * self.hidden) + self.width * self.vocabulary
        attention = self.layers * self.width * self.sequence
        return self.tokens * ((4 if self.lora else 6) * weights + 6 * attention)


# 3.4 billion weights: 54 GB with gradients and the state of Adam. 13 billion: 26 GB in bf16. 0.4 billion.
FULL = Size(28, 3072, 24, 8192, 32000, sequence=2048, rows=4, microbatches=8)
LORA = Size(40, 5120, 40, 13824, 32000, sequence=2048, rows=4, microbatches=8, lora=True)
SMALL = Size(16, 1280, 20, 3456, 16000, sequence=1024, rows=4, microbatches=4)
TINY = Size(3, 32, 2, 64, 61, sequence=16, rows=2, microbatches=3)


def make_model(size: Size) -> nn.Module:
    """On the host, always with the same values, in all layers: to draw them anew would take longer than to measure."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_hidden_layers=1,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if size.lora else torch.float32)
    try:
        model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    layers = model.model.layers
    for index in range(1, size.layers):
        layer = copy.deepcopy(layers[0])
        layer.self_attn.layer_idx = index
        layers.append(layer)
    model.config.num_hidden_layers = size.layers
    if not size.lora:
        return model  # type: ignore[no-any-return]
    import peft

    adapters = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=_ADAPTED, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model that :func:`make_model` has made."""
    (found,) = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return list(found)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """What the optimizer is for."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batches(size: Size) -> Iterator[Tensor]:
    """Tokens of one optimizer step after the other, the same for all contenders."""
    generator = torch.Generator().manual_seed(0)
    shape = (size.rows * size.microbatches, size.sequence)
    while True:
        yield torch.randint(size.vocabulary, shape, generator=generator)


class Rows(IterableDataset[Tensor]):
    """The rows of :func:`batches`, for a DataLoader."""

    def __init__(self, size: Size) -> None:
        self._size = size

    def __iter__(self) -> Iterator[Tensor]:
        for batch in batches(self._size):
            yield from batch


class Causal(L.LightningModule):
    """Trains a causal language model on tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(trained(self.model), lr=LEARNING_RATE, fused=True)
