"""The command itself: help, version, exit statuses."""

from __future__ import annotations

import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_roundpipe_command
from lightning_roundpipe import __version__
from lightning_roundpipe.cli import main, plan
from lightning_roundpipe.planning import CallCost, CostProfile
from tests.cli.conftest import RunFailing
from tests.cli.test_cli_models import SIZES

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("plan", "simulate", "estimate", "timeline", "doctor")


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([command, "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    assert "--json" in text
    assert f"roundpipe {command} " in text.split("example", 1)[1]  # an example to copy


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("fly",), "invalid choice: 'fly'"),
        (("plan",), "required: --profile, --devices, --microbatches"),
        (
            ("plan", "--devices", "0"),
            "argument --devices: '0' is not a whole number of at least 1. (see roundpipe plan",
        ),
        (("plan", "--microbatches", "1.5"), "argument --microbatches: '1.5' is not a whole number"),
        (("plan", "--round-size", "-3"), "argument --round-size: '-3' is not a whole number"),
        (("plan", "--device-memory", "24"), "'24' lacks a unit: write a size like 24GiB"),
        (("plan", "--h2d", "25GB"), "'25GB' is not a bandwidth"),
        (("plan", "--latency", "10"), "'10' lacks a unit"),
        (("simulate", "--hop-ms", "1.6ms"), "'1.6ms' is not a number of milliseconds"),
        (("simulate", "--only", "pipedream"), "invalid choice: 'pipedream'"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(
    arguments: tuple[str, ...], expected: str, run_failing: RunFailing
) -> None:
    message = run_failing(*arguments)
    assert expected in message
    assert message.startswith("roundpipe")
    assert message.count("\n") == 1


def test_errors_that_the_user_cannot_mend_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: Any) -> int:
        raise KeyError("a bug")

    monkeypatch.setattr(plan, "run", broken)
    with pytest.raises(KeyError, match="a bug"):
        main(["plan", "--profile", "p.json", "--devices", "1", "--microbatches", "1"])


def test_an_interrupt_has_a_status_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "run", interrupted)
    assert main(["plan", "--profile", "p.json", "--devices", "1", "--microbatches", "1"]) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "roundpipe plan: interrupted\n"


def test_the_package_runs_as_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m lightning_roundpipe.cli --version``."""
    monkeypatch.setattr(sys, "argv", ["cli", "--version"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_module("lightning_roundpipe.cli", run_name="__main__")
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"roundpipe {__version__}\n"


def test_a_reader_that_stops_reading_leaves_no_error(llama_file: str) -> None:
    """In a process of its own, as the console script: the error comes from a real pipe."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    arguments = ["simulate", "--profile", llama_file, "--devices", "2", "--microbatches", "2", "--only", "gpipe"]
    with os.fdopen(write_end, "wb") as pipe:
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=600,
            check=False,
        )
    assert result.returncode == 141
    assert result.stderr == b""


SCRIPT = "import sys; from lightning_roundpipe_command import main; sys.exit(main())"
# What the console script does with one command line after the other, and a look at what each has imported.
PROGRAM = """
import json, sys
from lightning_roundpipe_command import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["roundpipe", *arguments]
    try:
        status = main()
    except SystemExit as error:
        status = error.code
    heavy = sorted({"torch", "lightning", "numpy", "transformers", "matplotlib"} & set(sys.modules))
    print(f"ended with {status}, imported:", *heavy, file=sys.stderr)
"""
LIGHT: list[tuple[tuple[str, ...], int]] = [
    (("--help",), 0),
    (("--version",), 0),
    *(((command, "--help"), 0) for command in COMMANDS),
    ((), 2),
    (("fly",), 2),
    (("plan", "--devices", "0"), 2),
    (("plan", "--profile", "PROFILE", "--devices", "2", "--microbatches", "4", "--timeline", "TRACE"), 0),
    (("timeline", "TRACE"), 0),
    (("simulate", "--profile", "PROFILE", "--devices", "2", "--microbatches", "4"), 0),
    (("estimate", "--model", "CONFIG", "--gpu", "rtx4090", "--seq-len", "512"), 0),
    (("estimate", "--model", "no such model", "--gpu", "rtx4090", "--seq-len", "512"), 2),
    (("estimate", "--model", "nobody/nothing", "--gpu", "rtx4090", "--seq-len", "512"), 2),
]


def test_commands_import_no_torch(llama_file: str, tmp_path: Path) -> None:
    """As the console script; --help takes a tenth of a second because of this."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **SIZES}), encoding="utf-8")
    files = {"PROFILE": llama_file, "TRACE": str(tmp_path / "trace.json"), "CONFIG": str(config)}
    lines = [[files.get(argument, argument) for argument in arguments] for arguments, _ in LIGHT]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=True,
    )
    printed = iter(result.stderr.splitlines())
    for arguments, status in LIGHT:
        if status:
            assert next(printed).startswith("roundpipe"), arguments
        assert next(printed) == f"ended with {status}, imported:", arguments
    assert not list(printed)


def test_the_console_script_is_the_light_one() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '\nroundpipe = "lightning_roundpipe_command:main"\n' in text
    assert '\npy-modules = ["lightning_roundpipe_command"]\n' in text


def test_the_console_script_leaves_an_imported_package_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = sys.modules["lightning_roundpipe"]
    monkeypatch.setattr(sys, "argv", ["roundpipe", "--version"])
    with pytest.raises(SystemExit):
        lightning_roundpipe_command.main()
    assert capsys.readouterr().out == f"roundpipe {__version__}\n"
    assert sys.modules["lightning_roundpipe"] is package


def test_names_that_the_terminal_cannot_show_are_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    CostProfile((CallCost("größe", 1.0, 2.0),)).save(path)
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="ascii"))
    assert main(["plan", "--profile", str(path), "--devices", "1", "--microbatches", "1"]) == 0
    assert b"gr\\xf6\\xdfe" in output.getvalue()


def test_a_stdout_without_a_descriptor_is_written_to(monkeypatch: pytest.MonkeyPatch, llama_file: str) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["plan", "--profile", llama_file, "--devices", "2", "--microbatches", "2"]) == 0
    assert "Step time" in stream.getvalue()
