"""Revisions of a part table: other members reduce the parts of reducers that are lost during the exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from spes_p2p.rounds.cells import NO_CELL
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.reducers import Links, possible_reducers


def moved_parts(
    parts: tuple[Part, ...], members: tuple[Member, ...], newly_lost: tuple[int, ...], lost: set[int], revision: int
) -> dict[int, Part]:
    """Move the parts of newly lost reducers to the members whose links are then least busy; return them by index.

    Contributors push the same update again, to the new reducer. With hubs, those that are left push their cells' means to one
    of them. A part without remaining contributors is not moved, nor committed. `lost`: all members lost so far.
    """
    ends = next((part.ends for part in parts if part.hubs), len(members))
    links, rooted = Links(members, possible_reducers(members, lost), ends), Counter[int]()
    moved: dict[int, Part] = {}
    for part in parts:
        contributors = tuple(i for i in part.contributors if i not in lost)
        if part.reducer not in newly_lost or not contributors:
            continue
        of_all, part = part.contributors, replace(part, contributors=contributors, revision=revision)
        if part.hubs and NO_CELL not in part.cell_of:
            moved |= _moved_in_column(part, of_all, lost, rooted)
        elif links.reducers:
            part = _without_hubs(part, of_all, lost)
            reducer = links.reduce(part, links.least_busy(part))
            hubs = tuple(reducer if hub in lost else hub for hub in part.hubs)
            moved[part.index] = replace(part, reducer=reducer, hubs=hubs)
    return moved


def _without_hubs(part: Part, of_all: Sequence[int], lost: Collection[int]) -> Part:
    """Return a part without lost hubs: members of their cells push to the reducer. `of_all`: its contributors, lost or not.

    Means of the hubs that are left may contain updates of members that were lost since.
    """
    part = replace(part, summing=tuple(hub for hub in part.summing if hub not in lost))
    return replace(part, contributors=tuple(i for i in of_all if i not in lost or part.hub_of(i) in part.summing))


def _moved_in_column(part: Part, of_all: Sequence[int], lost: set[int], rooted: Counter[int]) -> dict[int, Part]:
    """Move a part to another hub of its column, if any is left; members of lost hubs' cells exchange with that one.

    `of_all`: its contributors, lost or not. `rooted`: bytes by hub of the parts moved so far.
    """
    left = [hub for hub in part.hubs if hub not in lost]
    summing = tuple(hub for hub in part.summing if hub not in lost)
    if not left or (part.summing and not summing):
        return {}
    if summing:  # their means may contain updates of members that were lost since
        cells = {part.cell_of[hub] for hub in summing}
        part = replace(part, contributors=tuple(i for i in of_all if part.cell_of[i] in cells))
    reducer = min(summing or left, key=lambda hub: (rooted[hub], hub))
    rooted[reducer] += part.encoded_bytes
    hubs = tuple(reducer if hub in lost else hub for hub in part.hubs)
    return {part.index: replace(part, reducer=reducer, hubs=hubs, summing=summing)}
