"""torch's Muon behind the interface of `adamw.py`: state is saved and restored by parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from spes_p2p.training.adamw import Arrays
from spes_p2p.training.moments import MOMENTUM


class Muon:
    """Nesterov momentum of 0.95, orthogonalised by five Newton-Schulz steps (torch.optim.Muon with its defaults).

    Updates are scaled to the size of AdamW's (arXiv 2502.16982, 0.2 sqrt(largest dimension)), so both share a learning rate.
    An expert's fused gate and up projection `[2F, H]` is orthogonalised as one matrix.

    torch computes the Newton-Schulz steps in bfloat16, for which most CPUs have no instructions. There float32 takes a
    thirtieth of the time, and the update differs by a hundredth.
    """

    def __init__(self, groups: list[dict[str, Any]]):
        self.torch_optimizer: torch.optim.Optimizer = torch.optim.Muon(groups, lr=0.0, adjust_lr_fn="match_rms_adamw")

    def step(self, rates: list[float]) -> None:
        """Apply the gradients with one learning rate per parameter group."""
        groups = self.torch_optimizer.param_groups
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        if not all(parameter.is_cpu for group in groups for parameter in group["params"]):
            self.torch_optimizer.step()
            return
        with torch.no_grad():
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_on_cpu(parameter, parameter.grad, group)

    def _step_on_cpu(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.torch_optimizer.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(gradient)
        average: Tensor = state[MOMENTUM]
        average.lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(average, group["momentum"])
        update = _orthogonalised(ahead, group["ns_coefficients"], group["ns_steps"], group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-0.2 * math.sqrt(max(parameter.shape)) * group["lr"])

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


def _orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Bring the singular values of `[M, N]` near 1: from norm 1, by steps of X <- a X + (b X X' + c (X X')^2) X."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found
