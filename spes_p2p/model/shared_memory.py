"""Main memory that the ranks of a peer share: one rank makes and writes it, the others map it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from spes_p2p.errors import UserError

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes: each tensor begins at a multiple of them."""
Shape = tuple[tuple[int, ...], torch.dtype]


class SharedMemory(mmap.mmap):
    """Zeroed memory for a few tensors, which vanishes with the last process that has it."""

    path: str
    """Other processes of this user can map the memory under this path while its maker lives and holds it."""
    _file: int | None
    _pinned: int | None

    def __new__(cls, shapes: Sequence[Shape], path: str | None = None) -> SharedMemory:
        """Make memory for tensors of these shapes, or map what another process made for them. Raises UserError."""
        size = max(1, sum(_room(each) for each in shapes))
        try:
            file = _new_file(size) if path is None else os.open(path, os.O_RDWR)
            made = super().__new__(cls, file, size)
        except OSError as error:
            raise UserError(f"--stored-on host: cannot share {size / 1e6:.0f} MB of foreign experts among the devices "
                            f"({error.strerror}); give --stored-on device") from None
        made.path, made._pinned, made._file = path or f"/proc/{os.getpid()}/fd/{file}", None, file
        if path is not None:
            os.close(file)
            made._file = None
        return made

    def tensors(self, shapes: Sequence[Shape]) -> list[Tensor]:
        """Return the tensors in it. They keep it alive."""
        found, start = [], 0
        for shape, dtype in shapes:
            count = torch.Size(shape).numel()
            flat = torch.frombuffer(self, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
            found.append(flat.view(shape))
            start += _room((shape, dtype))
        return found

    def pin(self) -> None:
        """Page-lock it for CUDA in this process, as far as the system allows: copies to the GPU are faster then."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(self))
        error = int(_cuda().cudaHostRegister(start, len(self), 0))
        if not error:
            self._pinned = start
            return
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")  # CUDA keeps the error until a kernel's launch has raised it
        _warn_of_slow_copies(error)

    def __del__(self) -> None:
        if self._pinned is not None:
            _cuda().cudaHostUnregister(self._pinned)
        if self._file is not None:
            os.close(self._file)


def _new_file(size: int) -> int:
    """Return a file in memory. All of it is allocated: a page that is missing later would end the process without a word."""
    if not hasattr(os, "memfd_create"):
        raise UserError("--stored-on host: needs Linux where --devices names several; leave it out")
    file = os.memfd_create("spes-shared")  # not in /dev/shm, which containers keep small
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        raise
    return file


@cache
def _warn_of_slow_copies(error: int) -> None:
    """Log it once for all layers and phases."""
    logger.warning("cannot page-lock foreign experts in main memory (CUDA error %d): slower copies to the GPU", error)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _room(shape: Shape) -> int:
    size = torch.Size(shape[0]).numel() * shape[1].itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT
