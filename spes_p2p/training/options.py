"""A peer's training options: they affect memory and speed, and the result only by rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spes_p2p.config.model import ModelSection
from spes_p2p.model.backends import BackendName, choose_backend
from spes_p2p.model.formats import StoredFormat, StoredPlace
from spes_p2p.model.memory import OptimizerKind
from spes_p2p.model.sizes import sizes_of
from spes_p2p.training.adamw import check_optimizer


@dataclass(frozen=True)
class TrainingOptions:
    """Options of one peer; peers may differ."""

    stored: StoredFormat | None = None
    """Format of foreign experts; default float32 on a CPU, otherwise bfloat16."""
    stored_on: StoredPlace = "device"
    backend: BackendName = "auto"
    optimizer: OptimizerKind = "adamw"
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass."""
    micro_batch_size: int | None = None
    """Samples per forward pass; default: the campaign's."""
    sharded: bool = False
    """Divide weights, stored experts and moments among several ranks (`shards.py`); activations are then recomputed."""
    compiles: bool = True
    """On a GPU, compile what is outside the experts where that agrees and is faster (`compiled.py`)."""
    memory_bytes: int | None = None
    """Of each GPU, the most that torch may take; default: all."""


def check_options(model: ModelSection, options: TrainingOptions, device: str) -> None:
    """Raise UserError, naming the alternatives, if this machine does not support the options. Allocates nothing."""
    choose_backend(options.backend, torch.device(device), *sizes_of(model).expert_shape)
    check_optimizer(options.optimizer)
