"""What a peer can and will do for a campaign."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Capacity:
    """What a peer announces of itself; plans are made from it."""

    experts: int
    """Most experts that it trains."""
    bandwidth: float = 1.0
    """Share of its measured upload bandwidth that counts in plans; 0: it cannot be dialled, and reduces nothing."""
    is_dialable: Callable[[], bool] = lambda: True
    """Whether others can open connections to it now."""

    def announced(self, bytes_per_s: float) -> float:
        """The bandwidth that plans count with, from a measured one; 0 for a peer that cannot be dialled."""
        return self.bandwidth * bytes_per_s if self.is_dialable() else 0.0


NOTHING_TO_TRAIN = Capacity(experts=0)
"""A helper's."""
