"""transformers: outputs, settings, caches and generation of models, their files, their batches and collators."""

from __future__ import annotations

import contextlib
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

from tests.support.huggingface import IGNORED, VOCAB, Task, batches, build, causal, compare_tasks, text
from tests.support.parity import COPIES, KINDS, assert_alike, both, fit, make_trainer, ready
from tests.support.rows import compat

# Settings of models --------------------------------------------------------------------------------------------------


@compat("Library", "transformers gradient_checkpointing_enable; transformers enable_input_require_grads")
def test_checkpoints_are_not_recomputed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """That they train alike: tests/parity/test_parity_huggingface.py, test_peft.py."""
    calls: list[bool] = []
    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda *args: calls.append(True) or forward(*args))

    def num_calls(kind: str, is_checkpointed: bool) -> int:
        model = causal()
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        calls.clear()
        fit(kind, lambda: Task(model), batches(rows=(5,)))
        return len(calls)

    assert num_calls("plain", True) == 2 * num_calls("plain", False)
    assert num_calls("roundpipe", True) == num_calls("roundpipe", False)


@compat("Library", "transformers use_cache")
@pytest.mark.parametrize("fails", [True, False])
def test_settings_are_off_in_training_steps_and_put_back_after(fails: bool) -> None:
    class Watching(Task):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert not self.model.config.use_cache
            assert not self.model.model.layers[0].gradient_checkpointing
            output = self.model(**batch)
            assert output.past_key_values is None
            if fails:
                raise RuntimeError("in the step")
            return output.loss

    model = causal()
    model.gradient_checkpointing_enable()
    with pytest.raises(RuntimeError, match="in the step") if fails else contextlib.nullcontext():
        make_trainer().fit(Watching(model), ready(batches()))
    assert model.config.use_cache
    assert model.model.layers[0].gradient_checkpointing
    assert model.eval()(**batches()[0]).past_key_values is not None


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
    model = causal("Qwen3", tie_word_embeddings=True, attn_implementation="eager")
    model.resize_token_embeddings(VOCAB + 4, mean_resizing=False)
    return model


TASKS: dict[str, Callable[[], Task]] = {
    "tuples": lambda: Tuples(resized()),
    "smoothed": lambda: Smoothed(causal(attn_implementation="softcapped")),
}


@pytest.mark.parametrize("name", TASKS)
@compat(
    "Library",
    "transformers return_dict=False; transformers losses outside the model; transformers AttentionInterface; "
    "transformers resize_token_embeddings; transformers output_hidden_states; transformers output_attentions",
)
def test_tasks_train_like_plain_lightning(name: str) -> None:
    plain, _ = compare_tasks(TASKS[name])
    assert "model.model.embed_tokens.weight" in plain.moved


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
    "The loss sees a micro-batch: use `whole_batch`, or `num_microbatches=1`.",
)
def test_contrastive_losses() -> None:
    whole, _ = compare_tasks(Contrasting, batches(captions), ours={"num_microbatches": 1})
    parts = fit("plain", lambda: Contrasting(3), batches(captions), seed=5)
    split = fit("roundpipe", Contrasting, batches(captions), seed=5, **COPIES)
    assert_alike(split.results, parts.results)
    losses = [run.trainer.callback_metrics["loss"] for run in (parts, whole)]
    assert not torch.allclose(*losses, rtol=1e-2)


# Files ---------------------------------------------------------------------------------------------------------------


@compat("Library", "transformers save_pretrained; transformers from_pretrained")
def test_files_of_models(tmp_path: Path) -> None:
    def saved(run: Any) -> Any:
        folder = tmp_path / run.kind
        run.module.model.save_pretrained(folder)
        return sorted(file.name for file in folder.iterdir()), (folder / "config.json").read_text()

    plain, _ = compare_tasks(lambda: Task(causal("GPT2")), also=saved)
    loaded = Task(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "roundpipe"))
    assert_alike(dict(loaded.state_dict()), plain.state)


@compat(
    "Library",
    "transformers dtype=torch.bfloat16",
    "differs",
    "Gradients are added up in bfloat16: use weights in float32 with `bf16-mixed`, or `num_microbatches=1`.",
)
def test_weights_in_bfloat16(tmp_path: Path) -> None:
    causal().save_pretrained(tmp_path)

    def load() -> Task:
        return Task(hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).train())

    exact = {"rtol": 0.0, "atol": 0.0}
    plain, ours = compare_tasks(load, ours={"num_microbatches": 1}, tolerances=exact)
    assert {p.dtype for p in ours.module.parameters()} == {torch.bfloat16}

    split = fit("roundpipe", load, batches(), **COPIES)
    for name, expected in plain.watch.gradients[0].items():
        found = split.watch.gradients[0][name]
        assert found is not None
        assert expected is not None
        assert found.dtype == torch.bfloat16
        assert (found - expected).float().norm() <= 0.03 * expected.float().norm(), name


# Generation ----------------------------------------------------------------------------------------------------------


class Generating(Task):
    """Generates in every step but that of the training."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model)
        self._options = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, **options}
        self.outputs: list[Any] = []

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return self.model.generate(**given, **self._options)

    validation_step = predict_step

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        self.outputs.append(outputs)


def prompts(rows: int) -> dict[str, Tensor]:
    """Padded on the left."""
    batch = text(rows, 6)
    lengths = torch.randint(3, 7, (rows, 1))
    lengths[0] = 6
    mask = torch.arange(6).expand(rows, 6) >= 6 - lengths
    return {"input_ids": batch["input_ids"] * mask, "attention_mask": mask.long()}


def generated(kind: str, task: Generating, seed: int = 0, **options: Any) -> list[Any]:
    """What prediction has generated of two batches."""
    data = ready(batches(prompts))
    torch.manual_seed(seed)
    return make_trainer(kind, **options).predict(task, data)


GENERATIONS: dict[str, Callable[[], Generating]] = {
    "greedy": lambda: Generating(causal()),
    "beams": lambda: Generating(causal("GPT2"), num_beams=3, length_penalty=0.5),
    "encoder-decoder": lambda: Generating(build("t5"), num_beams=2),
    "static-cache": lambda: Generating(causal(), cache_implementation="static"),
    "no-cache": lambda: Generating(causal(), use_cache=False),
}


@pytest.mark.parametrize("name", GENERATIONS)
@compat(
    "Library",
    "transformers generate (greedy); transformers generate (beam search); transformers generate (encoder-decoder); "
    "transformers generate (static cache); transformers generate (use_cache=False)",
)
def test_generation_in_prediction(name: str) -> None:
    expected = both(lambda kind: generated(kind, GENERATIONS[name]()))
    assert [len(tokens) for tokens in expected] == [5, 4]


def test_generation_in_validation() -> None:
    def act(kind: str) -> Any:
        task = Generating(causal())
        make_trainer(kind).validate(task, ready(batches(prompts)), verbose=False)
        return task.outputs

    assert [len(tokens) for tokens in both(act)] == [5, 4]


@compat(
    "Library",
    "transformers generate (sequences of different length)",
    "differs",
    "The result is the list of those of the micro-batches, also if `num_return_sequences` is more than 1.",
)
def test_sequences_of_different_length() -> None:
    def make() -> Generating:
        return Generating(causal(), min_new_tokens=0, eos_token_id=list(range(12, VOCAB)))

    expected, found = (generated(kind, make()) for kind in KINDS)
    assert any(isinstance(tokens, list) for tokens in found)
    for tokens, wanted in zip(found, expected, strict=True):
        parts = tokens if isinstance(tokens, list) else [tokens]
        assert torch.equal(torch.cat([F.pad(part, (0, wanted.shape[1] - part.shape[1])) for part in parts]), wanted)

    several = [generated(kind, Generating(causal(), num_beams=2, num_return_sequences=2)) for kind in KINDS]
    assert all(torch.equal(torch.cat(parts), wanted) for wanted, parts in zip(*several, strict=True))


@compat(
    "Library",
    "transformers generate (sampling)",
    "differs",
    "Other random numbers than in plain Lightning; the same for any number of devices.",
)
def test_sampling() -> None:
    def sample(seed: int, devices: int) -> list[Any]:
        return generated("roundpipe", Generating(causal(), do_sample=True), seed, devices=devices)

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
def test_decoding_by_hand() -> None:
    runs = compare_tasks(lambda: Decoding(causal()))
    tokens = [make_trainer(kind).predict(run.module, ready(batches())) for kind, run in zip(KINDS, runs, strict=True)]
    assert all(torch.equal(found, wanted) for wanted, found in zip(*tokens, strict=True))


# Batches and results -------------------------------------------------------------------------------------------------


class Predicting(Task):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, output_hidden_states=True)


@compat(
    "Library",
    "transformers ModelOutput (results)",
    "differs",
    "`past_key_values` is the list of the caches of the micro-batches.",
)
def test_results_of_models() -> None:
    plain, ours = (make_trainer(kind).predict(Predicting(causal()), ready(batches())) for kind in KINDS)
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
def test_batches_that_are_results() -> None:
    compare_tasks(lambda: FromOutputs(causal()), batches(outputs))


def tokenizer() -> Any:
    words = Tokenizer(WordLevel({"<pad>": 0, **{f"w{i}": i for i in range(1, VOCAB)}}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")


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


COLLATORS: dict[str, tuple[Callable[[], list[dict[str, Any]]], Any]] = {
    "bert-classifier": (classified, hf.DataCollatorWithPadding),
    "t5": (sentences, hf.DataCollatorForSeq2Seq),
}


@pytest.mark.parametrize("name", COLLATORS)
@compat("Library", "transformers DataCollatorWithPadding; transformers DataCollatorForSeq2Seq")
def test_collators(name: str) -> None:
    make_rows, collator = COLLATORS[name]
    data: DataLoader[Any] = DataLoader(make_rows(), batch_size=5, collate_fn=collator(tokenizer()))  # type: ignore[arg-type]
    data_list = list(data)
    assert bool((data_list[0]["labels"] == IGNORED).any()) is (name == "t5")
    compare_tasks(lambda: Task(build(name)), data_list)
