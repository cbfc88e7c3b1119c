"""Every example runs as a newcomer would run it: a process of its own, the command of its docstring, less work.

The first one starts an interpreter for itself, the others are forks; see :mod:`tests.support.forks`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.forks import ENVIRONMENT, Forks

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(forks: Forks, tmp_path: Path) -> Callable[..., str]:
    """Runs ``examples/<script>`` in ``tmp_path``, without network; what it printed."""
    return lambda script, *arguments: forks.run(EXAMPLES / script, *arguments, folder=tmp_path)


def losses_in(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"(?<!val_)\bloss\s+([0-9.]+)", output)]


def test_no_example_is_forgotten() -> None:
    scripts = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert scripts == {"minimal.py", "train_bytes.py", "finetune_lora.py", "long_sequence.py", "cli/main.py"}


def test_minimal(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "minimal.py")],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    losses = losses_in(done.stdout)
    assert len(losses) == 24
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    assert list(tmp_path.iterdir()) == []


def test_train_bytes(run: Callable[..., str]) -> None:
    output = run(
        "train_bytes.py",
        *("--max-steps", "12", "--devices", "2", "--width", "32", "--blocks", "3", "--context", "32"),
        *("--batch-size", "8", "--val-batches", "1", "--lr", "0.01", "--prompt", "import"),
    )
    losses = losses_in(output)
    assert losses[0] > 5.0
    assert losses[-1] < losses[0] - 0.2
    assert "Sample:\nimport" in output
    for row in ("devices", "stages", "micro-batches", "bubble", "tokens/s"):
        assert re.search(rf"^\s*{row}  \S", output, flags=re.MULTILINE), row


def test_finetune_lora(run: Callable[..., str], tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text(
        "\n\n".join(f"Paragraph {number}: " + "water and salt. " * (number % 5 + 1) for number in range(64))
    )
    output = run(
        "finetune_lora.py",
        *("--text", str(text), "--output", str(tmp_path / "adapter")),
        *("--max-steps", "4", "--batch-size", "8", "--max-length", "48", "--lr", "0.01", "--devices", "2"),
    )
    losses = losses_in(output)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_finetune_lora_loads_a_model_and_its_tokenizer(run: Callable[..., str], tmp_path: Path) -> None:
    """``--model`` with a folder: the same code as for a name on the hub."""
    tokenizers = pytest.importorskip("tokenizers")
    import transformers

    words = ["<pad>", "<unk>", "water", "and", "salt"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<pad>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "model")
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    text = tmp_path / "notes.txt"
    text.write_text("\n\n".join("water and salt and water and " * (number % 3 + 1) for number in range(16)))
    output = run(
        "finetune_lora.py",
        *("--model", str(tmp_path / "model"), "--text", str(text), "--output", str(tmp_path / "adapter")),
        *("--max-steps", "2", "--batch-size", "4", "--lr", "0.01", "--devices", "2", "--num-microbatches", "3"),
    )
    assert len(losses_in(output)) == 2
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_long_sequence(run: Callable[..., str]) -> None:
    output = run("long_sequence.py", "--tokens", "256", "--vocabulary", "512", "--width", "16", "--max-steps", "6")
    losses = losses_in(output)
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5


def test_long_sequence_measures_the_memory_of_both_losses(run: Callable[..., str]) -> None:
    output = run("long_sequence.py", "--measure", "--tokens", "1024", "--vocabulary", "2048", "--width", "16")
    found = {name: float(mib) for name, mib in re.findall(r"^  (logits|whole|in pieces) +([0-9.]+) MiB", output, re.M)}
    assert found["logits"] == 4 * 1024 * 2048 / 2**20
    assert found["whole"] >= 2 * found["logits"]
    assert found["in pieces"] < found["logits"]


@pytest.mark.parametrize("has_function", [True, False])
def test_long_sequence_computes_the_same_loss_in_pieces(monkeypatch: pytest.MonkeyPatch, has_function: bool) -> None:
    spec = importlib.util.spec_from_file_location("long_sequence", EXAMPLES / "long_sequence.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    if not has_function:
        monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    elif not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("this torch has no linear_cross_entropy in pieces")
    results = []
    for loss in (example.whole_loss, example.loss_in_pieces):
        torch.manual_seed(0)
        hidden, weight = torch.randn(300, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
        value = loss(hidden, weight, torch.randint(50, (300,)))
        value.backward()
        results.append((value.detach(), hidden.grad, weight.grad))
    torch.testing.assert_close(*results)


def test_cli(run: Callable[..., str], tmp_path: Path) -> None:
    arguments = ("--config", str(EXAMPLES / "cli" / "config.yaml"), "--data.num_points", "512")
    run("cli/main.py", "fit", *arguments, "--trainer.max_epochs", "1")
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    output = run("cli/main.py", "validate", *arguments, "--ckpt_path", str(checkpoint))
    (loss,) = re.findall(r"val_loss\s+\D\s+([0-9.]+)", output)
    assert float(loss) < 1.0  # 2.6 before training


def test_cli_with_options_of_the_strategy(run: Callable[..., str], tmp_path: Path) -> None:
    config = EXAMPLES / "cli" / "strategy_options.yaml"
    small = ("--trainer.max_epochs", "1", "--data.num_points", "256")
    run("cli/main.py", "fit", "--config", str(config), *small)
    (saved,) = tmp_path.rglob("config.yaml")
    assert "class_path: lightning_roundpipe.RoundPipeStrategy" in saved.read_text()
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1
