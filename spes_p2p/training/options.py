"""How one peer trains on its machine: memory and speed, not what is learned beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spes_p2p.config.campaign import ModelConfig
from spes_p2p.model.backends import BackendName, choose_backend
from spes_p2p.model.memory import OptimizerKind
from spes_p2p.model.stored import StoredFormat, StoredPlace
from spes_p2p.training.adamw import check_optimizer


@dataclass(frozen=True)
class TrainingOptions:
    """A peer's own choices; other peers need not make the same ones."""

    stored: StoredFormat | None = None
    """How foreign experts are kept; default float32 on a CPU, bfloat16 elsewhere."""
    stored_on: StoredPlace = "device"
    backend: BackendName = "auto"
    optimizer: OptimizerKind = "adamw"
    activation_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass instead of keeping them."""
    micro_batch_size: int | None = None
    """Samples in one forward pass; default the campaign's."""


def check_options(model: ModelConfig, options: TrainingOptions, device: str) -> None:
    """Can this machine train so? Raises UserError, naming what is possible, before anything is downloaded or built."""
    choose_backend(options.backend, torch.device(device), model.hidden_size, model.intermediate_size)
    check_optimizer(options.optimizer)
