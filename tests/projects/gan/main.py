"""Train the network and write what it draws next to the logs.

python -m tests.projects.gan.main --epochs 20
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from .callbacks import GeneratorAverage
from .data import Drawings
from .model import GAN


def train(
    folder: str = "runs",
    num_images: int = 512,
    batch_size: int = 32,
    resume: str | None = None,
    **trainer_arguments: Any,
) -> L.Trainer:
    """Train and return the trainer, which knows the model and its callbacks.

    Args:
        folder: where logs, pictures and checkpoints go.
        num_images: drawings to train on.
        batch_size: drawings per batch.
        resume: checkpoint to go on from; None starts from scratch.
        trainer_arguments: go to the trainer as they are.
    """
    L.seed_everything(1)
    trainer = L.Trainer(
        logger=CSVLogger(folder, name="gan"),
        callbacks=[GeneratorAverage(), ModelCheckpoint(filename="{epoch}", save_top_k=-1, save_last=True)],
        log_every_n_steps=1,
        **trainer_arguments,
    )
    trainer.fit(GAN(), Drawings(num_images, batch_size), ckpt_path=resume)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--resume", help="checkpoint to go on from")
    arguments = parser.parse_args()
    train(max_epochs=arguments.epochs, resume=arguments.resume)
