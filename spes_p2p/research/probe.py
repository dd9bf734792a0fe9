"""Measurements of a swarm's learning: drift, starved experts, changes of routing, similarity of experts.

Pure functions on numpy arrays, and a `Judge` that evaluates bases with its own model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.model.build import State
from spes_p2p.model.layout import Layout
from spes_p2p.model.partitioned import PartitionedExperts
from spes_p2p.training import balance
from spes_p2p.training.batches import Reader, Samples
from spes_p2p.training.losses import next_token_loss
from spes_p2p.training.options import TrainingOptions
from spes_p2p.training.trainer import TorchTrainer

CHUNK = 32
"""Samples per forward pass."""

Routing = npt.NDArray[np.int64]
"""`[layers, tokens, k]`: experts that each token is routed to."""


class Judge:
    """Measures bases on held-out text, with one model that owns no expert."""

    def __init__(self, config: CampaignConfig, base: State, held_out: Mapping[str, Reader], device: str):
        """`held_out`: readers by domain."""
        self._held_out = held_out
        any_reader = next(iter(held_out.values()))
        self._trainer = TorchTrainer(config, base, (), any_reader, device=device, options=TrainingOptions(stored="fp32"))
        self.fixed = np.concatenate([reader.read_spread(4) for reader in held_out.values()])
        """Samples `[n, sequence]` to compare models on."""

    def losses(self, base: State, samples: int) -> dict[str, float]:
        """Return the held-out cross-entropy per token by domain, on `samples` samples each."""
        self._trainer.load_base(base)
        return {domain: loss_of(self._trainer.model, reader.read_spread(samples)) for domain, reader in self._held_out.items()}

    def test_losses(self, base: State, samples: int) -> dict[str, float]:
        """Return the same on `samples` others, which lie between those that `losses` reads if it reads as many."""
        self._trainer.load_base(base)
        between = {domain: reader.read_spread(2 * samples)[1::2] for domain, reader in self._held_out.items()}
        return {domain: loss_of(self._trainer.model, chosen) for domain, chosen in between.items()}

    def loss(self, base: State, samples: Samples) -> float:
        """Return the cross-entropy per token on these samples."""
        self._trainer.load_base(base)
        return loss_of(self._trainer.model, samples)

    def routing(self, base: State) -> Routing:
        """Return the base's routing of the fixed samples."""
        self._trainer.load_base(base)
        return routing_of(self._trainer.model, self.fixed)


def loss_of(model: PreTrainedModel, samples: Samples) -> float:
    """Return a model's mean cross-entropy per token on samples `[n, sequence]`."""
    total = 0.0
    model.eval()
    with torch.no_grad():
        for chunk in _chunks(samples, model.device):
            hidden = model.base_model(input_ids=chunk, use_cache=False).last_hidden_state
            total += float(next_token_loss(model, hidden, chunk).cross_entropy) * len(chunk)
    return total / len(samples)


def routing_of(model: nn.Module, samples: Samples) -> Routing:
    """Return a model's routing of samples `[n, sequence]`."""
    blocks = [module for module in model.modules() if isinstance(module, PartitionedExperts)]
    found: list[list[Tensor]] = [[] for _ in blocks]
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for layer, block in enumerate(blocks):
            hooks.callback(block.register_forward_pre_hook(_keep_index(found[layer]), with_kwargs=True).remove)
        model.eval()
        for chunk in _chunks(samples, next(model.parameters()).device):
            model(input_ids=chunk, use_cache=False)
    return torch.stack([torch.cat(layer) for layer in found]).cpu().numpy()


def agreement(a: Routing, b: Routing) -> float:
    """Return the share of assignments in `a` that are also in `b`."""
    return float((a[..., :, None] == b[..., None, :]).any(axis=-1).mean())


def load_violation(routing: Routing, experts: int) -> list[float]:
    """Return, by layer, tokens of the busiest expert / mean over experts - 1: 0 is balanced, E - 1 is all on one expert."""
    return balance.load_violation([np.bincount(layer.reshape(-1), minlength=experts).tolist() for layer in routing])


def share_of(routing: Routing, experts: Sequence[int]) -> float:
    """Return the share of assignments that go to these experts."""
    return float(np.isin(routing, experts).mean())


def drift(updates: Sequence[State]) -> dict[str, float] | None:
    """Return mean cosine of two updates, and |mean| / mean |.|, of several peers' updates of the same weights; None for one."""
    if len(updates) < 2:
        return None
    norms = [_norm(update) for update in updates]
    pairs = [float(np.dot(a.astype(np.float64), b)) / max(_norm(a) * _norm(b), 1e-30) for a, b in combinations(updates, 2)]
    mean: npt.NDArray[np.float64] = np.stack(updates).mean(axis=0, dtype=np.float64)
    return {"cosine": float(np.mean(pairs)), "shrink": _norm(mean) / max(float(np.mean(norms)), 1e-30)}


def similarity(state: State, layout: Layout) -> float:
    """Return the mean cosine of two experts' matrices, over all pairs and layers."""
    experts = range(layout.num_experts)
    cosines = []
    for layer in layout.expert_layers:
        rows = []
        for expert in experts:
            places = layout.tensors_of_expert_layer(expert, layer)
            rows.append(state[places[0].start : places[-1].stop].astype(np.float64))
        unit = np.stack([row / max(_norm(row), 1e-30) for row in rows])
        cosines.append((unit @ unit.T)[np.triu_indices(len(rows), 1)].mean())
    return float(np.mean(cosines))


def norms(values: State, layout: Layout) -> dict[str, float]:
    """Return the L2 norm of a state or an update by kind: shared, router, expert."""
    squares: dict[str, float] = {}
    for group in layout.groups:
        squares[group.kind] = squares.get(group.kind, 0.0) + _norm(values[group.start : group.stop]) ** 2
    return {kind: square**0.5 for kind, square in squares.items()}


def _norm(values: npt.NDArray[Any]) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))


def _chunks(samples: Samples, device: torch.device) -> Iterator[Tensor]:
    for start in range(0, len(samples), CHUNK):
        yield torch.from_numpy(samples[start : start + CHUNK]).to(device)


def _keep_index(found: list[Tensor]) -> Any:
    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args[1] if len(args) > 1 else kwargs["top_k_index"]).detach().clone())

    return keep
