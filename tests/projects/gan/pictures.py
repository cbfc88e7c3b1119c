"""Sample images as files, in a format that needs no library."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

COLUMNS = 4


def save_grid(images: Tensor, folder: str | Path, name: str) -> None:
    """Write images of shape ``[rows, 1, height, width]`` and values from -1 to 1 side by side, as a grey PGM file."""
    rows = [torch.cat(list(row.squeeze(1)), dim=1) for row in images.split(COLUMNS)]
    grid = ((torch.cat(rows) + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    height, width = grid.shape
    path = Path(folder, "samples", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"P5 %d %d 255\n" % (width, height) + bytes(grid.flatten().tolist()))
