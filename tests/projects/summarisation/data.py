"""Docstrings as texts with summaries: the first line of a docstring sums up what follows it.

The texts are those of modules of Python's standard library, so that nothing is downloaded.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.utils.data import DataLoader
from transformers import BatchEncoding, PreTrainedTokenizerFast

MODULES = (
    "collections",
    "configparser",
    "difflib",
    "ipaddress",
    "logging",
    "random",
    "shutil",
    "statistics",
    "textwrap",
    "zipfile",
)
IGNORED = -100


@dataclass(frozen=True)
class Example:
    """A text and the line that sums it up."""

    text: str
    summary: str


def load_examples(modules: Sequence[str] = MODULES) -> list[Example]:
    """Collect the docstrings of functions and methods, each only once, in order of their names."""
    found = {}
    for module_name in modules:
        module = importlib.import_module(module_name)
        for owner in [module, *(cls for _, cls in inspect.getmembers(module, inspect.isclass))]:
            for _, function in inspect.getmembers(owner, inspect.isfunction):
                if function.__module__ != module_name:
                    continue
                summary, _, text = (inspect.getdoc(function) or "").partition("\n\n")
                if text.strip() and "\n" not in summary:
                    found[summary] = Example(" ".join(text.split()), summary)
    return [found[summary] for summary in sorted(found)]


def build_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer of lower-case words and punctuation marks: the most frequent ones of the texts."""
    counts = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text.lower()))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))
    words = ["<pad>", "</s>", "<unk>", *frequent][:vocab_size]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="right"
    )


@dataclass
class Collator:
    """Tokenizes and pads a batch; positions of the summaries behind the end carry no loss."""

    tokenizer: PreTrainedTokenizerFast
    max_text_tokens: int
    max_summary_tokens: int

    def __call__(self, examples: list[Example]) -> BatchEncoding:
        batch = self._encode([example.text for example in examples], self.max_text_tokens)
        targets = self._encode([example.summary for example in examples], self.max_summary_tokens)
        batch["labels"] = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, IGNORED)
        return batch

    def _encode(self, texts: list[str], max_tokens: int) -> BatchEncoding:
        return self.tokenizer(texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt")


class DocstringData(L.LightningDataModule):
    """Docstrings to be summarised; every fourth is held out, half of those for validation and half for the test.

    Args:
        batch_size: texts per batch.
        vocab_size: words of the tokenizer, the special ones included.
        max_text_tokens: where texts are cut.
        max_summary_tokens: where summaries are cut.
        limit: number of examples to use, spread over all; None takes all.
    """

    def __init__(
        self,
        batch_size: int = 8,
        vocab_size: int = 512,
        max_text_tokens: int = 48,
        max_summary_tokens: int = 12,
        limit: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        found = load_examples()
        self.examples = found if limit is None else found[:: len(found) // limit][:limit]
        texts = [text for example in self.examples for text in (example.text, example.summary)]
        self.tokenizer = build_tokenizer(texts, vocab_size)
        self.vocab_size = len(self.tokenizer)

    def setup(self, stage: str) -> None:
        held_out = self.examples[3::4]
        self.splits = {
            "fit": [example for index, example in enumerate(self.examples) if index % 4 != 3],
            "validate": held_out[::2],
            "test": held_out[1::2],
        }

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader("fit", shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("validate")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test")

    def _loader(self, split: str, shuffle: bool = False) -> DataLoader[Any]:
        collate = Collator(self.tokenizer, self.hparams.max_text_tokens, self.hparams.max_summary_tokens)
        return DataLoader(self.splits[split], batch_size=self.hparams.batch_size, shuffle=shuffle, collate_fn=collate)
