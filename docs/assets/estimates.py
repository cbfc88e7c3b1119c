"""The table of README.md: what `roundpipe estimate` says of some models on one and on eight GPUs of 24 GiB each.

    python -m docs.assets.estimates

Each line is `roundpipe estimate --model MODEL --gpu rtx4090 --devices GPUs --seq-len 2048`, of which it shows the host
memory to have and the range of the speed. With `--host-memory` of that size the command says that it fits.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from typing import Any

from lightning_roundpipe.cli import main
from lightning_roundpipe.cli.output import Table

MODELS = ("qwen3-8b", "qwen3-32b", "llama-3.1-70b", "qwen3-235b-a22b")
NUMBERS_OF_GPUS = (1, 8)
METHODS = ("lora", "full")


def estimate(model: str, num_gpus: int) -> dict[str, Any]:
    """What the command says."""
    printed = io.StringIO()
    arguments = ["--model", model, "--gpu", "rtx4090", "--devices", str(num_gpus), "--seq-len", "2048", "--json"]
    with contextlib.redirect_stdout(printed):
        main(["estimate", *arguments])
    document: dict[str, Any] = json.loads(printed.getvalue())
    return document


def cells(method: dict[str, Any], host_reserve_bytes: int) -> tuple[str, str]:
    """Host memory, with what is left to the system, and speed, or what does not fit."""
    needed = f"{math.ceil((method['host_memory']['total'] + host_reserve_bytes) / 2**30):,} GiB"
    if not method["fits"]:
        return needed, "does not fit"
    slow, fast = (method["speed"][end]["tokens_per_s"] for end in ("slow", "fast"))
    return needed, f"{slow:,.0f} to {fast:,.0f}"


def table() -> str:
    """The lines of the table."""
    rows = []
    for model in MODELS:
        for num_gpus in NUMBERS_OF_GPUS:
            document = estimate(model, num_gpus)
            methods, reserve = document["methods"], document["host_reserve_bytes"]
            rows.append((model, str(num_gpus), *(cell for name in METHODS for cell in cells(methods[name], reserve))))
    columns = ("model", "GPUs", "LoRA: host", "tokens/s", "full: host", "tokens/s")
    return Table("", columns, rows).format()


if __name__ == "__main__":
    print(table())
