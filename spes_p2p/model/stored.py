"""Storage formats of foreign experts' matrices: float32, bfloat16, or int8 with one scale per output channel.

Measured relative error of a block's output: bfloat16 2.5e-3, int8 1.1e-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from spes_p2p.errors import UserError
from spes_p2p.model.formats import Home, StoredFormat
from spes_p2p.model.shared_memory import Shape, SharedMemory

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def allocate(
    shape: Sequence[int], device: torch.device, home: Home, dtype: torch.dtype = torch.float32, pins: bool = False
) -> Tensor:
    """Return memory for a tensor with this home: one that is absent has a single value in place of all, and is never written.

    `pins`: page-lock what is in host memory.
    """
    if home == "absent":
        return torch.empty((), dtype=dtype, device=device).expand(*shape)
    on_host = home == "host"
    return torch.empty(*shape, dtype=dtype, device="cpu" if on_host else device, pin_memory=on_host and pins)


@dataclass(frozen=True)
class Matrices:
    """Matrices `[count, rows, columns]` on one device, each value = code * scale."""

    codes: Tensor
    scales: Tensor | None = None
    """`[count, rows, 1]` float32 for int8, else None."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that hold the matrices."""
        return (self.codes,) if self.scales is None else (self.codes, self.scales)

    def is_encoded(self, dtype: torch.dtype) -> bool:
        """Return whether multiplying in `dtype` requires decoding."""
        return self.scales is not None or self.codes.dtype != dtype

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return all matrices in `dtype`: the stored tensor itself if it needs no decoding."""
        if self.scales is None:
            return self.codes.to(dtype)
        if self.codes.device.type == "cuda":
            return torch.mul(self.codes, self.scales, out=torch.empty_like(self.codes, dtype=dtype))
        # Two passes: on a CPU, multiplying int8 by a float directly is twice as slow.
        return self.codes.to(dtype).mul_(self.scales.to(dtype))

    def decode_one(self, index: int, scratch: Tensor) -> Tensor:
        """Return one matrix in the dtype of `scratch` `[rows, columns]`, which is overwritten if decoding is needed."""
        if not self.is_encoded(scratch.dtype):
            return self.codes[index]
        scratch.copy_(self.codes[index])
        return scratch if self.scales is None else scratch.mul_(self.scales[index])


class StoredMatrices(nn.Module):
    """`count` matrices of one shape `[rows, columns]` without gradient.

    On the device they are buffers, which move with the model. In host memory they are not buffers, and are pinned for CUDA.
    Absent ones take no memory (`sharding.py`); those that another process shares are absent until `map`.
    """

    codes: Tensor
    scales: Tensor | None
    shared: SharedMemory | None = None
    """What holds them, if this process shares them."""

    def __init__(
        self, count: int, shape: Sequence[int], stored: StoredFormat, device: torch.device, place: Home = "device"
    ):
        super().__init__()
        if stored not in get_args(StoredFormat):
            raise UserError(f"stored format '{stored}': must be one of {', '.join(get_args(StoredFormat))}")
        self._pins = device.type == "cuda"
        self._shapes: list[Shape] = [((count, *shape), _DTYPES[stored])]
        if stored == "int8":
            self._shapes.append(((count, shape[0], 1), torch.float32))
        if place == "shared":
            self.shared = SharedMemory(self._shapes)
            tensors = self._tensors_in(self.shared)
        else:
            tensors = [allocate(each, device, place, dtype, self._pins) for each, dtype in self._shapes]
        on_host = place in ("host", "shared")
        self._on_host = Matrices(*tensors) if on_host else None
        self.register_buffer("codes", None if on_host else tensors[0], persistent=False)
        self.register_buffer("scales", None if on_host or stored != "int8" else tensors[1], persistent=False)

    @property
    def matrices(self) -> Matrices:
        """The stored matrices."""
        return self._on_host or Matrices(self.codes, self.scales)

    def map(self, path: str) -> None:
        """Use the matrices that another process shares under this path, until `unmap`."""
        self._on_host = Matrices(*self._tensors_in(SharedMemory(self._shapes, path)))

    def unmap(self) -> None:
        """Let go of them: they are absent again."""
        self._on_host = None

    def _tensors_in(self, memory: SharedMemory) -> list[Tensor]:
        if self._pins:
            memory.pin()
        return memory.tensors(self._shapes)

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Let these tensors, of the same shapes, hold the matrices from now on."""
        if self._on_host is not None:
            self._on_host = Matrices(*tensors)
        else:
            self.codes, self.scales = tensors[0], tensors[1] if len(tensors) > 1 else None

    def write(self, index: int, values: Tensor) -> None:
        """Encode a float32 matrix `[rows, columns]` into place `index`."""
        matrices = self.matrices
        values = values.to(matrices.codes.device)
        if matrices.scales is not None:
            scale = values.abs().amax(dim=1, keepdim=True).div_(127).clamp_min_(torch.finfo(torch.float32).tiny)
            matrices.scales[index] = scale
            values = (values / scale).round_().clamp_(-127, 127)
        matrices.codes[index].copy_(values)

    def copy(self, index: int, other: StoredMatrices, source: int) -> None:
        """Copy the encoded matrix at index `source` of another store of the same format."""
        for target, origin in zip(self.matrices.tensors, other.matrices.tensors, strict=True):
            target[index].copy_(origin[source])
