"""Reading through a large mapped file with little memory: pages are given back once they were used."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator

import numpy as np


def released(arrays: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the arrays; when the next one is asked for, release the one before."""
    for array in arrays:
        yield array
        release(array)


def release(array: np.ndarray) -> None:
    """Unmap the pages of an array that is a view of a read-only mapped file; another array stays as it is.

    The file's pages stay in the kernel's cache as long as there is room; they only no longer count as this process's memory.
    """
    mapped = _mapping(array)
    if mapped is not None:
        first = array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, start, first + array.nbytes - start)


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    """Return the mapped file that the array is a contiguous, read-only view of. Other memory must not be unmapped."""
    if array.flags.writeable or not array.flags.c_contiguous or not array.size:
        return None
    at: object = array
    while isinstance(at, (np.ndarray, memoryview)):
        at = at.base if isinstance(at, np.ndarray) else at.obj
    return at if isinstance(at, mmap.mmap) else None
