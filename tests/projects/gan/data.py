"""Small grey images in the manner of handwritten digits, drawn in code."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

SIZE = 12


def draw_image(generator: torch.Generator) -> Tensor:
    """Draw a box, a cross, a one or a seven at a random place; shape ``[1, 12, 12]``, values from -1 to 1."""
    kind, top, left, span = (int(torch.randint(n, (), generator=generator)) for n in (4, 4, 4, 3))
    bottom, right = top + 5 + span, left + 5 + span
    image = torch.zeros(SIZE + 4, SIZE + 4)
    if kind == 0:
        image[top : bottom + 1, left : right + 1] = 1
        image[top + 1 : bottom, left + 1 : right] = 0
    elif kind == 1:
        image[(top + bottom) // 2, left : right + 1] = 1
        image[top : bottom + 1, (left + right) // 2] = 1
    elif kind == 2:
        image[top : bottom + 1, (left + right) // 2] = 1
    else:
        image[top, left : right + 1] = 1
        for row in range(top, bottom + 1):
            image[row, max(left, right - (row - top))] = 1
    image = image[:SIZE, :SIZE] + 0.1 * torch.rand(SIZE, SIZE, generator=generator)
    return (2 * image.clamp(0, 1) - 1).unsqueeze(0)


class NoiseCollator:
    """Stacks images and gives each of them a latent vector, so that a run can be repeated exactly.

    Args:
        latent_size: numbers in a latent vector.
        seed: of the vectors.
    """

    def __init__(self, latent_size: int, seed: int) -> None:
        self.latent_size = latent_size
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: list[tuple[Tensor]]) -> dict[str, Tensor]:
        images = torch.stack([image for (image,) in rows])
        return {"image": images, "noise": torch.randn(len(rows), self.latent_size, generator=self.generator)}


class Drawings(L.LightningDataModule):
    """Drawings to imitate.

    Args:
        num_images: how many there are.
        batch_size: images per batch.
        latent_size: numbers in a latent vector.
        seed: of the images and the latent vectors.
    """

    def __init__(self, num_images: int = 512, batch_size: int = 32, latent_size: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(self.hparams.seed)
        self.images = torch.stack([draw_image(generator) for _ in range(self.hparams.num_images)])

    def train_dataloader(self) -> DataLoader[Any]:
        collate = NoiseCollator(self.hparams.latent_size, self.hparams.seed + 1)
        return DataLoader(
            TensorDataset(self.images), batch_size=self.hparams.batch_size, shuffle=True, collate_fn=collate
        )
