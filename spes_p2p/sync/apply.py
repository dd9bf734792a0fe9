"""From one base to the next: decode what was committed, outer step, merge. The same bits on every machine.

The new base is made piece by piece, so that it never needs to be in memory as a whole.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from spes_p2p.model.layout import Layout
from spes_p2p.swarm.records import Merge
from spes_p2p.sync.digest import PIECE_ELEMENTS
from spes_p2p.sync.merge import merge_range, merged_rows
from spes_p2p.sync.parts import Part

DECODED_PARTS = 16
"""Decoded parts that are kept at hand; a merge looks at several places at once."""


def next_base(
    base: np.ndarray,
    layout: Layout,
    committed: Sequence[Part],
    encoded: Mapping[int, bytes | memoryview],
    merge: Merge | None,
) -> Iterator[np.ndarray]:
    """The new base in pieces, float32 `[PIECE_ELEMENTS]` each but the last, new arrays.

    `committed`: the committed parts, ascending; `encoded`: their mean updates, by part index. The outer step is plain
    averaging: new = base + mean update. Parts that are not there keep the old value.
    """
    stepped = _OuterStep(base, committed, encoded)
    rows, alpha = (merged_rows(layout, merge.donors), merge.alpha) if merge is not None else ((), 0.0)
    for start in range(0, layout.size, PIECE_ELEMENTS):
        yield merge_range(stepped.values, rows, alpha, start, min(start + PIECE_ELEMENTS, layout.size))


class _OuterStep:
    """Values after the outer step, for any range."""

    def __init__(self, base: np.ndarray, committed: Sequence[Part], encoded: Mapping[int, bytes | memoryview]):
        self._base, self._parts, self._encoded = base, committed, encoded
        self._stops = [part.stop for part in committed]
        self._decoded: OrderedDict[int, np.ndarray] = OrderedDict()

    def values(self, start: int, stop: int) -> np.ndarray:
        """float32 `[stop - start]`, a new array."""
        new = self._base[start:stop].copy()
        for place in range(bisect.bisect_right(self._stops, start), len(self._parts)):
            part = self._parts[place]
            if part.start >= stop:
                break
            a, b = max(start, part.start), min(stop, part.stop)
            place_of_part = new[a - start : b - start]
            np.add(place_of_part, self._update(part)[a - part.start : b - part.start], out=place_of_part)
        return new

    def _update(self, part: Part) -> np.ndarray:
        update = self._decoded.get(part.index)
        if update is None:
            update = part.codec.decode(self._encoded[part.index], part.size)
            self._decoded[part.index] = update
            if len(self._decoded) > DECODED_PARTS:
                self._decoded.popitem(last=False)
        return update
