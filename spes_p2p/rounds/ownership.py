"""Assignment of experts to owners: a pure function of the members, their capacities and the last owners."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from functools import cache
from heapq import heappop, heappush

from spes_p2p.messages.consensus import Commit
from spes_p2p.rounds.remembered import remembered

Owners = tuple[tuple[str, ...], ...]


@remembered(2)
def owners_of(commit: Commit) -> Owners:
    """Return the ids of each expert's owners in the phase after this commit."""
    return tuple(tuple(commit.members[i] for i in owners) for owners in commit.owners)


def assign_experts(
    num_experts: int, capacities: Mapping[str, int], last: Sequence[Sequence[str]], redundancy: int, salt: str,
    newcomers: Set[str] = frozenset(),
) -> Owners:
    """Return the owners of each expert, sorted by peer id: `[experts][owners]`.

    Every expert gets an owner before any gets a second one, up to `redundancy`. No peer exceeds its capacity. Loads differ by
    at most one where capacities allow. Within these rules, the previous owners `last[e]` keep their experts. `salt` (the
    campaign hash) breaks ties, so no peer is favoured in every campaign. Where not all get as many, `newcomers` get less.
    """
    room = {peer: min(capacity, num_experts) for peer, capacity in capacities.items() if capacity > 0}
    if not room:
        return ((),) * num_experts
    copies = min(redundancy, len(room))
    held = {peer: sum(peer in peers for peers in last) for peer in room}
    order = sorted(room, key=lambda peer: (peer in newcomers, -held[peer], _rank(salt, peer)))
    quota = _quotas(room, num_experts * copies, order)
    owners: list[set[str]] = [set() for _ in range(num_experts)]
    free = dict(quota)
    # Drawn when first asked for: a peer that is full by then stays so.
    by_rank = cache(lambda expert: sorted(filter(free.get, free), key=lambda peer: _rank(salt, f"{peer}/{expert}")))
    for turn in range(copies):
        for expert in range(num_experts):
            if len(owners[expert]) > turn:
                continue
            keepers = [p for p in last[expert] if free.get(p, 0) > 0 and p not in owners[expert]] if expert < len(last) else []
            if keepers:
                _give(expert, min(keepers), owners, free)
        for expert in range(num_experts):
            if len(owners[expert]) <= turn:
                _place(expert, owners, free, by_rank(expert))
    return tuple(tuple(sorted(peers)) for peers in owners)


def _quotas(room: Mapping[str, int], wanted: int, order: Sequence[str]) -> dict[str, int]:
    """Share `wanted` places among peers that have room, as evenly as it allows; the first in `order` get the remainder."""
    quota, least = dict.fromkeys(room, 0), [(0, place, peer) for place, peer in enumerate(order)]
    for _ in range(min(wanted, sum(room.values()))):
        has, place, peer = heappop(least)
        quota[peer] = has + 1
        if has + 1 < room[peer]:
            heappush(least, (has + 1, place, peer))
    return quota


def _place(expert: int, owners: list[set[str]], free: dict[str, int], by_rank: Sequence[str]) -> None:
    """Give the expert to the peer with most free places; if only its owners have any, swap with another expert."""
    takers = [peer for peer in by_rank if free[peer] > 0 and peer not in owners[expert]]
    if takers:
        _give(expert, max(takers, key=free.__getitem__), owners, free)
        return
    for peer in sorted(peer for peer in free if free[peer] > 0):
        for other, others_owners in enumerate(owners):
            for giver in sorted(others_owners - owners[expert]):
                if other != expert and peer not in others_owners:
                    others_owners.remove(giver)
                    others_owners.add(peer)
                    owners[expert].add(giver)
                    free[peer] -= 1
                    return


def _give(expert: int, peer: str, owners: list[set[str]], free: dict[str, int]) -> None:
    owners[expert].add(peer)
    free[peer] -= 1


def _rank(salt: str, name: str) -> bytes:
    return hashlib.sha256(f"{salt}/{name}".encode()).digest()


def guard_experts(
    owners: Owners, capacities: Mapping[str, int], last: Sequence[Sequence[str]], redundancy: int, vouched: Set[str],
    proven: Set[str],
) -> Owners:
    """Return these owners with a vouched one for each expert; beyond these peers' capacity a proven one, or else none.

    Other arguments as in `assign_experts`.
    """
    found = [set(peers) for peers in owners]
    for trusted in (vouched, vouched | proven):
        _spread(found, capacities, last, redundancy, trusted, proven)
    return tuple(tuple(sorted(peers)) if peers & (vouched | proven) else () for peers in found)


def _spread(
    found: list[set[str]], capacities: Mapping[str, int], last: Sequence[Sequence[str]], redundancy: int, trusted: Set[str],
    proven: Set[str],
) -> None:
    """Give each expert without a trusted owner one that has room or, where none has, one of two that own the same expert.

    It takes the place of a newcomer rather than of a proven one.
    """
    load = Counter(peer for peers in found for peer in peers)
    room = {peer: min(capacities[peer], len(found)) - load[peer] for peer in trusted & capacities.keys()}
    for expert, peers in enumerate(found):
        if not peers.isdisjoint(trusted):
            continue
        before = last[expert] if expert < len(last) else ()
        roomy = [peer for peer in room if room[peer] > 0]
        doubled = next((other for other in found if len(other & trusted) > 1), None)
        if not roomy and doubled is None:
            continue
        rank = {peer: (peer not in proven, peer not in before, peer) for peer in peers}.__getitem__
        leaving = max(peers, key=rank) if len(peers) >= redundancy else None
        peers.discard(leaving or "")
        if roomy:
            taker = min(roomy, key=lambda peer: (peer not in before, -room[peer], peer))
            room[taker] -= 1
        elif doubled is not None:
            taker = min(doubled & trusted)
            doubled.remove(taker)
            if leaving is not None:
                doubled.add(leaving)
        peers.add(taker)
