"""Tiny models of ``transformers``, and batches for them.

Weights start ten times larger than the default of the configurations, or most gradients would be too small to be
compared. ``eps`` of AdamW is 1e-2: where the true gradient is zero (biases of attention keys) there is only rounding
noise, which a tiny ``eps`` would make steps of full size of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import lightning as L
import torch
import transformers as hf
from torch import Tensor, nn

from tests.support.parity import Run, compare

VOCAB = 24
IGNORED = -100
IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LAYERS_OF_BOTH = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2} | {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("attention_heads", 2), ("ffn_dim", 24))
}
DECODER = {
    **{**IDS, **LAYERS, "num_key_value_heads": 1, "head_dim": 8},
    **{"max_position_embeddings": 32, "initializer_range": 0.2},
}
BERT = {
    **{**LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 32, "initializer_range": 0.2},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3},
}
# Their auxiliary losses couple all tokens of a batch.
EXPERTS = {**DECODER, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 4}),
    "mixtral-auxiliary": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "moe_intermediate_size": 24, "num_experts": 4}),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            **{**IDS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.2},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "loss_type": "ForCausalLM"},
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {
            **{"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
            **{"dropout_rate": 0.0, "decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0},
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        {
            **{**IDS, **LAYERS_OF_BOTH, "max_position_embeddings": 32, "init_std": 0.2, "scale_embedding": True},
            **{"dropout": 0.0, "decoder_start_token_id": 2, "forced_eos_token_id": None},
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **{**IDS, **LAYERS_OF_BOTH, "num_mel_bins": 8, "max_source_positions": 6, "max_target_positions": 16},
            **{"init_std": 0.2, "dropout": 0.0, "decoder_start_token_id": 3},
            **{"suppress_tokens": None, "begin_suppress_tokens": None},
        },
    ),
    "bert-masked": ("BertForMaskedLM", BERT),
    "bert-classifier": ("BertForSequenceClassification", BERT),
    "vit": (
        "ViTForImageClassification",
        {
            **{**LAYERS, "image_size": 8, "patch_size": 4, "initializer_range": 0.2, "num_labels": 3},
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        },
    ),
}


def build(name: str, **options: Any) -> nn.Module:
    """A model in training mode; the same weights at every call."""
    kind, sizes = MODELS[name]
    model_class: Any = getattr(hf, kind)
    torch.manual_seed(1)
    model: nn.Module = model_class(model_class.config_class(**{**sizes, **options}))
    return model.train()


def causal(family: str = "Llama", **options: Any) -> nn.Module:
    """A causal language model."""
    return build(family.lower(), **options)


def lora(**options: Any) -> Any:
    """A configuration of LoRA. A and B are random: with the usual B = 0, A gets no gradient in the first step."""
    import peft

    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 2, "target_modules": targets, "init_lora_weights": False, **options}
    )


def adapted(config: Any = None, model: nn.Module | None = None) -> nn.Module:
    """A model with an adapter, by default LoRA; the same weights at every call."""
    import peft

    model = causal() if model is None else model
    torch.manual_seed(3)
    return peft.get_peft_model(model, lora() if config is None else config)


# --- batches -----------------------------------------------------------------------------------------------------


def text(rows: int, length: int = 8) -> dict[str, Tensor]:
    """Rows of tokens without padding: every row has as many labels."""
    tokens = torch.randint(3, VOCAB, (rows, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def padded(rows: int, length: int = 10) -> hf.BatchEncoding:
    """Rows of unequal length; the first tokens of each are a prompt without labels."""
    tokens = torch.randint(3, VOCAB, (rows, length))
    lengths = torch.randint(4, length + 1, (rows, 1))
    lengths[0] = length
    places = torch.arange(length).expand(rows, length)
    mask = places < lengths
    labels = tokens.masked_fill(~mask | (places < torch.randint(0, 3, (rows, 1))), IGNORED)
    return hf.BatchEncoding(
        {"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels}
    )


def pairs(rows: int) -> dict[str, Tensor]:
    """Sources and targets."""
    return {**text(rows), "labels": torch.randint(3, VOCAB, (rows, 6))}


def padded_pairs(rows: int) -> hf.BatchEncoding:
    """Sources and targets, both of unequal length."""
    batch = padded(rows)
    batch["labels"] = padded(rows)["labels"][:, :7].contiguous()
    return batch


def speech(rows: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(rows, 8, 12), "labels": padded(rows)["labels"][:, :7].contiguous()}


def masked(rows: int) -> hf.BatchEncoding:
    """Only the tokens that are masked out have labels."""
    batch = padded(rows)
    chosen = torch.rand(batch["input_ids"].shape) < 0.4
    chosen[:, 0] = True
    batch["labels"] = batch["input_ids"].masked_fill(~chosen | (batch["attention_mask"] == 0), IGNORED)
    batch["input_ids"] = batch["input_ids"].masked_fill(chosen, VOCAB - 1)
    return batch


def classified(rows: int) -> dict[str, Tensor]:
    return {**padded(rows), "labels": torch.randint(0, 3, (rows,))}


def images(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 8, 8), "labels": torch.randint(0, 3, (rows,))}


def batches(make: Callable[[int], Any] = text, rows: Iterable[int] = (5, 4)) -> list[Any]:
    """Ready-made batches, whose rows three micro-batches do not divide."""
    torch.manual_seed(2)
    return [make(count) for count in rows]


# --- tasks -------------------------------------------------------------------------------------------------------


class Task(L.LightningModule):
    """What a user writes around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-2)


def assert_planned(run: Run) -> Run:
    """A pipelined run was planned unit by unit, and has kept to its plan."""
    assert min(run.watch.num_calls) >= 4
    assert run.watch.num_off_plan == 0
    return run


def compare_tasks(make: Callable[[], Task], data: list[Any] | None = None, **settings: Any) -> tuple[Run, Run]:
    """Compares trainings, by default on devices that have copies of the weights."""
    data = batches() if data is None else data
    ours = {"options": {"virtual_copies": True}, **settings.pop("ours", {})}
    plain, pipelined = compare(make, data, ours=ours, seed=5, **settings)
    assert_planned(pipelined)
    return plain, pipelined


# --- checkpoints -------------------------------------------------------------------------------------------------


def write_checkpoint(folder: str) -> None:
    """Writes a causal language model and its tokenizer, which reads bytes, as a download from the Hub would."""
    import tokenizers

    specials = ["<pad>", "<end>"]
    bytewise = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = {word: place for place, word in enumerate([*specials, *sorted(bytewise.alphabet())])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = bytewise
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    ids = {"vocab_size": 1024, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    build("qwen3", **ids, max_position_embeddings=256).save_pretrained(folder)  # type: ignore[operator]
