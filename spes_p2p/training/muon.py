"""torch's Muon behind the interface of `adamw.py`: state is saved and restored by parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spes_p2p.training.adamw import Arrays
from spes_p2p.training.moments import MOMENTUM


class Muon:
    """Nesterov momentum of 0.95, orthogonalised by five Newton-Schulz steps (torch.optim.Muon with its defaults).

    Updates are scaled to the size of AdamW's (arXiv 2502.16982, 0.2 sqrt(largest dimension)), so both share a learning rate.
    An expert's fused gate and up projection `[2F, H]` is orthogonalised as one matrix.
    """

    def __init__(self, groups: list[dict[str, Any]]):
        self.torch_optimizer: torch.optim.Optimizer = torch.optim.Muon(groups, lr=0.0, adjust_lr_fn="match_rms_adamw")

    def step(self, rates: list[float]) -> None:
        """Apply the gradients with one learning rate per parameter group."""
        for group, rate in zip(self.torch_optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.torch_optimizer.step()

    def state_of(self, parameter: nn.Parameter, in_full: bool = False) -> dict[str, Tensor]:
        """Return a parameter's momentum, not a copy; empty before its first step. It is never in 8 bits."""
        momentum = self.torch_optimizer.state.get(parameter, {}).get(MOMENTUM)
        return {} if momentum is None else {MOMENTUM: momentum.detach()}

    def load_state_of(self, parameter: nn.Parameter, arrays: Arrays, device: torch.device) -> bool:
        """Restore `state_of` on this device; return False and change nothing if the arrays do not match this parameter."""
        momentum = arrays.get(MOMENTUM)
        if momentum is None or momentum.shape != tuple(parameter.shape):
            return False
        self.torch_optimizer.state[parameter] = {MOMENTUM: torch.tensor(momentum, device=device)}
        return True
