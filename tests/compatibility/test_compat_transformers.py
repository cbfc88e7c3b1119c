"""transformers: outputs, settings, caches and generation of models, their files, their batches and collators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.llama import modeling_llama

from tests.support.huggingface import (
    IGNORED,
    VOCAB,
    Task,
    batches,
    causal,
    loader,
    t5,
    text,
    train,
    train_both,
)
from tests.support.rows import compat

# Settings of models --------------------------------------------------------------------------------------------------


@compat("Library", "transformers gradient_checkpointing_enable")
def test_checkpoints_are_not_recomputed_twice(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That they train alike: tests/parity/test_parity_huggingface.py."""
    calls: list[bool] = []
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda *args: calls.append(True) or forward(*args))

    def num_calls(kind: str, **settings: bool) -> int:
        model = causal()
        if settings:
            model.gradient_checkpointing_enable(settings)
            model.enable_input_require_grads()
        calls.clear()
        train(make_trainer, kind, Task(model), batches())
        assert bool(settings) == any(vars(module).get("gradient_checkpointing") for module in model.modules())
        return len(calls)

    assert num_calls("plain", use_reentrant=False) == 2 * num_calls("plain")
    expected = num_calls("roundpipe")
    assert num_calls("roundpipe", use_reentrant=True) == expected
    assert num_calls("roundpipe", use_reentrant=False) == expected


@compat("Library", "transformers use_cache")
def test_settings_are_put_back_after_an_error(make_trainer: Any) -> None:
    class Failing(Task):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert not self.model.config.use_cache
            assert not self.model.model.layers[0].gradient_checkpointing
            assert self.model(**batch).past_key_values is None
            raise RuntimeError("in the step")

    model = causal()
    model.gradient_checkpointing_enable()
    with pytest.raises(RuntimeError, match="in the step"):
        make_trainer("roundpipe").fit(Failing(model), loader(batches()))
    assert model.config.use_cache
    assert model.model.layers[0].gradient_checkpointing


class Tuples(Task):
    """Reads results by their places, and what layers have recorded."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(**batch, return_dict=False, output_hidden_states=True, output_attentions=True)
        assert type(output) is tuple
        loss, *_, hidden, attentions = output
        return loss + 0.1 * torch.stack(hidden).pow(2).mean() + torch.stack(attentions).pow(2).mean()


class Smoothed(Task):
    """A loss outside the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1)


def softcapped(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """An attention of the user's own, in the place where fused kernels are put."""
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    scores = torch.tanh(query @ key.transpose(-1, -2) * kwargs["scaling"])
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


hf.AttentionInterface.register("softcapped", softcapped)


def resized() -> nn.Module:
    model = causal("Qwen3", tie_word_embeddings=True)
    model.resize_token_embeddings(VOCAB + 4, mean_resizing=False)
    return model


TASKS = [
    pytest.param(
        lambda: Tuples(causal(attn_implementation="eager")),
        id="tuples",
        marks=compat("Library", "transformers return_dict=False"),
    ),
    pytest.param(
        lambda: Smoothed(causal(attn_implementation="sdpa")),
        id="smoothed",
        marks=compat("Library", "transformers losses outside the model"),
    ),
    pytest.param(
        lambda: Task(causal(attn_implementation="softcapped")),
        id="attention",
        marks=compat("Library", "transformers AttentionInterface"),
    ),
    pytest.param(
        lambda: Task(resized()), id="resized", marks=compat("Library", "transformers resize_token_embeddings")
    ),
]


@pytest.mark.parametrize("make", TASKS)
def test_tasks_train_like_plain_lightning(make: Callable[[], Task], make_trainer: Any, assert_alike: Any) -> None:
    plain, ours = train_both(make_trainer, make, batches())
    assert_alike(ours.results, plain.results)
    assert "model.model.embed_tokens.weight" in plain.task.moved


def clip() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = {**sizes, "vocab_size": VOCAB, "max_position_embeddings": 16, "eos_token_id": 2, "pad_token_id": 0}
    images = {**sizes, "image_size": 8, "patch_size": 4}
    torch.manual_seed(1)
    return hf.CLIPModel(hf.CLIPConfig(text_config=words, vision_config=images, projection_dim=8)).train()


def captions(rows: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCAB, (rows, 6)), "pixel_values": torch.randn(rows, 3, 8, 8)}


class Contrasting(Task):
    """Takes the batch in parts, each with negatives of its own."""

    def __init__(self, num_parts: int = 1) -> None:
        super().__init__(clip())
        self._num_parts = num_parts

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [value.tensor_split(self._num_parts) for value in batch.values()]
        losses = [
            self.model(**dict(zip(batch, part, strict=True)), return_loss=True).loss * len(part[0])
            for part in zip(*parts, strict=True)
        ]
        loss = torch.stack(losses).sum() / len(batch["input_ids"])
        self.log("loss", loss)
        return loss


@compat(
    "Library",
    "transformers CLIP (contrastive losses)",
    "differs",
    "Negatives come from the same micro-batch, as under gradient accumulation: num_microbatches=1 takes the whole "
    "batch.",
)
def test_contrastive_losses(make_trainer: Any, assert_alike: Any) -> None:
    whole, ours = train_both(make_trainer, Contrasting, batches(captions), num_microbatches=1)
    assert_alike(ours.results, whole.results)
    parts = train(make_trainer, "plain", Contrasting(3), batches(captions))
    split = train(make_trainer, "roundpipe", Contrasting(), batches(captions))
    assert_alike(split.results, parts.results)
    assert not torch.allclose(parts.trainer.callback_metrics["loss"], whole.trainer.callback_metrics["loss"], rtol=1e-2)


# Files ---------------------------------------------------------------------------------------------------------------


@compat("Library", "transformers save_pretrained")
@compat("Library", "transformers from_pretrained")
def test_files_of_models(make_trainer: Any, assert_alike: Any, tmp_path: Path) -> None:
    plain, ours = train_both(make_trainer, lambda: Task(causal("GPT2")), batches())
    for run, name in ((plain, "plain"), (ours, "ours")):
        run.task.model.save_pretrained(tmp_path / name)
    names = [sorted(file.name for file in (tmp_path / name).iterdir()) for name in ("plain", "ours")]
    assert names[0] == names[1]
    configs = [(tmp_path / name / "config.json").read_text() for name in ("plain", "ours")]
    assert configs[0] == configs[1]

    def load() -> Task:
        return Task(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").train())

    assert_alike(dict(load().state_dict()), dict(plain.task.state_dict()))
    assert train(make_trainer, "roundpipe", load(), batches()).task.moved


@compat(
    "Library",
    "transformers dtype=torch.bfloat16",
    "differs",
    "Gradients of the micro-batches are added up in bfloat16, which rounds: use num_microbatches=1, or weights in "
    "float32 with precision='bf16-mixed'.",
)
def test_weights_in_bfloat16(make_trainer: Any, assert_alike: Any, tmp_path: Path) -> None:
    causal().save_pretrained(tmp_path)

    def load() -> Task:
        return Task(hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train())

    plain, ours = train_both(make_trainer, load, batches(), num_microbatches=1)
    assert_alike(ours.results, plain.results, rtol=0.0, atol=0.0)
    assert {p.dtype for p in ours.task.parameters()} == {torch.bfloat16}

    split = train(make_trainer, "roundpipe", load(), batches())
    for name, expected in plain.task._gradients[0].items():
        found = split.task._gradients[0][name]
        assert found.dtype == torch.bfloat16
        assert (found - expected).float().norm() <= 0.03 * expected.float().norm(), name


# Generation ----------------------------------------------------------------------------------------------------------


class Generating(Task):
    """Generates in every step but that of the training."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model)
        self._options = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, **options}
        self._outputs: list[Any] = []

    def _generate(self, batch: Any) -> Any:
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return self.model.generate(**given, **self._options)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self._generate(batch)

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        self._outputs.append(outputs)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self._generate(batch)


def prompts(rows: int) -> dict[str, Tensor]:
    """Padded on the left."""
    batch = text(rows, 6)
    lengths = torch.randint(3, 7, (rows, 1))
    lengths[0] = 6
    mask = torch.arange(6).expand(rows, 6) >= 6 - lengths
    return {"input_ids": batch["input_ids"] * mask, "attention_mask": mask.long()}


def generated(make_trainer: Any, kind: str, task: Generating, seed: int = 0, **options: Any) -> list[Any]:
    """What validation has generated of one batch, and prediction of another."""
    ready = batches(prompts)
    torch.manual_seed(seed)
    make_trainer(kind, **options).validate(task, loader(ready[:1]), verbose=False)
    return task._outputs + make_trainer(kind, **options).predict(task, loader(ready[1:]))


GENERATIONS = [
    pytest.param(lambda: Generating(causal()), id="greedy", marks=compat("Library", "transformers generate (greedy)")),
    pytest.param(
        lambda: Generating(causal("GPT2"), num_beams=3, length_penalty=0.5),
        id="beams",
        marks=compat("Library", "transformers generate (beam search)"),
    ),
    pytest.param(
        lambda: Generating(t5(), num_beams=2),
        id="encoder-decoder",
        marks=compat("Library", "transformers generate (encoder-decoder)"),
    ),
    pytest.param(
        lambda: Generating(causal(), cache_implementation="static"),
        id="static-cache",
        marks=compat("Library", "transformers generate (static cache)"),
    ),
    pytest.param(
        lambda: Generating(causal(), use_cache=False),
        id="no-cache",
        marks=compat("Library", "transformers generate (use_cache=False)"),
    ),
]


@pytest.mark.parametrize("make", GENERATIONS)
def test_generation_in_evaluation(make: Callable[[], Generating], make_trainer: Any) -> None:
    expected = generated(make_trainer, "plain", make())
    found = generated(make_trainer, "roundpipe", make())
    assert [len(tokens) for tokens in expected] == [5, 4]
    for tokens, wanted in zip(found, expected, strict=True):
        assert torch.equal(tokens, wanted)


@compat("Trainer argument", "inference_mode")
def test_generation_without_inference_mode(make_trainer: Any) -> None:
    runs = [
        generated(make_trainer, kind, Generating(causal()), inference_mode=False) for kind in ("plain", "roundpipe")
    ]
    assert not runs[1][0].is_inference()
    assert all(torch.equal(tokens, wanted) for tokens, wanted in zip(*runs, strict=True))


@compat(
    "Library",
    "transformers generate (sequences of different length)",
    "differs",
    "Where micro-batches end after different numbers of tokens, or num_return_sequences is more than 1, the result of "
    "the step is the list of their results in order.",
)
def test_sequences_of_different_length(make_trainer: Any) -> None:
    def make() -> Generating:
        return Generating(causal(), min_new_tokens=0, eos_token_id=list(range(12, VOCAB)))

    expected = generated(make_trainer, "plain", make())
    found = generated(make_trainer, "roundpipe", make())
    assert any(isinstance(tokens, list) for tokens in found)
    for tokens, wanted in zip(found, expected, strict=True):
        parts = tokens if isinstance(tokens, list) else [tokens]
        assert torch.equal(torch.cat([F.pad(part, (0, wanted.shape[1] - part.shape[1])) for part in parts]), wanted)

    several = [
        generated(make_trainer, kind, Generating(causal(), num_beams=2, num_return_sequences=2))
        for kind in ("plain", "roundpipe")
    ]
    assert all(torch.equal(torch.cat(parts), wanted) for wanted, parts in zip(*several, strict=True))


@compat(
    "Library",
    "transformers generate (sampling)",
    "differs",
    "The numbers are not those of plain Lightning; with the same seed they are the same for any number of devices.",
)
def test_sampling(make_trainer: Any) -> None:
    def sample(seed: int, devices: int) -> list[Any]:
        return generated(make_trainer, "roundpipe", Generating(causal(), do_sample=True), seed, devices=devices)

    first, second, other = sample(1, 2), sample(1, 3), sample(2, 2)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])


class Decoding(Task):
    """Decodes by hand, with a cache that grows, and trains on what it has sampled from itself."""

    def _decode(self, batch: Any) -> Tensor:
        tokens, cache = batch["input_ids"], hf.DynamicCache()
        for _ in range(3):
            given = tokens[:, cache.get_seq_length() :]
            output = self.model(input_ids=given, past_key_values=cache, use_cache=True)
            tokens = torch.cat([tokens, output.logits[:, -1:].argmax(-1)], dim=1)
        assert cache.get_seq_length() == tokens.shape[1] - 1
        return tokens

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            tokens = self._decode(batch)
        return self.model(input_ids=tokens, labels=tokens).loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._decode(batch)


@compat("Library", "transformers DynamicCache")
def test_decoding_by_hand(make_trainer: Any, assert_alike: Any) -> None:
    plain, ours = train_both(make_trainer, lambda: Decoding(causal()), batches())
    assert_alike(ours.results, plain.results)
    kinds = (("plain", plain), ("roundpipe", ours))
    tokens = [make_trainer(kind).predict(run.task, loader(batches())) for kind, run in kinds]
    assert all(torch.equal(found, wanted) for wanted, found in zip(*tokens, strict=True))


# Batches and results -------------------------------------------------------------------------------------------------


class Predicting(Task):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, output_hidden_states=True)


@compat(
    "Library",
    "transformers ModelOutput (results)",
    "differs",
    "Tensors are joined; past_key_values becomes the list of the caches of the micro-batches.",
)
def test_results_of_models(make_trainer: Any) -> None:
    plain, ours = (
        make_trainer(kind).predict(Predicting(causal()), loader(batches())) for kind in ("plain", "roundpipe")
    )
    for found, wanted in zip(ours, plain, strict=True):
        assert type(found) is type(wanted)
        assert list(found) == list(wanted)
        for name in ("loss", "logits", "hidden_states"):
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-6)
        lengths = [cache.get_seq_length() for cache in found.past_key_values]
        assert lengths == [wanted.past_key_values.get_seq_length()] * 3


class FromOutputs(Task):
    """Its batches are results of another model."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert isinstance(batch, BaseModelOutput)
        return self.model(inputs_embeds=batch.last_hidden_state, labels=batch["hidden_states"][0]).loss


def outputs(rows: int) -> BaseModelOutput:
    labels = torch.randint(0, VOCAB, (rows, 6))
    return BaseModelOutput(last_hidden_state=torch.randn(rows, 6, 16), hidden_states=(labels,))


@compat("Library", "transformers ModelOutput (batches)")
def test_batches_that_are_results(make_trainer: Any, assert_alike: Any) -> None:
    plain, ours = train_both(make_trainer, lambda: FromOutputs(causal()), batches(outputs))
    assert_alike(ours.results, plain.results)
    assert plain.task.moved


def tokenizer() -> Any:
    words = Tokenizer(WordLevel({"<pad>": 0, **{f"w{i}": i for i in range(1, VOCAB)}}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")


def bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
        num_labels=3,
    )
    torch.manual_seed(1)
    return hf.BertForSequenceClassification(config).train()


def sentences() -> list[dict[str, Any]]:
    """Nine of different lengths, tokenized, with targets of different lengths."""
    encode = tokenizer()
    rows = []
    for i in range(9):
        words = " ".join(f"w{3 + (i * 7 + j) % 20}" for j in range(3 + i % 4))
        rows.append({**encode(words), "labels": [3 + (i + j) % 20 for j in range(2 + i % 3)]})
    return rows


def classified() -> list[dict[str, Any]]:
    return [{**row, "labels": i % 3} for i, row in enumerate(sentences())]


COLLATORS = [
    pytest.param(
        bert,
        classified,
        hf.DataCollatorWithPadding,
        False,
        id="padding",
        marks=compat("Library", "transformers DataCollatorWithPadding"),
    ),
    pytest.param(
        t5,
        sentences,
        hf.DataCollatorForSeq2Seq,
        True,
        id="seq2seq",
        marks=compat("Library", "transformers DataCollatorForSeq2Seq"),
    ),
]


@pytest.mark.parametrize(("make_model", "make_rows", "collator", "pads_labels"), COLLATORS)
def test_collators(
    make_model: Callable[[], nn.Module],
    make_rows: Callable[[], list[dict[str, Any]]],
    collator: Callable[..., Any],
    pads_labels: bool,
    make_trainer: Any,
    assert_alike: Any,
) -> None:
    data: DataLoader[Any] = DataLoader(make_rows(), batch_size=5, collate_fn=collator(tokenizer()))  # type: ignore[arg-type]
    ready = list(data)
    assert bool((ready[0]["labels"] == IGNORED).any()) is pads_labels
    plain, ours = train_both(make_trainer, lambda: Task(make_model()), ready)
    results = [run.results for run in (ours, plain)]
    assert_alike(*results)
    assert plain.task.moved
