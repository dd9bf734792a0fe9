"""Who checks which reducer and hub after a round, and how many of its means. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import cycle, islice

from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.rounds import Announcement
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.remembered import remembered
from spes_p2p.rounds.results import Results

CHECKED_SHARE = 1 / 64
"""Share of the means that are made again. A check moves the encoded updates of all c contributors, the round c - 1 updates and
N - 1 results: in a round of N > 2 members at most this share of its bytes, but in small models."""
CHECKED_REDUCERS = 8
"""In small models, results of this many reducers are checked in a round, one of each, whatever the share."""


IN_REGION, ACROSS = 2.0, 1 / 8
"""Where there are regions, how many times as many are checked of a reducer in the checker's, and in another one: updates for
checks would be a quarter of what crosses the line between. So a region of liars is checked less, but checked."""


@remembered(4)
def checkers(commit: Commit, rule: str) -> Mapping[str, str]:
    """Return for each member of a round the member that checks it. `rule`: `admission` of the campaign.

    The order follows from the commit's hash, which nobody knows while results are made. In an open campaign vouched members
    check, if there are two.
    """
    order = sorted(commit.members, key=lambda peer: sha256(f"{commit.id}\0{peer}".encode()).digest())
    vouched = commit.trusted.intersection(order) if rule == "open" else set(order)
    able = vouched if len(vouched) > 1 else set(order)
    found = {}
    for place, peer in enumerate(order):
        later = islice(cycle(order), place + 1, place + len(order))
        checker = next((each for each in later if each in able), None)
        if checker is not None:
            found[peer] = checker
    return found


def disputed(recent: Sequence[Commit], announcements: Mapping[str, Announcement], rule: str) -> frozenset[str]:
    """Return the members that say of a reducer that it did not show its inputs, and these reducers, if both announce.

    Nobody can tell which of the two is to blame, so neither reduces for a while (`claims.demoted`): a liar that refuses
    checks gives up what it could harm with, and one that blames others gives up as much. Not so a vouched member that blames a
    stranger, which would cost the swarm a reducer.

    `recent`: the last commits, newest first.
    """
    by_round = {commit.round: (commit, checkers(commit, rule)) for commit in recent[:2] if commit.plan}
    found = set[str]()
    for peer, announcement in announcements.items():
        for each in announcement.unanswered:
            commit, checker_of = by_round.get(each.round, (None, {}))
            if commit is None or (rule == "open" and commit.trusted and peer not in commit.trusted):
                continue  # a newcomer gives up nothing
            if each.peer in announcements and checker_of.get(each.peer) == peer:
                is_above = rule == "open" and peer in commit.trusted and each.peer not in commit.trusted
                found |= {each.peer} if is_above else {peer, each.peer}
    return frozenset(found)


def means_by_reducer(commit: Commit, results: Results) -> dict[str, list[Part]]:
    """Return the committed parts that are means of updates, by the peer that reduced them."""
    found: dict[str, list[Part]] = {}
    for part in results.committed(commit):
        if part.is_mean:
            found.setdefault(results.plan.members[part.reducer].peer, []).append(part)
    return found


def means_by_hub(commit: Commit, results: Results) -> dict[str, list[Part]]:
    """Return the committed parts with a mean of a cell, by the hub that made it."""
    found: dict[str, list[Part]] = {}
    for part in results.committed(commit):
        included = set(results.contributors(part)) if part.summing else set[int]()
        for hub in part.summing:
            if included.intersection(part.in_cell(hub)):
                found.setdefault(results.plan.members[hub].peer, []).append(part)
    return found


def expected_checks(means: int, reducers: int, more: float = 1.0) -> float:
    """Return how many of a reducer's means are checked in a round, on average. `reducers`: those that made means.

    `more`: how many times as many as usual.
    """
    return min(means, more * max(CHECKED_SHARE * means, min(1.0, CHECKED_REDUCERS / reducers)))


def drawn(means: Sequence[Part], reducers: int, more: float, rng: random.Random) -> list[Part]:
    """Return the means of one reducer to check; see `expected_checks`.

    The checker draws them itself: a reducer that publishes last could try manifests until a draw from the commit's hash spared
    its wrong results.
    """
    expected = expected_checks(len(means), reducers, more)
    count = int(expected) + (rng.random() < expected % 1)
    return rng.sample(means, count)


def weight_of_checks(plan: Plan, checker: str, reducer: str) -> float:
    """Return how many times as many means of this reducer this checker makes again as usual: by the regions of the two.

    Strangers' words make regions, too, but a round with strangers has no use of them.
    """
    regions = {member.peer: member.place.region for member in plan.members}
    if len(set(regions.values())) == 1 or any(member.is_stranger for member in plan.members):
        return 1.0
    return IN_REGION if regions[checker] == regions[reducer] else ACROSS
