"""The page about migration: what it tells to write runs, and what it tells to replace is written for this Lightning."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from tests.support.small import CLASSES, WIDTH, Small

PAGE = Path(__file__).resolve().parents[3] / "docs" / "migration/index.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^(Before|After)?[^\n]*\n\n```python\n(.*?)```", TEXT, flags=re.DOTALL | re.MULTILINE)
OURS = [code for _, code in BLOCKS if "lightning_roundpipe" in code]


def test_blocks() -> None:
    assert [when for when, _ in BLOCKS] == ["Before", "After"] * 3 + ["", ""]
    assert all("lightning_roundpipe" in code for when, code in BLOCKS if when == "After")
    assert len(OURS) == 4


@pytest.mark.parametrize("code", OURS, ids=["ddp", "fsdp", "deepspeed", "weights of deepspeed"])
def test_what_to_write_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Small().state_dict()}, "weights.ckpt")
    dataset = TensorDataset(torch.randn(128, WIDTH), torch.randint(CLASSES, (128,)))
    Block = type("Block", (torch.nn.Sequential,), {})
    module = Small()
    module.body = torch.nn.Sequential(*(Block(*layers) for layers in module.body))
    names: dict[str, Any] = {"L": L, "torch": torch, "DataLoader": DataLoader, "dataset": dataset, "module": module}
    names["loader"] = DataLoader(dataset, batch_size=64)
    if "weights.ckpt" in code:
        names["module"] = Small()
    exec(compile(code.replace("num_workers=16", "num_workers=0"), PAGE.name, "exec"), names)
    if "configure_optimizers" in code:
        (group,) = names["configure_optimizers"](module).param_groups
        assert group["weight_decay"] == 0.0
    trainer = names.get("trainer")
    if trainer is None:
        assert names["module"].trainer.global_step == 2
    else:
        if trainer.global_step == 0:
            trainer.fit(module, names["loader"])
        assert (trainer.global_step, len(trainer.strategy.pool)) == (2, 4)


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_what_to_replace_is_right(strategy: type) -> None:
    calls = [node for _, code in BLOCKS for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    (call,) = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == strategy.__name__]
    allowed = set(inspect.signature(strategy).parameters)
    if strategy is FSDPStrategy:
        allowed |= set(inspect.signature(torch.distributed.fsdp.FullyShardedDataParallel).parameters)
    assert {keyword.arg for keyword in call.keywords} <= allowed


def test_commands() -> None:
    modules = re.findall(r"^python -m (\S+)", TEXT, flags=re.MULTILINE)
    assert len(modules) == 2
    assert all(importlib.util.find_spec(module) for module in modules)
    (tool,) = re.findall(r"from lightning\.pytorch\.utilities\.deepspeed import (\w+)", TEXT)
    assert hasattr(importlib.import_module("lightning.pytorch.utilities.deepspeed"), tool)
