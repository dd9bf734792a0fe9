"""The matrix products of experts, forward and backward, behind one interface.

`grouped_mm` is torch's grouped GEMM, `eager` a loop over experts (the reference), `megablocks` the optional Triton kernels of
megablocks and stk (`megablocks.py`). Their results differ by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from spes_p2p.errors import UserError
from spes_p2p.model.stored import Matrices

BackendName = Literal["auto", "grouped_mm", "eager", "megablocks"]

FIRST_WITH_BF16 = (8, 0)
"""Compute capability of the first GPUs that compute in bfloat16 natively, and have torch's grouped GEMM."""
ALIGNMENT = 8
"""grouped_mm requires rows of a multiple of 16 bytes: 8 elements in bfloat16."""


class Backend(Protocol):
    """Products of rows `[S, in]` or `[S, out]`, sorted by expert, with matrices `[G, out, in]`.

    `ends` is int32 `[G]`: the end of each expert's rows, of which there may be none. `ends[-1]` is S.
    """

    name: str

    def outputs(self, x: Tensor, weights: Matrices, ends: Tensor) -> Tensor:
        """x W^T, `[S, in]` -> `[S, out]`, in the dtype of x."""

    def input_gradient(self, grad: Tensor, weights: Matrices, ends: Tensor) -> Tensor:
        """g W, `[S, out]` -> `[S, in]`, in the dtype of g."""

    def weight_gradients(self, grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        """The sum of g x^T over each expert's rows: `[G, out, in]`; 0 for an expert without rows."""


class Eager:
    """One product per expert; stored matrices are decoded one at a time."""

    name = "eager"

    def outputs(self, x: Tensor, weights: Matrices, ends: Tensor) -> Tensor:
        """See Backend."""
        y = x.new_empty(x.shape[0], weights.codes.shape[1])
        for rows, matrix in _decoded(weights, ends, x.dtype):
            torch.mm(x[rows], matrix.t(), out=y[rows])
        return y

    def input_gradient(self, grad: Tensor, weights: Matrices, ends: Tensor) -> Tensor:
        """See Backend."""
        grad_x = grad.new_empty(grad.shape[0], weights.codes.shape[2])
        for rows, matrix in _decoded(weights, ends, grad.dtype):
            torch.mm(grad[rows], matrix, out=grad_x[rows])
        return grad_x

    def weight_gradients(self, grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        """See Backend."""
        result = grad.new_zeros(len(ends), grad.shape[1], x.shape[1])
        for group, rows in _rows(ends):
            torch.mm(grad[rows].t(), x[rows], out=result[group])
        return result


class GroupedMM:
    """torch's grouped GEMM, and the loop where that is faster or grouped GEMM is unsupported.

    On a CPU, decoding one matrix at a time keeps it in the cache. On CUDA, grouped GEMM is documented for bfloat16 only.
    """

    name = "grouped_mm"

    def __init__(self) -> None:
        self._loop = Eager()

    def outputs(self, x: Tensor, weights: Matrices, ends: Tensor) -> Tensor:
        """See Backend."""
        if x.shape[0] == 0 or _wants_loop(x, weights):
            return self._loop.outputs(x, weights, ends)
        return nn.functional.grouped_mm(x, weights.decode(x.dtype).transpose(1, 2), offs=ends)

    def input_gradient(self, grad: Tensor, weights: Matrices, ends: Tensor) -> Tensor:
        """See Backend."""
        if grad.shape[0] == 0 or _wants_loop(grad, weights):
            return self._loop.input_gradient(grad, weights, ends)
        return nn.functional.grouped_mm(grad, weights.decode(grad.dtype), offs=ends)

    def weight_gradients(self, grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        """See Backend."""
        if x.shape[0] == 0 or _wants_loop(x):
            return self._loop.weight_gradients(grad, x, ends)
        result = nn.functional.grouped_mm(grad.t(), x, offs=ends)
        # Some GPUs leave the gradients of experts without rows undefined (pytorch issue 172439).
        return result.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)


def choose_backend(wanted: BackendName, device: torch.device, hidden_size: int, intermediate_size: int) -> Backend:
    """Return the backend of that name; `auto` is grouped_mm if it supports the sizes, otherwise eager.

    Raises UserError, naming the alternatives, if the backend does not support these sizes on this device.
    """
    if wanted not in get_args(BackendName):
        raise UserError(f"backend '{wanted}': must be one of {', '.join(get_args(BackendName))}")
    problems = {name: find(device, hidden_size, intermediate_size) for name, find in _PROBLEMS.items()}
    if wanted == "auto":
        wanted = "eager" if problems["grouped_mm"] else "grouped_mm"
    if problems[wanted]:
        possible = [name for name, problem in problems.items() if not problem]
        raise UserError(f"backend {wanted}: {problems[wanted]}; possible here: {', '.join(possible)}")
    if wanted == "megablocks":
        from spes_p2p.model.megablocks import Megablocks

        return Megablocks()
    return GroupedMM() if wanted == "grouped_mm" else Eager()


def _grouped_mm_problem(device: torch.device, hidden_size: int, intermediate_size: int) -> str | None:
    if hidden_size % ALIGNMENT or intermediate_size % ALIGNMENT:
        return f"needs hidden_size = {hidden_size} and intermediate_size = {intermediate_size} to be multiples of {ALIGNMENT}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_WITH_BF16:
        return f"needs a GPU of compute capability 8.0 or higher, not {torch.cuda.get_device_name(device)}"
    return None


def _megablocks_problem(device: torch.device, hidden_size: int, intermediate_size: int) -> str | None:
    from spes_p2p.model import megablocks

    return megablocks.problem(device, hidden_size, intermediate_size)


_PROBLEMS: dict[str, Callable[[torch.device, int, int], str | None]] = {
    "grouped_mm": _grouped_mm_problem,
    "eager": lambda device, hidden_size, intermediate_size: None,
    "megablocks": _megablocks_problem,
}


def _wants_loop(x: Tensor, weights: Matrices | None = None) -> bool:
    if x.device.type == "cpu":
        return weights is not None and weights.is_encoded(x.dtype)
    return x.dtype != torch.bfloat16


def _rows(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (group, its rows) for groups with rows."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = end


def _decoded(weights: Matrices, ends: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, matrix) for groups with rows; a matrix is valid until the next one is yielded."""
    encoded = weights.is_encoded(dtype)
    scratch = torch.empty(weights.codes.shape[1:] if encoded else 0, dtype=dtype, device=weights.codes.device)
    for group, rows in _rows(ends):
        yield rows, weights.decode_one(group, scratch)
