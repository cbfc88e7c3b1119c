"""What ``loss_weight="auto"`` means: a guess until the model is seen to take labels, or something settles it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_roundpipe.integration.batches.loss_weight import LossWeights
from lightning_roundpipe.integration.batches.rank_shares import share_of
from lightning_roundpipe.integration.steps.notices import Notices
from tests.support.parity import make_trainer, ready

LABELS = torch.tensor([[1, 2, 3], [4, -100, -100]])
# Labels: 3 and 1 of two rows; without the first of each row 2 and 0.
PARTS = [{"labels": LABELS[:1]}, {"labels": LABELS[1:]}]
SIZES = (1, 1)
WEIGHTS = {"samples": (0.5, 0.5), "label_tokens": (0.75, 0.25), "causal_label_tokens": (1.0, 0.0), "sum": (0.5, 0.5)}
NO_MASK = [{"labels": LABELS[:1]}, {"labels": LABELS[:1]}]
CLASSES = [{"labels": torch.tensor([1])}, {"labels": torch.tensor([-100])}]
TOKENS = [{**part, "input_ids": part["labels"].clamp(min=0)} for part in PARTS]


def weights_of(rule: Any = "auto", module: nn.Module | None = None) -> LossWeights:
    return LossWeights(nn.Linear(1, 1) if module is None else module, rule, Notices())


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> Iterator[Any]:
    """What was said of weights since the last call: notes, warnings."""

    def taken() -> tuple[list[str], list[str]]:
        notes = [record.message for record in caplog.records if "loss_weight=" in record.message]
        warned = [str(one.message) for one in recwarn.list if "loss_weight=" in str(one.message)]
        caplog.clear()
        recwarn.clear()
        return notes, warned

    with caplog.at_level("INFO"):
        yield taken


# What may weigh ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "rules"),
    [
        (PARTS, ("label_tokens", "samples", "causal_label_tokens", "sum")),
        (TOKENS, ("causal_label_tokens", "samples", "label_tokens", "sum")),
        (NO_MASK, ("samples", "label_tokens", "causal_label_tokens", "sum")),
        (CLASSES, ("label_tokens", "samples", "sum")),
        ([{"labels": torch.zeros(1, 2)}] * 2, ("samples", "sum")),
        ([{"x": LABELS}] * 2, ("samples", "sum")),
        ([torch.zeros(1)] * 2, ("samples", "sum")),
        ([{"num_items_in_batch": 4, **part} for part in PARTS], ("sum", "samples", *list(WEIGHTS)[1:3])),
    ],
)
def test_what_weighs_now_is_the_first_of_the_candidates(parts: Any, rules: tuple[str, ...]) -> None:
    weights = weights_of()
    assert weights.candidates(parts) == rules
    assert weights.of(parts, SIZES) == weights.of(parts, SIZES, rules[0])


@pytest.mark.parametrize("rule", ["samples", "sum", len])
def test_what_the_user_says_is_the_only_candidate(rule: Any) -> None:
    assert weights_of(rule).candidates(PARTS) == (rule,)


@pytest.mark.parametrize("rule", WEIGHTS)
def test_candidates_can_be_tried(rule: str) -> None:
    weights, factors = weights_of().of(PARTS, SIZES, rule)
    assert weights == WEIGHTS[rule]
    assert factors == ((1.0, 1.0) if rule == "sum" else weights)


# What is settled -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", WEIGHTS)
def test_what_is_settled_weighs(rule: str, said: Any) -> None:
    weights = weights_of()
    with weights.watching("training_step"):
        weights.of(PARTS, SIZES)
        weights.settle(rule, "it was tried")
        assert weights.of(PARTS, SIZES) == weights_of().of(PARTS, SIZES, rule)
    decision = weights.decision(PARTS)
    assert (decision.rule, decision.is_certain) == (rule, True)
    assert weights.candidates(PARTS)[0] == rule
    (note,), warned = said()
    assert f"(loss_weight={rule!r}), because it was tried" in note
    assert not warned


@pytest.mark.parametrize("rule", ["label_tokens", "causal_label_tokens"])
def test_labels_that_are_not_there_cannot_weigh(rule: str) -> None:
    weights = weights_of()
    weights.settle(rule, "it was tried")
    assert weights.of([{"x": LABELS}] * 2, (2, 1)) == weights_of("samples").of([{"x": LABELS}] * 2, (2, 1))
    assert weights.of(NO_MASK, SIZES)[0] == (0.5, 0.5)
    assert weights.of(CLASSES, SIZES)[0] == (1.0, 0.0)  # no rows of labels, of which the first would not count


def test_what_everybody_expects_is_not_said(said: Any) -> None:
    weights = weights_of()
    with weights.watching("training_step"):
        weights.of(NO_MASK, SIZES)
        weights.settle("samples", "it was tried")
    assert said() == ([], [])


def test_another_rule_may_be_settled_later(said: Any) -> None:
    weights = weights_of()
    weights.settle("label_tokens", "masks agreed")
    weights.settle("causal_label_tokens", "they differ")
    assert weights.candidates(PARTS)[0] == "causal_label_tokens"
    assert len(said()[0]) == 2


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [("samples", [0.5, 0.5]), ("sum", [1.0, 1.0]), ("label_tokens", [0.75, 0.25]), ("causal_label_tokens", [1.0, 0.0])],
)
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 3}])
def test_what_is_settled_weighs_ranks(rule: str, wanted: list[float], more: dict[str, int]) -> None:
    weights = weights_of()
    weights.settle(rule, "it was tried")
    facts = [weights.facts([{**part, **more}], (1,)) for part in PARTS]
    assert [share_of(rank, facts) for rank in range(2)] == wanted


@pytest.mark.parametrize(
    ("rule", "predicts"), [("samples", True), ("label_tokens", False), ("causal_label_tokens", True)]
)
def test_what_is_settled_tells_whether_packed_text_is_predicted(rule: str, predicts: bool) -> None:
    weights = weights_of()
    weights.settle(rule, "it was tried")
    assert weights.predicts_next == predicts


# What is certain, and what is said of it -----------------------------------------------------------------------------


def gpt2() -> Any:
    hf = pytest.importorskip("transformers")
    sizes = {"vocab_size": 24, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def step(weights: LossWeights, kind: str, call: Any, *, warns: bool = True) -> None:
    with weights.watching(kind, warns=warns):
        weights.of(TOKENS, SIZES)
        call()


def test_the_choice_is_certain_if_the_model_takes_labels_in_the_first_step(said: Any) -> None:
    model = gpt2()
    weights = weights_of(module=model)
    step(weights, "training_step", lambda: model(**TOKENS[0]))
    assert weights.decision(TOKENS).is_certain
    step(weights, "training_step", lambda: model(TOKENS[0]["input_ids"]))
    assert weights.decision(TOKENS).is_certain
    notes, warned = said()
    assert len(notes) == 1, notes
    assert "GPT2LMHeadModel compares a position with the next label" in notes[0]
    assert not warned
    assert not model._forward_pre_hooks


def test_the_choice_is_a_guess_if_the_model_takes_no_labels(said: Any) -> None:
    model = gpt2()
    weights = weights_of(module=model)
    for _ in range(2):
        step(weights, "training_step", lambda: model(TOKENS[0]["input_ids"], labels=None))
    assert not weights.decision(TOKENS).is_certain
    notes, warned = said()
    assert not notes
    assert len(warned) == 1
    assert "training_step gives no 'labels' to the model" in warned[0]


def test_each_kind_of_step_is_watched_by_itself(said: Any) -> None:
    """The first one is the sanity check of ``fit``, whose guess is nothing to warn of: the training decides."""
    model = gpt2()
    weights = weights_of(module=model)
    step(weights, "validation_step", lambda: model(TOKENS[0]["input_ids"]), warns=False)
    assert said() == ([], [])
    step(weights, "training_step", lambda: model(**TOKENS[0]))
    assert [len(told) for told in said()] == [1, 0]


def test_a_step_that_fails_says_nothing(said: Any) -> None:
    def fail() -> None:
        raise RuntimeError("the step")

    with pytest.raises(RuntimeError, match="the step"):
        step(weights_of(), "training_step", fail)
    assert said() == ([], [])


def test_the_items_of_the_batch_divide_the_loss_if_the_model_takes_them(said: Any) -> None:
    model = gpt2()
    weights = weights_of(module=model)
    parts = [{**part, "num_items_in_batch": 3} for part in TOKENS]
    with weights.watching("training_step"):
        assert weights.of(parts, SIZES)[1] == (1.0, 1.0)
        model(**parts[0])
    assert [len(told) for told in said()] == [1, 0]


def test_it_is_said_once_by_one_trainer(said: Any) -> None:
    from tests.support.huggingface import Task, batches, build, padded

    class Evaluated(Task):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.model(**batch).loss)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(batch["input_ids"]).logits.argmax(-1)

    module, trainer, data = Evaluated(build("llama")), make_trainer(), ready(batches(padded))
    trainer.fit(module, data, data)
    trainer.validate(module, data, verbose=False)
    trainer.predict(module, data)
    notes, warned = said()
    assert len(notes) == 1, notes
    assert "LlamaForCausalLM" in notes[0]
    assert not warned
