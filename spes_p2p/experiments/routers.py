"""Two things that a swarm could do for its routers, tried where all peers are in one process; the product does neither.

- The load-balance loss counts what all peers' routers chose in their last phase, in place of a pass's own choices (after
  arXiv 2501.11873, which counts over a global batch in every step).
- The mean of a round weighs an expert's rows of the routers by who owns the expert: who sees what the expert answers today
  knows best what to send there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spes_p2p.model.build import State
from spes_p2p.model.layout import Group
from spes_p2p.training.interface import PhaseReport
from spes_p2p.training.losses import Losses, forward_losses
from spes_p2p.training.trainer import TorchTrainer


class Counts:
    """Assignments `[L, E]` of all peers in their last phase; None before there was one."""

    def __init__(self) -> None:
        self.last: tuple[Tensor, ...] | None = None
        self._of_round: dict[int, list[np.ndarray]] = {}

    def trained(self, round_number: int, report: PhaseReport, peers: int) -> None:
        """One of so many peers has trained for this round."""
        counts = self._of_round.setdefault(round_number, [])
        counts.append(np.array(report.assignments))
        if len(counts) == peers:
            self.last = tuple(torch.from_numpy(np.sum(self._of_round.pop(round_number), axis=0)))


class JointlyBalanced(TorchTrainer):
    """A trainer whose load-balance loss counts what all peers do."""

    counts: Counts

    def _losses(self, chunk: Tensor) -> Losses:
        last = None if self.counts.last is None else [layer.to(chunk.device) for layer in self.counts.last]
        return forward_losses(self._model, list(self._blocks.values()), chunk, self._config.training, last)


def weigh_router_rows(trainer: TorchTrainer, base: State, weight: float, owned: Sequence[tuple[int, ...]]) -> None:
    """Stretch what a phase did to the routers so that a mean of equal peers weighs it: an expert's owners `weight`, others 1.

    `owned`: of each peer. A round takes all of it, so that nothing of the stretch stays: routers' codec is `none`.
    """
    rows = np.array([_row_factor(e, e in trainer.owned, weight, owned) for e in range(trainer.layout.num_experts)], np.float32)
    for group in trainer.layout.groups:
        if group.kind == "router":
            trainer.add(group, _stretched(trainer, base, group, rows))


def _row_factor(expert: int, mine: bool, weight: float, owned: Sequence[tuple[int, ...]]) -> float:
    owners = sum(expert in each for each in owned)
    return len(owned) * (weight if mine else 1.0) / (weight * owners + len(owned) - owners)


def _stretched(trainer: TorchTrainer, base: State, group: Group, rows: np.ndarray) -> State:
    """What to add to the weights of one group of routers, each `[E, H]`."""
    update = trainer.read(group) - base[group.start : group.stop]
    for placed in trainer.layout.tensors_of(group):
        router = update[placed.start - group.start : placed.stop - group.start].reshape(placed.spec.shape)
        router *= rows[:, None] - 1
    return update
