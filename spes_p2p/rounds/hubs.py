"""The hubs of a round's parts: which column of cells exchanges each part, and which of its hubs sum first (`cells.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from spes_p2p.rounds.cells import NO_CELL, Cells
from spes_p2p.rounds.codecs import Codec
from spes_p2p.rounds.influence import ENOUGH_TO_CLIP
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.reducers import Links, choose_reducers
from spes_p2p.rounds.traffic import grouped_by_way

HUBS_DELEGATION_RATIO = 1.1
"""Owners that are hubs delegate when the busiest hub otherwise takes this many times as long."""


class Columns:
    """The hubs of a round in which all members have cells, chosen by the load of each hub's line."""

    def __init__(self, members: tuple[Member, ...], cells: Cells):
        self._cells, self._members = cells, members
        self._sizes = Counter(cells.of)
        self._column_of = {hub: column for column, hubs in enumerate(cells.columns) for hub in hubs}
        self._busy_s: dict[int, float] = {}
        """Seconds in which each hub sends."""
        self._ways: dict[tuple[tuple[int, ...], Codec], tuple[tuple[int, ...], bool]] = {}
        self._at_home = Counter[int]()
        """By cell: sets of few contributors whose parts its hubs reduce."""

    def table(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return the parts with their reducers and hubs.

        A sole contributor that is a hub reduces its parts, unless the busiest hub would then send for much longer: then it
        pushes them to the hubs of its cell, each of which reduces some. Contributors push to the reducer itself in a sparse
        codec, where what is left out of a cell's mean would be lost, and where only all of them together are enough to tell one
        that stands out. If they are few, the hubs of one of their cells reduce all they push, so that each has few neighbours.
        """
        (kept, kept_s), (delegated, delegated_s) = self._taken(parts, True), self._taken(parts, False)
        taken = kept if kept_s <= HUBS_DELEGATION_RATIO * delegated_s else delegated
        return tuple(self._placed(part, *taken[part.index]) for part in parts)

    def _taken(self, parts: Sequence[Part], keeps: bool) -> tuple[dict[int, tuple[int, int]], float]:
        """Return each part's column and reducer, and for how long the busiest hub then sends.

        `keeps`: sole contributors that are hubs reduce their parts.
        """
        self._count_updates(parts)
        taken: dict[int, tuple[int, int]] = {}
        for part in sorted(parts, key=lambda part: len(part.contributors) > 1):
            own = self._column_of.get(part.contributors[0]) if keeps and len(part.contributors) == 1 else None
            columns = range(len(self._cells.columns)) if own is None else (own,)
            column = min(columns, key=lambda column: (self._then_s(part, column), column))
            root, sends_s = self._sends_s(part, column)
            taken[part.index] = column, root
            for hub, more_s in sends_s.items():
                self._busy_s[hub] += more_s
        return taken, max(self._busy_s.values())

    def _count_updates(self, parts: Sequence[Part]) -> None:
        """Count the time in which hubs send their own updates."""
        own = Counter[int]()
        for part, size in grouped_by_way(parts):
            own.update(dict.fromkeys(part.contributors, size))
        self._busy_s = {hub: own[hub] / self._members[hub].bandwidth for hub in self._column_of}

    def _way(self, part: Part) -> tuple[tuple[int, ...], bool]:
        """Return the cells whose hubs may reduce the part, and whether the hubs of its contributors' cells sum first."""
        key = part.contributors, part.codec
        if key not in self._ways:
            counts = Counter(self._cells.of[i] for i in part.contributors)
            sums, homes = not part.codec.leaves_out and min(counts.values()) >= ENOUGH_TO_CLIP, tuple(sorted(counts))
            if not sums and len(part.contributors) <= len(self._sizes):
                homes = (min(homes, key=lambda cell: (self._at_home[cell], cell)),)
                self._at_home[homes[0]] += 1
            self._ways[key] = homes, sums and len(counts) > 1
        return self._ways[key]

    def _sends_s(self, part: Part, column: int) -> tuple[int, dict[int, float]]:
        """Return the least busy possible reducer in a column, and for how long each hub sends for the part.

        A hub sends copies to its cell, and its cell's mean to the reducer, which sends copies to the other hubs.
        """
        hubs, (homes, sums) = self._cells.columns[column], self._way(part)
        size, rate_of = part.encoded_bytes, {hub: self._members[hub].bandwidth for hub in hubs}
        root_s = {hub: (len(hubs) - 1) * size / rate_of[hub] for hub in hubs}
        root = min((hubs[cell] for cell in homes), key=lambda hub: (self._busy_s[hub] + root_s[hub], hub))
        sends_s = {hub: (self._sizes[cell] - (not sums)) * size / rate_of[hub] for cell, hub in enumerate(hubs)}
        sends_s[root] += root_s[root]
        return root, sends_s

    def _then_s(self, part: Part, column: int) -> float:
        """Return for how long the busiest hub of a column sends if it takes the part."""
        _, sends_s = self._sends_s(part, column)
        return max(self._busy_s[hub] + more_s for hub, more_s in sends_s.items())

    def _placed(self, part: Part, column: int, reducer: int) -> Part:
        """Return the part with its reducer and hubs."""
        hubs, (homes, sums) = self._cells.columns[column], self._way(part)
        summing = tuple(sorted(hubs[cell] for cell in homes)) if sums else ()
        return replace(part, reducer=reducer, hubs=hubs, summing=summing, cell_of=self._cells.of)


class StrangersColumns:
    """The hubs of a round in which only strangers have cells. Each reducer uses few columns, to have few neighbours."""

    def __init__(self, members: tuple[Member, ...], reducers: list[int], cells: Cells):
        self._cells, self._links = cells, Links(members, reducers, cells.ends)
        rates = [min(members[hub].bandwidth for hub in column) for column in cells.columns]
        self._columns_of: dict[int, set[int]] = {reducer: set() for reducer in reducers}
        for place in range(max(len(reducers), len(rates))):
            self._columns_of[reducers[place % len(reducers)]].add(place % len(rates))
        self._rates, self._busy_s = rates, [0.0] * len(rates)
        self._summed: dict[tuple[int, ...], list[int]] = {}

    def table(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return the parts with their reducers and hubs."""
        chosen = choose_reducers([self._with_hubs(part, 0) for part in parts], self._links)
        return tuple(self._with_hubs(part, self._column(part)) for part in chosen)

    def _column(self, part: Part) -> int:
        """Return the column of the reducer's whose hubs are then least busy."""
        columns = self._columns_of.get(part.reducer) or range(len(self._rates))
        column = min(columns, key=lambda place: (self._busy_s[place] + part.encoded_bytes / self._rates[place], place))
        self._busy_s[column] += part.encoded_bytes / self._rates[column]
        return column

    def _with_hubs(self, part: Part, column: int) -> Part:
        """Return the part with this column's hubs. Those with enough contributors to tell one that stands out sum first."""
        if part.contributors not in self._summed:
            counts = Counter(self._cells.of[i] for i in part.contributors)
            self._summed[part.contributors] = [
                cell for cell, count in counts.items() if count >= ENOUGH_TO_CLIP and cell != NO_CELL
            ]
        hubs, summed = self._cells.columns[column], self._summed[part.contributors] if not part.codec.leaves_out else []
        return replace(part, hubs=hubs, summing=tuple(sorted(hubs[cell] for cell in summed)), cell_of=self._cells.of)
