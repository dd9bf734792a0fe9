"""The reference with which the partitioned model is compared."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spes_p2p.config.model import ModelSection
from spes_p2p.model.build import State, empty_model, exact_tensor, layout_of, materialise, plain_tensor


def plain_model(config: ModelSection, base: State) -> PreTrainedModel:
    """Return the unmodified transformers model with the base's exact float32 values, on the CPU.

    Low-rank terms are added to the experts' matrices.
    """
    model, layout = empty_model(config), layout_of(config)

    def values(name: str, shape: tuple[int, ...]) -> Tensor:
        if name in layout.by_name:
            return exact_tensor(base, layout, name)
        block, _, matrix = name.rpartition(".")
        return torch.stack([plain_tensor(base, layout, f"{block}.{e}.{matrix}") for e in range(shape[0])])

    materialise(model, values, torch.device("cpu"))
    return model
