"""Fine-tunes a causal language model of Hugging Face with LoRA adapters (PEFT).

    python examples/finetune_lora.py                                 # a tiny random model, no download
    python examples/finetune_lora.py --model NAME_OR_PATH --text notes.txt

Without ``--model`` it builds a small Qwen3 with random weights and reads text byte by byte, which shows how it works
but learns little: only the adapters are trained. The weights of the model stay on the host; a device holds only the
layers that it is working on, so the model may be larger than the memory of a GPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from lightning_roundpipe import RoundPipeStrategy


class LoraFineTuning(L.LightningModule):
    """An ordinary LightningModule around a PEFT model: the loss comes from the model's forward."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        if batch_idx % self.trainer.log_every_n_steps == 0:
            self.print(f"step {self.global_step:4d}  loss {outputs['loss'].item():.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        adapters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(adapters, lr=self.lr, fused=True)


class ByteTokenizer:
    """Stands in for a tokenizer: a token is a byte, one more pads."""

    pad_token_id = 256

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def load(name: str | None) -> tuple[nn.Module, Any]:
    """The model and its tokenizer, from the hub or a folder; without a name the tiny stand-ins."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), tokenizer
    config = Qwen3Config(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config), ByteTokenizer()


def paragraphs_of(path: Path | None) -> list[str]:
    """Paragraphs of a text file; without one, of the sources of Python's standard library, which every machine has."""
    files = [path] if path is not None else sorted(Path(os.__file__).parent.glob("*.py"))[:20]
    text = "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return [paragraph for paragraph in text.split("\n\n") if len(paragraph) > 20]


def collate(rows: list[list[int]], pad: int) -> dict[str, Tensor]:
    """Pads rows of token ids; what is padded is neither attended to nor predicted."""
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def parse_arguments() -> argparse.Namespace:
    """The options, which ``--help`` explains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name on the Hugging Face hub or a folder (default: a tiny random Qwen3)")
    parser.add_argument("--text", type=Path, help="file to train on (default: sources of Python's standard library)")
    parser.add_argument("--output", type=Path, default=Path("adapter"), help="folder for the adapter (%(default)s)")
    parser.add_argument("--max-steps", type=int, default=40, help="optimizer steps (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="paragraphs per step (%(default)s)")
    parser.add_argument("--max-length", type=int, default=128, help="tokens per paragraph (%(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (%(default)s)")
    parser.add_argument(
        "--devices", default="auto", help="number of devices (%(default)s: all GPUs, or 2 virtual ones)"
    )
    parser.add_argument("--num-microbatches", type=int, help="micro-batches per step (default: two per device)")
    return parser.parse_args()


def main() -> None:
    """Trains adapters and saves them."""
    args = parse_arguments()
    L.seed_everything(0)
    model, tokenizer = load(args.model)
    model = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
    )
    model.print_trainable_parameters()

    rows = [tokenizer(paragraph)["input_ids"][: args.max_length] for paragraph in paragraphs_of(args.text)]
    data = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=args.batch_size,
        shuffle=True,
        collate_fn=lambda batch: collate(batch, tokenizer.pad_token_id),
    )

    trainer = L.Trainer(
        # The model's loss is a mean over predicted tokens, and rows have different numbers of them: with these weights
        # micro-batches add up to exactly the loss of the whole batch.
        strategy=RoundPipeStrategy(num_microbatches=args.num_microbatches or "auto", loss_weight="causal_label_tokens"),
        accelerator="roundpipe",
        devices=2 if args.devices == "auto" and not torch.cuda.is_available() else args.devices,
        max_steps=args.max_steps,
        log_every_n_steps=max(1, args.max_steps // 10),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(LoraFineTuning(model, args.lr), data)
    model.save_pretrained(args.output)
    print(f"The adapter is in {args.output}: load it with PeftModel.from_pretrained(base_model, {str(args.output)!r}).")


if __name__ == "__main__":
    main()
