"""Regions: members with fast lines among each other and slow ones to the others, as in one laboratory.

Each member announces which members of the last round are near it: those to whom it lately sent over no slower line than its own
(`net/nearness.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import numpy as np

from spes_p2p.messages.rounds import Announcement
from spes_p2p.rounds.parts import from_mask
from spes_p2p.rounds.planned import Place

SMALLEST_REGION = 4
"""Trainers. The hubs of a smaller one could not tell an update that stands out, and a reducer clips no cell's mean."""
IN_COMMON = 0.5
"""Of its other neighbours, a pair has this share in common, of the one that has fewer, and at least one."""
VISIT_EVERY = 8
"""In one round of this many, who is in a region only by its own word is a guest, so that it measures other lines, too."""


def regions_of(announcements: Mapping[str, Announcement], last_members: Sequence[str], round_number: int) -> dict[str, Place]:
    """Return each announcing peer's place. `last_members`: of the commit that the announcements name.

    A region begins with SMALLEST_REGION trainers that are connected by pairs which call each other near and have such
    neighbours in common, which a pair across two sites that is near by chance rarely has. Regions hold at least half of all
    peers, or there are none: those that chance makes rarely do. Two regions are one if one calls most members of the other
    near: then its own lines are slow, not the line between. A helper sends nothing, so it calls nobody near, and joins the
    region in which by far most call it near. Nobody sends to a newcomer, or to one that reduces little or nothing, so others
    cannot call these near: each joins the only region of whose reducers it calls most near. The others are guests of each
    region in turn, round by round, and so measure the lines to all. One that has met a single region may call its members near
    only because they are less far than others, so who joined one by its own word is sometimes a guest, too, unless it reduces
    nothing anyway.
    """
    peers = sorted(announcements)
    at = {peer: place for place, peer in enumerate(peers)}
    calls = np.zeros((len(peers), len(peers)), bool)
    for peer, place in at.items():
        near = (last_members[i] for i in from_mask(announcements[peer].near) if i < len(last_members))
        calls[place, [at[other] for other in near if other in at and other != peer]] = True
    trains = np.array([announcements[peer].trains for peer in peers])
    is_able = np.array([announcements[peer].bandwidth > 0 for peer in peers])
    begun = [
        each for each in _connected(_linked(calls & calls.T)) if trains[each].sum() >= SMALLEST_REGION and is_able[each].any()
    ]
    regions = list(_united(begun, calls))
    if len(regions) < 2 or 2 * sum(map(len, regions)) < len(peers):
        return dict.fromkeys(peers, Place())
    places = {}
    for peer, place in at.items():
        own = [k for k, region in enumerate(regions) if place in region] or _caller_of(calls, place, regions)
        if not own and (round_number % VISIT_EVERY or not is_able[place]):
            own = [k for k, region in enumerate(regions) if _calls_most(calls[place], is_able, region)]
        turn = round_number if round_number % VISIT_EVERY else round_number // VISIT_EVERY
        places[peer] = Place(own[0]) if len(own) == 1 else Place((place + turn) % len(regions), is_guest=True)
    return places


def _caller_of(calls: np.ndarray, place: int, regions: list[list[int]]) -> list[int]:
    """Return the region that calls this peer near twice as much as any other, if it calls nobody near itself; else none."""
    shares = [calls[region, place].mean() for region in regions]
    second, best = np.argsort(shares, kind="stable")[-2:]
    return [int(best)] if not calls[place].any() and shares[best] > 2 * shares[second] else []


def _calls_most(calls: np.ndarray, is_able: np.ndarray, region: list[int]) -> bool:
    """Return whether a peer calls most of a region's reducers near. `calls`: bool `[peers]`."""
    return bool(calls[region][is_able[region]].mean() > 0.5)


def _linked(mutual: np.ndarray) -> np.ndarray:
    """Return which pairs that call each other near have enough such neighbours in common."""
    ones = mutual.astype(np.float32)  # exact, and hundreds of times as fast as integers
    common, others = ones @ ones, ones.sum(0) - 1
    linked: np.ndarray = mutual & (common > 0) & (common >= IN_COMMON * np.minimum.outer(others, others))
    return linked


def _connected(linked: np.ndarray) -> Iterator[list[int]]:
    """Yield the members of each connected component, by their least member."""
    left = np.ones(len(linked), bool)
    while left.any():
        found = np.zeros_like(left)
        found[left.argmax()] = True
        while (more := linked[found].any(0) & ~found).any():
            found |= more
        left &= ~found
        yield np.flatnonzero(found).tolist()


def _united(begun: list[list[int]], calls: np.ndarray) -> Iterator[list[int]]:
    """Yield the regions that remain when those are united of which one calls most members of the other near."""
    is_one = np.zeros((len(begun), len(begun)), bool)
    for a, b in permutations(range(len(begun)), 2):
        if calls[np.ix_(begun[a], begun[b])].mean() > 0.5:
            is_one[a, b] = is_one[b, a] = True
    for group in _connected(is_one):
        yield sorted(member for k in group for member in begun[k])
