"""A checkpoint becomes base 0, and base 0 a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from spes_p2p.campaign.start import Start, find_start
from spes_p2p.model.build import State, layout_of
from spes_p2p.model.checkpoint import Checkpoint, checkpoint_state
from spes_p2p.model.export import export_checkpoint
from spes_p2p.model.upcycle import UpcycleRule, upcycled_state

IDS = torch.arange(96).view(4, 24) * 5 % 512


def started(folder: Path, experts: int | None = None, rule: UpcycleRule | None = None) -> tuple[Start, State]:
    """What `init --from` finds in the folder, and base 0."""
    start = find_start(str(folder), folder.parent, None, experts, None, rule)
    state = np.full(layout_of(start.model).size, np.nan, np.float32)
    if start.upcycle is None:
        checkpoint_state(start.model, Checkpoint(folder), state)
    else:
        upcycled_state(start.model, Checkpoint(folder), start.upcycle, state)
    assert np.isfinite(state).all()
    return start, state


def export(start: Start, state: State, output: Path, **options: Any) -> PreTrainedModel:
    export_checkpoint(start.model, state, start.tokenizer, start.eos_token, None, output, **options)
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    return loaded.eval()


@torch.no_grad()
def difference(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """The largest difference of the two models' logits."""
    return float((one(input_ids=IDS).logits - other(input_ids=IDS).logits).abs().max())


def keys_of(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found
