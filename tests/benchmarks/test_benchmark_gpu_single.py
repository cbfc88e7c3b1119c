"""The benchmark for one GPU runs without one: every line of it that needs no GPU."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_single
from benchmarks.gpu_single import CASES, TINY, Llama, main, measure, train

ARGS = argparse.Namespace(quick=True, cap_gib=24.0, steps=2, warmup=1)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", TINY)
def test_both_models_train_pipelined_and_plain(name: str) -> None:
    ours, plain = train("roundpipe", TINY[name], ARGS), train("resident", TINY[name], ARGS)
    for found in (ours, plain):
        assert found["tokens_per_second"]["median"] > 0
        assert found["seconds_per_step"] > 0
        assert found["peak_host_bytes"] > 0
    assert 0 <= ours["transfers_under_compute"] <= 1
    assert ours["bytes_up"] > 0
    assert ours["bytes_down"] > 0
    assert ours["num_microbatches"] == TINY[name].num_microbatches


@pytest.mark.parametrize("name", CASES)
def test_the_models_do_not_fit_the_default_cap(name: str) -> None:
    with torch.device("meta"):
        model = Llama(CASES[name], is_checkpointed=False)
    resident = 0
    for parameter in model.parameters():
        # Trained: the weight, its gradient, and two moments.
        resident += parameter.numel() * parameter.element_size() * (4 if parameter.requires_grad else 1)
    assert resident > 24 * 2**30


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_single"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "this benchmark needs a CUDA device; --tiny runs it on virtual devices\n"


def test_what_cannot_run_is_null_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(command: list[str], **kwargs: Any) -> Any:
        """In this process: another one would import everything again."""
        assert command[:3] == [sys.executable, "-m", "benchmarks.gpu_single"]
        monkeypatch.setattr(sys, "argv", command[2:])
        main()
        return SimpleNamespace(stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    found = measure("full", "fsdp_offload", ARGS, tmp_path)
    assert found == {"tokens_per_second": None, "reason": "RuntimeError: needs a GPU"}
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout="killed"))
    found = measure("full", "fsdp_offload", ARGS, tmp_path)
    assert found == {"tokens_per_second": None, "reason": "the process died: killed"}


def test_one_json_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measured(name: str, variant: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
        assert args.quick
        return {"tokens_per_second": None, "reason": f"{name} {variant}"}

    monkeypatch.setattr(gpu_single, "measure", measured)
    monkeypatch.setattr(sys, "argv", ["gpu_single", "--tiny", "--case", "lora"])
    main()
    report = json.loads(capsys.readouterr().out)
    assert report["benchmark"] == "gpu_single"
    assert list(report["results"]) == ["lora"]
    assert list(report["results"]["lora"]) == ["roundpipe", "resident", "fsdp_offload", "deepspeed_offload"]
    assert report["parameters"]["cases"]["lora"]["layers"] == TINY["lora"].layers
