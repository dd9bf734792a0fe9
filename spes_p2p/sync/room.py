"""Where arrays lie that a peer keeps for a round or longer: in files of its run-dir that need not last, or in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

K = TypeVar("K")

Room = Callable[[str, int], np.ndarray]
"""`room(what, elements)`: float32 `[elements]`, writable, of any content (`Store.scratch`)."""


def memory_room(what: str, elements: int) -> np.ndarray:
    """Room in this process's memory."""
    return np.empty(elements, np.float32)


def rooms(room: Room, what: str, sizes: Mapping[K, int]) -> dict[K, np.ndarray]:
    """Several arrays of these sizes side by side in one room."""
    whole, at, found = room(what, sum(sizes.values())), 0, {}
    for key, size in sizes.items():
        found[key], at = whole[at : at + size], at + size
    return found
