"""Shapes of models without formulas: transformers builds them on the meta device, without memory for their weights.

::

    config.json -> AutoConfig -> AutoModelForCausalLM, or AutoModel, on "meta" -> its layers -> ModelShape

Numbers of weights are exact. The rest is read off the shapes of parameters, without knowledge of the code: the
outermost lists of modules are the layers, what has two dimensions is a matrix that every token passes, what lies in a
module named "experts" is routed, and every layer has an attention over what its configuration says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from .models import Family, LayerShape, ModelShape

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")


def built_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of the model that transformers makes of a configuration.

    Args:
        config: What the ``config.json`` holds, whose ``model_type`` transformers knows.
        name: For messages.

    Raises:
        ImportError: If transformers or torch is not installed.
        ValueError: If transformers cannot build the model, or it has no layers or no table of tokens.
    """
    model, made = _build(config, name)
    text = made.get_text_config()
    table = _table_of(model)
    layers = [child for modules in _outermost_lists(model) for child in modules]
    if not layers or table is None:
        lacks = "lists of layers" if table is not None else "table of tokens"
        raise ValueError(
            f"The model {name} of type {made.model_type!r} has no {lacks}: estimates are for language models."
        )
    vocab, hidden = table.shape
    head = model.get_output_embeddings()
    is_tied = head is None or head.weight is table
    shapes = tuple(_layer_shape(layer, index, text, hidden) for index, layer in enumerate(layers))
    total = sum(parameter.numel() for parameter in model.parameters())
    counted = sum(shape.num_weights for shape in shapes) + vocab * hidden * (1 if is_tied else 2) + hidden
    return ModelShape(
        name=name,
        model_type=made.model_type,
        hidden=hidden,
        vocab=vocab,
        is_tied=is_tied,
        layers=shapes,
        max_length=getattr(text, "max_position_embeddings", None),
        num_other=max(0, total - counted),
        is_built=True,
    )


def _build(config: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """The model and its configuration."""
    import torch
    import transformers

    auto: Any = transformers
    try:
        made = auto.AutoConfig.for_model(**config)
        is_causal = type(made) in auto.MODEL_FOR_CAUSAL_LM_MAPPING
        kind = auto.AutoModelForCausalLM if is_causal else auto.AutoModel
        with torch.device("meta"):
            return kind.from_config(made), made
    except Exception as error:  # of any kind, from code that is not ours
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            f"transformers {transformers.__version__} cannot build {name} of type {config.get('model_type')!r} "
            f"({reason}): correct its config.json, or install a transformers that knows this type."
        ) from error


def _table_of(model: Any) -> Any:
    """The weight of the table of tokens; None if there is none."""
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:
        return None
    return weight if weight is not None and weight.dim() == 2 else None


def _outermost_lists(module: Any) -> Iterable[Any]:
    """Lists of modules with weights that lie in no other one."""
    from torch import nn

    for child in module.children():
        if isinstance(child, nn.ModuleList) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _outermost_lists(child)


def _layer_shape(layer: Any, index: int, config: Any, hidden: int) -> LayerShape:
    heads = _first(config, ("num_attention_heads",))
    head_dim = _first(config, ("head_dim",)) or (hidden // heads if heads else 0)
    query_width = heads * head_dim
    key_width = (_first(config, ("num_key_value_heads",)) or heads) * head_dim
    named = dict(layer.named_parameters())
    routed = [parameter for name, parameter in named.items() if "experts" in name.split(".")[:-1]]
    matrices = [p for name, p in named.items() if p.dim() == 2 and not any(p is other for other in routed)]
    pairs = tuple((parameter.shape[1], parameter.shape[0]) for parameter in matrices)
    num_routed = sum(parameter.numel() for parameter in routed)
    num_experts = _first(config, _NUM_EXPERTS) if routed else 0
    width = num_routed // (3 * num_experts * hidden) if num_experts else 0
    counted = sum(rows * columns for rows, columns in pairs) + 3 * num_experts * hidden * width
    kinds: Any = getattr(config, "layer_types", None) or ()
    is_windowed = index < len(kinds) and kinds[index] == "sliding_attention"
    return LayerShape(
        family=Family(num_norms=_num_norms(layer, hidden)),
        hidden=hidden,
        query_width=query_width,
        key_width=key_width,
        mlp_width=_mlp_width(pairs, config, query_width + 2 * key_width),
        num_experts=num_experts,
        experts_per_token=min(num_experts, _first(config, _EXPERTS_PER_TOKEN) or num_experts),
        expert_width=width,
        window=getattr(config, "sliding_window", None) if is_windowed else None,
        num_small=sum(parameter.numel() for parameter in named.values()) - counted,
        matrices=pairs,
    )


def _first(config: Any, names: Iterable[str]) -> int:
    """The first of these numbers that the configuration has; 0 if it has none."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)


def _mlp_width(pairs: Iterable[tuple[int, int]], config: Any, attention_width: int) -> int:
    """Inner width of a layer's dense MLP; 0 for none."""
    widths = {max(pair) for pair in pairs}
    inner = _first(config, ("intermediate_size",))
    if inner and not widths.isdisjoint((inner, 2 * inner)):  # gate and up may be one matrix
        return inner
    widest = max(widths, default=0)
    return widest if widest > attention_width else 0


def _num_norms(layer: Any, hidden: int) -> int:
    """Norms over the whole width."""
    weights = (getattr(module, "weight", None) for module in layer.modules() if "Norm" in type(module).__name__)
    return sum(weight is not None and math.prod(weight.shape) == hidden for weight in weights)
