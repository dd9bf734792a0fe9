"""From one base to the next: decode what was committed, outer step, merge. The same bits on every machine.

The new base is made piece by piece, so that it never needs to be in memory as a whole.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spes_p2p.config.campaign import OuterConfig
from spes_p2p.messages.rounds import Merge
from spes_p2p.model.layout import Layout
from spes_p2p.rounds.digest import PIECE_ELEMENTS
from spes_p2p.rounds.merge import merge_range, merged_rows
from spes_p2p.rounds.outer import momentum_offsets, next_momentum, next_weights, outer_settings
from spes_p2p.rounds.parts import Part

DECODED_PARTS = 16
"""Decoded parts that are kept at hand; a merge looks at several places at once."""
PLAIN = OuterConfig()


class NextBase:
    """The new base (float32 `[base_size(layout, outer)]`), any piece of it: `[PIECE_ELEMENTS]` each but the last.

    Parts that were not committed keep their old weights and momentum. The merge moves weights, never momentum.
    """

    def __init__(
        self,
        base: np.ndarray,
        layout: Layout,
        committed: Sequence[Part],
        encoded: Mapping[int, bytes | memoryview],
        merge: Merge | None,
        outer: OuterConfig = PLAIN,
    ):
        """`committed`: the committed parts, ascending; `encoded`: their mean updates, by part index."""
        self._size = base.size
        self._stepped = _OuterStep(base, layout, committed, encoded, outer)
        self._rows = merged_rows(layout, merge.donors) if merge is not None else ()
        self._alpha = merge.alpha if merge is not None else 0.0

    def piece(self, number: int) -> np.ndarray:
        """One piece, a new array."""
        start = number * PIECE_ELEMENTS
        return merge_range(self._stepped.values, self._rows, self._alpha, start, min(start + PIECE_ELEMENTS, self._size))

    def parts_by_piece(self) -> list[tuple[int, ...]]:
        """For each piece, which parts are in it by their index."""
        return self._stepped.parts_by_piece(-(-self._size // PIECE_ELEMENTS))

    def merged_pieces(self) -> set[int]:
        """Pieces that the merge changes: parts of other places are in them too."""
        return {n for row in self._rows for n in range(row.start // PIECE_ELEMENTS, -(-row.stop // PIECE_ELEMENTS))}


def next_base(
    base: np.ndarray,
    layout: Layout,
    committed: Sequence[Part],
    encoded: Mapping[int, bytes | memoryview],
    merge: Merge | None,
    outer: OuterConfig = PLAIN,
) -> Iterator[np.ndarray]:
    """All pieces of a `NextBase`."""
    new = NextBase(base, layout, committed, encoded, merge, outer)
    return (new.piece(number) for number in range(-(-base.size // PIECE_ELEMENTS)))


@dataclass(frozen=True)
class _Stretch:
    """Where a part's update goes: its weights, or their momentum."""

    start: int
    stop: int
    part: Part
    momentum_at: int | None
    """Where the momentum of the part begins in the base; None where its group has none."""

    @property
    def is_momentum(self) -> bool:
        return self.start == self.momentum_at


class _OuterStep:
    """Values after the outer step, for any range."""

    def __init__(
        self,
        base: np.ndarray,
        layout: Layout,
        committed: Sequence[Part],
        encoded: Mapping[int, bytes | memoryview],
        outer: OuterConfig,
    ):
        self._base, self._encoded, self._outer = base, encoded, outer
        self._stretches = _stretches(layout, committed, outer)
        self._stops = [stretch.stop for stretch in self._stretches]
        self._decoded: OrderedDict[int, np.ndarray] = OrderedDict()

    def values(self, start: int, stop: int) -> np.ndarray:
        """float32 `[stop - start]`, a new array."""
        new = self._base[start:stop].copy()
        for place in range(bisect.bisect_right(self._stops, start), len(self._stretches)):
            stretch = self._stretches[place]
            if stretch.start >= stop:
                break
            a, b = max(start, stretch.start), min(stop, stretch.stop)
            self._step(stretch, a - stretch.start, b - stretch.start, new[a - start : b - start])
        return new

    def parts_by_piece(self, pieces: int) -> list[tuple[int, ...]]:
        """For each of so many pieces, the parts whose weights or momentum are in it."""
        found: list[list[int]] = [[] for _ in range(pieces)]
        for stretch in self._stretches:
            for number in range(stretch.start // PIECE_ELEMENTS, -(-stretch.stop // PIECE_ELEMENTS)):
                found[number].append(stretch.part.index)
        return list(map(tuple, found))

    def _step(self, stretch: _Stretch, a: int, b: int, values: np.ndarray) -> None:
        """In place, on elements `[a, b)` of a stretch, which hold the old base's values."""
        rate, mu = outer_settings(stretch.part.group, self._outer)
        update, momentum = self._update(stretch.part)[a:b], None
        if stretch.momentum_at is not None:
            momentum = next_momentum(self._base[stretch.momentum_at + a : stretch.momentum_at + b], update, mu)
        if stretch.is_momentum:
            values[:] = momentum
        else:
            next_weights(values, update, momentum, rate, mu)

    def _update(self, part: Part) -> np.ndarray:
        update = self._decoded.get(part.index)
        if update is None:
            update = part.codec.decode(self._encoded[part.index], part.size)
            self._decoded[part.index] = update
            if len(self._decoded) > DECODED_PARTS:
                self._decoded.popitem(last=False)
        return update


def _stretches(layout: Layout, committed: Sequence[Part], outer: OuterConfig) -> list[_Stretch]:
    """Of all committed parts, ascending: the weights, then the momentum of those groups that have one."""
    offsets = momentum_offsets(layout, outer)
    weights, momentum = [], []
    for part in committed:
        begin = offsets.get(part.group.name)
        at = None if begin is None else begin + part.start - part.group.start
        weights.append(_Stretch(part.start, part.stop, part, at))
        if at is not None:
            momentum.append(_Stretch(at, at + part.size, part, at))
    return weights + momentum
