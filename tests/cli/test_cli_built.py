"""Models without formulas, which transformers builds on the meta device, and where their configurations are found."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_roundpipe.cli.estimate.built import built_shape
from lightning_roundpipe.cli.estimate.models import read_shape
from lightning_roundpipe.cli.estimate.resolve import load_shape
from tests.cli.conftest import RunJson
from tests.cli.test_cli_models import CASES, SIZES, build, number_of_weights

pytest.importorskip("transformers")

UNKNOWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 101, "n_positions": 32},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 101},
    "t5": {"d_model": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 101, "d_ff": 96, "d_kv": 16},
    "deepseek_v3": {
        **SIZES,
        **{"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
        **{"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16},
    },
}


@pytest.mark.parametrize(("model_type", "changes"), CASES)
def test_what_is_built_is_what_the_formulas_say(model_type: str, changes: dict[str, Any]) -> None:
    config = {"model_type": model_type, **SIZES, **changes}
    built, known = built_shape(config, "small"), read_shape(config, "small")
    assert built.num_weights == known.num_weights
    assert built.num_active == pytest.approx(known.num_active, rel=0.02)  # biases of experts belong to them
    assert built.num_other == 0
    assert (built.hidden, built.vocab, built.is_tied) == (known.hidden, known.vocab, known.is_tied)
    for mine, theirs in zip(built.layers, known.layers, strict=True):
        assert mine.num_weights == theirs.num_weights
        assert (mine.query_width, mine.key_width) == (theirs.query_width, theirs.key_width)
        assert mine.mlp_width == theirs.mlp_width or theirs.num_experts
        assert mine.family.num_norms == theirs.family.num_norms


def test_models_without_formulas_have_all_their_weights(tmp_path: Path, run_json: RunJson) -> None:
    for model_type, sizes in UNKNOWN.items():
        config = {"model_type": model_type, **sizes}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        shape = load_shape(str(tmp_path))
        if model_type == "t5":  # without a head
            assert len(shape.layers) == 4  # of encoder and decoder
        else:
            assert shape.num_weights == number_of_weights(build(config))
            assert len(shape.layers) == sizes.get("num_hidden_layers", 3)
        assert shape.is_built
    experts = [layer.num_experts for layer in shape.layers]
    assert experts == [0, 8, 8, 8]
    idle = 3 * 6 * 3 * 64 * 32  # in three layers six of eight experts
    assert shape.num_active == shape.num_weights - idle

    common = ("--gpu", "rtx4090", "--seq-len", "128", "--batch-size", "4")
    found = run_json("estimate", "--model", str(tmp_path), *common)
    assert found["methods"]["full"]["fits"]
    assert found["methods"]["full"]["trained_weights"] == shape.num_weights
    assert any("transformers built the model" in line for line in found["assumptions"])


def test_a_model_of_the_cache_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "hub" / "models--some--small"
    config = {"model_type": "llama", **SIZES}
    for snapshot, changes in (("old", {"num_hidden_layers": 1}), ("new", {})):
        (folder / "snapshots" / snapshot).mkdir(parents=True)
        path = folder / "snapshots" / snapshot / "config.json"
        path.write_text(json.dumps({**config, **changes}), encoding="utf-8")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("new", encoding="utf-8")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert load_shape("some/small") == read_shape(config, "some/small")
    monkeypatch.setenv("HF_HOME", "/nowhere")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert load_shape("some/small") == read_shape(config, "some/small")


def test_what_cannot_be_built_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for config, message in (
        ({"model_type": "nothing"}, "cannot build small of type 'nothing' (ValueError: Unrecognized model identifier"),
        ({"model_type": "vit"}, "The model small of type 'vit' has no table of tokens: estimates are for language"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            built_shape(config, "small")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"no formulas for it.* or install transformers, which builds others"):
        load_shape(str(tmp_path))
