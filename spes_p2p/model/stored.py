"""Foreign experts' matrices as they are kept: float32, bfloat16, or int8 with one scale an output channel.

Measured output error of a block, relative: bfloat16 2.5e-3, int8 1.1e-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from spes_p2p.errors import UserError

StoredFormat = Literal["fp32", "bf16", "int8"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


class StoredMatrices(nn.Module):
    """`count` matrices of one shape `[rows, columns]` without gradient; buffers, so that they move with the model."""

    codes: Tensor
    """`[count, rows, columns]` in the stored dtype."""
    scales: Tensor | None
    """`[count, rows, 1]` float32 for int8, else None: value = code * scale."""

    def __init__(self, count: int, shape: Sequence[int], stored: StoredFormat, device: torch.device):
        super().__init__()
        if stored not in get_args(StoredFormat):
            raise UserError(f"stored format '{stored}': foreign experts can be kept as {', '.join(get_args(StoredFormat))}")
        codes = torch.empty(count, *shape, dtype=_DTYPES[stored], device=device)
        scales = torch.empty(count, shape[0], 1, dtype=torch.float32, device=device) if stored == "int8" else None
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def write(self, index: int, values: Tensor) -> None:
        """Encode a float32 matrix `[rows, columns]` into place `index`."""
        values = values.to(self.codes.device)
        if self.scales is not None:
            scale = values.abs().amax(dim=1, keepdim=True).div_(127).clamp_min_(torch.finfo(torch.float32).tiny)
            self.scales[index] = scale
            values = (values / scale).round_().clamp_(-127, 127)
        self.codes[index].copy_(values)

    def copy(self, index: int, other: StoredMatrices, source: int) -> None:
        """Take over the matrix at place `source` of another store of the same format, without decoding it."""
        self.codes[index].copy_(other.codes[source])
        if self.scales is not None and other.scales is not None:
            self.scales[index].copy_(other.scales[source])

    def decode(self, dtype: torch.dtype) -> Tensor:
        """All matrices `[count, rows, columns]` in `dtype`: the stored tensor itself where no decoding is needed."""
        if self.scales is None:
            return self.codes.to(dtype)
        # Two passes: multiplying int8 by a float in one is twice as slow on a CPU.
        return self.codes.to(dtype).mul_(self.scales.to(dtype))
