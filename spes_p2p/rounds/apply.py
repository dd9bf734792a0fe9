"""Apply a decided round: decode the committed results, outer step, merge. Every machine computes the same bits.

The next base is computed in pieces, so it is never in memory as a whole.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spes_p2p.config.campaign import OuterConfig
from spes_p2p.model.layout import Layout
from spes_p2p.rounds.digest import PIECE_ELEMENTS
from spes_p2p.rounds.influence import square_sum
from spes_p2p.rounds.merge import merge_range, merged_rows
from spes_p2p.rounds.outer import momentum_offsets, next_momentum, next_weights, outer_settings
from spes_p2p.rounds.parts import Part, decode_result
from spes_p2p.rounds.planned import Merge
from spes_p2p.rounds.step_bounds import StepBounds

DECODED_PARTS = 16
"""Bounds the cache of decoded parts, for each thread. A merge reads several places of the state at a time."""
PLAIN = OuterConfig()


class NextBase:
    """Computes any piece of the next base: float32 `[PIECE_ELEMENTS]`, the last one shorter; `base_size` elements in all.

    Parts that are not committed keep their old weights and momentum. The merge moves weights, never momentum.
    """

    def __init__(
        self,
        base: np.ndarray,
        layout: Layout,
        committed: Sequence[Part],
        encoded: Mapping[int, bytes | memoryview],
        merge: Merge | None,
        outer: OuterConfig = PLAIN,
        bounds: StepBounds | None = None,
        threads: int = 1,
    ):
        """`committed`: parts, ascending; `encoded`: their encoded mean updates, by part index.

        `threads`: of those that call `piece` at the same time.
        """
        self._size, self._bounds = base.size, bounds
        self._records_start = base.size - len(layout.groups)
        self._stepped = _OuterStep(base, layout, committed, encoded, outer, {} if bounds is None else bounds.factors, threads)
        self._rows = merged_rows(layout, merge.donors) if merge is not None else ()
        self._alpha = merge.alpha if merge is not None else 0.0

    def piece(self, number: int) -> np.ndarray:
        """Return one piece as a new array."""
        start, stop = number * PIECE_ELEMENTS, min((number + 1) * PIECE_ELEMENTS, self._size)
        values = merge_range(self._stepped.values, self._rows, self._alpha, start, stop)
        first = max(start, self._records_start)
        if self._bounds is not None and first < stop:
            values[first - start :] = self._bounds.records[first - self._records_start : stop - self._records_start]
        return values

    def values(self, start: int, stop: int) -> np.ndarray:
        """Return a range before the merge, float32 `[stop - start]`, as a new array."""
        return self._stepped.values(start, stop)

    def square_sum_of(self, part: Part) -> float:
        """Return the sum of squares of a part's update, before it is bounded."""
        return square_sum(self._stepped.decoded(part))

    def forget_decoded(self) -> None:
        """Free the memory of decoded parts."""
        self._stepped.forget_decoded()

    def parts_by_piece(self) -> list[tuple[int, ...]]:
        """Return the indices of the parts in each piece."""
        return self._stepped.parts_by_piece(-(-self._size // PIECE_ELEMENTS))

    def late_pieces(self) -> set[int]:
        """Return the pieces that depend on parts in other pieces: those that the merge changes, and those with records."""
        merged = {n for row in self._rows for n in range(row.start // PIECE_ELEMENTS, -(-row.stop // PIECE_ELEMENTS))}
        return merged | set(range(max(0, self._records_start) // PIECE_ELEMENTS, -(-self._size // PIECE_ELEMENTS)))


def next_base_pieces(
    base: np.ndarray,
    layout: Layout,
    committed: Sequence[Part],
    encoded: Mapping[int, bytes | memoryview],
    merge: Merge | None,
    outer: OuterConfig = PLAIN,
    bounds: StepBounds | None = None,
) -> Iterator[np.ndarray]:
    """Yield all pieces of a `NextBase`."""
    new = NextBase(base, layout, committed, encoded, merge, outer, bounds)
    return (new.piece(number) for number in range(-(-base.size // PIECE_ELEMENTS)))


@dataclass(frozen=True)
class _Target:
    """A range of the base that a part's update changes: its weights, or their momentum."""

    start: int
    stop: int
    part: Part
    momentum_at: int | None
    """Start of the part's momentum in the base; None without momentum."""

    @property
    def is_momentum(self) -> bool:
        return self.start == self.momentum_at


class _OuterStep:
    """Computes any range of the base after the outer step."""

    def __init__(
        self,
        base: np.ndarray,
        layout: Layout,
        committed: Sequence[Part],
        encoded: Mapping[int, bytes | memoryview],
        outer: OuterConfig,
        factors: Mapping[str, np.float32],
        threads: int,
    ):
        self._base, self._encoded, self._outer, self._factors = base, encoded, outer, factors
        self._layout, self._targets = layout, _targets(layout, committed, outer)
        self._stops = [target.stop for target in self._targets]
        self._decoded: OrderedDict[int, tuple[bytes | memoryview, np.ndarray]] = OrderedDict()
        """By part index: what was decoded, and its values."""
        self._most_decoded, self._lock = DECODED_PARTS * threads, threading.Lock()

    def values(self, start: int, stop: int) -> np.ndarray:
        """Return float32 `[stop - start]`, a new array."""
        new = self._base[start:stop].copy()
        for place in range(bisect.bisect_right(self._stops, start), len(self._targets)):
            target = self._targets[place]
            if target.start >= stop:
                break
            a, b = max(start, target.start), min(stop, target.stop)
            self._step(target, a - target.start, b - target.start, new[a - start : b - start])
        return new

    def forget_decoded(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._decoded.clear()

    def parts_by_piece(self, pieces: int) -> list[tuple[int, ...]]:
        """Return for each piece the indices of the parts whose weights or momentum it contains."""
        found: list[list[int]] = [[] for _ in range(pieces)]
        for target in self._targets:
            for number in range(target.start // PIECE_ELEMENTS, -(-target.stop // PIECE_ELEMENTS)):
                found[number].append(target.part.index)
        return list(map(tuple, found))

    def _step(self, target: _Target, a: int, b: int, values: np.ndarray) -> None:
        """Update elements `[a, b)` of a range in place; `values` holds the old base's."""
        rate, mu = outer_settings(target.part.group, self._outer)
        update, momentum = self.decoded(target.part)[a:b], None
        factor = self._factors.get(target.part.group.name)
        if factor is not None:
            update = np.multiply(update, factor)
        if target.momentum_at is not None:
            momentum = next_momentum(self._base[target.momentum_at + a : target.momentum_at + b], update, mu)
        if target.is_momentum:
            values[:] = momentum
        else:
            next_weights(values, update, momentum, rate, mu)

    def decoded(self, part: Part) -> np.ndarray:
        """Return a part's update, from the cache unless its result was replaced since."""
        encoded, known = self._encoded[part.index], self._decoded.get(part.index)
        if known is None or known[0] is not encoded:
            known = encoded, decode_result(part, encoded, self._layout)
            with self._lock:
                self._decoded[part.index] = known
                if len(self._decoded) > self._most_decoded:
                    self._decoded.popitem(last=False)
        return known[1]


def _targets(layout: Layout, committed: Sequence[Part], outer: OuterConfig) -> list[_Target]:
    """Return the targets of all committed parts, ascending: weights, then momentum."""
    offsets = momentum_offsets(layout, outer)
    weights, momentum = [], []
    for part in committed:
        begin = offsets.get(part.group.name)
        at = None if begin is None else begin + part.start - part.group.start
        weights.append(_Target(part.start, part.stop, part, at))
        if at is not None:
            momentum.append(_Target(at, at + part.size, part, at))
    return weights + momentum
