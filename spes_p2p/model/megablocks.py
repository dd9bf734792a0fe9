"""Optional backend with megablocks' and stk's Triton kernels (arXiv 2211.15841): padded rows, block-sparse products.

Install the packages without their dependencies, which pin an old torch: `pip install --no-deps megablocks stanford-stk`. Only
megablocks' kernels are loaded, because importing the package requires its compiled CUDA extension; the topology of the sparse
matrix, which that extension computes, is built with torch here. megablocks' gather and scatter pad the rows; stk's sdd (dense x
dense at the topology's blocks) and dsd (sparse x dense) multiply them.

Parity with the other backends is tested on a CPU with Triton's interpreter. In bfloat16 it held on an H100, where this was the
slowest of the three.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spes_p2p.model.stored import Matrices

BLOCK = 128
PACKAGES = {"megablocks": "megablocks", "stk": "stanford-stk", "triton": "triton"}
"""Distribution of each module."""


def problem(device: torch.device, hidden_size: int, intermediate_size: int) -> str | None:
    """Return why this backend does not support these sizes on this device; None if it does."""
    missing = [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        return f"needs {' and '.join(missing)} (pip install --no-deps {' '.join(missing)})"
    if device.type != "cuda" and not _interpreted():
        return "needs a CUDA device (on a CPU it runs in Triton's interpreter only, TRITON_INTERPRET=1, for tests)"
    if hidden_size % BLOCK or intermediate_size % BLOCK:
        return f"needs hidden_size = {hidden_size} and intermediate_size = {intermediate_size} to be multiples of {BLOCK}"
    return None


class Megablocks:
    """Implements `backends.Backend`."""

    name = "megablocks"

    def outputs(self, x: Tensor, weights: Matrices, ends: Tensor) -> Tensor:
        """See Backend."""
        experts, out_size, in_size = weights.codes.shape
        rows = _Padded.of(ends)
        flat = weights.decode(x.dtype).reshape(experts * out_size, in_size)
        sparse = _stk_ops().sdd(rows.pad(x), flat.t(), rows.sparse(None, out_size, x.dtype))
        return rows.unpad(rows.dense(sparse.data, out_size))

    def input_gradient(self, grad: Tensor, weights: Matrices, ends: Tensor) -> Tensor:
        """See Backend."""
        experts, out_size, in_size = weights.codes.shape
        rows = _Padded.of(ends)
        flat = weights.decode(grad.dtype).reshape(experts * out_size, in_size)
        return rows.unpad(_stk_ops().dsd(rows.sparse(grad, out_size, grad.dtype), flat))

    def weight_gradients(self, grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
        """See Backend."""
        rows = _Padded.of(ends)
        sparse = rows.sparse(grad, grad.shape[1], grad.dtype)
        flat: Tensor = _stk_ops().dsd(sparse.t(), rows.pad(x))
        return flat.view(len(ends), grad.shape[1], x.shape[1])


@dataclass(frozen=True)
class _Padded:
    """Positions of S rows, sorted by expert, when each expert's rows are padded to whole blocks."""

    ends: Tensor
    padded_ends: Tensor
    expert_of_row: Tensor
    """int32 `[S]`"""
    expert_of_block: Tensor
    """int64 `[P / BLOCK]`, P padded rows."""

    @classmethod
    def of(cls, ends: Tensor) -> _Padded:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        blocks = (counts + BLOCK - 1) // BLOCK
        experts = torch.arange(len(ends), device=ends.device)
        padded_ends = (blocks.cumsum(0) * BLOCK).to(torch.int32)
        return cls(ends, padded_ends, experts.repeat_interleave(counts).int(), experts.repeat_interleave(blocks))

    def pad(self, x: Tensor) -> Tensor:
        """`[S, columns]` -> `[P, columns]`, with zeros in the padding."""
        index = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        if x.shape[0] == 0:
            return x
        padded: Tensor = _kernels().padded_gather(
            x.contiguous(), index, self.expert_of_row, None, self.ends, self.padded_ends, 1
        )
        return padded

    def unpad(self, padded: Tensor) -> Tensor:
        """Inverse of `pad`."""
        index = torch.arange(len(self.expert_of_row), dtype=torch.int32, device=padded.device)
        if len(index) == 0:
            return padded
        rows: Tensor = _kernels().padded_scatter(padded, index, self.expert_of_row, None, self.ends, self.padded_ends, 1)
        return rows

    def sparse(self, values: Tensor | None, width: int, dtype: torch.dtype) -> Any:
        """Block-sparse `[P, experts * width]` in which a row has the columns of its expert only.

        `values`: the rows `[S, width]`; None for the topology alone.
        """
        from stk import Matrix

        across = width // BLOCK
        block_rows, device = len(self.expert_of_block), self.ends.device
        columns = (self.expert_of_block[:, None] * across + torch.arange(across, device=device)).flatten()
        rows = torch.arange(block_rows, device=device).repeat_interleave(across)
        by_column = columns.argsort(stable=True)
        column_ends = columns.bincount(minlength=len(self.ends) * across).cumsum(0)
        if values is None:
            data = torch.empty(len(columns), BLOCK, BLOCK, dtype=dtype, device="meta")
        else:
            tiles = self.pad(values).view(block_rows, BLOCK, across, BLOCK)
            data = tiles.transpose(1, 2).reshape(len(columns), BLOCK, BLOCK)
        return Matrix(
            torch.Size((block_rows * BLOCK, len(self.ends) * across * BLOCK)),
            data,
            rows.int(),
            columns.int(),
            (torch.arange(block_rows + 1, device=device) * across).int(),
            rows[by_column].int(),
            torch.cat((column_ends.new_zeros(1), column_ends)).int(),
            by_column.int(),
        )

    def dense(self, blocks: Tensor, width: int) -> Tensor:
        """Blocks of `sparse` -> `[P, width]`."""
        tiles = blocks.view(len(self.expert_of_block), width // BLOCK, BLOCK, BLOCK)
        return tiles.transpose(1, 2).reshape(-1, width)


@lru_cache(maxsize=1)
def _kernels() -> Any:
    """Load megablocks' Triton kernels without importing the package."""
    package = importlib.util.find_spec("megablocks")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0], "backend", "kernels.py")
    spec = importlib.util.spec_from_file_location("spes_p2p_megablocks_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    if _interpreted():
        # Triton cannot autotune in the interpreter.
        kernels._padded_copy.configs = kernels._padded_copy.configs[:1]
    return kernels


def _stk_ops() -> Any:
    return importlib.import_module("stk.ops")


def _interpreted() -> bool:
    triton = importlib.import_module("triton")
    return bool(triton.knobs.runtime.interpret) if hasattr(triton, "knobs") else False
