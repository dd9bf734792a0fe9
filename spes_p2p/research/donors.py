"""Merge donors as SPES chooses them: the most similar experts of the new aggregate, not of the base before the round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from spes_p2p.config.campaign import OuterConfig
from spes_p2p.model.layout import Layout
from spes_p2p.rounds import next_base
from spes_p2p.rounds.apply import PLAIN, NextBase
from spes_p2p.rounds.digest import num_pieces
from spes_p2p.rounds.merge import Donors, nearest_experts
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Merge
from spes_p2p.rounds.step_bounds import StepBounds


class NextBaseOfAggregate(NextBase):
    """A `NextBase` that replaces the plan's donors."""

    def __init__(
        self, base: np.ndarray, layout: Layout, committed: Sequence[Part], encoded: Mapping[int, bytes | memoryview],
        merge: Merge | None, outer: OuterConfig = PLAIN, bounds: StepBounds | None = None, threads: int = 1,
    ):
        if merge is not None:
            unmerged = NextBase(base, layout, committed, encoded, None, outer, bounds)
            merge = replace(merge, donors=nearest_after(unmerged, base.size, layout, max(map(len, merge.donors[0]))))
        super().__init__(base, layout, committed, encoded, merge, outer, bounds, threads)


def nearest_after(unmerged: NextBase, size: int, layout: Layout, top_k: int) -> Donors:
    """Return the most similar experts in a next base before its merge."""
    return nearest_experts(np.concatenate([unmerged.piece(number) for number in range(num_pieces(size))]), layout, top_k)


@contextmanager
def donors_of_the_aggregate() -> Iterator[None]:
    """Let all peers of this process merge so during the block."""
    with patch.object(next_base, "NextBase", NextBaseOfAggregate):
        yield
