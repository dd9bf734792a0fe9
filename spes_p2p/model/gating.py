"""The gate between an expert's two products and the weighting after them, with less memory than autograd would use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

Gate = Callable[[Tensor], Tensor]


def gate_of(block: nn.Module) -> Gate:
    """Return the gate of a transformers experts block, rows `[S, 2F]` -> `[S, F]`; `silu_gate` for the default SiLU gate."""
    gate: Gate = block._apply_gate  # type: ignore[assignment]
    is_silu = getattr(gate, "__name__", "") == "_default_apply_gate" and isinstance(block.act_fn, type(ACT2FN["silu"]))
    return silu_gate if is_silu else gate


def silu_gate(x: Tensor) -> Tensor:
    """Return silu(x[:, :F]) * x[:, F:] for rows `[S, 2F]`."""
    result: Tensor = _SiluGate.apply(x)  # type: ignore[no-untyped-call]
    return result


def join_weighted(owned: Tensor, foreign: Tensor, weights: Tensor) -> Tensor:
    """Concatenate rows of owned and foreign experts to `[S, H]`, multiplied by their weights `[S]`, in the wider dtype."""
    result: Tensor = _JoinWeighted.apply(owned, foreign, weights)  # type: ignore[no-untyped-call]
    return result


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        activated = nn.functional.silu(gate)
        ctx.save_for_backward(x, activated)
        return activated * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, activated = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_up)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_x


class _JoinWeighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owned: Tensor, foreign: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(owned, foreign, weights)
        shape, dtype = (len(weights), owned.shape[1]), torch.promote_types(owned.dtype, weights.dtype)
        joined = torch.empty(shape, dtype=dtype, device=owned.device)
        split = len(owned)
        torch.mul(owned, weights[:split, None], out=joined[:split])
        torch.mul(foreign, weights[split:, None], out=joined[split:])
        return joined

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        owned, foreign, weights = ctx.saved_tensors
        split = len(owned)
        grad_weights = torch.cat(((grad[:split] * owned).sum(dim=1), (grad[split:] * foreign).sum(dim=1)))
        grad_owned = (grad[:split] * weights[:split, None]).to(owned.dtype)
        grad_foreign = (grad[split:] * weights[split:, None]).to(foreign.dtype)
        return grad_owned, grad_foreign, grad_weights.to(weights.dtype)
