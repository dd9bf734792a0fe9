"""Fused output head and cross-entropy, which never materializes the logits of all tokens.

With a large vocabulary, logits take more memory than the layers. Here they exist for LOSS_CHUNK tokens at a time: the forward
pass turns each chunk's logits into its share of the gradients, so nothing is recomputed, and autograd saves only gradients of
the size of the hidden states and the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spes_p2p.model.memory import LOSS_CHUNK, PRODUCT_ROWS


@dataclass(frozen=True)
class HeadLoss:
    """Scalars, float32."""

    total: Tensor
    """cross_entropy + z_weight * z_loss; the only field with a gradient."""
    cross_entropy: Tensor
    z_loss: Tensor


def head_loss(hidden: Tensor, head: Tensor, targets: Tensor, z_weight: float = 0.0) -> HeadLoss:
    """Return mean losses of the logits `hidden @ head.T`: hidden `[T, H]`, head `[V, H]`, target ids `[T]`.

    Cross-entropy in nats; z-loss is logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5). Products use the autocast dtype, all
    else float32. Supports a single backward pass.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    results = _HeadLoss.apply(hidden, head, targets, z_weight, dtype, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return HeadLoss(*results)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, z_weight: float, dtype: torch.dtype, with_gradients: bool
    ) -> tuple[Tensor, ...]:
        matrix, count = head.to(dtype), len(hidden)
        sums = torch.zeros(2, device=hidden.device)
        gradients = (torch.empty_like(hidden), torch.zeros_like(head)) if with_gradients else ()
        for start in range(0, count, LOSS_CHUNK):
            chunk = slice(start, start + LOSS_CHUNK)
            rows, ids = hidden[chunk].to(dtype), targets[chunk, None]
            chunk_sums, exponentials, scale = _chunk_losses((rows @ matrix.t()).float(), ids, z_weight)
            sums += chunk_sums
            if gradients:
                of_logits = _gradient(exponentials, scale / count, ids, count).to(dtype)
                gradients[0][chunk] = of_logits @ matrix
                _add_product(gradients[1], of_logits.t(), rows)
                del of_logits
            # Free these logits before the next chunk's are allocated.
            del exponentials
        ctx.save_for_backward(*gradients)
        cross_entropy, z_loss = (sums / count).unbind()
        total = cross_entropy + z_weight * z_loss if z_weight else cross_entropy.clone()
        ctx.mark_non_differentiable(cross_entropy, z_loss)
        return total, cross_entropy, z_loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = ctx.saved_tensors
        return of_hidden.mul_(grad), of_head.mul_(grad), None, None, None, None


def _chunk_losses(logits: Tensor, ids: Tensor, z_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of both losses `[2]`; exp(logits - row maximum) `[T, V]`, in place; its factor in the gradient `[T, 1]`."""
    highest, chosen = logits.amax(dim=1, keepdim=True), logits.gather(1, ids)
    exponentials = logits.sub_(highest).exp_()
    norm = exponentials.sum(dim=1, keepdim=True)
    log_norm = norm.log() + highest
    sums = torch.stack(((log_norm - chosen).sum(), log_norm.square().sum()))
    return sums, exponentials, (1 + 2 * z_weight * log_norm) / norm


def _gradient(exponentials: Tensor, scale: Tensor, ids: Tensor, count: int) -> Tensor:
    """Return d(mean loss) / d(logits) `[T, V]`, in place: (softmax (1 + 2 z_weight log_norm) - one_hot(ids)) / count."""
    return exponentials.mul_(scale).scatter_add_(1, ids, scale.new_full((), -1 / count).expand(ids.shape))


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target += a b. If the dtypes differ, in blocks of rows, to avoid a temporary as large as `target`."""
    if a.dtype == target.dtype:
        torch.addmm(target, a, b, out=target)
        return
    for start in range(0, len(target), PRODUCT_ROWS):
        target[start : start + PRODUCT_ROWS].add_(a[start : start + PRODUCT_ROWS] @ b)
