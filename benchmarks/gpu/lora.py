"""Training adapters on a model whose weights alone do not fit."""

from __future__ import annotations

from dataclasses import replace

from .full import contenders
from .models import LORA, TINY
from .results import Options, Step


def steps(options: Options) -> list[Step]:
    """One for each contender."""
    return contenders(options, replace(TINY, lora=True) if options.is_tiny else LORA)
