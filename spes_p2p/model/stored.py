"""Foreign experts' matrices as they are kept: float32, bfloat16, or int8 with one scale an output channel.

Measured output error of a block, relative: bfloat16 2.5e-3, int8 1.1e-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from spes_p2p.errors import UserError

StoredFormat = Literal["fp32", "bf16", "int8"]
StoredPlace = Literal["device", "host"]
"""Where foreign experts are kept: beside the trained ones, or in host memory, brought to the device layer by layer."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Matrices:
    """Matrices `[count, rows, columns]` on one device, each value = code * scale."""

    codes: Tensor
    scales: Tensor | None = None
    """`[count, rows, 1]` float32 for int8, else None."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What takes memory."""
        return (self.codes,) if self.scales is None else (self.codes, self.scales)

    def is_encoded(self, dtype: torch.dtype) -> bool:
        """Must they be decoded to be multiplied in `dtype`?"""
        return self.scales is not None or self.codes.dtype != dtype

    def decode(self, dtype: torch.dtype) -> Tensor:
        """All matrices in `dtype`: the stored tensor itself where no decoding is needed."""
        if self.scales is None:
            return self.codes.to(dtype)
        # Two passes: multiplying int8 by a float in one is twice as slow on a CPU.
        return self.codes.to(dtype).mul_(self.scales.to(dtype))

    def decode_one(self, index: int, scratch: Tensor) -> Tensor:
        """One matrix in the dtype of `scratch` `[rows, columns]`, which is overwritten where decoding is needed."""
        if not self.is_encoded(scratch.dtype):
            return self.codes[index]
        scratch.copy_(self.codes[index])
        return scratch if self.scales is None else scratch.mul_(self.scales[index])


class StoredMatrices(nn.Module):
    """`count` matrices of one shape `[rows, columns]` without gradient.

    On the device they are buffers, which move with the model; in host memory they are not, and pinned where there is CUDA.
    """

    codes: Tensor
    scales: Tensor | None

    def __init__(
        self, count: int, shape: Sequence[int], stored: StoredFormat, device: torch.device, place: StoredPlace = "device"
    ):
        super().__init__()
        if stored not in get_args(StoredFormat):
            raise UserError(f"stored format '{stored}': foreign experts can be kept as {', '.join(get_args(StoredFormat))}")
        on_host = place == "host"
        pinned = on_host and device.type == "cuda"
        where = torch.device("cpu") if on_host else device
        codes = torch.empty(count, *shape, dtype=_DTYPES[stored], device=where, pin_memory=pinned)
        scales = None
        if stored == "int8":
            scales = torch.empty(count, shape[0], 1, dtype=torch.float32, device=where, pin_memory=pinned)
        self._on_host = Matrices(codes, scales) if on_host else None
        self.register_buffer("codes", None if on_host else codes, persistent=False)
        self.register_buffer("scales", None if on_host else scales, persistent=False)

    @property
    def matrices(self) -> Matrices:
        """Where they are kept."""
        return self._on_host or Matrices(self.codes, self.scales)

    def write(self, index: int, values: Tensor) -> None:
        """Encode a float32 matrix `[rows, columns]` into place `index`."""
        kept = self.matrices
        values = values.to(kept.codes.device)
        if kept.scales is not None:
            scale = values.abs().amax(dim=1, keepdim=True).div_(127).clamp_min_(torch.finfo(torch.float32).tiny)
            kept.scales[index] = scale
            values = (values / scale).round_().clamp_(-127, 127)
        kept.codes[index].copy_(values)

    def copy(self, index: int, other: StoredMatrices, source: int) -> None:
        """Take over the matrix at place `source` of another store of the same format, without decoding it."""
        for mine, theirs in zip(self.matrices.tensors, other.matrices.tensors, strict=True):
            mine[index].copy_(theirs[source])
