"""The hubs of a round's parts: which column of cells exchanges each part, and which of its hubs sum first (`cells.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median_low

from spes_p2p.rounds.cells import NO_CELL, Cells
from spes_p2p.rounds.codecs import Codec
from spes_p2p.rounds.influence import ENOUGH_TO_CLIP
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.reducers import Links, choose_reducers, shares, within
from spes_p2p.rounds.traffic import grouped_by_way

HUBS_DELEGATION_RATIO = 1.1
"""Owners that are hubs delegate when the busiest hub otherwise takes this many times as long."""


class Columns:
    """The hubs of a round in which all members have cells, chosen by the load of each hub's line."""

    def __init__(self, members: tuple[Member, ...], cells: Cells):
        self._cells, self._members = cells, members
        self._sizes = Counter(cells.of)
        self._rates = {column: min(members[hub].bandwidth for hub in hubs) for column, hubs in enumerate(cells.columns)}
        """By column: the bandwidth of its slowest hub."""
        self._column_of = {hub: column for column, hubs in enumerate(cells.columns) for hub in hubs}
        self._rate_of = {hub: members[hub].bandwidth for hub in self._column_of}
        self._left: dict[int, float] = {}
        """Bytes to which several contribute of which each hub may still become the reducer, if its column takes them."""
        self._sends_s: dict[int, float] = {}
        """Seconds in which each hub sends."""
        self._receives_s: dict[int, float] = {}
        """Seconds in which each hub receives."""
        self._updates_s: dict[int, float] = {}
        """Of these, seconds for updates and means of cells, without which it has no mean to send."""
        self._counts: dict[tuple[int, ...], Counter[int]] = {}
        """By contributors: their number in each cell."""
        self._copies_of: dict[tuple[tuple[int, ...], Codec, int], list[tuple[int, float, float]]] = {}
        """By contributors, codec and column: see `_copies`."""
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
        shared = sum(part.encoded_bytes for part in parts if len(part.contributors) > 1)
        left, self._left = (shares(shared, rates) for rates in (self._rates, self._rate_of))
        taken: dict[int, tuple[int, int]] = {}
        for part in sorted(parts, key=lambda part: len(part.contributors) == 1):
            own = self._column_of.get(part.contributors[0]) if keeps and len(part.contributors) == 1 else None
            columns: Sequence[int] = range(len(self._cells.columns)) if own is None else (own,)
            if len(part.contributors) > 1:
                columns = within(left, part.encoded_bytes)
            column = min(columns, key=lambda column: (self._then_s(part, column), column))
            root, more_s = self._more_s(part, column)
            left[column] -= part.encoded_bytes
            self._left[root] -= part.encoded_bytes
            taken[part.index] = column, root
            for hub, sends_s, receives_s in more_s:
                self._sends_s[hub] += sends_s
                self._receives_s[hub] += receives_s
                self._updates_s[hub] += receives_s
        return taken, max(self._sends_s.values())

    def _count_updates(self, parts: Sequence[Part]) -> None:
        """Count the time in which hubs send their own updates and receive all results.

        One without an update of its own, such as a helper, has no mean to send until others have sent their updates.
        """
        own, alone, results = Counter[int](), Counter[int](), 0
        for part, size in grouped_by_way(parts):
            results += size
            own.update(dict.fromkeys(part.contributors, size))
            if len(part.contributors) == 1:
                alone[part.contributors[0]] += size
        own_s = {hub: own[hub] / self._members[hub].bandwidth for hub in self._column_of}
        waited_s = median_low([seconds for seconds in own_s.values() if seconds] or [0.0])
        self._sends_s = {hub: seconds or waited_s for hub, seconds in own_s.items()}
        self._receives_s = {hub: (results - alone[hub]) / self._members[hub].bandwidth for hub in self._column_of}
        self._updates_s = dict.fromkeys(self._column_of, 0.0)

    def _way(self, part: Part) -> tuple[tuple[int, ...], bool]:
        """Return the cells whose hubs may reduce the part, and whether the hubs of its contributors' cells sum first."""
        key = part.contributors, part.codec
        if key not in self._ways:
            counts = self._in_cells(part.contributors)
            sums, homes = not part.codec.leaves_out and min(counts.values()) >= ENOUGH_TO_CLIP, tuple(sorted(counts))
            if not sums and len(part.contributors) <= len(self._sizes):
                homes = (min(homes, key=lambda cell: (self._at_home[cell], cell)),)
                self._at_home[homes[0]] += 1
            self._ways[key] = homes, sums and len(counts) > 1
        return self._ways[key]

    def _in_cells(self, contributors: tuple[int, ...]) -> Counter[int]:
        """Return the number of contributors in each cell."""
        if contributors not in self._counts:
            self._counts[contributors] = Counter(self._cells.of[i] for i in contributors)
        return self._counts[contributors]

    def _copies(self, part: Part, column: int) -> list[tuple[int, float, float]]:
        """Return each hub of a column with the seconds in which it sends and receives for a byte of the part.

        A hub sends copies to its cell, and its cell's mean to the reducer. It receives its cell's updates.
        """
        key = part.contributors, part.codec, column
        if key not in self._copies_of:
            (_, sums), inputs, copies = self._way(part), self._in_cells(part.contributors), []
            for cell, hub in enumerate(self._cells.columns[column]):
                rate, received = self._members[hub].bandwidth, inputs[cell] - (hub in part.contributors) if sums else 0
                copies.append((hub, (self._sizes[cell] - (not sums)) / rate, received / rate))
            self._copies_of[key] = copies
        return self._copies_of[key]

    def _more_s(self, part: Part, column: int) -> tuple[int, list[tuple[int, float, float]]]:
        """Return the least busy possible reducer in a column, and each hub with how long it sends and receives for the part.

        The reducer sends copies to the other hubs, and receives means or updates in place of the result.
        """
        hubs, (homes, sums), size = self._cells.columns[column], self._way(part), part.encoded_bytes
        more = (len(hubs) - 1) * size
        able: Iterable[int] = (hubs[cell] for cell in homes)
        if len(part.contributors) > 1:
            able = within({hub: self._left[hub] for hub in able}, size)
        then_s = {hub: self._sends_s[hub] + more / self._members[hub].bandwidth for hub in able}
        root = min(then_s, key=lambda hub: (then_s[hub], hub))
        more_s = [(hub, sent * size, received * size) for hub, sent, received in self._copies(part, column)]
        inputs = len(homes) - 1 if sums else len(part.contributors) - (root in part.contributors)
        place, rate = hubs.index(root), self._members[root].bandwidth
        hub, sends_s, receives_s = more_s[place]
        more_s[place] = hub, sends_s + more / rate, receives_s + (inputs - (part.contributors != (root,))) * size / rate
        return root, more_s

    def _then_s(self, part: Part, column: int) -> float:
        """Return for how long the busiest hub of a column is busy if it takes the part, in each direction to which that adds.

        Hubs that receive updates for it send after these.
        """
        busy_s = 0.0
        for hub, sends_s, receives_s in self._more_s(part, column)[1]:
            sends_s += self._sends_s[hub]
            if receives_s > 0:
                sends_s += self._updates_s[hub] + receives_s
                busy_s = max(busy_s, self._receives_s[hub] + receives_s)
            busy_s = max(busy_s, sends_s)
        return busy_s

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
