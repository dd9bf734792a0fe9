"""Tiny model and campaign configs that the model and training tests share."""

from typing import Any

from spes_p2p.config.campaign import CampaignConfig, DataConfig, EvaluationConfig, TrainingConfig
from spes_p2p.config.model import ModelConfig, ModelSection


def tiny_model(**changes: Any) -> ModelConfig:
    """Two layers, four experts, two a token, 64 ids."""
    shape: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "moe_num_experts": 4, "moe_top_k": 2, "initializer_range": 0.1,
    }
    return ModelConfig(**{**shape, **changes})


def tiny_training(**changes: Any) -> TrainingConfig:
    """Four samples of 16 tokens a step."""
    settings: dict[str, Any] = {
        "sequence_length": 16, "batch_size": 4, "total_steps": 100, "sync_steps": 10, "learning_rate": 3e-3,
        "new_owner_ramp_steps": 4,
    }
    return TrainingConfig(**{**settings, **changes})


def tiny_campaign(model: ModelSection | None = None, training: TrainingConfig | None = None) -> CampaignConfig:
    """A campaign of the tiny model; its data section names no real files."""
    return CampaignConfig(
        name="tiny",
        model=model or tiny_model(),
        training=training or tiny_training(),
        evaluation=EvaluationConfig(max_samples=8),
        data=DataConfig(manifest="none", tokenizer="none"),
    )
