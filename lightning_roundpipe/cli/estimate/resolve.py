"""Find the configuration behind ``--model``: a file, a folder, a model that comes with the package, or one on the Hub.

``configs.json`` beside this file holds what counts of the public configurations of a few models, by their names on the
Hugging Face Hub: these need no network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..arguments import read_text
from .models import ModelShape, read_shape

_CONFIG = "config.json"
_BUNDLED = Path(__file__).with_name("configs.json")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PASS_FILE = "pass the path of its config.json or of a folder with one"
_TIMEOUT_S = 5.0


def load_shape(model: str) -> ModelShape:
    """Return the shape of the model; the network is asked only for a name that does not come with the package.

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
    if path.suffix == ".json" or _HUB_NAME.fullmatch(model) is None:
        raise ValueError(
            f"--model {model}: there is no such file: {_PASS_FILE}, or a name on the Hugging Face Hub. These need no "
            f"network: {_names()}."
        )
    return read_shape(_parse(_download(model)), model)


def bundled_configs() -> dict[str, Mapping[str, Any]]:
    """Return the configurations that come with the package, by their names on the Hugging Face Hub."""
    configs: dict[str, Mapping[str, Any]] = json.loads(_BUNDLED.read_text(encoding="utf-8"))
    return configs


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _names() -> str:
    return ", ".join(map(_short, bundled_configs()))


def _download(name: str) -> Path:
    """The file of that name on the Hub, or in its cache on this machine."""
    unknown = f"--model {name} is no file, and no model that comes with the package"
    ways_out = f"{_PASS_FILE}, or one of {_names()}."
    try:
        from huggingface_hub import get_session, hf_hub_download, hf_hub_url
    except ImportError as error:
        raise ValueError(
            f"{unknown}. The Hugging Face Hub can only be asked with huggingface_hub, which is not installed: pip "
            f"install huggingface_hub, {ways_out}"
        ) from error
    try:
        return Path(hf_hub_download(name, _CONFIG, local_files_only=True))
    except Exception:  # not in the cache, or not a name that it could hold
        pass
    try:
        # Any answer will do. hf_hub_download would try five more times.
        get_session().head(hf_hub_url(name, _CONFIG), timeout=_TIMEOUT_S)
    except Exception as error:  # of the library below, which is another one in each major version
        raise ValueError(
            f"{unknown}, and the Hugging Face Hub cannot be asked ({_first_line(error)}): {ways_out}"
        ) from error
    try:
        return Path(hf_hub_download(name, _CONFIG))
    except Exception as error:  # many kinds: no such model, no access
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise ValueError(
            f"{unknown}, and the Hugging Face Hub did not give its {_CONFIG} ({reason}): {ways_out}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _parse(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(read_text(str(path), "configuration"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--model {path} is not JSON ({error}): {_PASS_FILE}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"--model {path} holds no JSON object: {_PASS_FILE}.")
    return config
