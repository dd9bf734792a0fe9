"""Allocation of large arrays that live for a round or longer: in temporary files of the run-dir, or in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

K = TypeVar("K")

Scratch = Callable[[str, int], np.ndarray]
"""`scratch(name, elements)` returns a writable float32 `[elements]` with undefined values (`Store.scratch`)."""


def memory_scratch(name: str, elements: int) -> np.ndarray:
    """Allocate in memory."""
    return np.empty(elements, np.float32)


def scratch_arrays(scratch: Scratch, name: str, sizes: Mapping[K, int]) -> dict[K, np.ndarray]:
    """Allocate several arrays of these sizes as views of one scratch array."""
    whole, at, found = scratch(name, sum(sizes.values())), 0, {}
    for key, size in sizes.items():
        found[key], at = whole[at : at + size], at + size
    return found
