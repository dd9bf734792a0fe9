"""Samples in which tokens attend only within their own document (`training.intra_document_masking`).

transformers recognises packed documents by positions that restart, and masks the attention between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

LARGEST_LEAK = 0.1
"""Share of a document's influence on the next one that masks may leave. It is rounding, far below this, or all of it."""
LENGTH = 8


@dataclass(frozen=True)
class Documents:
    """How the samples of a step, ids `[B, S]`, divide into documents."""

    eos_token_id: int
    """Id that ends each document; it belongs to the document."""
    labels: int
    """Labels of the step's samples, over all micro-batches and ranks."""

    def positions(self, ids: Tensor) -> Tensor:
        """Return each token's position in its document `[B, S]`; a document that began before its sample starts at 0 there."""
        place = torch.arange(ids.shape[1], device=ids.device)
        is_first = functional.pad(ids[:, :-1] == self.eos_token_id, (1, 0))
        return place - (place * is_first).cummax(dim=1).values

    def has_label(self, ids: Tensor) -> Tensor:
        """Return `[B, S - 1]`: whether the next token is of the same document. How another one begins cannot be predicted."""
        return ids[:, :-1] != self.eos_token_id


@torch.no_grad()
def is_crossed(model: PreTrainedModel, eos_token_id: int, device: torch.device) -> bool:
    """Return whether what a document computes depends on the one before it in the sample, on this device and installation."""
    words = [token for token in range(3 * LENGTH + 1) if token != eos_token_id]
    after = words[2 * LENGTH : 3 * LENGTH]
    ids = torch.tensor([[*words[start : start + LENGTH], eos_token_id, *after] for start in (0, LENGTH)], device=device)
    changes = []
    for positions in (Documents(eos_token_id, 0).positions(ids), None):
        hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        first, second = hidden[:, -LENGTH:]
        changes.append(float((first - second).norm()))
    return changes[0] > LARGEST_LEAK * changes[1]
