"""Where arrays lie that a peer keeps for a round or longer: in files of its run-dir that need not last, or in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

K = TypeVar("K")

Scratch = Callable[[str, int], np.ndarray]
"""`scratch(what, elements)`: float32 `[elements]`, writable, of any content (`Store.scratch`)."""


def memory_scratch(what: str, elements: int) -> np.ndarray:
    """In this process's memory."""
    return np.empty(elements, np.float32)


def side_by_side(scratch: Scratch, what: str, sizes: Mapping[K, int]) -> dict[K, np.ndarray]:
    """Several arrays of these sizes in one."""
    whole, at, found = scratch(what, sum(sizes.values())), 0, {}
    for key, size in sizes.items():
        found[key], at = whole[at : at + size], at + size
    return found
