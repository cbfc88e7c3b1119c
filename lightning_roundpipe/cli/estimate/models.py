"""Shapes of decoder models from the ``config.json`` of the Hugging Face Hub, and how many weights they have.

Nothing is built or downloaded for it: the counts are formulas over the numbers of the configuration. ``built`` makes
the shapes of models for which there are none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Activation = Literal["gated", "clamped"]
"""Kind of MLP: ``act(gate) * up``; the same with the clamps and biases of GPT-OSS."""
Norm = Literal["rms", "rms_fp32"]
"""Kind of norm: RMS in several steps; the same with the product by its weights in fp32 (Gemma, GPT-OSS)."""


@dataclass(frozen=True)
class Family:
    """What the code of a model type does that its configuration does not say, or says only where it departs from it.

    Attributes:
        num_norms: Norms over the whole width, per layer.
        norm: Kind of norm.
        has_qk_norm: Whether queries and keys are normed too.
        has_sinks: Whether attention has a learned sink per head.
        activation: Kind of MLP.
        bias_key: The configuration's switch for the biases of queries, keys, values and of attention's output.
        experts_key: Where the configuration says how many experts there are; empty for a family without.
        window: Which layers look back through a window; a number n: all but every n-th.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    bias_key: str = ""
    num_norms: int = 2
    norm: Norm = "rms"
    has_qk_norm: bool = False
    has_sinks: bool = False
    head_dim: int | None = None
    is_tied: bool = False
    activation: Activation = "gated"
    experts_key: str = ""
    expert_width_key: str = "moe_intermediate_size"
    window: Literal["none", "all", "tail"] | int = "none"


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer. Widths are numbers of elements per token.

    Attributes:
        family: What is the same in all models of its type.
        hidden: Width of the residual stream.
        query_width: Number of query heads times the size of a head.
        key_width: Number of key-value heads times the size of a head.
        mlp_width: Inner width of the dense MLP (of the shared expert where there are experts); 0 for none.
        num_experts: Routed experts; 0 for none.
        experts_per_token: Routed experts that a token visits.
        expert_width: Inner width of a routed expert.
        window: Tokens that a token attends to; None for all before it.
        num_small: Weights outside matrices: norms, biases, attention sinks.
        matrices: The `linears` of a model that was built, and its routers; None for those that follow from the widths.
    """

    family: Family
    hidden: int
    query_width: int
    key_width: int
    mlp_width: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    window: int | None
    num_small: int
    matrices: tuple[tuple[int, int], ...] | None = None

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Matrices that every token passes, as (in, out): attention and dense MLP. LoRA adapts these."""
        if self.matrices is not None:
            return self.matrices
        h, q, k, inner = self.hidden, self.query_width, self.key_width, self.mlp_width
        attention = ((h, q), (h, k), (h, k), (q, h))
        if not inner:
            return attention
        return (*attention, (h, inner), (h, inner), (inner, h))

    @property
    def num_dense(self) -> int:
        """Weights in matrices that every token passes, with the router (and the gate of a shared expert)."""
        products = sum(rows * columns for rows, columns in self.linears)
        if self.matrices is not None:
            return products
        router = self.hidden * self.num_experts
        shared_gate = self.hidden if self.num_experts and self.mlp_width else 0
        return products + router + shared_gate

    @property
    def num_expert(self) -> int:
        """Weights of all routed experts."""
        return 3 * self.num_experts * self.hidden * self.expert_width

    @property
    def num_weights(self) -> int:
        """All weights of the layer."""
        return self.num_dense + self.num_expert + self.num_small

    @property
    def largest_weight(self) -> int:
        """Weights in the largest single tensor; experts are stacked, gate and up in one tensor."""
        matrices = [rows * columns for rows, columns in self.linears]
        return max(*matrices, 0, 2 * self.num_experts * self.hidden * self.expert_width)


@dataclass(frozen=True)
class ModelShape:
    """A decoder: an embedding, layers, a final norm, and a head, which uses the embedding's table if `is_tied`.

    Attributes:
        hidden: Width of the residual stream.
        vocab: Number of rows of the embedding, and of logits.
        max_length: Longest sequence the configuration is made for; None if it does not say.
        num_other: Weights outside layers, tables and the last norm.
        is_built: Whether it was read off a model, and not from formulas.
    """

    name: str
    model_type: str
    hidden: int
    vocab: int
    is_tied: bool
    layers: tuple[LayerShape, ...]
    max_length: int | None
    num_other: int = 0
    is_built: bool = False

    @property
    def num_embedding(self) -> int:
        """Weights of the embedding, and of the head, which is of the same size or the same one."""
        return self.vocab * self.hidden

    @property
    def num_weights(self) -> int:
        """All weights, tied ones once."""
        tables = self.num_embedding * (1 if self.is_tied else 2)
        return tables + sum(layer.num_weights for layer in self.layers) + self.hidden + self.num_other

    @property
    def num_active(self) -> int:
        """Weights that a token meets: as `num_weights`, but only the experts that it visits."""
        idle = sum(
            layer.num_expert * (layer.num_experts - layer.experts_per_token) // layer.num_experts
            for layer in self.layers
            if layer.num_experts
        )
        return self.num_weights - idle


_FAMILIES: dict[str, Family] = {
    "llama": Family(bias_key="attention_bias"),
    "mistral": Family(window="all"),
    "phi3": Family(window="all"),
    "qwen2": Family(qkv_bias=True, window="tail"),
    "qwen3": Family(bias_key="attention_bias", has_qk_norm=True, head_dim=128, window="tail"),
    "gemma": Family(bias_key="attention_bias", norm="rms_fp32", head_dim=256, is_tied=True),
    "gemma2": Family(bias_key="attention_bias", num_norms=4, norm="rms_fp32", head_dim=256, is_tied=True, window=2),
    "gemma3_text": Family(
        bias_key="attention_bias",
        num_norms=4,
        has_qk_norm=True,
        norm="rms_fp32",
        head_dim=256,
        is_tied=True,
        window=6,
    ),
    "mixtral": Family(experts_key="num_local_experts", expert_width_key="intermediate_size", window="all"),
    "qwen2_moe": Family(qkv_bias=True, bias_key="qkv_bias", experts_key="num_experts"),
    "qwen3_moe": Family(bias_key="attention_bias", has_qk_norm=True, experts_key="num_experts", window="all"),
    "gpt_oss": Family(
        qkv_bias=True,
        out_bias=True,
        bias_key="attention_bias",
        norm="rms_fp32",
        has_sinks=True,
        head_dim=64,
        activation="clamped",
        experts_key="num_local_experts",
        expert_width_key="intermediate_size",
        window=2,
    ),
}
# Their configuration may leave out the number of key-value heads: one for each query head.
_ONE_KEY_PER_QUERY = frozenset({"llama", "phi3"})


def has_formulas(config: Mapping[str, Any]) -> bool:
    """Whether `read_shape` knows the type of the model."""
    return config.get("model_type") in _FAMILIES


def read_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of the model that a ``config.json`` describes; `name` is for messages."""
    reader = _Reader(config, name)
    return ModelShape(
        name=name,
        model_type=reader.model_type,
        hidden=reader.count("hidden_size"),
        vocab=reader.count("vocab_size"),
        is_tied=bool(reader.get("tie_word_embeddings", reader.family.is_tied)),
        layers=tuple(reader.layer(index) for index in range(reader.count("num_hidden_layers"))),
        max_length=reader.count("max_position_embeddings", optional=True) or None,
    )


class _Reader:
    """Looks numbers up in a configuration and says what is wrong with them."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config, self._name = config, name
        self.model_type = str(config.get("model_type", ""))
        if self.model_type not in _FAMILIES:
            raise ValueError(self._unknown())
        self.family = _FAMILIES[self.model_type]

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default if it is absent or null."""
        value = self._config.get(key)
        return default if value is None else value

    def count(self, key: str, *, optional: bool = False) -> int:
        """A whole number of at least 1; 0 if it is optional and not there."""
        value = self.get(key)
        if value is None and optional:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            found = "has no" if value is None else f"has {value!r} as"
            raise ValueError(
                f"The configuration of {self._name} ({self.model_type}) {found} {key!r}, which must be a whole number "
                "of at least 1: complete the config.json."
            )
        return value

    def layer(self, index: int) -> LayerShape:
        """The layer at this position."""
        family, hidden, heads = self.family, self.count("hidden_size"), self.count("num_attention_heads")
        optional = self.model_type in _ONE_KEY_PER_QUERY
        key_heads = self.count("num_key_value_heads", optional=optional) or heads
        head_dim = self.count("head_dim", optional=True) or family.head_dim or hidden // heads
        if heads % key_heads:
            raise ValueError(
                f"The configuration of {self._name} has {heads} attention heads on {key_heads} key-value heads, which "
                "does not divide: correct the config.json."
            )
        num_experts, per_token, expert_width, mlp_width = self._mlp(index)
        query_width, key_width = heads * head_dim, key_heads * head_dim
        small = family.num_norms * hidden
        small += 2 * head_dim if family.has_qk_norm else 0
        small += heads if family.has_sinks else 0
        small += self._num_biases(hidden, query_width, key_width, mlp_width)
        if family.activation == "clamped":
            small += num_experts * (1 + 2 * expert_width + hidden)
        return LayerShape(
            family=family,
            hidden=hidden,
            query_width=query_width,
            key_width=key_width,
            mlp_width=mlp_width,
            num_experts=num_experts,
            experts_per_token=per_token,
            expert_width=expert_width,
            window=self._window(index),
            num_small=small,
        )

    def _mlp(self, index: int) -> tuple[int, int, int, int]:
        """Experts, experts per token, width of an expert, width of the dense MLP or shared expert."""
        family = self.family
        every = self.count("decoder_sparse_step", optional=True) or 1
        if not family.experts_key or index in self.get("mlp_only_layers", ()) or (index + 1) % every:
            return 0, 0, 0, self.count("intermediate_size")
        # newer configurations of the Qwen models are written with the common name
        key = family.experts_key if self.get(family.experts_key) is not None else "num_local_experts"
        num_experts, per_token = self.count(key), self.count("num_experts_per_tok")
        if per_token > num_experts:
            raise ValueError(
                f"The configuration of {self._name} sends a token to {per_token} of {num_experts} experts: correct "
                "'num_experts_per_tok' in the config.json."
            )
        shared = self.count("shared_expert_intermediate_size") if self.model_type == "qwen2_moe" else 0
        return num_experts, per_token, self.count(family.expert_width_key), shared

    def _num_biases(self, hidden: int, query_width: int, key_width: int, mlp_width: int) -> int:
        family = self.family
        is_on = self.get(family.bias_key) if family.bias_key else None
        qkv = family.qkv_bias if is_on is None else bool(is_on)
        out = family.out_bias if is_on is None or family.bias_key == "qkv_bias" else bool(is_on)
        count = (query_width + 2 * key_width if qkv else 0) + (hidden if out else 0)
        if self.model_type == "llama" and self.get("mlp_bias"):
            count += 2 * mlp_width + hidden
        return count

    def _window(self, index: int) -> int | None:
        rule, width = self.family.window, self.get("sliding_window")
        types = self.get("layer_types")
        if types is not None:
            kind = types[index] if index < len(types) else None
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(
                    f"Layer {index} of {self._name} is of type {kind!r}: only layers with full_attention or "
                    "sliding_attention can be estimated."
                )
            return width if kind == "sliding_attention" else None
        if isinstance(rule, int):
            return width if (index + 1) % rule else None
        if rule == "none" or self.get("use_sliding_window", rule == "all") is False:
            return None
        return width if rule == "all" or index >= self.get("max_window_layers", 28) else None

    def _unknown(self) -> str:
        known = ", ".join(_FAMILIES)
        what = f"model type {self.model_type!r}" if self.model_type else "no 'model_type'"
        return (
            f"The configuration of {self._name} has {what}, and there are no formulas for it. Known are {known}: pass "
            "the config.json of a model of one of these types with similar sizes, or install transformers, which "
            "builds others."
        )
