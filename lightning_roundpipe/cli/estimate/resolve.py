"""Find the configuration behind ``--model``: a file, a folder, a model that comes with the package, or of the cache.

``configs.json`` beside this file holds what counts of the public configurations of a few models, by their names on the
Hugging Face Hub. The cache is that of the libraries of Hugging Face: ::

    $HF_HUB_CACHE, $HF_HOME/hub or ~/.cache/huggingface/hub
        models--ORGANISATION--NAME/refs/main                   the name of a snapshot
        models--ORGANISATION--NAME/snapshots/.../config.json

Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..arguments import read_text
from .built import built_shape
from .models import ModelShape, has_formulas, read_shape

_CONFIG = "config.json"
_BUNDLED = Path(__file__).with_name("configs.json")
_PASS_FILE = "pass the path of its config.json or of a folder with one"


def load_shape(model: str) -> ModelShape:
    """Return the shape of the model.

    Args:
        model: Path of a ``config.json``, of a folder with one, or a name such as ``"Qwen/Qwen3-8B"``. The names of
            `bundled_configs` may be written in upper or lower case, and without the organisation; those of the cache
            are as on the Hub.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / _CONFIG
    if path.is_file():
        return _shape(_parse(path), model)
    for name, config in bundled_configs().items():
        if model.lower() in (name.lower(), _short(name).lower()):
            return read_shape(config, name)
    if (cached := _cached(model)) is not None:
        return _shape(_parse(cached), model)
    names = ", ".join(map(_short, bundled_configs()))
    raise ValueError(
        f"--model {model} is no file and no folder with a {_CONFIG}, does not come with the package, and is not in the "
        f"cache of Hugging Face: {_PASS_FILE}, or one of {names}. Of a model on the Hugging Face Hub: hf download "
        f"ORGANISATION/NAME {_CONFIG}."
    )


def bundled_configs() -> dict[str, Mapping[str, Any]]:
    """Return the configurations that come with the package, by their names on the Hugging Face Hub."""
    configs: dict[str, Mapping[str, Any]] = json.loads(_BUNDLED.read_text(encoding="utf-8"))
    return configs


def _shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """By formulas, or else by a model that transformers builds."""
    if has_formulas(config) or "model_type" not in config:
        return read_shape(config, name)
    try:
        return built_shape(config, name)
    except ImportError:
        return read_shape(config, name)  # which says that there are no formulas


def _cached(model: str) -> Path | None:
    """The configuration of a model in the cache of Hugging Face, as last downloaded."""
    home = Path(os.environ.get("HF_HOME") or Path("~", ".cache", "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    folder = hub / f"models--{model.replace('/', '--')}"
    try:
        snapshot = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    path = folder / "snapshots" / snapshot / _CONFIG
    return path if path.is_file() else None


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
