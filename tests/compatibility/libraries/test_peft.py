"""PEFT: every kind of adapter trains as in plain Lightning; adapters are switched, saved, loaded and merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from tests.support.huggingface import Task, adapted, batches, build, causal, compare_tasks, lora, padded, pairs
from tests.support.parity import COPIES, KINDS, Run, fit, make_trainer, ready
from tests.support.rows import compat

LM = "CAUSAL_LM"
TARGETS = ["q_proj", "v_proj", "down_proj"]


def checkpointed() -> nn.Module:
    """The usual recipe: a hook on the embedding, so that reentrant checkpoints have a gradient."""
    model = adapted()
    model.enable_input_require_grads()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


def on_query(kind: str, layers: int = 1, **options: Any) -> nn.Module:
    config = getattr(peft, kind)(task_type=LM, target_modules=["q_proj"], **options)
    return adapted(config, causal(num_hidden_layers=layers))


def prompted(kind: str, layers: int = 2, **options: Any) -> nn.Module:
    config = getattr(peft, kind)(task_type=LM, **{"num_virtual_tokens": 3, **options})
    return adapted(config, causal(num_hidden_layers=layers))


# What is trained together, each method with a model of its own. LoRA by itself is in
# tests/parity/test_parity_huggingface.py, prefix tuning is below.
METHODS: dict[str, Callable[[], list[nn.Module]]] = {
    "of layers": lambda: [
        on_query("LoHaConfig", r=2, init_weights=False),
        on_query("LoKrConfig", r=2, init_weights=False),
        on_query("OFTConfig", oft_block_size=4, init_weights=False),
        on_query("VeraConfig", layers=2, r=2, init_weights=False),  # layers share what is not trained
        adapted(peft.LNTuningConfig(task_type=LM), causal(num_hidden_layers=1)),
    ],
    "of products": lambda: [
        adapted(lora(use_dora=True), causal(num_hidden_layers=1)),
        adapted(
            peft.IA3Config(task_type=LM, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
            causal(num_hidden_layers=1),
        ),
        adapted(
            lora(target_modules="all-linear", use_rslora=True, lora_alpha=1, bias="all"), causal(num_hidden_layers=1)
        ),
    ],
    "of prompts": lambda: [
        prompted("PromptTuningConfig", layers=1),
        prompted("PromptEncoderConfig", layers=1, encoder_hidden_size=8, encoder_reparameterization_type="LSTM"),
        adapted(peft.AdaptionPromptConfig(task_type=LM, adapter_len=2, adapter_layers=2)),
    ],
    "modules_to_save": lambda: [adapted(lora(modules_to_save=["lm_head", "embed_tokens"]), causal("Qwen3"))],
    "weights of experts": lambda: [
        adapted(
            lora(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
            causal("Mixtral"),
        )
    ],
    "embeddings": lambda: [
        adapted(lora(target_modules=["embed_tokens", "q_proj"], trainable_token_indices={"lm_head": [3, 4]}))
    ],
    "fan_in_fan_out": lambda: [adapted(lora(target_modules=["c_attn"], fan_in_fan_out=True), causal("GPT2"))],
    "reentrant checkpoints": lambda: [checkpointed()],
}


class Several(Task):
    """Trains several models on the same batches."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__(nn.ModuleList(models))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = torch.stack([model(**batch).loss for model in self.model]).sum()
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("name", METHODS)
@compat(
    "Library",
    "PEFT DoRA; PEFT IA3; PEFT modules_to_save; PEFT LoRA (all-linear, rank-stabilized, biases); "
    "PEFT LoRA (weights of experts, target_parameters); PEFT LoRA (embeddings, trainable_token_indices); "
    "PEFT LoRA (fan_in_fan_out); PEFT prompt tuning; PEFT p-tuning; PEFT LoHa; PEFT LoKr; "
    "PEFT OFT; PEFT VeRA; PEFT LayerNorm tuning; PEFT adaption prompt",
)
def test_methods_train_like_plain_lightning(name: str) -> None:
    plain, _ = compare_tasks(lambda: Several(METHODS[name]()))
    assert plain.moved <= {name for name, p in plain.module.named_parameters() if p.requires_grad}
    assert {name.split(".")[1] for name in plain.moved} == {str(number) for number in range(len(plain.module.model))}


def test_base_weights_keep_their_identity_and_bits() -> None:
    base = causal()
    before = {id(parameter): (parameter.data_ptr(), parameter.detach().clone()) for parameter in base.parameters()}

    def make() -> Task:
        return Task(adapted(model=base))

    run = fit("roundpipe", make, batches(padded), **COPIES)
    kept = [parameter for name, parameter in run.module.named_parameters() if "lora_" not in name]
    assert {id(parameter) for parameter in kept} == set(before)
    for parameter in kept:
        address, bits = before[id(parameter)]
        assert parameter.grad is None
        assert parameter.data_ptr() == address
        assert torch.equal(parameter, bits)


class Comparing(Task):
    """Holds the adapter close to the base model, as preference optimization does."""

    is_first = True

    def base(self, batch: Any) -> Tensor:
        with torch.no_grad(), self.model.disable_adapter():
            return self.model(**batch).logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        base = self.base(batch) if self.is_first else None
        output = self.model(**batch)
        return output.loss + (output.logits - (self.base(batch) if base is None else base)).pow(2).mean()


@compat("Library", "PEFT prefix tuning (encoder-decoder)")
def test_prefixes_of_an_encoder_and_a_decoder() -> None:
    """With a forward of the base model in the same step, which has no prefix."""

    def make() -> Task:
        config = peft.PrefixTuningConfig(
            task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8
        )
        return Comparing(adapted(config, build("t5")))

    plain, _ = compare_tasks(make, batches(pairs))
    assert {name for name in plain.moved if "prompt_encoder" in name}


@compat("Library", "PEFT prefix tuning")
def test_prefixes_in_generation() -> None:
    """The cache grows behind the prefix: in prediction, and in a training step that samples from its own model."""

    class Sampling(Task):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            given = {name: batch[name] for name in ("input_ids", "attention_mask")}
            return self.model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                tokens = self.predict_step(batch, batch_idx)
            return self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss

    runs = compare_tasks(lambda: Sampling(prompted("PrefixTuningConfig")))
    tokens = [make_trainer(kind).predict(run.module, ready(batches())) for kind, run in zip(KINDS, runs, strict=True)]
    assert [len(each) for each in tokens[0]] == [5, 4]
    assert all(torch.equal(one, other) for one, other in zip(*tokens, strict=True))


@compat(
    "Library",
    "PEFT CPT",
    "refused",
    "It assigns to its own weights in every forward: use another method.",
)
def test_weights_that_are_assigned_in_a_forward_are_refused() -> None:
    config = peft.CPTConfig(task_type=LM, cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2])
    with pytest.raises(Exception, match=r"prompt_encoder.default.*assigns to its own weights.*strategy='auto'"):
        make_trainer().fit(Task(adapted(config)), ready(batches()))


class Allocating(Task):
    """AdaLoRA, with the call that its users make after every step."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.model.base_model.update_and_allocate(self.trainer.global_step)


@compat("Library", "PEFT AdaLoRA")
def test_ranks_that_change_during_training() -> None:
    def make() -> Task:
        schedule = {"init_r": 3, "target_r": 1, "total_step": 4, "tinit": 0, "tfinal": 1, "deltaT": 1}
        config = peft.AdaLoraConfig(task_type=LM, target_modules=TARGETS, init_lora_weights=False, **schedule)
        return Allocating(adapted(config))

    plain, _ = compare_tasks(
        make,
        batches(rows=(5, 4, 5, 4)),
        also=lambda run: run.module.model.peft_config["default"].rank_pattern,
    )
    kept = [sum(ranks) for ranks in plain.module.model.peft_config["default"].rank_pattern.values()]
    assert sum(kept) < 3 * len(kept)


# Adapters that are switched -------------------------------------------------------------------------------------------


class ComparingLater(Comparing):
    is_first = False


class ComparingWithAnother(Comparing):
    """The reference is a second, frozen adapter."""

    def base(self, batch: Any) -> Tensor:
        self.model.set_adapter("other")
        with torch.no_grad():
            reference = self.model(**batch).logits
        self.model.set_adapter("default")
        return reference


class Both(Task):
    """Uses two adapters in one step; the last one is trained, as PEFT has frozen the other one by the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.model.set_adapter("default")
        loss = self.model(**batch).loss
        self.model.set_adapter("other")
        return loss + 2 * self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        adapters = [p for name, p in self.named_parameters() if "lora_" in name]
        return torch.optim.AdamW(adapters, lr=1e-2, eps=1e-2)


class Alternating(Both):
    """Trains one adapter per batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.set_adapter("other" if batch_idx % 2 else "default")

    training_step = Task.training_step


SWITCHES: dict[type[Task], set[str]] = {
    Comparing: {"default"},
    ComparingLater: {"default"},
    ComparingWithAnother: {"default"},
    Both: {"other"},
    Alternating: {"default", "other"},
}


@pytest.mark.parametrize("kind", SWITCHES)
@compat("Library", "PEFT disable_adapter; PEFT disable_adapter (in a step); PEFT set_adapter")
def test_switched_adapters(kind: type[Task]) -> None:
    def make() -> Task:
        model = adapted(lora(modules_to_save=["lm_head"] if kind is Comparing else None))
        model.add_adapter("other", lora())
        model.set_adapter("default")
        return kind(model)

    plain, _ = compare_tasks(make)
    assert {name.rsplit(".", 2)[-2] for name in plain.moved if "lora_" in name} == SWITCHES[kind]


# Files ----------------------------------------------------------------------------------------------------------------


def saved(run: Run, folder: Path) -> tuple[dict[str, Tensor], Any, list[str]]:
    run.module.model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    return dict(peft.utils.load_peft_weights(str(folder), "cpu")), config, sorted(f.name for f in folder.iterdir())


SAVED: dict[str, Callable[[], nn.Module]] = {
    "lora": lambda: adapted(lora(modules_to_save=["lm_head"])),
    "prefix": lambda: prompted("PrefixTuningConfig"),
}


@pytest.mark.parametrize("name", SAVED)
@compat("Library", "PEFT prefix tuning; PEFT save_pretrained; PEFT from_pretrained; PEFT merge_and_unload")
def test_saved_adapters(name: str, tmp_path: Path) -> None:
    """The files are those of plain Lightning; they load, train on, and merge."""
    _, ours = compare_tasks(lambda: Task(SAVED[name]()), also=lambda run: saved(run, tmp_path / run.kind))
    loaded = peft.PeftModel.from_pretrained(causal(), tmp_path / "roundpipe", is_trainable=name == "lora")
    batch = batches()[0]
    with torch.no_grad():
        wanted = ours.module.eval().model(**batch).logits
        torch.testing.assert_close(loaded.eval()(**batch).logits, wanted)
    if name == "lora":
        assert fit("roundpipe", lambda: Task(loaded.train()), batches(), **COPIES).moved
        merged = ours.module.model.merge_and_unload()
        with torch.no_grad():
            torch.testing.assert_close(merged(**batch).logits, wanted, rtol=1e-4, atol=1e-5)
        assert not [name for name, _ in merged.named_parameters() if "lora_" in name]


@compat("Library", "PEFT add_adapter of transformers models")
def test_adapters_of_transformers() -> None:
    """Without a PeftModel around the model."""

    def make() -> Task:
        model = causal()
        torch.manual_seed(3)
        model.add_adapter(lora())
        return Task(model)

    plain, _ = compare_tasks(make)
    assert {name for name in plain.moved if "lora_" in name} == plain.moved != set()
