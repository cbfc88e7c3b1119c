"""Fine-tunes a causal language model of Hugging Face with LoRA adapters (PEFT).

    python examples/finetune_lora.py                                                   # a tiny model, on the CPU
    python examples/finetune_lora.py --model Qwen/Qwen3-32B --devices 2 --text notes.txt \\
        --length 1024 --batch-size 32 --lr 2e-4 --max-steps 1000                       # GPUs of 24 GB

A row is a paragraph of the text. The weights of the model stay on the host; a device holds only the layers that it is
working on, so the model may be larger than the memory of a GPU. The tiny model has random weights, of which only the
adapters are trained: it shows how it works, and learns little.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from common import PRECISION, PrintLosses, load, parser_for, text_of
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy, RoundPipeTimeline


class LoraFineTuning(L.LightningModule):
    """An ordinary LightningModule around a PEFT model: the loss comes from the model's forward."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        adapters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(adapters, lr=self.lr, fused=True)


def collate(rows: list[list[int]], pad: int) -> dict[str, Tensor]:
    """Pads rows of token ids; what is padded is neither attended to nor predicted."""
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def main() -> None:
    """Trains adapters and saves them."""
    parser = parser_for(__doc__)
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters (%(default)s)")
    parser.add_argument("--output", default="adapter", help="folder for the adapter (%(default)s)")
    args = parser.parse_args()
    L.seed_everything(0)
    # What is frozen takes 2 bytes for each weight on the host; PEFT makes its adapters in float32.
    model, tokenizer = load(args.model, torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    lora = LoraConfig(task_type="CAUSAL_LM", r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()

    paragraphs = [paragraph for paragraph in text_of(args.text).split("\n\n") if len(paragraph) > 20]
    if not paragraphs:
        parser.error(f"{args.text} has no paragraph of more than 20 characters: give another --text")
    rows: Any = [tokenizer(paragraph)["input_ids"][: args.length] for paragraph in paragraphs]
    data = DataLoader(
        rows, args.batch_size, shuffle=True, collate_fn=lambda batch: collate(batch, tokenizer.pad_token_id)
    )
    count_tokens = lambda batch: int(batch["attention_mask"].sum())  # noqa: E731
    trainer = L.Trainer(
        # The model's loss is a mean over predicted tokens, and rows have different numbers of them: with these weights
        # micro-batches add up to exactly the loss of the whole batch.
        strategy=RoundPipeStrategy(loss_weight="causal_label_tokens"),
        accelerator="roundpipe",  # the GPUs, or virtual devices on a machine without
        devices=args.devices,
        precision=PRECISION,
        max_steps=args.max_steps,
        callbacks=[PrintLosses(), RoundPipeTimeline(picture="finetune_lora.svg", summary=True, tokens_of=count_tokens)],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LoraFineTuning(model, args.lr), data)
    model.save_pretrained(args.output)
    print(f"The adapter is in {args.output}: load it with PeftModel.from_pretrained(base_model, {args.output!r}).")


if __name__ == "__main__":
    main()
