"""A term of low rank beside each expert's matrices that every peer trains, so that its tokens teach foreign experts too.

An expert's matrix `W [rows, columns]` becomes `W + B A`. `B [rows, rank]` begins as 0 and is one of the shared weights: all
peers train it and rounds average it. `A [rank, columns]` is fixed: random signs (LoRA, arXiv 2106.09685, with the random half
frozen), computed from the matrix's name, so that nobody sends or stores it. Their size makes a step of AdamW on B, which moves
each of its elements by the learning rate, change a product by as much as one on W would: rank * size * |x| is then
sqrt(columns) * |x|.

An exported model has the sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spes_p2p.model.backends import Backend, BackendName, choose_backend
from spes_p2p.model.stored import Matrices


def low_rank_name(block: str, matrix: str) -> str:
    """Of the layer's `B [E, rows, rank]`; `block` is the name of its experts module."""
    return f"{block}.low_rank.{matrix}"


def directions(name: str, rank: int, columns: int) -> Tensor:
    """`A [rank, columns]`, float32, for the B of this name: the same bits everywhere."""
    count = rank * columns
    drawn = np.frombuffer(hashlib.shake_256(name.encode()).digest(-(-count // 8)), np.uint8)
    signs = 1 - 2 * np.unpackbits(drawn, count=count).astype(np.float32)
    return torch.from_numpy(signs * np.float32(columns**0.5 / rank)).view(rank, columns)


class LowRank(nn.Module):
    """The terms of one layer's experts."""

    def __init__(
        self, block: str, shapes: Mapping[str, Sequence[int]], num_experts: int, rank: int, experts: Backend,
        device: torch.device,
    ):
        """`shapes`: `(rows, columns)` of an expert's matrices, by name; `experts`: what computes these.

        The Bs are on the meta device until they get values.
        """
        super().__init__()
        self._backends: dict[str, Backend] = {}
        for matrix, (rows, columns) in shapes.items():
            self.register_parameter(matrix, nn.Parameter(torch.empty(num_experts, rows, rank, device="meta")))
            fixed = directions(low_rank_name(block, matrix), rank, columns).to(device)
            self.register_buffer(f"directions_of_{matrix}", fixed, persistent=False)
            wanted: BackendName = "eager" if experts.name == "eager" else "auto"  # megablocks needs wider matrices
            self._backends[matrix] = choose_backend(wanted, device, rows, rank)

    def forward(self, matrix: str, rows: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
        """`rows A^T B^T` of each row's expert: `[S, columns]` -> `[S, rows]`.

        Rows are sorted by expert; those up to `ends[i]` belong to `experts[i]` or one before.
        """
        narrow = nn.functional.linear(rows, self.get_buffer(f"directions_of_{matrix}").to(rows.dtype))
        term: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            narrow, self.get_parameter(matrix), experts, ends, self._backends[matrix]
        )
        return term


class _Product(torch.autograd.Function):
    """y = x B^T for rows sorted by expert; `experts` says which of all Bs are meant, in which order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, experts: Tensor, ends: Tensor, backend: Backend) -> Tensor:
        ctx.save_for_backward(x, parameter, experts, ends)
        ctx.backend = backend
        return backend.outputs(x, Matrices(parameter[experts]), ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, parameter, experts, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = ctx.backend.input_gradient(grad, Matrices(parameter[experts]), ends)
        grad_parameter = torch.zeros_like(parameter)
        grad_parameter[experts] = ctx.backend.weight_gradients(grad, x, ends).to(parameter.dtype)
        return grad_x, grad_parameter, None, None, None
