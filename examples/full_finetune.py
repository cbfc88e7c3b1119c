"""Full fine-tuning of a causal language model of Hugging Face: every weight is trained.

    python examples/full_finetune.py                                                    # a tiny model, on the CPU
    python examples/full_finetune.py --model Qwen/Qwen3-8B --devices 4 --text notes.txt \\
        --length 2048 --batch-size 64 --lr 1e-5 --max-steps 1000                        # GPUs of 24 GB

Weights, gradients and the state of AdamW are float32 in the memory of the host, 18 bytes for each weight; a GPU holds
the layers that it is working on, in bfloat16. ``roundpipe estimate --model qwen3-8b --gpu rtx4090 --devices 4
--seq-len 2048`` says beforehand what a training needs, and how fast it may be.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from common import PRECISION, PrintLosses, load, parser_for, text_of, token_rows
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from lightning_roundpipe import RoundPipeTimeline


class FullFineTuning(L.LightningModule):
    """An ordinary LightningModule: it knows nothing of devices, micro-batches or stages."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """By norm: Lightning's own refuses fused optimizers under mixed precision, also where no loss is scaled."""
        if gradient_clip_val:
            self.trainer.precision_plugin.clip_grad_by_norm(optimizer, gradient_clip_val)


def main() -> None:
    """Trains all weights and saves them."""
    parser = parser_for(__doc__, lr=3e-3)
    parser.add_argument("--output", default="finetuned", help="folder for model and tokenizer (%(default)s)")
    args = parser.parse_args()
    L.seed_everything(0)
    model, tokenizer = load(args.model)
    rows = token_rows(tokenizer, text_of(args.text), args.length)
    trainer = L.Trainer(
        strategy="roundpipe",
        accelerator="roundpipe",  # the GPUs, or virtual devices on a machine without
        devices=args.devices,
        precision=PRECISION,
        max_steps=args.max_steps,
        gradient_clip_val=1.0,
        callbacks=[PrintLosses(), RoundPipeTimeline(picture="full_finetune.svg", summary=True, tokens_of=Tensor.numel)],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(FullFineTuning(model, args.lr), DataLoader(rows, args.batch_size, shuffle=True))  # type: ignore[arg-type]
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"The model is in {args.output}: AutoModelForCausalLM.from_pretrained({args.output!r}) loads it.")


if __name__ == "__main__":
    main()
