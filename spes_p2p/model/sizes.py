"""The layout of a campaign's model for its sizes, without torch and transformers, which take seconds to import.

For the families of the short form (`ModelConfig`) it is known by formula. For others it is derived from transformers' model, as
for training (`build.layout_of`), which never uses these formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from spes_p2p.config.model import ModelConfig, ModelSection
from spes_p2p.model.layout import Layout, TensorSpec, check_size


@lru_cache(maxsize=8)
def sizes_of(model: ModelSection) -> Layout:
    """Return the layout of the model's flat state. Raises UserError if it is too large, or if transformers refuses it."""
    if not isinstance(model, ModelConfig):
        from spes_p2p.model.build import layout_of

        return layout_of(model)
    layout = Layout(_specs(model))
    check_size(layout)
    return layout


def _specs(model: ModelConfig) -> Iterator[TensorSpec]:
    """Yield the tensors of transformers' `olmoe` and `qwen3_moe`."""
    layers, hidden = range(model.num_hidden_layers), model.hidden_size
    yield TensorSpec("model.embed_tokens.weight", (model.vocab_size, hidden), "shared")
    for layer in layers:
        for name, shape in _attention(model).items():
            yield TensorSpec(f"model.layers.{layer}.{name}.weight", shape, "shared", layer)
    yield TensorSpec("model.norm.weight", (hidden,), "shared")
    if not model.tie_word_embeddings:
        yield TensorSpec("lm_head.weight", (model.vocab_size, hidden), "shared")
    matrices = {"gate_up_proj": (2 * model.intermediate_size, hidden), "down_proj": (hidden, model.intermediate_size)}
    for layer in layers:
        block = f"model.layers.{layer}.mlp"
        yield TensorSpec(f"{block}.gate.weight", (model.moe_num_experts, hidden), "router", layer)
        for name, shape in matrices.items():
            if model.moe_low_rank:
                low_rank = (model.moe_num_experts, shape[0], model.moe_low_rank)
                yield TensorSpec(f"{block}.experts.low_rank.{name}", low_rank, "shared", layer)
            for expert in range(model.moe_num_experts):
                yield TensorSpec(f"{block}.experts.{expert}.{name}", shape, "expert", layer, expert)


def _attention(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors outside its experts and router."""
    hidden, head = model.hidden_size, model.hidden_size // model.num_attention_heads
    keys = head * model.num_key_value_heads
    normed = (head, head) if model.architecture == "qwen3_moe" else (hidden, keys)
    return {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden), "self_attn.q_norm": normed[:1], "self_attn.k_norm": normed[1:],
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }
