"""Find the configuration behind ``--model``: a file, a folder, or a model that comes with the package.

``configs.json`` beside this file holds what counts of the public configurations of a few models, by their names on the
Hugging Face Hub. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..arguments import read_text
from .models import ModelShape, read_shape

_CONFIG = "config.json"
_BUNDLED = Path(__file__).with_name("configs.json")
_PASS_FILE = "pass the path of its config.json or of a folder with one"


def load_shape(model: str) -> ModelShape:
    """Return the shape of the model.

    Args:
        model: Path of a ``config.json``, of a folder with one, or a name such as ``"Qwen/Qwen3-8B"``. The names of
            `bundled_configs` may be written in upper or lower case, and without the organisation.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / _CONFIG
    if path.is_file():
        return read_shape(_parse(path), model)
    for name, config in bundled_configs().items():
        if model.lower() in (name.lower(), _short(name).lower()):
            return read_shape(config, name)
    names = ", ".join(map(_short, bundled_configs()))
    raise ValueError(
        f"--model {model} is no file and no folder with a {_CONFIG}, and does not come with the package: {_PASS_FILE}, "
        f"or one of {names}. Of a model on the Hugging Face Hub: hf download ORGANISATION/NAME {_CONFIG}."
    )


def bundled_configs() -> dict[str, Mapping[str, Any]]:
    """Return the configurations that come with the package, by their names on the Hugging Face Hub."""
    configs: dict[str, Mapping[str, Any]] = json.loads(_BUNDLED.read_text(encoding="utf-8"))
    return configs


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _parse(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_text(str(path), "configuration"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--model {path} is not JSON ({error}): {_PASS_FILE}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"--model {path} holds no JSON object: {_PASS_FILE}.")
    return config
