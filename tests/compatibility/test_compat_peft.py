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

from tests.support.huggingface import Task, Trained, batches, causal, loader, pairs, t5, text, train, train_both
from tests.support.rows import compat

LM = "CAUSAL_LM"
TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(**options: Any) -> peft.PeftConfig:
    # Random A and B: with the usual B = 0, A gets no gradient in the first step.
    return peft.LoraConfig(
        **{"task_type": LM, "r": 2, "target_modules": TARGETS, "init_lora_weights": False, **options}
    )


def adapted(config: peft.PeftConfig, model: nn.Module | None = None) -> nn.Module:
    """A model with an adapter; the same weights at every call."""
    model = causal() if model is None else model
    torch.manual_seed(3)
    return peft.get_peft_model(model, config)


# Methods --------------------------------------------------------------------------------------------------------------

Make = Callable[[], nn.Module]
# LoRA on linear layers, DoRA, IA3 and modules_to_save: tests/parity/test_parity_peft.py.
METHODS = [
    pytest.param(
        lambda: adapted(lora(target_modules="all-linear", use_rslora=True, lora_alpha=1, bias="all")),
        id="lora-all",
        marks=compat("Library", "PEFT LoRA (all-linear, rank-stabilized, biases)"),
    ),
    pytest.param(
        lambda: adapted(
            lora(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
            causal("Mixtral"),
        ),
        id="lora-experts",
        marks=compat("Library", "PEFT LoRA (weights of experts, target_parameters)"),
    ),
    pytest.param(
        lambda: adapted(lora(target_modules=["embed_tokens", "q_proj"], trainable_token_indices={"lm_head": [3, 4]})),
        id="lora-embeddings",
        marks=compat("Library", "PEFT LoRA (embeddings, trainable_token_indices)"),
    ),
    pytest.param(
        lambda: adapted(lora(target_modules=["c_attn"], fan_in_fan_out=True), causal("GPT2")),
        id="lora-gpt2",
        marks=compat("Library", "PEFT LoRA (fan_in_fan_out)"),
    ),
    pytest.param(
        lambda: adapted(peft.PromptTuningConfig(task_type=LM, num_virtual_tokens=3)),
        id="prompt-tuning",
        marks=compat("Library", "PEFT prompt tuning"),
    ),
    pytest.param(
        lambda: adapted(
            peft.PromptEncoderConfig(
                task_type=LM, num_virtual_tokens=3, encoder_hidden_size=8, encoder_reparameterization_type="LSTM"
            )
        ),
        id="p-tuning",
        marks=compat("Library", "PEFT p-tuning"),
    ),
    pytest.param(
        lambda: adapted(peft.PrefixTuningConfig(task_type=LM, num_virtual_tokens=3)),
        id="prefix-tuning",
        marks=compat("Library", "PEFT prefix tuning"),
    ),
    pytest.param(
        lambda: adapted(
            peft.LoHaConfig(task_type=LM, r=2, target_modules=["q_proj"], init_weights=False),
        ),
        id="loha",
        marks=compat("Library", "PEFT LoHa"),
    ),
    pytest.param(
        lambda: adapted(peft.LoKrConfig(task_type=LM, r=2, target_modules=["q_proj"], init_weights=False)),
        id="lokr",
        marks=compat("Library", "PEFT LoKr"),
    ),
    pytest.param(
        lambda: adapted(peft.OFTConfig(task_type=LM, oft_block_size=4, target_modules=["q_proj"], init_weights=False)),
        id="oft",
        marks=compat("Library", "PEFT OFT"),
    ),
    pytest.param(
        lambda: adapted(peft.VeraConfig(task_type=LM, r=2, target_modules=["q_proj"], init_weights=False)),
        id="vera",
        marks=compat("Library", "PEFT VeRA"),
    ),
    pytest.param(
        lambda: adapted(peft.LNTuningConfig(task_type=LM)), id="norms", marks=compat("Library", "PEFT LayerNorm tuning")
    ),
    pytest.param(
        lambda: adapted(peft.AdaptionPromptConfig(task_type=LM, adapter_len=2, adapter_layers=2)),
        id="adaption-prompt",
        marks=compat("Library", "PEFT adaption prompt"),
    ),
]


@pytest.mark.parametrize("make", METHODS)
def test_methods_train_like_plain_lightning(make: Make, make_trainer: Any, assert_alike: Any) -> None:
    plain, ours = train_both(make_trainer, lambda: Task(make()), batches())
    assert_alike(ours.results, plain.results)
    assert plain.task.moved
    assert plain.task.moved <= {name for name, p in plain.task.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("reference", [False, True])
@compat("Library", "PEFT prefix tuning (encoder-decoder)")
def test_prefixes_of_an_encoder_and_a_decoder(reference: bool, make_trainer: Any, assert_alike: Any) -> None:
    """Also with a forward of the base model in the same step, which has no prefix."""

    class Comparing(Task):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if not reference:
                return super().training_step(batch, batch_idx)
            with torch.no_grad(), self.model.disable_adapter():
                base = self.model(**batch).logits
            output = self.model(**batch)
            return output.loss + (output.logits - base).pow(2).mean()

    def make() -> Task:
        config = peft.PrefixTuningConfig(
            task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8
        )
        return Comparing(adapted(config, t5()))

    plain, ours = train_both(make_trainer, make, batches(pairs))
    assert_alike(ours.results, plain.results)
    assert {name for name in plain.task.moved if "prompt_encoder" in name}


@compat("Library", "PEFT prefix tuning")
def test_prefixes_in_generation(make_trainer: Any) -> None:
    """The cache grows behind the prefix: in prediction, and in a training step that samples from its own model."""

    class Sampling(Task):
        def _sample(self, batch: Any) -> Tensor:
            given = {name: batch[name] for name in ("input_ids", "attention_mask")}
            return self.model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                tokens = self._sample(batch)
            return self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self._sample(batch)

    def make() -> Task:
        return Sampling(adapted(peft.PrefixTuningConfig(task_type=LM, num_virtual_tokens=3)))

    plain, ours = train_both(make_trainer, make, batches())
    tokens = [
        make_trainer(kind).predict(run.task, loader(batches())) for kind, run in (("plain", plain), ("roundpipe", ours))
    ]
    assert [len(each) for each in tokens[0]] == [5, 4]
    assert all(torch.equal(one, other) for one, other in zip(*tokens, strict=True))
    torch.testing.assert_close(ours.task.state_dict(), plain.task.state_dict(), rtol=1e-4, atol=1e-6)


@compat(
    "Library",
    "PEFT CPT",
    "refused",
    "Its prompt module assigns to its own weights in every forward, which would reach a copy: use another method, or "
    "strategy='auto'.",
)
def test_weights_that_are_assigned_in_a_forward_are_refused(make_trainer: Any) -> None:
    config = peft.CPTConfig(task_type=LM, cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2])
    with pytest.raises(Exception, match=r"prompt_encoder.default.*assigns to its own weights.*strategy='auto'"):
        make_trainer("roundpipe").fit(Task(adapted(config)), loader(batches()))


class Allocating(Task):
    """AdaLoRA, with the call that its users make after every step."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.model.base_model.update_and_allocate(self.trainer.global_step)


@compat("Library", "PEFT AdaLoRA")
def test_ranks_that_change_during_training(make_trainer: Any, assert_alike: Any) -> None:
    def make() -> Task:
        config = peft.AdaLoraConfig(
            task_type=LM,
            init_r=3,
            target_r=1,
            total_step=4,
            tinit=0,
            tfinal=1,
            deltaT=1,
            target_modules=TARGETS,
            init_lora_weights=False,
        )
        return Allocating(adapted(config))

    plain, ours = train_both(make_trainer, make, batches(rows=(5, 4, 5, 4)))
    assert_alike(ours.results, plain.results)
    pattern = plain.task.model.peft_config["default"].rank_pattern
    assert ours.task.model.peft_config["default"].rank_pattern == pattern
    kept = [sum(ranks) for ranks in pattern.values()]
    assert sum(kept) < 3 * len(kept)


# Adapters that are switched -------------------------------------------------------------------------------------------


class Comparing(Task):
    """Holds the adapter close to the base model, as preference optimization does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad(), self.model.disable_adapter():
            base = self.model(**batch).logits
        output = self.model(**batch)
        return output.loss + (output.logits - base).pow(2).mean()


class ComparingLater(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(**batch)
        with torch.no_grad(), self.model.disable_adapter():
            base = self.model(**batch).logits
        return output.loss + (output.logits - base).pow(2).mean()


class ComparingWithAnother(Task):
    """The reference is a second, frozen adapter."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.model.set_adapter("other")
        with torch.no_grad():
            reference = self.model(**batch).logits
        self.model.set_adapter("default")
        output = self.model(**batch)
        return output.loss + (output.logits - reference).pow(2).mean()


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


SWITCHES = [
    pytest.param(Comparing, id="base-first", marks=compat("Library", "PEFT disable_adapter")),
    pytest.param(ComparingLater, id="base-last", marks=compat("Library", "PEFT disable_adapter")),
    pytest.param(ComparingWithAnother, id="another", marks=compat("Library", "PEFT set_adapter")),
    pytest.param(Both, id="both", marks=compat("Library", "PEFT set_adapter")),
    pytest.param(Alternating, id="alternating", marks=compat("Library", "PEFT set_adapter")),
]


@pytest.mark.parametrize("kind", SWITCHES)
def test_switched_adapters(kind: type[Task], make_trainer: Any, assert_alike: Any) -> None:
    def make() -> Task:
        model = adapted(lora(modules_to_save=["lm_head"] if kind is Comparing else None))
        model.add_adapter("other", lora())
        model.set_adapter("default")
        return kind(model)

    plain, ours = train_both(make_trainer, make, batches())
    assert_alike(ours.results, plain.results)
    moved = {name.rsplit(".", 2)[-2] for name in plain.task.moved if "lora_" in name}
    assert moved == {Both: {"other"}, Alternating: {"default", "other"}}.get(kind, {"default"})


# Files ----------------------------------------------------------------------------------------------------------------


def _saved(run: Trained, folder: Path) -> tuple[dict[str, Tensor], Any, list[str]]:
    run.task.model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    return peft.utils.load_peft_weights(str(folder), "cpu"), config, sorted(file.name for file in folder.iterdir())


SAVED = [
    pytest.param(lambda: lora(modules_to_save=["lm_head"]), id="lora", marks=compat("Library", "PEFT save_pretrained")),
    pytest.param(
        lambda: peft.PrefixTuningConfig(task_type=LM, num_virtual_tokens=3),
        id="prefix",
        marks=compat("Library", "PEFT save_pretrained"),
    ),
]


@pytest.mark.parametrize("config", SAVED)
@compat("Library", "PEFT from_pretrained")
@compat("Library", "PEFT merge_and_unload")
def test_saved_adapters(
    config: Callable[[], peft.PeftConfig], make_trainer: Any, assert_alike: Any, tmp_path: Path
) -> None:
    """The files are those of plain Lightning; they load, train on, and merge."""
    plain, ours = train_both(make_trainer, lambda: Task(adapted(config())), batches())
    expected, found = _saved(plain, tmp_path / "plain"), _saved(ours, tmp_path / "ours")
    assert found[1:] == expected[1:]
    assert_alike(dict(found[0]), dict(expected[0]))

    is_lora = hasattr(ours.task.model, "merge_and_unload")
    loaded = peft.PeftModel.from_pretrained(causal(), tmp_path / "ours", is_trainable=is_lora)
    batch = batches()[0]
    with torch.no_grad():
        wanted = ours.task.eval().model(**batch).logits
        torch.testing.assert_close(loaded.eval()(**batch).logits, wanted)
    if is_lora:
        again = train(make_trainer, "roundpipe", Task(loaded.train()), batches())
        assert again.task.moved
        merged = ours.task.model.merge_and_unload()
        with torch.no_grad():
            torch.testing.assert_close(merged(**batch).logits, wanted, rtol=1e-4, atol=1e-5)
        assert not [name for name, _ in merged.named_parameters() if "lora_" in name]


@compat("Library", "PEFT add_adapter of transformers models")
def test_adapters_of_transformers(make_trainer: Any, assert_alike: Any) -> None:
    """Without a PeftModel around the model."""

    def make() -> Task:
        model = causal()
        torch.manual_seed(3)
        model.add_adapter(lora())
        return Task(model)

    plain, ours = train_both(make_trainer, make, batches(text))
    assert_alike(ours.results, plain.results)
    assert {name for name in plain.task.moved if "lora_" in name} == plain.task.moved != set()
