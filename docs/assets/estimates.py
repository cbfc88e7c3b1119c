"""The table of README.md: what `roundpipe estimate` says of some models on one and on eight GPUs of 24 GiB each.

    python -m docs.assets.estimates

Each line is `roundpipe estimate --model MODEL --gpu rtx4090 --devices GPUs --seq-len 2048`, of which it shows the host
memory that is needed and the range of the speed.
"""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

from lightning_roundpipe.cli import main
from lightning_roundpipe.cli.output import Table

MODELS = ("qwen3-8b", "qwen3-32b", "llama-3.1-70b", "qwen3-235b-a22b")
NUMBERS_OF_GPUS = (1, 8)
METHODS = ("lora", "full")


def estimate(model: str, num_gpus: int) -> dict[str, Any]:
    """What the command says of each method."""
    printed = io.StringIO()
    arguments = ["--model", model, "--gpu", "rtx4090", "--devices", str(num_gpus), "--seq-len", "2048", "--json"]
    with contextlib.redirect_stdout(printed):
        main(["estimate", *arguments])
    methods: dict[str, Any] = json.loads(printed.getvalue())["methods"]
    return methods


def cells(method: dict[str, Any]) -> tuple[str, str]:
    """Host memory and speed, or what does not fit."""
    needed = f"{method['host_memory']['total'] / 2**30:,.0f} GiB"
    if not method["fits"]:
        return needed, "does not fit"
    slow, fast = (method["speed"][end]["tokens_per_s"] for end in ("slow", "fast"))
    return needed, f"{slow:,.0f} to {fast:,.0f}"


def table() -> str:
    """The lines of the table."""
    rows = []
    for model in MODELS:
        for num_gpus in NUMBERS_OF_GPUS:
            methods = estimate(model, num_gpus)
            rows.append((model, str(num_gpus), *(cell for name in METHODS for cell in cells(methods[name]))))
    columns = ("model", "GPUs", "LoRA: host", "tokens/s", "full: host", "tokens/s")
    return Table("", columns, rows).format()


if __name__ == "__main__":
    print(table())
