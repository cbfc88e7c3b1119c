"""An encoder-decoder of Hugging Face, fine-tuned to write summaries."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from transformers import BatchEncoding, T5Config, T5ForConditionalGeneration, get_linear_schedule_with_warmup

from .metrics import RougeL

PAD, END, UNKNOWN = 0, 1, 2


class Summariser(L.LightningModule):
    """T5 1.1, with the optimizer and the schedule of the usual fine-tuning recipes.

    Args:
        vocab_size: words that the tokenizer knows.
        width: size of the hidden vectors.
        num_layers: layers of the encoder, and of the decoder.
        dropout: share of activations that are dropped.
        lr: learning rate after the warm-up.
        weight_decay: of matrices; scales of norms have none.
        warmup_share: share of all steps in which the learning rate rises.
        max_summary_tokens: where generated summaries end at the latest.
    """

    def __init__(
        self,
        vocab_size: int = 512,
        width: int = 32,
        num_layers: int = 2,
        dropout: float = 0.1,
        lr: float = 1e-2,
        weight_decay: float = 0.01,
        warmup_share: float = 0.1,
        max_summary_tokens: int = 12,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = T5Config(
            vocab_size=vocab_size,
            d_model=width,
            d_kv=width // 4,
            d_ff=2 * width,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            num_layers=num_layers,
            dropout_rate=dropout,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
        )
        self.model = T5ForConditionalGeneration(config)
        self.rouge = RougeL(ignored=(PAD, END, -100))
        self.summaries: list[list[int]] = []

    def forward(self, batch: BatchEncoding) -> Any:
        return self.model(**batch)

    def training_step(self, batch: BatchEncoding, batch_idx: int) -> Tensor:
        loss = self(batch).loss
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: BatchEncoding, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: BatchEncoding, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: BatchEncoding, stage: str) -> None:
        self.log(f"{stage}_loss", self(batch).loss, prog_bar=True)
        written = self.model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=self.hparams.max_summary_tokens,
            suppress_tokens=[UNKNOWN],
            no_repeat_ngram_size=2,
        )
        self.rouge(written, batch["labels"])
        self.log(f"{stage}_rouge_l", self.rouge, prog_bar=True)
        self.summaries.extend(written.tolist())

    def on_validation_epoch_start(self) -> None:
        self.summaries.clear()

    def on_test_epoch_start(self) -> None:
        self.summaries.clear()

    def on_validation_epoch_end(self) -> None:
        lengths = [sum(token not in (PAD, END) for token in summary) for summary in self.summaries]
        self.log("val_length", sum(lengths) / len(lengths))

    def configure_optimizers(self) -> Any:
        norms = {
            f"{name}.{parameter_name}"
            for name, module in self.named_modules()
            if not isinstance(module, (nn.Linear, nn.Embedding))
            for parameter_name, _ in module.named_parameters(recurse=False)
        }
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": self.hparams.weight_decay}]
        groups.append({"params": [], "weight_decay": 0.0})
        for name, parameter in self.named_parameters():
            groups[name in norms]["params"].append(parameter)
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_linear_schedule_with_warmup(optimizer, int(self.hparams.warmup_share * steps), steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
