"""What this reducer's encodings dropped: it is added to the next mean of the same part (error feedback, the reducer's side)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spes_p2p.rounds.results import Results
from spes_p2p.storage.scratch import Scratch, side_by_side


class Reduction(Protocol):
    """What this peer reduced in one revision of a round's part table."""

    me: int
    """Index of this peer among the members."""
    revision: int
    rounding: dict[int, np.ndarray]
    """What encoding dropped of each part's mean, float32, by start of the part."""


class Carried:
    """By start of the part's range, float32: kept until the part is committed again."""

    def __init__(self, scratch: Scratch):
        self._scratch = scratch
        self.by_start: dict[int, np.ndarray] = {}

    def settle(self, exchanges: Sequence[Reduction], results: Results, committed: set[int]) -> None:
        """After a commit of these parts (their indices), which I reduced in these exchanges.

        A part that has another reducer now starts anew there.
        """
        if not exchanges:
            return
        others = {part.start for part in results.parts if part.reducer != exchanges[0].me}
        older = {start: dropped for start, dropped in self.by_start.items() if start not in others}
        newer: dict[int, np.ndarray] = {}
        for exchange in exchanges:
            for part in results.parts:
                if part.revision == exchange.revision and part.index in committed and part.start in exchange.rounding:
                    newer[part.start] = exchange.rounding[part.start]
                    older.pop(part.start, None)
        # Those of earlier rounds would each keep the whole file of theirs.
        kept = side_by_side(self._scratch, "carried", {start: dropped.size for start, dropped in older.items()})
        for start, dropped in older.items():
            np.copyto(kept[start], dropped)
        self.by_start = kept | newer

    def clear(self) -> None:
        """The campaign went back to an earlier base."""
        self.by_start = {}
