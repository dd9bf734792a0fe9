"""Sizes of a model that formulas of memory and FLOPs need, of any family: from the layout, and from the model section or
transformers' configuration what no tensor shows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from spes_p2p.config.model import ModelConfig, ModelSection
from spes_p2p.model.layout import Layout
from spes_p2p.model.sizes import sizes_of

ATTENTION = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")


@dataclass(frozen=True)
class ModelShape:
    """Sizes in elements, per token where activations are meant."""

    hidden_size: int
    intermediate_size: int
    """Width of one expert."""
    vocab_size: int
    num_hidden_layers: int
    num_experts: int
    top_k: int
    low_rank: int
    num_heads: int
    query_size: int
    """Width of all query heads."""
    key_size: int
    """Width of all key heads."""
    has_query_norm: bool
    """Whether queries and keys are normalised."""
    other_size: int
    """Inputs and outputs of the largest layer's other matrices, such as a shared expert's."""


@lru_cache(maxsize=8)
def shape_of(model: ModelSection) -> ModelShape:
    """Return the shape of a campaign's model."""
    layout = sizes_of(model)
    top_k, num_heads = _from_config(model)
    hidden_size, intermediate_size = layout.expert_shape
    names = {placed.spec.name for placed in layout.tensors}
    query_size = _rows(layout, "q_proj.weight") or hidden_size
    return ModelShape(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        vocab_size=model.vocab_size,
        num_hidden_layers=model.num_hidden_layers,
        num_experts=layout.num_experts,
        top_k=top_k,
        low_rank=model.moe_low_rank,
        num_heads=num_heads,
        query_size=query_size,
        key_size=_rows(layout, "k_proj.weight") or query_size,
        has_query_norm=any(name.endswith(".q_norm.weight") for name in names),
        other_size=_other_size(layout),
    )


def _from_config(model: ModelSection) -> tuple[int, int]:
    """Return experts per token and attention heads."""
    if isinstance(model, ModelConfig):
        return model.moe_top_k, model.num_attention_heads
    from spes_p2p.model.build import transformers_config

    config = transformers_config(model)
    return config.num_experts_per_tok, config.num_attention_heads


def _rows(layout: Layout, ending: str) -> int:
    """Return the most rows of any tensor whose name ends like this; 0 without one."""
    return max((t.spec.shape[0] for t in layout.tensors if t.spec.name.endswith(ending)), default=0)


def _other_size(layout: Layout) -> int:
    sizes: dict[int, int] = {}
    for placed in layout.tensors:
        spec = placed.spec
        is_other = spec.kind == "shared" and len(spec.shape) == 2 and not spec.name.endswith(ATTENTION)
        if spec.layer is not None and is_other:
            sizes[spec.layer] = sizes.get(spec.layer, 0) + sum(spec.shape)
    return max(sizes.values(), default=0)
