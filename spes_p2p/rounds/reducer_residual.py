"""Error feedback of reducers: the residual of encoding a part's mean is added to the part's next mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spes_p2p.rounds.results import Results
from spes_p2p.storage.scratch import Scratch, scratch_arrays


class Reduction(Protocol):
    """What this peer reduced in one revision of a round's part table."""

    me: int
    """Index of this peer among the members."""
    revision: int
    new_residuals: dict[int, np.ndarray]
    """Mean minus decoded mean of each reduced part, float32, by start of the part."""


class ReducerResiduals:
    """Residuals by start of the part's range, float32. Each is kept until its part is committed again."""

    def __init__(self, scratch: Scratch):
        self._scratch = scratch
        self.by_start: dict[int, np.ndarray] = {}

    def settle(self, exchanges: Sequence[Reduction], results: Results, committed: set[int]) -> None:
        """Take the residuals of a commit. `exchanges`: this peer's in the round; `committed`: indices of the committed parts.

        The residual of a part that moved to another reducer is dropped.
        """
        if not exchanges:
            return
        moved = {part.start for part in results.parts if part.reducer != exchanges[0].me}
        older = {start: residual for start, residual in self.by_start.items() if start not in moved}
        newer: dict[int, np.ndarray] = {}
        for exchange in exchanges:
            for part in results.parts:
                if part.revision == exchange.revision and part.index in committed and part.start in exchange.new_residuals:
                    newer[part.start] = exchange.new_residuals[part.start]
                    older.pop(part.start, None)
        # Copy the older ones: each would keep a whole round's file alive.
        kept = scratch_arrays(self._scratch, "residual", {start: residual.size for start, residual in older.items()})
        for start, residual in older.items():
            np.copyto(kept[start], residual)
        self.by_start = kept | newer

    def clear(self) -> None:
        """Drop all residuals, after a rollback."""
        self.by_start = {}
