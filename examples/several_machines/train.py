"""Full fine-tuning on several machines: the script for one, with the number of machines, a checkpoint, and a restart.

Two processes on this machine, which divide its devices, with a tiny model:

    torchrun --standalone --nproc-per-node=2 examples/several_machines/train.py

Two machines with 4 GPUs each, on both of them (``torchrun.sh`` beside this file), or under SLURM (``slurm.sh``):

    torchrun --nnodes=2 --nproc-per-node=1 --max-restarts=3 \\
        --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --rdzv-id=1 \\
        examples/several_machines/train.py --num-nodes 2 --model Qwen/Qwen3-8B --text /shared/notes.txt \\
        --length 2048 --batch-size 64 --lr 1e-5 --max-steps 1000 --folder /shared/run

``--batch-size`` is what each process loads: a step sees that many rows times the number of processes. Started again, a
training goes on from its newest checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy, RoundPipeTimeline

sys.path.append(str(Path(__file__).resolve().parents[1]))
from common import PRECISION, PrintLosses, load, parser_for, text_of, token_rows


class FineTuning(L.LightningModule):
    """An ordinary LightningModule: Lightning gives each rank its part of the data."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, fused=True)


def main() -> None:
    """Trains, or goes on from the newest checkpoint in the folder."""
    parser = parser_for(__doc__, lr=3e-3)
    parser.add_argument("--num-nodes", type=int, default=1, help="machines (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("run"), help="checkpoints and picture (%(default)s)")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps (%(default)s)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    L.seed_everything(0)
    model, tokenizer = load(args.model)
    rows = token_rows(tokenizer, text_of(args.text), args.length)
    picture = args.folder / "several_machines.svg"
    trainer = L.Trainer(
        # Gradients travel as bfloat16, and each rank keeps the optimizer state of its part of the weights.
        strategy=RoundPipeStrategy(reduce_dtype="bf16", shard_optimizer=True),
        accelerator="roundpipe",  # the GPUs, or virtual devices on a machine without
        devices=args.devices,
        num_nodes=args.num_nodes,
        precision=PRECISION,
        max_steps=args.max_steps,
        callbacks=[
            ModelCheckpoint(args.folder, every_n_train_steps=args.checkpoint_every, save_last=True),
            PrintLosses(),
            RoundPipeTimeline(picture=picture, summary=True, tokens_of=Tensor.numel),
        ],
        logger=False,
    )
    data = DataLoader(rows, args.batch_size, shuffle=True)  # type: ignore[arg-type]
    trainer.fit(FineTuning(model, args.lr), data, ckpt_path="last")


if __name__ == "__main__":
    main()
