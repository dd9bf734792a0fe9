"""Error feedback of reducers and hubs: the residual of encoding a mean is added to the part's next mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spes_p2p.rounds.cells import NO_CELL
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.results import Results
from spes_p2p.storage.scratch import Scratch, scratch_arrays


class Reduction(Protocol):
    """What this peer reduced in one revision of a round's part table."""

    me: int
    """Index of this peer among the members."""
    revision: int
    new_residuals: dict[int, np.ndarray]
    """Mean minus decoded mean of each reduced part, float32, by `residual_key`."""


def residual_key(part: Part, is_cell: bool = False) -> int:
    """Return the key of the residual of a part's mean, or of a cell's mean of it: a member may make both."""
    return ~part.start if is_cell else part.start


class ReducerResiduals:
    """Residuals by `residual_key`, float32. Each is kept until a commit includes this peer's mean of the part again."""

    def __init__(self, scratch: Scratch):
        self._scratch = scratch
        self.by_key: dict[int, np.ndarray] = {}

    def settle(self, exchanges: Sequence[Reduction], results: Results, committed: set[int]) -> None:
        """Take the residuals of a commit. `exchanges`: this peer's in the round; `committed`: indices of the committed parts.

        The residual of a part that moved to another reducer or hub is dropped, except of a cell of strangers: lots draw other
        hubs each round, so each keeps what it dropped until it makes a mean of the part again.
        """
        if not exchanges:
            return
        me, made = exchanges[0].me, {(each.revision, key): new for each in exchanges for key, new in each.new_residuals.items()}
        older, newer = dict(self.by_key), dict[int, np.ndarray]()
        for part in results.parts:
            of_part = residual_key(part), part.revision, part.reducer == me, part.index in committed
            of_cell = residual_key(part, is_cell=True), 0, me in part.summing, of_part[-1] and _includes_cell(results, part, me)
            for key, revision, is_mine, is_included in (of_part, of_cell):
                waits = key < 0 and NO_CELL in part.cell_of
                if not (is_mine or waits) or (is_included and (revision, key) in made):
                    older.pop(key, None)
                if is_mine and is_included and (revision, key) in made:
                    newer[key] = made[revision, key]
        # Copy the older ones: each would keep a whole round's file alive.
        kept = scratch_arrays(self._scratch, "residual", {key: residual.size for key, residual in older.items()})
        for key, residual in older.items():
            np.copyto(kept[key], residual)
        self.by_key = kept | newer

    def clear(self) -> None:
        """Drop all residuals, after a rollback."""
        self.by_key = {}


def _includes_cell(results: Results, part: Part, hub: int) -> bool:
    """Return whether a result has the mean of this hub's cell."""
    return hub in part.summing and not set(part.in_cell(hub)).isdisjoint(results.contributors(part))
