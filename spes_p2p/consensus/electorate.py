"""Who votes on a round, with which incarnation, who coordinates it, and how many votes decide."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from spes_p2p.messages.consensus import Commit

MAX_ELECTORS = 7


def quorum(electorate: tuple[str, ...]) -> int:
    """Votes that decide: a majority."""
    return len(electorate) // 2 + 1


def incarnations_of(commit: Commit) -> Mapping[str, str]:
    """The incarnation that each elector of the next round votes with."""
    return dict(zip(commit.electorate, commit.incarnations, strict=True))


def choose_electorate(helpers: tuple[str, ...], members: Iterable[str], last: tuple[str, ...]) -> tuple[str, ...]:
    """Electors of the next round, sorted: the helpers, then members that were electors before, then others; at most seven.

    `members`: those that can be dialled. The number is odd: an even one needs one more vote for a majority and tolerates no
    more failures. A lone trainer decides alone: a second vote would make nothing safer.
    """
    trainers = set(members) - set(helpers)
    if len(trainers) == 1:
        return tuple(trainers)
    ranked = sorted(trainers, key=lambda peer: (peer not in last, peer))
    chosen = (*helpers, *ranked)[:MAX_ELECTORS]
    return tuple(sorted(chosen if len(chosen) % 2 else chosen[:-1]))


def coordinator_order(commit: Commit) -> tuple[str, ...]:
    """Coordinators of the next round by rank: its trainer electors by hash(campaign, term, round, id), then the helpers."""

    def rank(peer: str) -> tuple[bool, bytes]:
        name = f"{commit.campaign}/{commit.term}/{commit.round + 1}/{peer}"
        return peer in commit.helpers, hashlib.sha256(name.encode()).digest()

    return tuple(sorted(commit.electorate, key=rank))
