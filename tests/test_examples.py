"""Every example runs as a newcomer would run it: a process of its own, a command of its docstring, less work.

The processes are forks; see :mod:`tests.support.forks`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import lightning as L
import pytest
import torch

from tests.support.forks import Forks
from tests.support.huggingface import write_checkpoint

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
TORCHRUN = ROOT / "tests" / "support" / "rank_runs" / "restarted.py"  # what it does with two ranks


@pytest.fixture
def run(forks: Forks, tmp_path: Path) -> Callable[..., str]:
    """Runs ``examples/<script>`` in ``tmp_path``, without network; what it printed."""
    return lambda script, *arguments: forks.run(EXAMPLES / script, *arguments, folder=tmp_path, needs=["peft"])


def losses_in(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"(?<!val_)\bloss\s+([0-9.]+)", output)]


def assert_ends_with_picture_and_table(output: str, picture: Path, *more_rows: str) -> None:
    """The picture is one, and is named; the table has a figure in every row."""
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert picture.name in output
    for row in ("devices", "stages", "step", "bubble", "device memory", "host memory", *more_rows):
        (value,) = re.findall(rf"^ +{row}  (\S.*)", output, flags=re.MULTILINE)
        assert "not known" not in value, row


def loaded(script: str) -> Any:
    """An example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location(Path(script).stem, EXAMPLES / script)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
        sys.modules.pop("common", None)
    return module


def test_no_example_is_forgotten() -> None:
    scripts = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")} - {"common.py"}
    assert scripts == {
        "minimal.py",
        "demo.py",
        "finetune_lora.py",
        "full_finetune.py",
        "dpo.py",
        "long_sequence.py",
        "several_machines/train.py",
        "cli/main.py",
    }
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for script in scripts:
        assert script.partition("/")[0] in table, script


def test_minimal(run: Callable[..., str], tmp_path: Path) -> None:
    losses = losses_in(run("minimal.py"))
    assert len(losses) == 24
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    assert list(tmp_path.iterdir()) == []


def test_demo(run: Callable[..., str], tmp_path: Path) -> None:
    small = ("--max-steps", "20", "--devices", "2", "--width", "32", "--blocks", "3", "--words", "600", "--lr", "0.02")
    output = run("demo.py", *small, "--sources", str(Path(os.__file__).with_name("asyncio")))
    losses = losses_in(output)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
    curve = [line.index("*") for line in output.splitlines() if line.startswith("  step ") and line.endswith("*")]
    assert curve[0] == max(curve)
    assert curve[-1] < curve[0]
    assert_ends_with_picture_and_table(output, tmp_path / "demo.svg", "micro-batches", "tokens/s")
    can_be_parsed, new = map(int, re.findall(r"Python can parse (\d+); (\d+) are new", output)[0])
    assert 0 <= new <= can_be_parsed <= 32
    speeds = re.findall(r"^ +([148])  .* ([\d,]+) to ([\d,]+)  ", output, flags=re.MULTILINE)
    assert [number for number, _, _ in speeds] == ["1", "4", "8"]
    fast = [int(speed.replace(",", "")) for _, _, speed in speeds]
    assert fast == sorted(fast)


def test_demo_keeps_short_functions_of_common_words() -> None:
    demo = loaded("demo.py")
    functions = ["def f(x):\n    return x", "def g(x):\n    return x", "def rare(x):\n    return x"]
    texts = ["".join(tokens) for tokens in demo.plain([*functions, "def f(x):\n    return " + "x + " * 40 + "x"], 50)]
    assert texts == []  # f and g come once each, too
    assert ["".join(tokens) for tokens in demo.plain([*functions, "def f(y):\n    y"], 50)] == functions[:1]
    assert [demo.is_python(text) for text in (functions[0], "def f(:")] == [True, False]
    for function in demo.functions_of(EXAMPLES):
        assert ast.get_docstring(ast.parse(function).body[0]) is None  # type: ignore[arg-type]


def test_finetune_lora(run: Callable[..., str], tmp_path: Path) -> None:
    """``--model`` with a folder, whose tokenizer cannot pad: the same code as for a name on the hub."""
    import transformers

    folder, text = str(tmp_path / "model"), tmp_path / "notes.txt"
    write_checkpoint(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert transformers.AutoTokenizer.from_pretrained(folder).pad_token is None
    text.write_text(
        "\n\n".join(f"Paragraph {number}: " + "water and salt. " * (number % 5 + 1) for number in range(64))
    )
    output = run(
        "finetune_lora.py",
        *("--model", folder, "--text", str(text), "--output", str(tmp_path / "adapter")),
        *("--max-steps", "4", "--batch-size", "8", "--length", "48", "--lr", "0.01", "--devices", "2"),
    )
    losses = losses_in(output)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert_ends_with_picture_and_table(output, tmp_path / "finetune_lora.svg", "tokens/s")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "nothing.txt"), "there is no file 'nothing.txt'"),
        (("--length", "0"), "'0' is not a whole number above 0"),
        (("--text", __file__, "--length", "10000000"), "give more text, or a lower --length"),
    ],
)
def test_wrong_arguments_end_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    example = loaded("full_finetune.py")
    monkeypatch.setattr("sys.argv", ["full_finetune.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert message in str(ended.value) + capsys.readouterr().err


def test_full_finetune_saves_a_model_that_loads(run: Callable[..., str], tmp_path: Path) -> None:
    import transformers

    small = ("--max-steps", "5", "--length", "48", "--batch-size", "8", "--lr", "0.01", "--devices", "2")
    output = run("full_finetune.py", *small)
    losses = losses_in(output)
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.2
    assert_ends_with_picture_and_table(output, tmp_path / "full_finetune.svg", "tokens/s")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "finetuned")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "finetuned")
    text = tokenizer("import os", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(text[0]) == "import os"
    assert model(text).logits.shape == (1, 9, 257)


@pytest.mark.parametrize("script", ["full_finetune.py", "cli/main.py"])
def test_gradients_are_clipped_with_the_precision_of_gpus(script: str, tmp_path: Path) -> None:
    """Lightning's own clipping refuses their fused optimizer under mixed precision."""
    example = loaded(script)
    module = example.CausalLM() if script == "cli/main.py" else example.FullFineTuning(example.load(None)[0], lr=1e-3)
    rows = torch.utils.data.DataLoader(torch.randint(257, (4, 16)), batch_size=4)
    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    trainer = L.Trainer(
        strategy="roundpipe",
        accelerator="cpu",
        devices=2,
        precision="bf16-mixed",
        max_epochs=1,
        gradient_clip_val=1e-3,
        default_root_dir=tmp_path,
        **quiet,
    )
    trainer.fit(module, rows)
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in module.parameters() if weight.grad is not None])
    assert float(norm) == pytest.approx(1e-3, rel=1e-2)


def test_dpo_prefers_the_chosen_answers(run: Callable[..., str], tmp_path: Path) -> None:
    small = ("--max-steps", "4", "--length", "48", "--batch-size", "8", "--lr", "0.01", "--devices", "2")
    output = run("dpo.py", *small, "--output", str(tmp_path / "adapter"))
    gained = re.search(r"(\d+)% of the chosen answers have gained", output)
    assert gained
    assert int(gained[1]) > 50
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert_ends_with_picture_and_table(output, tmp_path / "dpo.svg", "tokens/s")


def test_long_sequence(run: Callable[..., str], tmp_path: Path) -> None:
    small = ("--length", "256", "--max-steps", "5", "--batch-size", "4", "--lr", "0.01", "--devices", "2")
    output = run("long_sequence.py", *small)
    losses = losses_in(output)
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.5
    assert_ends_with_picture_and_table(output, tmp_path / "long_sequence.svg", "tokens/s")


def test_long_sequence_measures_the_memory_of_both_losses(run: Callable[..., str]) -> None:
    output = run("long_sequence.py", "--measure", "--tokens", "1024", "--vocabulary", "2048", "--width", "16")
    found = {name: float(mib) for name, mib in re.findall(r"^  (logits|whole|in pieces) +([0-9.]+) MiB", output, re.M)}
    assert found["logits"] == 4 * 1024 * 2048 / 2**20
    assert found["whole"] >= 2 * found["logits"]
    assert found["in pieces"] < found["logits"]


@pytest.mark.parametrize("has_function", [True, False])
def test_long_sequence_computes_the_same_loss_in_pieces(monkeypatch: pytest.MonkeyPatch, has_function: bool) -> None:
    example = loaded("long_sequence.py")
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
    arguments = ("--config", str(EXAMPLES / "cli" / "config.yaml"), "--data.max_rows", "100", "--data.length", "48")
    arguments += ("--model.lr", "0.01", "--trainer.devices", "2")
    output = run("cli/main.py", "fit", *arguments)
    assert_ends_with_picture_and_table(output, tmp_path / "cli.svg")
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    output = run("cli/main.py", "validate", *arguments, "--ckpt_path", str(checkpoint))
    (loss,) = re.findall(r"val_loss\s+\D\s+([0-9.]+)", output)
    assert float(loss) < 5.2  # 5.5, the logarithm of 257, before training


def test_cli_file_for_gpus_is_understood(run: Callable[..., str]) -> None:
    """Printing the configuration parses it: every name and type must be right."""
    output = run("cli/main.py", "fit", "--config", str(EXAMPLES / "cli" / "gpus.yaml"), "--print_config")
    assert "class_path: lightning_roundpipe.RoundPipeStrategy" in output
    assert output.count("name: Qwen/Qwen3-8B") == 2


def test_several_machines_with_two_ranks_and_on_from_their_checkpoint(
    run: Callable[..., str], forks: Forks, tmp_path: Path
) -> None:
    small = ("--length", "48", "--batch-size", "4", "--checkpoint-every", "3", "--devices", "2", "--lr", "0.01")
    script = str(EXAMPLES / "several_machines" / "train.py")
    output = forks.run(TORCHRUN, "0", script, *small, "--max-steps", "6", folder=tmp_path, needs=["peft"])
    losses = losses_in(output)
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.3
    assert "1 virtual in each of 2 ranks" in output
    assert_ends_with_picture_and_table(output, tmp_path / "run" / "several_machines.svg", "tokens/s")
    checkpoint = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 6
    output = run("several_machines/train.py", *small, "--max-steps", "8")
    assert re.findall(r"^step +(\d+)  loss", output, flags=re.MULTILINE) == ["7", "8"]


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sh"])
def test_launchers_pass_options_that_exist(script: str, tmp_path: Path) -> None:
    """A stand-in for torchrun and srun prints what it is called with."""
    for name in ("torchrun", "srun"):
        (tmp_path / name).write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOST": "first", "SLURM_CPUS_PER_TASK": "8"}
    words = subprocess.run(
        ["bash", str(EXAMPLES / "several_machines" / script)],
        env={**variables, "SLURM_NNODES": "2"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout.splitlines()
    place = next(i for i, word in enumerate(words) if word.endswith("several_machines/train.py"))
    source = (EXAMPLES / "several_machines" / "train.py").read_text() + (EXAMPLES / "common.py").read_text()
    for word in words[place:]:
        assert not word.startswith("--") or f'"{word}"' in source, word
    assert words[words.index("--num-nodes") + 1] == "2"
    if script == "torchrun.sh":
        from torch.distributed.run import get_args_parser

        assert get_args_parser().parse_args(words).rdzv_endpoint == "first:29500"


def test_notebook(run: Callable[..., str], tmp_path: Path) -> None:
    """Its code runs as a script: what Jupyter adds, it does not need."""
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], set(notebook)) == (4, {"cells", "metadata", "nbformat", "nbformat_minor"})
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) > 10
    for cell in notebook["cells"]:
        needed = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            needed |= {"outputs", "execution_count"}
        assert set(cell) == needed
        assert all(isinstance(line, str) for line in cell["source"])
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "quickstart.py"
    script.write_text("\n\n".join(code), encoding="utf-8")
    output = run(script)
    loss, before = map(float, re.findall(r"loss ([0-9.]+) \(a model that says 0 has ([0-9.]+)\)", output)[0])
    assert loss < before / 2
    assert_ends_with_picture_and_table(output, tmp_path / "quickstart.svg")
    assert "fused" in output
    assert (tmp_path / "quickstart.pt").is_file()
