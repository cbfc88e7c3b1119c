"""Hugging Face models, built from tiny configs: the same training as plain Lightning on one device, full batch.

The LightningModules are what a user writes: ``self.model(**batch).loss``. Every run takes three AdamW steps on batches
that the number of micro-batches does not divide, the last one smaller. Two choices make the comparison sharp:

- Weights start ten times larger than the configs' default, or most gradients would be too small to be compared.
- AdamW's ``eps`` is 1e-2. Where the true gradient is zero (the bias of attention keys shifts all scores of a row alike,
  which softmax ignores) both runs see only rounding noise, and with a tiny ``eps`` Adam would amplify that noise into
  steps of full size, in either run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import lightning as L
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_roundpipe import RoundPipeStrategy
from tests.support.rows import compat

VOCAB = 40
IGNORED = -100
ROWS = (5, 5, 3)

Batch = Any


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The models are too small for more, and sums over threads would not be bit-identical."""
    torch.set_num_threads(1)


# Modules and runs ----------------------------------------------------------------------------------------------------


class Task(L.LightningModule):
    """What a user writes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-2)


class Accumulating(Task):
    """The reference where a loss couples the rows: plain autograd over weighted micro-batches in sequence."""

    def __init__(self, model: nn.Module, num_microbatches: int, weight: Callable[[dict[str, Tensor]], float]) -> None:
        super().__init__(model)
        self._count = num_microbatches
        self._weight = weight

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        count = min(self._count, len(next(iter(batch.values()))))
        parts = zip(*(value.tensor_split(count) for value in batch.values()), strict=True)
        microbatches = [dict(zip(batch, part, strict=True)) for part in parts]
        weights = torch.tensor([self._weight(microbatch) for microbatch in microbatches])
        losses = torch.stack([self.model(**microbatch).loss for microbatch in microbatches])
        return (losses * weights / weights.sum()).sum()


class Recorder(L.Callback):
    """Keeps the losses that Lightning sees, and counts unit calls that the plan did not foresee."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.num_off_plan = 0

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(outputs["loss"].detach().clone())
        if isinstance(trainer.strategy, RoundPipeStrategy):
            assert trainer.strategy.last_step is not None
            self.num_off_plan += trainer.strategy.last_step.num_off_plan


@dataclass
class Run:
    """What a training left behind, by name."""

    losses: Tensor
    updates: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    num_off_plan: int


def trainer_for(strategy: Any, devices: int, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def loader(batches: Sequence[Batch]) -> DataLoader[Any]:
    """Ready-made batches, untouched (a bare list would be one loader per entry to Lightning)."""
    return DataLoader(batches, batch_size=None, collate_fn=_as_it_is)  # type: ignore[arg-type]


def _as_it_is(batch: Batch) -> Batch:
    return batch


def train(task: Task, batches: Sequence[Batch], strategy: Any = "auto", devices: int = 1) -> Run:
    before = {name: parameter.detach().clone() for name, parameter in task.named_parameters()}
    recorder = Recorder()
    trainer = trainer_for(strategy, devices, callbacks=[recorder])
    trainer.fit(task, loader(batches))
    assert len(recorder.values) == len(batches)
    parameters = {name: parameter.detach() for name, parameter in task.named_parameters()}
    (optimizer,) = trainer.optimizers
    return Run(
        torch.stack(recorder.values),
        {name: parameters[name] - before[name] for name in parameters},
        parameters,
        dict(task.named_buffers()),
        {
            f"{name}.{key}": value
            for name, parameter in task.named_parameters()
            for key, value in optimizer.state[parameter].items()
        },
        recorder.num_off_plan,
    )


def train_piped(
    task: Task, batches: Sequence[Batch], devices: int, microbatches: int, loss_weight: Any = "auto", **options: Any
) -> Run:
    # Real copies on two devices: what is read too early or too late there is NaN.
    options.setdefault("virtual_copies", devices == 2)
    strategy = RoundPipeStrategy(
        num_microbatches=microbatches, loss_weight=loss_weight, threads_per_device=1, **options
    )
    run = train(task, batches, strategy, devices)
    assert run.num_off_plan == 0
    return run


def train_on(pipeline: dict[str, Any], task: Task, batches: Sequence[Batch], loss_weight: Any = "auto") -> Run:
    """With what the fixture ``pipeline`` gives."""
    devices, microbatches = pipeline["devices"], pipeline["num_microbatches"]
    return train_piped(task, batches, devices, microbatches, loss_weight, **pipeline.get("strategy_options", {}))


def assert_same(run: Run, expected: Run) -> None:
    torch.testing.assert_close(run.losses, expected.losses, rtol=1e-4, atol=1e-6)
    for kind in ("parameters", "buffers", "optimizer"):
        found, wanted = getattr(run, kind), getattr(expected, kind)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
    # The step taken, not only the weights it led to: a weight of 0.1 would hide an error of 1e-5 in an update.
    for name, update in expected.updates.items():
        difference = (run.updates[name] - update).norm()
        assert difference <= 1e-3 * update.norm() + 1e-6 * update.numel() ** 0.5, f"update of {name}"


def assert_identical(run: Run, expected: Run) -> None:
    assert torch.equal(run.losses, expected.losses)
    for kind in ("parameters", "buffers", "optimizer"):
        found, wanted = getattr(run, kind), getattr(expected, kind)
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


# Models --------------------------------------------------------------------------------------------------------------


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights at every call, in training mode."""
    torch.manual_seed(1)
    return make().train()


def llama(**options: Any) -> nn.Module:
    config = hf.LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
            "initializer_range": 0.2,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
            **options,
        }
    )
    return hf.LlamaForCausalLM(config)


def qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(
        hf.Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=32,
            initializer_range=0.2,
            tie_word_embeddings=True,
        )
    )


def gpt2(dropout: float = 0.0) -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCAB,
            n_positions=32,
            n_embd=32,
            n_layer=3,
            n_head=4,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
        )
    )


def t5(dropout: float = 0.0) -> nn.Module:
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            dropout_rate=dropout,
            decoder_start_token_id=0,
            eos_token_id=None,
            pad_token_id=0,
        )
    )


def bart(dropout: float = 0.0, layerdrop: float = 0.0) -> nn.Module:
    return hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=32,
            dropout=dropout,
            attention_dropout=dropout,
            encoder_layerdrop=layerdrop,
            decoder_layerdrop=layerdrop,
            init_std=0.2,
            scale_embedding=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
        )
    )


def whisper() -> nn.Module:
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=VOCAB,
            num_mel_bins=8,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_source_positions=6,
            max_target_positions=16,
            init_std=0.2,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )


def _bert_config() -> hf.BertConfig:
    return hf.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
        num_labels=3,
    )


def bert_masked() -> nn.Module:
    return hf.BertForMaskedLM(_bert_config())


def bert_classifier() -> nn.Module:
    return hf.BertForSequenceClassification(_bert_config())


def vit() -> nn.Module:
    model = hf.ViTForImageClassification(
        hf.ViTConfig(
            image_size=8,
            patch_size=4,
            num_channels=3,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=48,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.2,
            num_labels=3,
        )
    )
    return model


def mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            router_aux_loss_coef=0.3,
            initializer_range=0.2,
        )
    )


def qwen3_moe() -> nn.Module:
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=32,
            num_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            router_aux_loss_coef=0.3,
            initializer_range=0.2,
        )
    )


def resnet() -> nn.Module:
    return hf.ResNetForImageClassification(
        hf.ResNetConfig(
            num_channels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=3
        )
    )


# Batches -------------------------------------------------------------------------------------------------------------


def text_batch(rows: int, *, left: bool = False) -> hf.BatchEncoding:
    """Token ids padded to unequal lengths; the first tokens of each row are a prompt without labels."""
    length = 10
    tokens = torch.randint(1, VOCAB, (rows, length))
    lengths = torch.randint(4, length + 1, (rows, 1))
    lengths[0] = length
    places = torch.arange(length).expand(rows, length)
    mask = places >= length - lengths if left else places < lengths
    prompts = torch.randint(0, 3, (rows, 1))
    labels = tokens.masked_fill(~mask | (places < prompts), IGNORED)
    return hf.BatchEncoding(
        {"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels}
    )


def full_text_batch(rows: int) -> dict[str, Tensor]:
    """No padding: every row has as many labels, so that a mean over tokens is a mean over samples too."""
    tokens = torch.randint(1, VOCAB, (rows, 8))
    return {"input_ids": tokens, "labels": tokens.clone()}


def pair_batch(rows: int) -> hf.BatchEncoding:
    """Source and target text, both padded."""
    batch = text_batch(rows)
    batch["labels"] = text_batch(rows)["labels"][:, :7].contiguous()
    return batch


def speech_batch(rows: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(rows, 8, 12), "labels": text_batch(rows)["labels"][:, :7].contiguous()}


def masked_batch(rows: int) -> hf.BatchEncoding:
    batch = text_batch(rows)
    chosen = torch.rand(batch["input_ids"].shape) < 0.4
    chosen[:, 0] = True
    batch["labels"] = batch["input_ids"].masked_fill(~chosen | (batch["attention_mask"] == 0), IGNORED)
    batch["input_ids"] = batch["input_ids"].masked_fill(chosen, VOCAB - 1)
    return batch


def classification_batch(rows: int) -> dict[str, Tensor]:
    return {**text_batch(rows), "labels": torch.randint(0, 3, (rows,))}


def image_batch(rows: int, size: int = 8) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.randint(0, 3, (rows,))}


def batches_of(make: Callable[[int], Batch], rows: Iterable[int] = ROWS) -> list[Batch]:
    torch.manual_seed(2)
    return [make(count) for count in rows]


# Parity --------------------------------------------------------------------------------------------------------------

MODELS = {
    "llama": (llama, text_batch),
    "qwen3-tied": (qwen3, text_batch),
    "gpt2-tied": (gpt2, text_batch),
    "t5": (t5, pair_batch),
    "bart": (bart, pair_batch),
    "whisper": (whisper, speech_batch),
    "bert-masked": (bert_masked, masked_batch),
    "bert-classifier": (bert_classifier, classification_batch),
    "vit": (vit, image_batch),
}


@pytest.fixture(scope="module")
def plain() -> Callable[[str], Run]:
    """Plain Lightning's runs of ``MODELS``, each made once."""
    runs: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in runs:
            model, batch = MODELS[name]
            runs[name] = train(Task(build(model)), batches_of(batch))
        return runs[name]

    return run


@pytest.mark.parametrize("name", MODELS)
@compat("Library", "transformers Llama")
@compat("Library", "transformers Qwen3 (tied embeddings)")
@compat("Library", "transformers GPT-2 (tied embeddings)")
@compat("Library", "transformers T5")
@compat("Library", "transformers BART")
@compat("Library", "transformers Whisper")
@compat("Library", "transformers BERT (masked language model, classification)")
@compat("Library", "transformers ViT")
@compat("Library", "transformers BatchEncoding")
def test_models_train_like_plain_lightning(name: str, pipeline: dict[str, Any], plain: Callable[[str], Run]) -> None:
    model, batch = MODELS[name]
    run = train_on(pipeline, Task(build(model)), batches_of(batch))
    assert_same(run, plain(name))


def test_unequal_padding_needs_token_weights(plain: Callable[[str], Run]) -> None:
    """The batches of this file can tell token weights from sample weights, or the tests above would prove little."""
    run = train_piped(Task(build(llama)), batches_of(text_batch), 2, 3, "samples")
    assert not torch.allclose(run.losses, plain("llama").losses, rtol=1e-3)


def _causal_tokens(microbatch: dict[str, Tensor]) -> float:
    return float((microbatch["labels"][:, 1:] != IGNORED).sum())


@pytest.mark.parametrize("model", [mixtral, qwen3_moe])
@compat(
    "Library",
    "transformers Mixtral, Qwen3-MoE",
    "differs",
    "The auxiliary loss balances the experts over a micro-batch, as under gradient accumulation: num_microbatches=1 "
    "takes the whole batch.",
)
@pytest.mark.ways("lazy")
def test_mixture_of_experts_with_auxiliary_loss(model: Callable[[], nn.Module]) -> None:
    """The auxiliary loss couples all tokens of a batch: exact with one micro-batch, else as under accumulation."""
    batches = batches_of(text_batch)
    assert build(model)(**batches[0]).aux_loss.requires_grad
    assert_same(
        train_piped(Task(build(model)), batches, 2, 1, "causal_label_tokens"), train(Task(build(model)), batches)
    )
    for devices, microbatches in ((2, 3), (4, 5)):
        run = train_piped(Task(build(model)), batches, devices, microbatches, "causal_label_tokens")
        assert_same(run, train(Accumulating(build(model), microbatches, _causal_tokens), batches))


@compat(
    "Library",
    "transformers ResNet (batch norm)",
    "differs",
    "Statistics are those of a micro-batch, as under gradient accumulation: num_microbatches=1 takes the whole batch.",
)
@pytest.mark.ways("aliases")
def test_batch_norm() -> None:
    """Statistics are those of a micro-batch; the running ones see the micro-batches one after another."""
    batches = batches_of(lambda rows: image_batch(rows, 24), (7, 7, 6))
    assert_same(train_piped(Task(build(resnet)), batches, 2, 1), train(Task(build(resnet)), batches))
    for devices in (2, 4):
        expected = train(Accumulating(build(resnet), 3, lambda m: float(len(m["labels"]))), batches)
        assert_same(train_piped(Task(build(resnet)), batches, devices, 3), expected)


# What a forward records ----------------------------------------------------------------------------------------------


class Regularized(Task):
    """Uses what the model's layers record along the way."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        output = self.model(**batch, output_hidden_states=True, output_attentions=True)
        hidden = torch.stack([state.pow(2).mean() for state in output.hidden_states]).mean()
        attention = torch.stack([weights.pow(2).mean() for weights in output.attentions]).mean()
        return output.loss + 0.3 * hidden + 3.0 * attention


def _eager(model: nn.Module) -> nn.Module:
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("model", "batch"),
    [(llama, full_text_batch), (gpt2, full_text_batch), (vit, image_batch)],
    ids=["llama", "gpt2", "vit"],
)
@compat("Library", "transformers output_hidden_states")
@compat("Library", "transformers output_attentions")
def test_hidden_states_and_attentions_in_the_loss(
    model: Callable[[], nn.Module], batch: Callable[[int], Batch], pipeline: dict[str, Any]
) -> None:
    batches = batches_of(batch)
    expected = train(Regularized(_eager(build(model))), batches)
    run = train_on(pipeline, Regularized(_eager(build(model))), batches)
    assert_same(run, expected)


class LateRecording(Task):
    """In the second step the model is called twice, and asked to record for the first time by the second call."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        if batch_idx == 0:
            return loss
        output = self.model(**batch, output_attentions=True)
        return loss + 30.0 * torch.stack([weights.pow(2).mean() for weights in output.attentions]).mean()


def test_recording_that_starts_in_the_middle_of_a_step() -> None:
    batches = batches_of(full_text_batch)
    expected = train(LateRecording(_eager(build(llama))), batches)
    for devices, microbatches in ((1, 2), (2, 3)):
        strategy = RoundPipeStrategy(num_microbatches=microbatches, threads_per_device=1)
        assert_same(train(LateRecording(_eager(build(llama))), batches, strategy, devices), expected)


# Settings of the model -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "microbatches"), [(1, 2), (2, 3)])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "t5"])
@compat("Library", "transformers gradient_checkpointing_enable")
@pytest.mark.ways("lazy")
def test_gradient_checkpointing(
    name: str, use_reentrant: bool, devices: int, microbatches: int, plain: Callable[[str], Run]
) -> None:
    make, batch = MODELS[name]
    model = build(make)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    run = train_piped(Task(model), batches_of(batch), devices, microbatches)
    assert_same(run, plain(name))
    assert model.is_gradient_checkpointing


@compat("Library", "transformers use_cache")
def test_the_cache_is_off_in_training_steps_and_on_again_after() -> None:
    class Watching(Task):
        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            assert self.model(**batch).past_key_values is None
            return super().training_step(batch, batch_idx)

    model = build(llama)
    assert model.config.use_cache is True
    batches = batches_of(text_batch)
    run = train_piped(Watching(model), batches, 2, 3, "causal_label_tokens")
    assert model.config.use_cache is True
    assert model(**batches[0]).past_key_values is not None
    assert run.losses.isfinite().all()


class Generating(Task):
    """Trains, then samples greedily in ``validation_step``, with a key-value cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.generated: list[Tensor] = []

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        tokens = self.model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=5,
            do_sample=False,
            use_cache=True,
        )
        self.generated.append(tokens)


@pytest.mark.parametrize("name", ["llama", "gpt2-tied", "t5"])
@compat("Library", "transformers generate (greedy)")
@pytest.mark.ways("aliases")
def test_generate_in_validation(name: str) -> None:
    make, batch = MODELS[name]
    training = batches_of(batch)
    validation = batches_of(lambda rows: text_batch(rows, left=True), (5, 3))

    def tokens_of(strategy: Any, devices: int) -> list[Tensor]:
        task = Generating(build(make))
        trainer_for(strategy, devices, num_sanity_val_steps=1).fit(task, loader(training), loader(validation))
        return task.generated

    expected = tokens_of("auto", 1)
    assert [len(tokens) for tokens in expected] == [5, 5, 3]
    for devices, microbatches in ((1, 2), (2, 3)):
        strategy = RoundPipeStrategy(num_microbatches=microbatches, threads_per_device=1)
        for found, wanted in zip(tokens_of(strategy, devices), expected, strict=True):
            assert torch.equal(found, wanted)


# Random numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (lambda: llama(attention_dropout=0.3), text_batch),
        (lambda: gpt2(0.2), text_batch),
        (lambda: t5(0.2), pair_batch),
        (lambda: bart(0.2), pair_batch),
    ],
    ids=["llama", "gpt2", "t5", "bart"],
)
@pytest.mark.ways("lazy")
def test_dropout_does_not_depend_on_the_number_of_devices(
    model: Callable[[], nn.Module], batch: Callable[[int], Batch]
) -> None:
    batches = batches_of(batch)
    runs = []
    for devices in (1, 2, 4):
        task = Task(build(model))
        runs.append(train_piped(task, batches, devices, 4, "label_tokens", round_size=4))
    for run in runs[1:]:
        assert_identical(run, runs[0])
    with torch.no_grad():
        undisturbed = build(model).eval()(**batches[0]).loss
    assert (runs[0].losses[0] - undisturbed).abs() > 1e-4


@pytest.mark.ways("lazy")
def test_skipped_layers_do_not_depend_on_the_number_of_devices() -> None:
    """LayerDrop: every micro-batch skips other layers, so that most calls are not where the plan expects them."""
    batches = batches_of(pair_batch, (8, 8, 8, 8))
    runs = []
    for devices in (1, 2, 4):
        task = Task(build(lambda: bart(layerdrop=0.5)))
        strategy = RoundPipeStrategy(num_microbatches=4, round_size=4, loss_weight="label_tokens", threads_per_device=1)
        runs.append(train(task, batches, strategy, devices))
    for run in runs[1:]:
        assert_same(run, runs[0])
    whole = train(Task(build(bart)), batches)
    assert (runs[0].losses[0] - whole.losses[0]).abs() > 1e-4
