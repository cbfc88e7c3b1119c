"""Shapes from configurations: counts of weights against the models that transformers builds, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_roundpipe.cli.estimate.models import read_shape
from lightning_roundpipe.cli.estimate.resolve import bundled_configs, load_shape

NAMES = [name.partition("/")[2] for name in bundled_configs()]
ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 101,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": None}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True}),
    ("mistral", {"head_dim": 16}),
    ("phi3", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "head_dim": 16}),
    ("gemma", {}),
    ("gemma2", {"head_dim": 16}),
    ("gemma3_text", {}),
    ("mixtral", LOCAL_EXPERTS),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48, "qkv_bias": False}),
    ("qwen3_moe", EXPERTS),
    ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    ("gpt_oss", LOCAL_EXPERTS),
    ("gpt_oss", {**LOCAL_EXPERTS, "attention_bias": False, "head_dim": 16}),
]


def bundled(name: str) -> dict[str, Any]:
    """A configuration that comes with the package, by its name in small letters without the organisation."""
    (config,) = (config for known, config in bundled_configs().items() if known.lower().endswith(f"/{name.lower()}"))
    return dict(config)


def build(config: dict[str, Any]) -> Any:
    """The model that transformers makes of a configuration, without memory for its weights."""
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(made)


def number_of_weights(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_counts_are_those_of_transformers(model_type: str, changes: dict[str, Any]) -> None:
    config = {"model_type": model_type, **SIZES, **changes}
    model = build(config)
    expected = number_of_weights(model)
    shape = read_shape(config, "small")
    assert shape.num_weights == expected
    # what transformers itself writes to disk says the same in more words
    assert read_shape(model.config.to_dict(), "small").num_weights == expected


# Total and active weights in billions, as their makers round them. Those of gpt-oss count active weights without
# embedding and head, which hold 1.2 billion.
STATED = {
    "Qwen3-0.6B": (0.6, 0.6),
    "Qwen3-1.7B": (1.7, 1.7),
    "Qwen3-4B": (4.0, 4.0),
    "Qwen3-8B": (8.2, 8.2),
    "Qwen3-14B": (14.8, 14.8),
    "Qwen3-32B": (32.8, 32.8),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235.1, 22.2),
    "Llama-3.1-8B": (8.0, 8.0),
    "Llama-3.1-70B": (70.6, 70.6),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
}


@pytest.mark.parametrize("name", NAMES)
def test_sizes_as_their_makers_state_them(name: str) -> None:
    shape = read_shape(bundled(name), name)
    billions, active = STATED[name]
    assert round(shape.num_weights / 1e9, 1) == billions
    tables = 0 if shape.model_type != "gpt_oss" else shape.num_embedding
    assert (shape.num_active - tables) / 1e9 == pytest.approx(active, abs=0.1)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "qwen/qwen3-32b", "QWEN/QWEN3-32B", "Qwen3-32b"])
def test_a_bundled_model_is_found_in_any_spelling(name: str) -> None:
    assert load_shape(name) == read_shape(bundled_configs()["Qwen/Qwen3-32B"], "Qwen/Qwen3-32B")


def test_a_folder_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen3-32b").mkdir()
    (tmp_path / "qwen3-32b" / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_shape("qwen3-32b").hidden == SIZES["hidden_size"]


def test_the_documentation_names_models_that_come_with_the_package() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = {name for page in pages for name in re.findall(r"--model ([\w./-]+)", page.read_text(encoding="utf-8"))}
    assert {"qwen3-32b", "qwen3-235b-a22b"} <= named
    known = [spelling.lower() for name in bundled_configs() for spelling in (name, name.partition("/")[2])]
    assert [name for name in named if name.lower() not in known and name != "config.json"] == []


def test_layers_of_matrices_hold_the_rest_of_the_weights() -> None:
    shape = read_shape({"model_type": "qwen3_moe", **SIZES, **EXPERTS, "mlp_only_layers": [2]}, "small")
    assert [layer.num_experts for layer in shape.layers] == [8, 8, 0, 8]
    model = build({"model_type": "qwen3_moe", **SIZES, **EXPERTS, "mlp_only_layers": [2]})
    for layer, built in zip(shape.layers, model.model.layers, strict=True):
        matrices = sum(p.numel() for p in built.parameters() if p.dim() > 1)
        assert layer.num_dense + layer.num_expert == matrices
        assert layer.num_small == number_of_weights(built) - matrices


WINDOWS: list[tuple[str, dict[str, Any], list[int | None]]] = [
    ("llama", {"sliding_window": 16}, [None] * 4),
    ("mistral", {"sliding_window": 16}, [16] * 4),
    ("mistral", {"sliding_window": None}, [None] * 4),
    ("qwen3", {"sliding_window": 16, "max_window_layers": 2}, [None] * 4),
    ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}, [None, None, 16, 16]),
    ("gpt_oss", {**LOCAL_EXPERTS, "sliding_window": 16}, [16, None, 16, None]),
    ("gemma3_text", {"sliding_window": 16, "num_hidden_layers": 7}, [16, 16, 16, 16, 16, None, 16]),
    ("qwen3", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}, [16, None] * 2),
]


@pytest.mark.parametrize(("model_type", "changes", "expected"), WINDOWS)
def test_windows_follow_the_rules_of_the_model_type(
    model_type: str, changes: dict[str, Any], expected: list[int | None]
) -> None:
    shape = read_shape({"model_type": model_type, **SIZES, **changes}, "small")
    assert [layer.window for layer in shape.layers] == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 8}, "has no 'model_type', and there are no formulas for it. Known are llama, mistral"),
    ({"model_type": "mamba"}, "has model type 'mamba', and there are no formulas"),
    ({"model_type": "llama", **SIZES, "hidden_size": None}, "has no 'hidden_size', which must be a whole number"),
    ({"model_type": "llama", **SIZES, "vocab_size": "many"}, "has 'many' as 'vocab_size'"),
    ({"model_type": "mistral", **SIZES, "num_key_value_heads": None}, "has no 'num_key_value_heads'"),
    ({"model_type": "llama", **SIZES, "num_key_value_heads": 3}, "8 attention heads on 3 key-value heads"),
    (
        {"model_type": "qwen3_moe", **SIZES, "num_experts": 8, "num_experts_per_tok": 2},
        "has no 'moe_intermediate_size'",
    ),
    ({"model_type": "mixtral", **SIZES, **LOCAL_EXPERTS, "num_experts_per_tok": 9}, "to 9 of 8 experts"),
    ({"model_type": "qwen3", **SIZES, "layer_types": ["linear_attention"] * 4}, "Layer 0 of x is of type 'linear_"),
    ({"model_type": "qwen3", **SIZES, "layer_types": ["full_attention"]}, "Layer 1 of x is of type None"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_configurations_that_are_refused_say_why(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_shape(config, "x")
