"""What the examples share: a tiny model for runs without downloads, text to train on, and their options."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PRECISION: Any = "bf16-mixed" if torch.cuda.is_available() else "32-true"


def parser_for(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the options that all examples have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name on the Hugging Face Hub, or a folder (default: a tiny random Qwen3)")
    parser.add_argument("--text", type=_file, help="file to train on (default: sources of Python's standard library)")
    parser.add_argument("--devices", default="auto", help="number of GPUs, or of virtual devices (default: all)")
    parser.add_argument("--max-steps", type=_count, default=40, help="optimizer steps (%(default)s)")
    parser.add_argument("--batch-size", type=_count, default=16, help="rows per step (%(default)s)")
    parser.add_argument("--length", type=_count, default=128, help="tokens per row (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (%(default)s)")
    parser.set_defaults(**defaults)
    return parser


def load(name: str | None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A causal language model and its tokenizer, from the Hub or a folder; without a name a tiny one that is new."""
    if name is not None:  # it comes in evaluation mode
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).train(), load_tokenizer(name)
    config = Qwen3Config(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).to(dtype), load_tokenizer(None)


def load_tokenizer(name: str | None) -> Any:
    """The tokenizer of a model, which can pad; without a name one for bytes."""
    if name is None:
        return _byte_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token is a byte; one more ends and pads."""
    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def text_of(path: Path | None) -> str:
    """The text of a file; without one, some modules of the standard library, which every machine has."""
    files = [path] if path is not None else sorted(Path(os.__file__).parent.glob("*.py"))[:20]
    return "\n\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)


def token_rows(tokenizer: Any, text: str, length: int) -> Tensor:
    """The tokens of a text in rows of ``length``.

    Raises:
        SystemExit: if the text does not fill a row.
    """
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    if len(tokens) < length:
        raise SystemExit(f"the text has {len(tokens)} tokens, and a row {length}: give more text, or a lower --length")
    return tokens[: len(tokens) // length * length].view(-1, length)


class PrintLosses(L.Callback):
    """Prints the loss about ten times during a training: a log that is left when the progress bar is gone."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Prints the loss of the batch, if it is time."""
        if batch_idx % max(1, trainer.max_steps // 10) == 0:
            module.print(f"step {trainer.global_step:4d}  loss {outputs['loss'].item():.3f}")


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return Path(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
