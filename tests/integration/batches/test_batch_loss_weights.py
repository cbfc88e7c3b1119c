"""What weighs a micro-batch in the loss: options, and what is chosen without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_roundpipe.integration.batches.loss_weight import LossWeights
from lightning_roundpipe.integration.steps.notices import Notices
from tests.support.loaders import Loader
from tests.support.parity import compare, make_loader, make_trainer
from tests.support.small import Small


class Tokens(Small):
    """A loss over labelled positions only."""

    def token_loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["x"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.token_loss(batch)
        self.log("loss", loss)
        return loss


class Causal(Tokens):
    def token_loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch["x"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class Divided(Tokens):
    def token_loss(self, batch: Any) -> Tensor:
        logits = self(batch["x"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum") / batch["num_items_in_batch"]


@pytest.fixture
def token_loader() -> Loader:
    """Rows with between none and all of 5 positions labelled."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for rows in (8, 7, 4):
        labels = torch.randint(3, (rows, 5), generator=generator)
        keep = torch.randint(0, 6, (rows, 1), generator=generator)
        keep[0], keep[1] = 0, 5
        labels[torch.arange(5)[None] >= keep] = -100
        batches.append({"x": torch.randn(rows, 5, 6, generator=generator), "labels": labels})
    return Loader(batches)


def num_labels(batch: Any) -> int:
    return int((batch["labels"] >= 0).sum())


# Nothing is tried on the first batch.
GUESSING: dict[str, Any] = {"options": {"check_split": "off"}}
# name: (module, micro-batches, rule). Of 8 micro-batches of one row the first has no label: its loss is NaN.
RULES: dict[str, tuple[type[Tokens], int, Any]] = {
    "label tokens, by rows": (Tokens, 8, "label_tokens"),
    "causal": (Causal, 3, "causal_label_tokens"),
    "function": (Tokens, 3, num_labels),
    "divided by the items of the batch": (Divided, 3, "auto"),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(token_loader: Loader, name: str) -> None:
    module, num_microbatches, rule = RULES[name]
    if module is Divided:
        for batch in token_loader.batches:
            batch["num_items_in_batch"] = num_labels(batch)
    ours = {"num_microbatches": num_microbatches, "options": {"loss_weight": rule}}
    # The mean of losses that are sums is not their sum.
    compare(module, token_loader, ours=ours, but_for=["logged", "metrics"] if module is Divided else [])


def test_weights_matter(token_loader: Loader) -> None:
    """The tests above can fail: samples are the wrong weight for a mean over tokens."""

    with pytest.raises(AssertionError, match="not close"):
        compare(Tokens, token_loader, ours={"options": {"loss_weight": "samples"}})


def test_labels_are_demanded() -> None:
    with pytest.raises(ValueError, match=r"loss_weight='label_tokens' needs a tensor 'labels'.*loss_weight='samples'"):
        make_trainer(options={"loss_weight": "label_tokens"}).fit(Small(), make_loader())


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_impossible_weights(weight: float) -> None:
    with pytest.raises(ValueError, match="weights must be numbers >= 0"):
        make_trainer(options={"loss_weight": lambda batch: weight}).fit(Small(), make_loader())


def test_auto_guesses_that_labels_count_where_some_are_ignored(token_loader: Loader) -> None:
    with pytest.warns(UserWarning, match="loss_weight='label_tokens'.*another shape than input_ids") as caught:
        compare(Tokens, token_loader, ours=GUESSING)
    assert len([one for one in caught if "loss_weight=" in str(one.message)]) == 1


def test_auto_leaves_out_the_first_label_where_labels_are_those_of_the_tokens(token_loader: Loader) -> None:
    for batch in token_loader.batches:
        batch["input_ids"] = batch["labels"].clamp(min=0)
    with pytest.warns(UserWarning, match=r"without the first of each row \(loss_weight='causal_label_tokens'\)"):
        compare(Causal, token_loader, ours=GUESSING)


@pytest.mark.parametrize("width", [5, 6])
def test_labels_of_another_sequence_may_have_the_shape_of_the_tokens(token_loader: Loader, width: int) -> None:
    """Targets and sources are filled up by themselves: in some batches, or in all, they are as long as each other."""
    for batch, tokens in zip(token_loader.batches, (width, 5, 5), strict=True):
        batch["input_ids"] = torch.ones(len(batch["x"]), tokens, dtype=torch.long)
    why = "labels are others than input_ids" if width == 5 else "labels have another shape"
    with pytest.warns(UserWarning, match=why):
        compare(Tokens, token_loader, ours=GUESSING)


def test_auto_counts_samples_where_no_label_is_ignored(caplog: Any) -> None:
    class Learns(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss((batch["x"], batch["labels"]))

    loader = Loader([{"x": x, "labels": y} for x, y in make_loader()])
    with caplog.at_level("INFO"):
        compare(Learns, loader)
    assert "loss_weight" not in caplog.text


def test_a_function_that_gives_zero_everywhere_is_an_error() -> None:
    def nothing(batch: Any) -> int:
        return 0

    with pytest.raises(ValueError, match=r"nothing gave 0 for all 3 micro-batches"):
        make_trainer(options={"loss_weight": nothing}).fit(Small(), make_loader())


def test_ignored_labels_in_another_place_are_warned_of(token_loader: Loader) -> None:
    class Learns(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    loader = Loader([(batch["x"], batch["labels"]) for batch in token_loader.batches])
    with pytest.warns(UserWarning, match=r"batch\[1\] holds -100.*counts samples.*loss_weight='samples'"):
        make_trainer().fit(Learns(), loader)


SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SIZES |= {"vocab_size": 24}
CTC = {"conv_dim": (8,), "conv_kernel": (3,), "conv_stride": (2,), "num_feat_extract_layers": 1}
CTC |= {**SIZES, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
LLAMA, BERT = ("LlamaForCausalLM", SIZES), ("BertForSequenceClassification", SIZES)
GPT2 = ("GPT2LMHeadModel", {"vocab_size": 24, "n_embd": 16, "n_layer": 1, "n_head": 2})
XLNET = ("XLNetLMHeadModel", {"vocab_size": 24, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16})
DECODER = {"model_type": "bert", "is_decoder": True, "add_cross_attention": True, **SIZES}
COMPOSED = ("EncoderDecoderModel", {"encoder": {"model_type": "bert", **SIZES}, "decoder": DECODER})
# name: (class and sizes of each model, whether the first is frozen, rule, whether it is certain)
CLASSES: dict[str, tuple[list[tuple[str, Any]], bool, str, bool]] = {
    "shifts": ([LLAMA], False, "causal_label_tokens", True),
    "shifts by default": ([GPT2], False, "causal_label_tokens", True),
    "does not shift": ([XLNET], False, "label_tokens", True),
    "mean of sequences": ([("Wav2Vec2ForCTC", {**CTC, "ctc_loss_reduction": "mean"})], False, "samples", True),
    "sum of sequences": ([("Wav2Vec2ForCTC", {**CTC, "ctc_loss_reduction": "sum"})], False, "sum", True),
    "two means": ([("BertForPreTraining", SIZES)], False, "label_tokens", False),
    "decoder with a head of its own": ([COMPOSED], False, "label_tokens", True),
    "frozen beside it": ([BERT, LLAMA], True, "causal_label_tokens", True),
    "two that disagree": ([BERT, LLAMA], False, "label_tokens", False),
}


def take(weights: LossWeights, *models: Any, **given: Any) -> None:
    """Lets a step call the models, which compute nothing."""
    with weights.watching("training_step"):
        for model in models:
            model.forward = lambda **kwargs: None
            model(**given)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_class_of_a_model_of_hugging_face_tells(kind: str) -> None:
    hf = pytest.importorskip("transformers")
    given, is_frozen, rule, is_certain = CLASSES[kind]
    models = [getattr(hf, name)(getattr(hf, name).config_class(**sizes)) for name, sizes in given]
    if is_frozen:
        models[0].requires_grad_(False)
    labels = torch.tensor([[1, 2, -100]])
    weights = LossWeights(torch.nn.ModuleList(models), "auto", Notices())
    guessed = weights.decision([{"labels": labels, "input_ids": labels}])
    take(weights, *models, labels=labels)
    found = weights.decision([{"labels": labels, "input_ids": labels}])
    assert (guessed.rule, guessed.is_certain) == (rule, False)
    assert (found.rule, found.is_certain) == (rule, is_certain)
    assert given[-1][0] in found.why


@pytest.mark.parametrize(
    ("method", "rule"), [("PromptTuningConfig", "label_tokens"), ("PrefixTuningConfig", "causal_label_tokens")]
)
def test_virtual_tokens_in_front_predict_the_first_label(method: str, rule: str) -> None:
    hf, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    model = getattr(hf, GPT2[0])(hf.GPT2Config(**GPT2[1]))
    adapted = peft.get_peft_model(model, getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=2))
    labels = torch.tensor([[1, 2, -100]])
    weights = LossWeights(adapted, "auto", Notices())
    take(weights, adapted.get_base_model(), labels=labels)
    found = weights.decision([{"labels": labels, "input_ids": labels}])
    assert (found.rule, found.is_certain) == (rule, True)
