"""The traffic of an exchange: the bytes that each member sends and receives, and the time limits that follow from its line."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from spes_p2p.config.campaign import SLOWEST_LINE_BITS
from spes_p2p.rounds.parts import Part, pulls
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.remembered import remembered

SHORTEST_LIMIT_S, PATIENCE = 60.0, 6.0
"""The time limit of an exchange: this long, plus this many times what the slowest line needs at the announced bandwidth. An
unmeasured line counts as 100 Mbit/s, so one of 20 Mbit/s is in time."""
SLOWEST_BYTES_PER_S: float = SLOWEST_LINE_BITS / 8
"""The slowest permitted line. A claim of less does not lengthen the limit, and a transfer that moves less has stalled."""
ASSUMED_BYTES_PER_S = 12.5e6
"""The most that is assumed of a member that announces no bandwidth."""


def traffic(parts: Sequence[Part], members: int) -> tuple[list[int], list[int]]:
    """Return by member the bytes that it sends and receives in an exchange of these parts. `members`: their number."""
    up, down = [0] * members, [0] * members
    for part, size in grouped_by_way(parts):
        pushers = {*part.contributors, *part.summing} - {part.reducer}
        for member in range(members):
            if member in pushers:
                up[member] += size
                down[part.pushed_to(member)] += size
            if pulls(part, member):
                down[member] += size
                up[part.parent(member)] += size
    return up, down


def grouped_by_way(parts: Sequence[Part], together: Callable[[int, int], int] = operator.add) -> list[tuple[Part, int]]:
    """Return one part of each kind, which takes the same way through the same members, and the bytes of its kind together."""
    found: dict[tuple[object, ...], tuple[Part, int]] = {}
    for part in parts:
        way = part.contributors, part.reducer, part.hubs, part.summing
        size = found[way][1] if way in found else 0
        found[way] = part, together(size, part.encoded_bytes)
    return list(found.values())


@remembered(4)
def exchange_limit_s(parts: Sequence[Part], members: Sequence[Member]) -> float:
    """Return the time limit of an exchange, from the bytes that each member moves and the bandwidth that it announced.

    It only ends what nothing else ends: members that stall or fall behind the others are left out much earlier.
    """
    return SHORTEST_LIMIT_S + PATIENCE * exchange_s(parts, members, range(len(members)))


def exchange_s(parts: Sequence[Part], members: Sequence[Member], of: Iterable[int]) -> float:
    """Return the seconds that the slowest of these members needs for what it moves, at the bandwidth that it announced."""
    up, down = traffic(parts, len(members))
    rates = _bandwidths(members)
    return max((max(up[i], down[i]) / rates[i] for i in of), default=0.0)


def _bandwidths(members: Sequence[Member]) -> list[float]:
    """Return what each member's line is taken for, in bytes per second: like the slowest other's if it announces none."""
    known = [max(SLOWEST_BYTES_PER_S, member.bandwidth) if member.bandwidth > 0 else None for member in members]
    unknown = min([ASSUMED_BYTES_PER_S, *(rate for rate in known if rate is not None)])
    return [unknown if rate is None else rate for rate in known]


@remembered(4)
def stall_rates(members: Sequence[Member]) -> Sequence[float]:
    """Return for each member the bytes per second below which its transfers have stalled."""
    return [max(SLOWEST_BYTES_PER_S, rate / PATIENCE) for rate in _bandwidths(members)]


@remembered(4)
def push_turns(parts: Sequence[Part]) -> Mapping[int, tuple[int, int]]:
    """Return for each contributor to how many other members it pushes, and the bytes of one part to each of them.

    A contributor pushes to all of them at once, so for as long as these bytes take no part may be complete anywhere.
    """
    largest: dict[int, dict[int, int]] = {}
    for part, size in grouped_by_way(parts, max):
        for member in {*part.contributors, *part.summing} - {part.reducer}:
            to, receiver = largest.setdefault(member, {}), part.pushed_to(member)
            to[receiver] = max(size, to.get(receiver, 0))
    return {member: (len(to), sum(to.values())) for member, to in largest.items()}
