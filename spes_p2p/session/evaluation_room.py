"""What evaluating a base beside training takes of a machine, and in which precision it is done."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.errors import UserError
from spes_p2p.observe.units import human_bytes

PROGRAM_BYTES = 10**9
"""Memory of the process without the model, of which 0.65 GB were measured, and for the tasks' data."""
LOADING_SHARE = 0.15
"""Memory for loading the weights, over theirs: 0.01 in float32 and 0.10 in bfloat16 were measured (docs/memory.md)."""
SHARE_FOR_FLOAT32 = 0.5
"""Evaluate in float32 where that takes at most this share of what is free; otherwise in bfloat16."""
LOGITS_BYTES = 2**31
"""Bound of the logits of a batch, unless those of one sample are larger."""
LARGEST_BATCH = 8


@dataclass(frozen=True)
class EvaluationRoom:
    """How a base is evaluated, and what it takes beside training."""

    dtype: Literal["fp32", "bf16"]
    batch_size: int
    """Samples per pass of lm-eval."""
    memory: int
    """Main memory, in bytes."""
    disk: int
    """Bytes of the copy in the run-dir."""

    def __str__(self) -> str:
        """'14.1 GB of memory and 13.2 GB of disk, in bf16'."""
        return f"{human_bytes(self.memory)} of memory and {human_bytes(self.disk)} of disk, in {self.dtype}"


def evaluation_room(config: CampaignConfig, parameters: int, memory: int, disk: int) -> EvaluationRoom:
    """Return how a base of this many parameters is evaluated with these bytes of main memory and disk beside training.

    Raises UserError where they do not suffice.
    """
    exact, rounded = (_room(config, parameters, dtype) for dtype in ("fp32", "bf16"))
    if exact.memory <= SHARE_FOR_FLOAT32 * memory and exact.disk <= SHARE_FOR_FLOAT32 * disk:
        return exact
    if rounded.memory <= memory and rounded.disk <= disk:
        return rounded
    left = f"{human_bytes(max(0, memory))} of memory and {human_bytes(max(0, disk))} of disk"
    raise UserError(f"evaluating tasks and prompts takes {rounded}, and this peer leaves {left}")


def _room(config: CampaignConfig, parameters: int, dtype: Literal["fp32", "bf16"]) -> EvaluationRoom:
    width = 4 if dtype == "fp32" else 2
    # lm-eval takes the softmax of all logits of a batch beside the logits.
    sample = 2 * width * config.training.sequence_length * config.model.vocab_size
    batch = max(1, min(LARGEST_BATCH, LOGITS_BYTES // sample))
    weights = width * parameters
    memory = round((1 + LOADING_SHARE) * weights) + batch * sample + PROGRAM_BYTES
    return EvaluationRoom(dtype, batch, memory, weights)


def free_disk(run_dir: Path) -> int:
    """Return the free bytes of the disk that has the run-dir, or will have it."""
    resolved = run_dir.resolve()
    return shutil.disk_usage(next(folder for folder in (resolved, *resolved.parents) if folder.exists())).free
