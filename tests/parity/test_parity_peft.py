"""PEFT adapters on tiny Hugging Face models: only adapters are trained, to the values of plain Lightning."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import lightning as L
import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from tests.support.rows import compat

VOCAB = 40
IGNORED = -100
WEIGHTS = {"loss_weight": "causal_label_tokens"}


def base_model(family: str = "Qwen3") -> nn.Module:
    """A causal language model; the same weights at every call."""
    config = getattr(hf, f"{family}Config")(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        initializer_range=0.2,  # ten times the default: gradients that are large enough to be compared
    )
    torch.manual_seed(1)
    return getattr(hf, f"{family}ForCausalLM")(config)


def lora(**options: Any) -> peft.PeftConfig:
    # Random A and B: with the usual B = 0, A gets no gradient in the first step.
    return peft.LoraConfig(
        **{
            "task_type": "CAUSAL_LM",
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "init_lora_weights": False,
            **options,
        }
    )


def ia3() -> peft.PeftConfig:
    return peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    )


class FineTuning(L.LightningModule):
    """What a user writes."""

    def __init__(self, model: nn.Module, config: peft.PeftConfig) -> None:
        super().__init__()
        self.model = peft.get_peft_model(model, config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1)


def padded_batches() -> list[hf.BatchEncoding]:
    torch.manual_seed(2)
    batches = []
    for rows in (5, 5, 3):
        tokens = torch.randint(1, VOCAB, (rows, 10))
        mask = torch.arange(10).expand(rows, 10) < torch.randint(3, 11, (rows, 1))
        labels = tokens.masked_fill(~mask, IGNORED)
        batches.append(hf.BatchEncoding({"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}))
    return batches


CASES: dict[str, tuple[str, Callable[[], peft.PeftConfig]]] = {
    "lora-qwen3": ("Qwen3", lora),
    "lora-llama": ("Llama", lora),
    "dora": ("Qwen3", lambda: lora(use_dora=True)),
    "ia3": ("Llama", ia3),
    "modules-to-save": ("Qwen3", lambda: lora(modules_to_save=["lm_head", "embed_tokens"])),
}


def case(name: str) -> Callable[[], FineTuning]:
    family, config = CASES[name]
    return lambda: FineTuning(base_model(family), config())


def trained_names(name: str) -> set[str]:
    return {key for key, parameter in case(name)().named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", CASES)
@compat("Library", "PEFT LoRA")
@compat("Library", "PEFT DoRA")
@compat("Library", "PEFT IA3")
@compat("Library", "PEFT modules_to_save")
def test_adapters_train_like_plain_lightning(
    name: str,
    pipeline: dict[str, Any],
    train: Callable[..., Any],
    assert_same: Callable[..., None],
    assert_pipelined: Callable[..., None],
    references: dict[Any, Any],
) -> None:
    key = ("peft", name)
    if key not in references:
        references[key] = train(case(name), padded_batches, optimizer=adamw)
    torch.manual_seed(1234)  # as `train` does before it makes the module
    initial = case(name)().state_dict()

    run = train(
        case(name),
        padded_batches,
        **{**pipeline, "strategy_options": {**WEIGHTS, **pipeline.get("strategy_options", {})}},
        optimizer=adamw,
    )

    assert_same(run, references[key])
    assert_pipelined(run, devices=pipeline["devices"], num_microbatches=pipeline["num_microbatches"], min_calls=5)
    trained = trained_names(name)
    assert trained
    assert {key for key, gradient in run.gradients.items() if gradient is not None} == trained
    changed = {key for key, value in run.state.items() if not torch.equal(value, initial[key])}
    assert changed == trained


def test_base_weights_keep_their_identity_and_bits(train: Callable[..., Any]) -> None:
    untouched = base_model()
    bits = {name: parameter.detach().clone() for name, parameter in untouched.named_parameters()}
    addresses = {name: parameter.data_ptr() for name, parameter in untouched.named_parameters()}
    run = train(
        lambda: FineTuning(untouched, lora()),
        padded_batches,
        devices=2,
        num_microbatches=3,
        strategy_options={**WEIGHTS, "virtual_copies": True},
        optimizer=adamw,
    )
    base = {
        name.replace(".base_layer", ""): parameter
        for name, parameter in run.module.model.base_model.model.named_parameters()
        if "lora_" not in name
    }
    assert base.keys() == bits.keys()
    for name, parameter in base.items():
        assert parameter.grad is None
        assert not parameter.requires_grad
        assert parameter.data_ptr() == addresses[name]
        assert torch.equal(parameter, bits[name])


@compat("Library", "PEFT save_pretrained")
@compat("Library", "PEFT from_pretrained")
def test_a_saved_adapter_is_the_one_of_plain_lightning(
    train: Callable[..., Any], assert_same: Callable[..., None], tmp_path: Path
) -> None:
    plain = train(case("lora-qwen3"), padded_batches, optimizer=adamw)
    piped = train(
        case("lora-qwen3"), padded_batches, devices=2, num_microbatches=3, strategy_options=WEIGHTS, optimizer=adamw
    )
    plain.module.model.save_pretrained(tmp_path / "plain")
    piped.module.model.save_pretrained(tmp_path / "piped")
    expected, found = (peft.utils.load_peft_weights(str(tmp_path / name), "cpu") for name in ("plain", "piped"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)

    loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path / "piped").eval()
    batch = padded_batches()[0]
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).logits, piped.module.eval().model(**batch).logits)


@pytest.mark.parametrize("use_reentrant", [True, False])
@compat("Library", "transformers enable_input_require_grads")
@pytest.mark.ways("lazy")
def test_gradient_checkpointing_with_inputs_that_require_gradients(
    use_reentrant: bool, train: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    """The usual recipe for adapters: a forward hook on the embedding, so that reentrant checkpoints have a gradient."""

    def make() -> FineTuning:
        module = case("lora-llama")()
        module.model.enable_input_require_grads()
        module.model.base_model.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return module

    run = train(make, padded_batches, devices=2, num_microbatches=3, strategy_options=WEIGHTS, optimizer=adamw)
    assert_same(run, train(make, padded_batches, optimizer=adamw))
    assert_same(run, train(case("lora-llama"), padded_batches, optimizer=adamw))


@compat(
    "Library",
    "PEFT LoRA (dropout)",
    "differs",
    "Random numbers are not those of plain Lightning; they are the same for any number of devices.",
)
@pytest.mark.ways("lazy")
def test_adapter_dropout_does_not_depend_on_the_number_of_devices(
    train: Callable[..., Any], assert_same: Callable[..., None]
) -> None:
    runs = [
        train(
            lambda: FineTuning(base_model(), lora(lora_dropout=0.3)),
            padded_batches,
            devices=devices,
            num_microbatches=4,
            strategy_options={**WEIGHTS, "round_size": 4},
            optimizer=adamw,
        )
        for devices in (1, 2, 4)
    ]
    for run in runs[1:]:
        assert_same(run, runs[0], exact=True)
    undisturbed = train(lambda: FineTuning(base_model(), lora()), padded_batches, optimizer=adamw)
    assert (runs[0].losses[0] - undisturbed.losses[0]).abs() > 1e-4
