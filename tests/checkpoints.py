"""Small checkpoints of several families, made by transformers, with a tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from sample_text import CONFIGS
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}
ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}
MOE: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "olmoe": (OlmoeConfig, OlmoeForCausalLM, {"intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
                                              "clip_qkv": 4.0}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {
        "intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
        "norm_topk_prob": True, "attention_bias": True, "rms_norm_eps": 1e-4, **ROPE}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"intermediate_size": 24, "num_local_experts": 4,
                                                    "num_experts_per_tok": 2, "tie_word_embeddings": True}),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, {
        "intermediate_size": 40, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, {
        "intermediate_size": 40, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 4,
        "num_experts_per_tok": 2, "mlp_only_layers": [0]}),
}
"""Families with experts, each with settings that the short form of a model section cannot say."""
DENSE: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"intermediate_size": 24, "tie_word_embeddings": True, **ROPE}),
    "mistral": (MistralConfig, MistralForCausalLM, {"intermediate_size": 24, "head_dim": 16}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"intermediate_size": 24, "head_dim": 16, "rms_norm_eps": 1e-4}),
}


def balance_routers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Change what a checkpoint holds that no gradient changes, as balancing in pretraining does; return it by name."""
    trained = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    fixed = {name: tensor for name, tensor in model.state_dict().items() if name not in trained}
    for tensor in fixed.values():
        tensor += 0.3 * torch.rand_like(tensor)
    return fixed


def make_checkpoint(
    family: str, folder: Path, dtype: torch.dtype = torch.float32, shape: dict[str, int] | None = None, **save: Any
) -> PreTrainedModel:
    """Save a model with random weights, small but for `shape`, and a tokenizer of 512 ids; return the model, in float32."""
    config_class, model_class, changes = {**MOE, **DENSE}[family]
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config_class(**{**SIZES, **changes, **(shape or {})})).to(dtype)
    balance_routers(model)
    model.save_pretrained(folder, **save)
    shutil.copy(CONFIGS / "demo_text/tokenizer_512.json", folder / "tokenizer.json")
    return model.float().eval()
