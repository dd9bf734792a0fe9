"""transformers' causal language models with experts, and a small configuration of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from checkpoints import SIZES
from model_classes import classes_of
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spes_p2p.config.model import NUM_EXPERTS

SMALL: dict[str, Any] = {
    **SIZES, **dict.fromkeys(NUM_EXPERTS, 4), "intermediate_size": 40, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 40, "head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}
"""Taken over by families that have these settings."""
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
          "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LATENT = ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
"""Families whose keys and values have as many heads as queries, and whose `head_dim` is that of rotary positions."""
OF_FAMILY: dict[str, dict[str, Any]] = {
    **{family: {"num_key_value_heads": 4, "head_dim": 8} for family in LATENT},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "ernie4_5_moe": {"moe_k": 2, "moe_layer_start_index": 0},
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 8, "global_head_dim": 16,
                    "enable_moe_block": True, "top_k_experts": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
                         "mamba_n_groups": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "qwen3_5_moe_text": {**LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                       "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "qwen3_next": LINEAR,
    "qwen4_exp_text": {**LINEAR, "layer_types": ["linear_attention", "indexed_attention"], "hc_count": 2, "hc_lowrank": 8,
                       "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
                       "indexer_compress_ratio": 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs beside them."""


def moe_types() -> list[str]:
    """Model types of the causal language models whose code has experts. Reads the code: importing all of it takes seconds."""
    found = []
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        classes = (names,) if isinstance(names, str) else names
        files = (Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)).glob("modeling_*.py")
        sources = [file.read_text() for file in files]
        if any("Experts(" in source and f"class {name}(" in source for source in sources for name in classes):
            found.append(model_type)
    return found


MOE_TYPES = moe_types()


def small_config(model_type: str) -> Any:
    """A configuration of two layers."""
    config_class, _ = classes_of(model_type)
    default = config_class().to_dict()
    settings = {name: value for name, value in SMALL.items() if name in default or name.endswith("token_id")}
    if default.get("layer_types"):
        settings["layer_types"] = default["layer_types"][: SIZES["num_hidden_layers"]]
    if default.get("mlp_layer_types"):
        settings["mlp_layer_types"] = default["mlp_layer_types"][-SIZES["num_hidden_layers"] :]
    return config_class(**{**settings, **OF_FAMILY.get(model_type, {})})
