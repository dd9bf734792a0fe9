"""Fused output head and cross-entropy, which never materializes the logits of all tokens.

With a large vocabulary, logits take more memory than the layers. Here they exist for LOSS_CHUNK tokens at a time: the forward
pass turns each chunk's logits into its share of the gradients, so nothing is recomputed. The gradient of the hidden states is
saved for the backward pass; that of the head is added to `head.grad` at once, since a second array of its size would be what
decides whether a large vocabulary fits on a small card.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spes_p2p.model.memory import LOSS_CHUNK, PRODUCT_ROWS

ALIGNMENT = 64
"""Rows of the head in 16 bits are a multiple of this."""


@dataclass(frozen=True)
class HeadLoss:
    """Scalars, float32."""

    total: Tensor
    """share * (cross_entropy + z_weight * z_loss); the only field with a gradient."""
    cross_entropy: Tensor
    z_loss: Tensor


def head_loss(hidden: Tensor, head: Tensor, targets: Tensor, z_weight: float = 0.0, share: float = 1.0) -> HeadLoss:
    """Return mean losses of the logits `hidden @ head.T`: hidden `[T, H]`, head `[V, H]`, target ids `[T]`; 0 if T is 0.

    Cross-entropy in nats; z-loss is logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5). Products use the autocast dtype, all
    else float32. `share` is the part of a step's samples that these are. With gradients enabled, this call adds the gradient of
    `total` to `head.grad`, so `total` must be part of the step's loss with factor 1. Supports a single backward pass.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    results = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head.detach(), targets, z_weight, share, dtype, _gradient_of(head) if torch.is_grad_enabled() else None
    )
    return HeadLoss(*results)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, z_weight: float, share: float, dtype: torch.dtype,
        of_head: Tensor | None,
    ) -> tuple[Tensor, ...]:
        matrix, count = _padded(head, dtype), max(len(hidden), 1)
        sums = torch.zeros(2, device=hidden.device)
        of_hidden = torch.empty_like(hidden if of_head is not None else hidden[:0])
        for start in range(0, len(hidden), LOSS_CHUNK):
            chunk = slice(start, start + LOSS_CHUNK)
            rows, ids = hidden[chunk].to(dtype), targets[chunk, None]
            logits = (rows @ matrix.t()).float()
            logits[:, len(head) :] = -torch.inf
            chunk_sums, exponentials, scale = _chunk_losses(logits, ids, z_weight)
            sums += chunk_sums
            if of_head is not None:
                of_logits = _gradient(exponentials, scale, ids, share / count).to(dtype)
                of_hidden[chunk] = of_logits @ matrix
                _add_product(of_head, of_logits.t(), rows)
                del of_logits
            # Free these logits before the next chunk's are allocated.
            del logits, exponentials
        ctx.save_for_backward(of_hidden)
        cross_entropy, z_loss = (sums / count).unbind()
        total = share * (cross_entropy + z_weight * z_loss if z_weight else cross_entropy)
        ctx.mark_non_differentiable(cross_entropy, z_loss)
        return total, cross_entropy, z_loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        (of_hidden,) = ctx.saved_tensors
        return of_hidden.mul_(grad), None, None, None, None, None, None


def _padded(head: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the head in this dtype; a copy has rows of zeros up to a multiple of ALIGNMENT.

    On an H100, the three bf16 products with a vocabulary of 151,665 take several times as long as with 151,680: their rows are
    not aligned to 16 bytes, and cuBLAS then chooses kernels made for older cards.
    """
    rows = -len(head) % ALIGNMENT
    if dtype == head.dtype or rows == 0:
        return head.to(dtype)
    matrix = head.new_empty(len(head) + rows, head.shape[1], dtype=dtype)
    matrix[: len(head)] = head
    matrix[len(head) :] = 0
    return matrix


def _gradient_of(head: Tensor) -> Tensor:
    """Return `head.grad`, zeros if there was none."""
    if head.grad is None:
        head.grad = torch.zeros_like(head)
    return head.grad


def _chunk_losses(logits: Tensor, ids: Tensor, z_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of both losses `[2]`; exp(logits - row maximum) `[T, V]`, in place; its factor in the gradient `[T, 1]`."""
    highest, chosen = logits.amax(dim=1, keepdim=True), logits.gather(1, ids)
    exponentials = logits.sub_(highest).exp_()
    norm = exponentials.sum(dim=1, keepdim=True)
    log_norm = norm.log() + highest
    sums = torch.stack(((log_norm - chosen).sum(), log_norm.square().sum()))
    return sums, exponentials, (1 + 2 * z_weight * log_norm) / norm


def _gradient(exponentials: Tensor, scale: Tensor, ids: Tensor, weight: float) -> Tensor:
    """Return d(weight * summed losses) / d(logits) `[T, V]`, in place: weight (softmax (1 + 2 z_weight log_norm) - one_hot)."""
    return exponentials.mul_(scale * weight).scatter_add_(1, ids, scale.new_full((), -weight).expand(ids.shape))


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target += a b, without the rows that a has more. In blocks of rows if the dtypes differ: no temporary of this size."""
    if a.dtype == target.dtype:
        torch.addmm(target, a, b, out=target)
        return
    for start in range(0, len(target), PRODUCT_ROWS):
        rows = target[start : start + PRODUCT_ROWS]
        rows.add_((a[start : start + PRODUCT_ROWS] @ b)[: len(rows)])
