"""Cells: members of a large round sum within small cells first, and cells with each other, so that each has few neighbours.

Regions are cells, too, also in small rounds: then one copy of what is exchanged crosses the slow lines between them.

Each cell has the same number of *hubs*. The hubs at the same place of all cells are a *column*, and each part belongs to one
column: its hubs sum the updates of their cells, the part's reducer, which is one of them, sums these, and results take the same
way back. With N members in G cells of N / G a member sends its update of S bytes within its cell, and hubs send what they
summed, S G / N each: S (1 - G / N) + S (G / N) (1 - 1 / G) = S (1 - 1 / N), as much as without cells. It has N / G - 1
neighbours in its cell and as a hub G - 1 in its column, fewest for G = sqrt(N): 30 instead of 255 with 256 members.

In a round with strangers only these have cells, with strangers past probation as hubs. The others exchange with reducers, which
sum their updates and one mean of each cell, and bound what such a mean can do (`influence.py`).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from spes_p2p.rounds.planned import Member, Place

NO_CELL = -1
"""The cell of a member that exchanges with reducers as in a small round."""
FLAT_MEMBERS = 32
"""Rounds of up to this many members have no cells but for regions: each member exchanges with each other."""
LEAST_STRANGERS = 9
"""Fewer exchange with reducers. Three cells of three are the least whose sums tell one that stands out."""
WORTH_OTHER_CELLS = 1.05
"""As many times the bandwidth is worth another number of cells, which gives all members other neighbours."""
CLASS_EDGES = (math.sqrt(math.sqrt(0.5)), math.sqrt(math.sqrt(0.125)))
"""2^-1/4 and 2^-3/4: where twice the binary logarithm is rounded up, between 1/2 and 1."""
LARGEST_REGION = 64
"""Bounds the members of a region that is a cell, and their number."""


@dataclass(frozen=True)
class Cells:
    """A division of a round's members."""

    of: tuple[int, ...]
    """Each member's cell, or NO_CELL."""
    columns: tuple[tuple[int, ...], ...]
    """Hubs, `[columns][cells]`."""

    @property
    def largest(self) -> int:
        """Members of the largest cell."""
        return max(self.of.count(cell) for cell in set(self.of))

    @property
    def ends(self) -> int:
        """Members that get results from reducers: those of no cell, and one hub of each cell."""
        return self.of.count(NO_CELL) + len(self.columns[0])


def make_cells(members: Sequence[Member], reducers: Sequence[int]) -> Cells | None:
    """Divide a round's members; None if it needs no cells. `reducers`: members that may reduce.

    A column is as fast as its slowest hub, so its hubs have lines alike. Lines count as alike within a factor of sqrt(2), else
    each measurement would give members other neighbours. Sole owners of experts are spread over the cells: only hubs of its
    cell can reduce what a member alone has trained.
    """
    if any(member.is_stranger for member in members):
        return _of_strangers(members, reducers)
    regions = _regions(members, reducers)
    if regions is not None:
        return regions
    if len(members) <= FLAT_MEMBERS or len(reducers) < 2:
        return None
    fastest_first = _fastest_first(members, reducers)
    root = min(math.isqrt(len(members)), len(reducers))
    count = _count_of([_class_of_line(members[i].bandwidth) for i in fastest_first], root)
    columns = [tuple(fastest_first[start : start + count]) for start in range(0, len(reducers) - count + 1, count)]
    columns = _owners_apart(members, [column if place % 2 else column[::-1] for place, column in enumerate(columns)])
    cell_of = {hub: cell for column in columns for cell, hub in enumerate(column)}
    others = [i for i in range(len(members)) if i not in cell_of]
    cell_of.update((member, place % count) for place, member in enumerate(others))
    return Cells(tuple(cell_of[i] for i in range(len(members))), tuple(columns))


def _count_of(classes: Sequence[int], root: int) -> int:
    """Return the number of cells: `root`, or one within a quarter of it whose columns use clearly more bandwidth.

    `classes`: of the possible hubs' lines, fastest first. Those that fill no column send their own updates only. The fastest
    quarter counts as the next one does: a few liars would choose the number with which they alone are a column.
    """
    counted = (divmod(min(each, classes[len(classes) // 4]), 2) for each in classes)
    rates = [math.ldexp(math.sqrt(2.0) if half else 1.0, whole) for whole, half in counted]
    used = {count: count * math.fsum(rates[count - 1 :: count]) for count in range(root - root // 4, root + root // 4 + 1)}
    best = max(used, key=lambda count: (used[count], -abs(count - root), count))
    return best if used[best] > WORTH_OTHER_CELLS * used[root] else root


def _of_strangers(members: Sequence[Member], reducers: Sequence[int]) -> Cells | None:
    """Divide a round's strangers; None if they are few, if too few of them can be hubs, or if strangers reduce.

    Lots draw who meets whom: no identity can be made for a place. Lines count as alike within a factor of two, and above the
    median as that: with a claim of its own a class of liars would be a whole column.
    """
    strangers = [i for i, member in enumerate(members) if member.is_stranger]
    able = [i for i in strangers if members[i].standing == "proven" and members[i].bandwidth > 0 and not members[i].demoted]
    count = math.isqrt(len(strangers))
    if len(strangers) < LEAST_STRANGERS or len(able) < count or not set(strangers).isdisjoint(reducers):
        return None
    order = sorted(strangers, key=lambda i: members[i].lot)
    median = statistics.median_high(members[i].bandwidth for i in able)
    rates = {i: _class_of_line(min(members[i].bandwidth, median)) // 2 for i in able}
    fastest_first = sorted((i for i in order if i in rates), key=lambda i: -rates[i])
    columns = tuple(tuple(fastest_first[start : start + count]) for start in range(0, len(able) - count + 1, count))
    cell_of = {hub: cell for column in columns for cell, hub in enumerate(column)}
    others = (i for i in order if i not in cell_of)
    cell_of.update((member, place % count) for place, member in enumerate(others))
    return Cells(tuple(cell_of.get(i, NO_CELL) for i in range(len(members))), columns)


def _owners_apart(members: Sequence[Member], columns: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the columns with their hubs in such an order that cells have about as many experts with a sole owner each."""
    owners = [[i for i, count in enumerate(counts) if count] for counts in zip(*(m.routed for m in members), strict=True)]
    alone, owned = Counter(its[0] for its in owners if len(its) == 1), [0] * len(columns[0])
    ordered = []
    for column in columns:
        cells = sorted(range(len(column)), key=lambda cell: owned[cell])
        hub_of = dict(zip(cells, sorted(column, key=lambda hub: -alone[hub]), strict=True))
        ordered.append(tuple(hub_of[cell] for cell in range(len(column))))
        owned = [count + alone[hub] for count, hub in zip(owned, ordered[-1], strict=True)]
    return ordered


def _regions(members: Sequence[Member], reducers: Sequence[int]) -> Cells | None:
    """Return the members' regions as cells; None with fewer than two, or if they make too many neighbours.

    Guests are no hubs. A region with few hubs has each in several columns.
    """
    regions = sorted({member.place.region for member in members})
    hubs = [_fastest_first(members, [i for i in reducers if members[i].place == Place(region)]) for region in regions]
    if len(regions) < 2 or not all(hubs):
        return None
    columns = range(max(map(len, hubs)))
    cells = Cells(
        tuple(regions.index(member.place.region) for member in members),
        tuple(tuple(own[column % len(own)] for own in hubs) for column in columns),
    )
    return cells if max(len(regions), cells.largest) <= LARGEST_REGION else None


def _fastest_first(members: Sequence[Member], reducers: Sequence[int]) -> list[int]:
    return sorted(reducers, key=lambda i: (-_class_of_line(members[i].bandwidth), i))


def _class_of_line(bandwidth: float) -> int:
    """Return the class of lines alike within a factor of sqrt(2), higher for faster ones.

    It is twice the binary logarithm of the bandwidth, above 0, rounded: exactly, since `log2` differs between machines.
    """
    mantissa, exponent = math.frexp(bandwidth)
    return 2 * exponent - sum(mantissa < edge for edge in CLASS_EDGES)
