"""The training loss: next-token cross-entropy, load balancing and z-losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spes_p2p.config.campaign import TrainingConfig
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.training.documents import Documents
from spes_p2p.training.head_loss import HeadLoss, head_loss


@dataclass(frozen=True)
class Losses:
    """Scalars of one forward pass, on the model's device."""

    total: Tensor
    """share * (cross_entropy + auxiliary), with the gradient. Call its `backward` as it is: see `head_loss`."""
    cross_entropy: Tensor
    auxiliary: Tensor
    """Weighted sum of the other losses."""
    assignments: Tensor
    """`[layers, E]`: the pass's assignments to each expert, by all ranks."""


def forward_losses(
    model: PreTrainedModel, blocks: Sequence[PartitionedExperts], input_ids: Tensor, config: TrainingConfig,
    share: float = 1.0, over_ranks: Callable[[Tensor], Tensor] = lambda counts: counts, documents: Documents | None = None,
) -> Losses:
    """Return the losses of samples `[B, S]`, which are the part `share` of a step's samples.

    `blocks`: the model's experts blocks in order; the pass sets their `routed`. Adds to the gradient of the output head.
    `over_ranks` sums counts over the ranks that share a pass. Load balancing is linear in this rank's probabilities, so with
    those counts the ranks' losses, weighted by their shares, add up to that of the whole pass. `documents`: keep these apart.
    """
    # The outer model would also compute transformers' own auxiliary loss.
    positions = documents.positions(input_ids) if documents else None
    outputs = model.base_model(input_ids=input_ids, position_ids=positions, use_cache=False, output_router_logits=True)
    head = next_token_loss(model, outputs.last_hidden_state, input_ids, config.lm_head_zloss_weight, share, documents)
    assignments = over_ranks(torch.stack([block.routed for block in blocks if block.routed is not None]))
    auxiliary = config.moe_loss_weight * load_balancing_loss(outputs.router_logits, assignments)
    auxiliary = auxiliary + config.moe_zloss_weight * router_z_loss(outputs.router_logits)
    weighted_z_loss = config.lm_head_zloss_weight * head.z_loss if config.lm_head_zloss_weight > 0 else 0.0
    return Losses(head.total + share * auxiliary, head.cross_entropy, auxiliary.detach() + weighted_z_loss, assignments)


def next_token_loss(
    model: PreTrainedModel, hidden: Tensor, input_ids: Tensor, z_weight: float = 0.0, share: float = 1.0,
    documents: Documents | None = None,
) -> HeadLoss:
    """Return the losses of all tokens but the first: ids `[B, S]`, hidden states `[B, S, H]` before the bias-free head.

    With `documents`, without the first of each; the losses are then this part of the step's labels, whatever `share` is.
    """
    matrix: Tensor = model.get_output_embeddings().weight
    if documents is not None:
        counted = documents.has_label(input_ids)
        rows = hidden[:, :-1][counted]
        return head_loss(rows, matrix, input_ids[:, 1:][counted], z_weight, len(rows) / max(documents.labels, 1))
    return head_loss(hidden[:, :-1].flatten(0, 1), matrix, input_ids[:, 1:].flatten(), z_weight, share)


def load_balancing_loss(router_logits: Sequence[Tensor], routed: Iterable[Tensor]) -> Tensor:
    """Return the mean over layers of E / (k T) * sum_e n_e * mean_t p_te (Switch Transformer, arXiv 2101.03961, eq. 4, top-k).

    Per layer: router logits `[T, E]`, and counts n `[E]` of assignments, which sum to k T. Balanced routing gives 1, all tokens
    on the same k experts E / k. Computed per layer: in sums over layers, collapses onto different experts would look balanced.
    """
    layers = []
    for logits, counts in zip(router_logits, routed, strict=True):
        probabilities = logits.float().softmax(dim=-1).mean(dim=0)
        layers.append(logits.shape[-1] * (counts / counts.sum() * probabilities).sum())
    return torch.stack(layers).mean()


def router_z_loss(router_logits: Sequence[Tensor]) -> Tensor:
    """Return the mean z-loss of the layers' router logits `[T, E]` (ST-MoE, arXiv 2202.08906, eq. 5)."""
    return torch.stack([z_loss(logits) for logits in router_logits]).mean()


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean of logsumexp(logits)^2 over the last dimension, which keeps logits from drifting."""
    return logits.float().logsumexp(dim=-1).square().mean()
