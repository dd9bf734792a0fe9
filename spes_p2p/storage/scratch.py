"""Allocation of large arrays that live for a round or longer: in temporary files, or in memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from spes_p2p.errors import UserError

K = TypeVar("K")

Scratch = Callable[[str, int], np.ndarray]
"""`scratch(name, elements)` returns a writable float32 `[elements]` with undefined values (`Store.scratch`)."""


def memory_scratch(name: str, elements: int) -> np.ndarray:
    """Allocate in memory."""
    return np.empty(elements, np.float32)


def file_scratch(folder: Path, name: str, elements: int) -> np.ndarray:
    """Allocate in a mapped file of the folder that is deleted with the array. Raises UserError if the disk has no room."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, 4 * elements)
            return np.frombuffer(mmap.mmap(file.fileno(), 4 * elements), np.float32)
    except OSError as error:
        raise UserError(f"{folder}: cannot hold {4e-6 * elements:.1f} MB ({error.strerror}); choose another folder") from None


def scratch_arrays(scratch: Scratch, name: str, sizes: Mapping[K, int]) -> dict[K, np.ndarray]:
    """Allocate several arrays of these sizes as views of one scratch array."""
    whole, at, found = scratch(name, sum(sizes.values())), 0, {}
    for key, size in sizes.items():
        found[key], at = whole[at : at + size], at + size
    return found
