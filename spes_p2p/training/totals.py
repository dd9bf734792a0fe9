"""Sums over the forward passes of a step or phase."""

from __future__ import annotations

import math

import torch

from spes_p2p.messages.samples import Interval
from spes_p2p.training.interface import PhaseReport
from spes_p2p.training.losses import Losses


class Totals:
    """Tokens, losses and routing; the last two stay on the device until the report."""

    def __init__(self, layers: int, num_experts: int, device: torch.device):
        self.tokens = 0
        self.skipped = 0
        self.losses = torch.zeros(2, dtype=torch.float64, device=device)
        """Cross-entropy and auxiliary loss, each multiplied by tokens."""
        self.assignments = torch.zeros(layers, num_experts, dtype=torch.int64, device=device)

    def add_pass(self, tokens: int, losses: Losses) -> None:
        """Add a forward pass over this many tokens."""
        self.losses += torch.stack((losses.cross_entropy, losses.auxiliary)) * tokens
        self.assignments += losses.assignments

    def add(self, other: Totals) -> None:
        """Add the sums of a step that was taken."""
        self.tokens += other.tokens
        self.losses += other.losses
        self.assignments += other.assignments

    def report(
        self, steps: int, owned: tuple[int, ...], seconds: float, untrained: tuple[Interval, ...], flops_per_second: float,
        peak: float | None,
    ) -> PhaseReport:
        """Return the report of a phase of `steps` steps. `peak`: FLOP/s of the device, None where they are not known."""
        cross_entropy, auxiliary = (self.losses / self.tokens).tolist() if self.tokens else (float("nan"), float("nan"))
        assignments = tuple(tuple(layer) for layer in self.assignments.tolist())
        routed = tuple(count if e in owned else 0 for e, count in enumerate(map(sum, zip(*assignments, strict=True))))
        return PhaseReport(
            steps, self.tokens, routed, cross_entropy, auxiliary, seconds, untrained, self.skipped, flops_per_second,
            mfu=flops_per_second / peak if peak else math.nan, assignments=assignments,
        )
