"""The electorate of a round: its members and incarnations, its quorum, and the order of its coordinators."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from spes_p2p.messages.consensus import Commit

MAX_ELECTORS = 7
HOME_CONNECTIONS = 64
"""What a home router bears. Each member of a round has a connection to the coordinator."""


def quorum(electorate: tuple[str, ...]) -> int:
    """Return the number of votes that decide: a majority."""
    return len(electorate) // 2 + 1


def incarnations_of(commit: Commit) -> Mapping[str, str]:
    """Return the incarnation under which each elector of the next round votes."""
    return dict(zip(commit.electorate, commit.incarnations, strict=True))


def choose_electorate(
    helpers: tuple[str, ...], members: Iterable[str], last: tuple[str, ...], alone: bool = True
) -> tuple[str, ...]:
    """Return the next electorate, sorted: helpers first, then members that were electors, then others; at most seven.

    `members`: those that can be dialled. The number is odd, because one more elector would raise the quorum without tolerating
    another failure. A lone trainer decides alone: a second vote would add no safety. `alone`: False where others train, too,
    and have no vote.
    """
    trainers = set(members) - set(helpers)
    if len(trainers) == 1 and alone:
        return tuple(trainers)
    ranked = sorted(trainers, key=lambda peer: (peer not in last, peer))
    chosen = (*helpers, *ranked)[:MAX_ELECTORS]
    return tuple(sorted(chosen if len(chosen) % 2 else chosen[:-1]))


def coordinator_order(commit: Commit) -> tuple[str, ...]:
    """Return the next coordinators in the order of their turns, each kind by hash(campaign, term, round, id).

    Trainers come before helpers, but after them while there are more members than HOME_CONNECTIONS.
    """
    helpers_first = len(commit.members) > HOME_CONNECTIONS

    def turn(peer: str) -> tuple[bool, bytes]:
        name = f"{commit.campaign}/{commit.term}/{commit.round + 1}/{peer}"
        return (peer in commit.helpers) != helpers_first, hashlib.sha256(name.encode()).digest()

    return tuple(sorted(commit.electorate, key=turn))


def taking_turns(commit: Commit) -> int:
    """Return how many coordinators take turns while all are there: those of the kind that comes first."""
    order = coordinator_order(commit)
    return sum((peer in commit.helpers) == (order[0] in commit.helpers) for peer in order)
