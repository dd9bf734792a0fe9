"""The classes of transformers for a model type."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


def classes_of(model_type: str) -> tuple[Any, Any]:
    """Configuration class and model class."""
    config_class = CONFIG_MAPPING[model_type]
    found = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return config_class, found[0] if isinstance(found, (tuple, list)) else found
