"""Tiny models of ``transformers``, their data, and trainings of them that are compared.

Weights start ten times larger than the default of the configurations, or most gradients would be too small to be
compared. ``eps`` of AdamW is 1e-2: where the true gradient is zero (biases of attention keys) there is only rounding
noise, which a tiny ``eps`` would make steps of full size of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import lightning as L
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy

VOCAB = 24
IGNORED = -100
# Copies on devices with memory of their own, poisoned when they are freed: what does not travel correctly is NaN.
COPIES = {"virtual_copies": True}


def causal(family: str = "Llama", **options: Any) -> nn.Module:
    """A causal language model; the same weights at every call."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 32,
    }
    if family == "GPT2":
        sizes = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "loss_type": "ForCausalLM"}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(hf, f"{family}Config")(**{**sizes, **tokens, "initializer_range": 0.2, **options})
    torch.manual_seed(1)
    model: nn.Module = getattr(hf, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    return model.train()


def t5() -> nn.Module:
    """An encoder and a decoder; the same weights at every call."""
    torch.manual_seed(1)
    config = hf.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config).train()


def text(rows: int, length: int = 8) -> dict[str, Tensor]:
    """Rows of tokens without padding: every row has as many labels."""
    tokens = torch.randint(3, VOCAB, (rows, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def pairs(rows: int) -> dict[str, Tensor]:
    """Sources and targets."""
    return {**text(rows), "labels": torch.randint(3, VOCAB, (rows, 6))}


def batches(make: Callable[[int], Any] = text, rows: Iterable[int] = (5, 4)) -> list[Any]:
    """Ready-made batches, whose rows three micro-batches do not divide."""
    torch.manual_seed(2)
    return [make(count) for count in rows]


def loader(ready: Sequence[Any]) -> DataLoader[Any]:
    """Gives out ``ready`` as it is."""
    return DataLoader(ready, batch_size=None, collate_fn=lambda batch: batch)  # type: ignore[arg-type]


class Task(L.LightningModule):
    """What a user writes around a model; keeps the weights from before and the gradients of every optimizer step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._gradients: list[dict[str, Tensor | None]] = []
        self._start: dict[str, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-2)

    def on_fit_start(self) -> None:
        self._start = {name: p.detach().clone() for name, p in self.named_parameters()}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        found = {name: None if p.grad is None else p.grad.clone() for name, p in self.named_parameters()}
        self._gradients.append(found)

    @property
    def moved(self) -> set[str]:
        """Names of the parameters that the training has changed."""
        return {name for name, p in self.named_parameters() if not torch.equal(p, self._start[name])}


@dataclass
class Trained:
    """A task and the trainer that has trained it."""

    task: Any
    trainer: L.Trainer

    @property
    def results(self) -> dict[str, Any]:
        """All there is to compare."""
        return {
            "state": dict(self.task.state_dict()),
            "gradients": self.task._gradients,
            "trained": {name: p.requires_grad for name, p in self.task.named_parameters()},
            "optimizers": [optimizer.state_dict() for optimizer in self.trainer.optimizers],
            "metrics": dict(self.trainer.callback_metrics),
            "steps": self.trainer.global_step,
        }


def train(
    make_trainer: Callable[..., L.Trainer], kind: str, task: Task, ready: Sequence[Any], **options: Any
) -> Trained:
    """Trains ``task`` for one epoch; the pipelined run must have been planned and have kept to its plan."""
    trainer = make_trainer(kind, **options)
    torch.manual_seed(5)
    trainer.fit(task, loader(ready))
    if isinstance(trainer.strategy, RoundPipeStrategy):
        step = trainer.strategy.last_step
        assert step is not None
        assert step.partition is not None
        assert step.partition.num_calls >= 4
        assert step.num_off_plan == 0
    return Trained(task, trainer)


def train_both(
    make_trainer: Callable[..., L.Trainer],
    make: Callable[[], Task],
    ready: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    num_microbatches: int = 3,
    **kwargs: Any,
) -> tuple[Trained, Trained]:
    """Trains two fresh tasks: plain first, pipelined on devices that copy second."""
    plain = train(make_trainer, "plain", make(), ready, **kwargs)
    chosen = {"options": {**COPIES, **(options or {})}, "num_microbatches": num_microbatches}
    return plain, train(make_trainer, "roundpipe", make(), ready, **chosen, **kwargs)
