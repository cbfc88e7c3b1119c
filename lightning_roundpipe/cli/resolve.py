"""Find the ``config.json`` behind ``--model``: a file, a folder, or a name on the Hugging Face Hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .arguments import read_text
from .models import ModelShape, read_shape

_CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PASS_FILE = "pass the path of its config.json"


def load_shape(model: str) -> ModelShape:
    """Return the shape of the model; the network is asked only for a Hub name, and only if huggingface_hub is there.

    Args:
        model: Path of a ``config.json``, of a folder with one, or a name such as ``"Qwen/Qwen3-8B"``.

    Raises:
        ValueError: If there is no such configuration, it cannot be read, or it is not one of a known decoder.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / _CONFIG
    if path.is_file():
        return read_shape(_parse(path), model)
    if path.suffix == ".json" or _HUB_NAME.fullmatch(model) is None:
        raise ValueError(f"--model {model}: there is no such file: {_PASS_FILE}, or a name on the Hugging Face Hub.")
    return read_shape(_parse(_download(model)), model)


def _download(name: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ValueError(
            f"--model {name}: there is no such file, and a name on the Hugging Face Hub can only be looked up with "
            f"huggingface_hub, which is not installed: {_PASS_FILE}, or pip install huggingface_hub."
        ) from error
    try:
        return Path(hf_hub_download(name, _CONFIG))
    except Exception as error:  # many kinds: no network, no such model, no access
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"--model {name}: the Hugging Face Hub did not give its {_CONFIG} ({reason}): {_PASS_FILE}."
        ) from error


def _parse(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_text(str(path), "configuration"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--model {path} is not JSON ({error}): {_PASS_FILE}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"--model {path} holds no JSON object: {_PASS_FILE}.")
    return config
