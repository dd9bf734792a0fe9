"""The part table: all parts of a round with their reducers and hubs. A pure function of the plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from spes_p2p.model.layout import Group, Layout
from spes_p2p.rounds.cells import NO_CELL, make_cells
from spes_p2p.rounds.codecs import GroupCodecs
from spes_p2p.rounds.hubs import Columns, StrangersColumns
from spes_p2p.rounds.parts import PART_BYTES, Part, is_unwatched, part_ranges, weight
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.reducers import Links, choose_reducers, possible_reducers
from spes_p2p.rounds.remembered import remembered


@dataclass(frozen=True, eq=False)
class PlanMembers:
    """Members of a plan: hashing them all for each look at the last tables would take as long as to make one."""

    members: tuple[Member, ...]


_by_identity = remembered(4)(PlanMembers)


def part_table(
    layout: Layout, members: tuple[Member, ...], codecs: GroupCodecs, part_bytes: int = PART_BYTES, is_last: bool = False
) -> tuple[Part, ...]:
    """Return every part of a round, ascending. Groups without contributors have no parts: the base keeps their values.

    Parts go to reducers by the load of their links (`reducers.py`), and in a round with cells to columns of hubs (`hubs.py`).

    If no member may reduce, there are no parts. Nor are there parts of an expert that only newcomers trained: its base keeps
    its values.

    `is_last`: in a campaign's last round.
    """
    return table_of(layout, _by_identity(members), codecs, part_bytes, is_last)


@lru_cache(2)
def table_of(layout: Layout, plan: PlanMembers, codecs: GroupCodecs, part_bytes: int, is_last: bool) -> tuple[Part, ...]:
    """See `part_table`; the tables of the last two plans are kept."""
    members = plan.members
    reducers = possible_reducers(members)
    if not reducers:
        return ()
    contributors_of = {group: _contributors(members, group) for group in layout.groups}
    ranges = [
        (group, start, stop, contributors_of[group])
        for group, start, stop in part_ranges(layout, codecs, part_bytes) if contributors_of[group]
    ]
    parts = [
        Part(k, group, a, b, senders, senders[0], codecs.of(group, is_last)) for k, (group, a, b, senders) in enumerate(ranges)
    ]
    cells = make_cells(members, reducers)
    if cells is not None and NO_CELL not in cells.of:
        return Columns(members, cells).table(parts)
    if cells is None:
        return choose_reducers(parts, Links(members, reducers, len(members)))
    return StrangersColumns(members, reducers, cells).table(parts)


def _contributors(members: tuple[Member, ...], group: Group) -> tuple[int, ...]:
    """Return the members whose updates of this group count."""
    trained = tuple(i for i, member in enumerate(members) if weight(member, group) > 0)
    return () if is_unwatched(members, group, trained) else trained
