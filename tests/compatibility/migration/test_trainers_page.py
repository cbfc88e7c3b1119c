"""The page for those who come from Unsloth, Axolotl or LLaMA-Factory: its options exist, its exports can be loaded."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from tests.docs.pages import python_of, run_block, text_of
from tests.support.huggingface import adapted, batches, causal
from tests.support.parity import fit, make_trainer, ready

PAGE, TRL = "docs/migration/trainers.md", "docs/migration/trl.md"
OURS: dict[str, Callable[..., Any]] = {
    "Trainer": L.Trainer,
    "RoundPipeStrategy": RoundPipeStrategy,
    "ModelCheckpoint": ModelCheckpoint,
    "DataLoader": DataLoader,
    "LoraConfig": peft.LoraConfig,
    "fit": L.Trainer.fit,
}


def calls_on(page: str) -> list[ast.Call]:
    """The calls of ours that its tables name."""
    found = [code for code in re.findall(r"`([^`\n]+)`", text_of(page)) if re.match(rf"({'|'.join(OURS)})\(", code)]
    calls = [ast.parse(code, mode="eval").body for code in found]
    return [call for call in calls if isinstance(call, ast.Call)]


@pytest.mark.parametrize(("page", "least"), [(TRL, 7), (PAGE, 9)])
def test_arguments_of_ours_exist(page: str, least: int) -> None:
    calls = calls_on(page)
    assert len(calls) >= least
    for call in calls:
        assert isinstance(call.func, ast.Name)
        known = inspect.signature(OURS[call.func.id]).parameters
        names = [keyword.arg for keyword in call.keywords]
        assert names
        assert set(names) <= set(known), ast.unparse(call)


def test_values_for_ours_are_taken() -> None:
    """What the tables write in full is made as it is written."""
    for page in (TRL, PAGE):
        for code in map(ast.unparse, calls_on(page)):
            if "..." not in code and not code.startswith(("fit(", "DataLoader(")):
                eval(code, dict(OURS))


def test_options_of_transformers_exist() -> None:
    """Those for all trainers of TRL, which inherits them."""
    table = text_of(TRL).split("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    own = {"activation_offloading", "peft_config"}
    assert own < names
    assert names - own <= set(inspect.signature(transformers.TrainingArguments).parameters)


class Tokenizer:
    """Writes one file, as one of transformers would."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def logits(model: nn.Module) -> Tensor:
    batch = batches()[0]
    with torch.no_grad():
        return model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


@pytest.fixture(scope="module")
def page_of_trl() -> dict[str, Any]:
    """The class of the module that is exported, without the training that follows it on the page."""
    (code,) = (block for block in python_of(TRL) if "class PackedSFT" in block)
    names: dict[str, Any] = {}
    exec(compile(code.split("loader = ")[0], TRL, "exec"), names)
    return names


def test_merged_model_and_adapter_can_be_loaded(
    page_of_trl: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a training, and again from a checkpoint of it: logits are those of the model that was trained."""
    monkeypatch.chdir(tmp_path)
    causal().save_pretrained("base")
    run = fit("roundpipe", lambda: page_of_trl["PackedSFT"](adapted()), batches())
    run.trainer.save_checkpoint("last.ckpt")
    names = {"model": run.module.model, "tokenizer": Tokenizer()}
    trained = logits(names["model"])
    assert not torch.allclose(trained, logits(adapted()), atol=1e-2)
    run_block(PAGE, "merge_and_unload", names)

    merged = transformers.AutoModelForCausalLM.from_pretrained("merged")
    assert type(merged) is type(causal())
    torch.testing.assert_close(logits(merged), trained, rtol=1e-4, atol=1e-5)
    base = transformers.AutoModelForCausalLM.from_pretrained("base")
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(base, "adapter")), trained)
    assert Path("merged/tokenizer.json").is_file()

    again = {**page_of_trl, "model": adapted()}
    run_block(PAGE, "load_from_checkpoint", again)
    torch.testing.assert_close(logits(again["model"]), trained)


def test_adapters_on_a_base_in_bfloat16_are_trained_in_float32(page_of_trl: dict[str, Any]) -> None:
    model = adapted(model=causal().to(torch.bfloat16))
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in adapters.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make_trainer(precision="bf16-mixed", options={"virtual_copies": True})
    trainer.fit(page_of_trl["PackedSFT"](model, lr=1e-2), ready(batches()))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(adapters)
    assert trainer.strategy.last_step.num_microbatches == 3
