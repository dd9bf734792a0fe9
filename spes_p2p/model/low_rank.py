"""Low-rank terms of experts that every peer trains, so that a peer's tokens also train foreign experts.

An expert's matrix `W [rows, columns]` becomes `W + B A`. `B [rows, rank]` starts at 0 and is a shared weight: all peers train
it and rounds average it. `A [rank, columns]` is fixed: random signs (LoRA, arXiv 2106.09685, with the random factor frozen),
derived from the matrix's name, so it is neither sent nor stored. A's magnitude is sqrt(columns) / rank: AdamW moves each
element of B by about the learning rate, and this makes such a step change a product by as much as a step on W would.

An exported model contains the sum.
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
    """Return the name of the layer's `B [E, rows, rank]`; `block` is the name of its experts module."""
    return f"{block}.low_rank.{matrix}"


def directions(name: str, rank: int, columns: int) -> Tensor:
    """Return `A [rank, columns]`, float32, for the B of this name, with the same bits on every machine."""
    count = rank * columns
    drawn = np.frombuffer(hashlib.shake_256(name.encode()).digest(-(-count // 8)), np.uint8)
    signs = 1 - 2 * np.unpackbits(drawn, count=count).astype(np.float32)
    return torch.from_numpy(signs * np.float32(columns**0.5 / rank)).view(rank, columns)


class LowRank(nn.Module):
    """The low-rank terms of one layer's experts."""

    def __init__(
        self, block: str, shapes: Mapping[str, Sequence[int]], num_experts: int, rank: int, experts: Backend,
        device: torch.device,
    ):
        """`shapes`: `(rows, columns)` of an expert's matrices by name; `experts`: the backend of those matrices.

        The Bs are on the meta device until they are materialised.
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
        """Return `rows A^T B^T` of each row's expert: `[S, columns]` -> `[S, rows]`.

        Rows are sorted by expert; those of `experts[i]` end at `ends[i]`.
        """
        narrow = nn.functional.linear(rows, self.get_buffer(f"directions_of_{matrix}").to(rows.dtype))
        term: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            narrow, self.get_parameter(matrix), experts, ends, self._backends[matrix]
        )
        return term


class _Product(torch.autograd.Function):
    """y = x B^T for rows sorted by expert; `experts` selects the Bs, in the order of the rows."""

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
