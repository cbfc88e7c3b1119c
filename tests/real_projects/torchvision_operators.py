"""The operators without which torchvision cannot be imported, where its extension cannot be loaded.

Wheels of torchvision from the registry are built for CUDA: beside a torch without it, importing them fails because
``torchvision::nms`` and ``qnms`` are unknown. Of all operators the projects need the first one alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: list[torch.library.Library] = []  # as long as it lives, the operator does


def register_missing() -> None:
    """Registers them, if they are missing."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).parent / "_C.so"))
    except OSError:
        _library.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _library[0].define(name + _SCHEMA)
        _library[0].impl("nms", nms, "CPU")
        importlib.import_module("torchvision.extension")._has_ops = lambda: True


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Boxes from the best one on, but for those that a better one covers."""
    areas = (dets[:, 2:] - dets[:, :2]).prod(1)
    left, kept = scores.argsort(descending=True, stable=True), []
    while left.numel():
        best, left = left[0], left[1:]
        kept.append(best)
        corners = torch.max(dets[left, :2], dets[best, :2]), torch.min(dets[left, 2:], dets[best, 2:])
        common = (corners[1] - corners[0]).clamp(min=0).prod(1)
        left = left[common <= iou_threshold * (areas[left] + areas[best] - common)]
    return torch.stack(kept) if kept else torch.zeros(0, dtype=torch.long)
