"""LoRA adapters of a small causal model, with batches as the collators of transformers and TRL make them."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling as MaskingCollator
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.real_projects.cases import Case, Run

WORDS = 48


def tokenizer() -> PreTrainedTokenizerFast:
    known = {"<pad>": 0, **{f"w{index}": index for index in range(1, WORDS)}}
    words = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")


class Adapted(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, pad_token_id=0, use_cache=False, **sizes)
        )
        self.model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


class Preferring(Adapted):
    """Rows are first those that were chosen, then those that were rejected."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
        likely = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        chosen, rejected = (likely * batch["completion_mask"][:, 1:]).sum(1).chunk(2)
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        self.log("loss", loss)
        return loss


def texts() -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, WORDS, (4 + index % 5,), generator=random).tolist() for index in range(16)]
    return [{"input_ids": row, "labels": [-100, -100, *row[2:]]} for row in rows]


def pairs() -> list[dict[str, Any]]:
    rows = [row["input_ids"] for row in texts()]
    return [{"prompt_ids": row[:2], "chosen_ids": row[2:], "rejected_ids": row[1:3]} for row in rows]


def adapt(run: Run, collate: Callable[[Any], Any], data: Any = None, module: type[Adapted] = Adapted) -> None:
    loader = DataLoader(data or texts(), batch_size=8, collate_fn=collate)

    def make() -> Adapted:
        pl.seed_everything(0)
        return module()

    trainer, model = run.fit(make, loader)
    # What is predicted for a row of several texts is a row.
    if module is Adapted and "attention_mask" in next(iter(loader)):
        run.keep(predictions=trainer.predict(model, loader))


def unlabelled() -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"]} for row in texts()]


def of_pairs(batch: Any, num_microbatches: int) -> list[Any]:
    """Pairs stay together: so many of the chosen, and the same ones of the rejected."""
    parts = {name: [half.tensor_split(num_microbatches) for half in value.chunk(2)] for name, value in batch.items()}
    return [
        {name: torch.cat([chosen[index], rejected[index]]) for name, (chosen, rejected) in parts.items()}
        for index in range(num_microbatches)
    ]


CASES = {
    "Seq2Seq": Case(
        lambda run: adapt(run, DataCollatorForSeq2Seq(tokenizer())),
        "transformers' collator: training, resumed; predictions",
    ),
    "LanguageModeling": Case(
        lambda run: adapt(run, MaskingCollator(tokenizer(), mlm=False), unlabelled()), "transformers': the same"
    ),
    "Flattening": Case(
        lambda run: adapt(run, DataCollatorWithFlattening()),
        "transformers': training, resumed",
        {"split_batch": "packed"},
        'split_batch="packed"',
    ),
    "TRL": Case(
        lambda run: adapt(run, DataCollatorForLanguageModeling(pad_token_id=0)), "its language modeling: the same"
    ),
    "TRL padding-free": Case(
        lambda run: adapt(run, DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)),
        "training, resumed",
        {"split_batch": "packed"},
        'split_batch="packed"',
    ),
    "TRL preferences": Case(
        lambda run: adapt(run, DataCollatorForPreference(pad_token_id=0), pairs(), Preferring),
        "training, resumed",
        {"split_batch": of_pairs},
        "split_batch=function that keeps pairs together",
    ),
}
