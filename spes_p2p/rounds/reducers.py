"""The reducers of a round's parts, chosen by the load of members' links, each way.

A part's only contributor reduces it. The reducer of another part receives the updates of others in place of the result, and
sends copies to N - 1 members, less its own update, which it does not push. It goes to the member whose link is then busy for
the shortest time, in whichever direction is the busier one. All members receive a result of everything, so on a thin line that
alone may take longest, and what the line could send meanwhile is no reason to let it receive updates, too. But lines are fast
by what members claim, so each reduces a bounded share of what others trained, too (`shares`).

Then the members that would send for longest delegate parts that they alone contribute to, and send those only once. A round
takes at least max over members of (bytes sent / upload bandwidth): a contributor sends its update once, a reducer
`extra_copies` more. One without an update of its own has no mean to send until others have sent their updates; what one member
alone contributes it hands on as it comes. Delegation adds no bytes, since a result crosses N - 1 uplinks whoever serves it, so
the optimum is at least max(own updates / own bandwidth, all bytes sent / all bandwidth). Members delegate if the longest time
exceeds DELEGATION_RATIO times that bound, as long as it gets shorter. What they may delegate does not count when the other
parts are placed: it adds nothing to what members receive, so it can go wherever that leaves time to send.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median_low

from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import BANDWIDTH_RATIO, Member

DELEGATION_RATIO = 1.25
"""Owners delegate parts when the busiest link takes this many times the least possible: less is an error of measurement."""


def possible_reducers(members: tuple[Member, ...], lost: Collection[int] = ()) -> list[int]:
    """Return the members that may reduce: no newcomers, and proven strangers only where there is nobody else.

    Neither do members that are demoted, while others are left. Members with bandwidth 0 cannot be dialled and reduce nothing.
    """
    able = [i for i, member in enumerate(members) if member.bandwidth > 0 and member.standing != "newcomer" and i not in lost]
    able = [i for i in able if members[i].standing != "proven"] or able
    return [i for i in able if not members[i].demoted] or able


def choose_reducers(parts: Sequence[Part], links: Links) -> tuple[Part, ...]:
    """Return the parts with their reducers. Beside cells, few contributors push to as few as their shares allow."""
    for part in parts:
        links.exchange(part)
    links.wait_for_updates()
    own = [part for part in parts if len(part.contributors) == 1 and part.reducer in links.reducers]
    chosen = {part.index: part for part in own}
    links.share(sum(part.encoded_bytes for part in parts if len(part.contributors) > 1))
    if not links.may_delegate:
        links.keep(own)
    reducer_of: dict[tuple[int, ...], int] = {}
    for part in parts:
        if part.index not in chosen and not part.summing and len(part.contributors) <= len(part.hubs):
            reducer = reducer_of.get(part.contributors)
            if reducer is None or not links.has_share(part, reducer):
                reducer = reducer_of[part.contributors] = links.least_busy(part)
            chosen[part.index] = replace(part, reducer=links.reduce(part, reducer))
    for part in parts:
        if part.index not in chosen:
            chosen[part.index] = replace(part, reducer=links.reduce(part, links.least_busy(part)))
    if links.may_delegate:
        links.keep(own)
        chosen.update(links.delegate(own))
    return tuple(chosen[part.index] for part in parts)


def shares(size: int, rates: dict[int, float]) -> dict[int, float]:
    """Return how many of `size` bytes each may reduce: its share of the rates, or the share of one that claims BANDWIDTH_RATIO.

    Without the bound such a line alone would have time to spare, where those of others are full with their experts. The sum is
    exact, because `sum` rounds otherwise from Python 3.12 on.
    """
    claimed, all_rates = BANDWIDTH_RATIO / (BANDWIDTH_RATIO + len(rates) - 1), math.fsum(rates.values())
    return {i: size * max(rate / all_rates, claimed) for i, rate in rates.items()}


def within(left: Mapping[int, float], size: int) -> list[int]:
    """Return those whose shares have `size` bytes left or, where none has, the most: a part may be larger than any share."""
    needed = min(size, max(left.values()))
    return [i for i, share in left.items() if share >= needed]


def extra_copies(part: Part, reducer: int, ends: int) -> int:
    """Return the copies of a part that its reducer sends, in addition to its own update, which counts as one copy.

    `ends` - 1 members get the result from it, except a sole contributor that delegated the part: it has the result.
    """
    return ends - 1 - (reducer in part.contributors or len(part.contributors) == 1)


class Links:
    """The load of each possible reducer's link, each way."""

    def __init__(self, members: tuple[Member, ...], reducers: list[int], ends: int):
        """`ends`: see `Cells.ends`; all members in a round without cells."""
        self.reducers = frozenset(reducers)
        """Members that may reduce."""
        self._ends = ends
        self._own_s = dict.fromkeys(reducers, 0.0)
        """Seconds to upload its own updates."""
        self._averaged_s = dict.fromkeys(reducers, 0.0)
        """Those of parts to which others contribute, too."""
        self._results = 0
        """Bytes of one result of each part."""
        self._sends_s = dict.fromkeys(reducers, 0.0)
        """Seconds until it has sent all."""
        self._receives_s = dict.fromkeys(reducers, 0.0)
        """Seconds in which it receives."""
        self._reduced_s = dict.fromkeys(reducers, 0.0)
        """Seconds that a copy of each part takes that it reduces."""
        self._shares = dict.fromkeys(reducers, math.inf)
        """Bytes to which several contribute of which each may still become the reducer."""
        self._members = members

    @property
    def may_delegate(self) -> bool:
        """Whether there is a third member, to which parts can be handed over."""
        return len(self._members) > 2

    def exchange(self, part: Part) -> None:
        """Count the upload of the contributors' updates, and one result for each member."""
        self._results += part.encoded_bytes
        for i in self.reducers.intersection(part.contributors):
            seconds = part.encoded_bytes / self._members[i].bandwidth
            self._own_s[i] += seconds
            self._averaged_s[i] += seconds * (len(part.contributors) > 1)

    def wait_for_updates(self) -> None:
        """Count the time until there are means, for reducers without an update of their own, such as helpers."""
        waited_s = median_low([averaged_s for averaged_s in self._averaged_s.values() if averaged_s] or [0.0])
        for i, own_s in self._own_s.items():
            self._sends_s[i] = own_s or waited_s
            self._receives_s[i] = self._results / self._members[i].bandwidth - (own_s - self._averaged_s[i])

    def share(self, size: int) -> None:
        """Bound each member's share of these bytes, which are to be placed."""
        self._shares = shares(size, {i: self._members[i].bandwidth for i in self._sends_s})

    def keep(self, own: list[Part]) -> None:
        """Let the only contributors of these parts reduce them."""
        for part in own:
            self._count(part, part.reducer)

    def reduce(self, part: Part, reducer: int) -> int:
        """Assign the part to this reducer and return it."""
        if len(part.contributors) > 1:
            self._shares[reducer] -= part.encoded_bytes
        self._count(part, reducer)
        return reducer

    def _count(self, part: Part, reducer: int) -> None:
        self._sends_s[reducer] += self._more_sent_s(part, reducer)
        self._receives_s[reducer] += self._more_received_s(part, reducer)
        self._reduced_s[reducer] += part.encoded_bytes / self._members[reducer].bandwidth

    def has_share(self, part: Part, reducer: int) -> bool:
        """Return whether the part is within what this reducer may still get of parts to which several contribute."""
        return len(part.contributors) == 1 or self._shares[reducer] >= part.encoded_bytes

    def least_busy(self, part: Part) -> int:
        """Return the member whose link is busy for the shortest time if it reduces the part. Of two members none is busier."""
        able = within(self._shares, part.encoded_bytes) if len(part.contributors) > 1 else self._shares
        return min(able, key=lambda i: (self._busy_s(part, i), self._reduced_s[i], i))

    def delegate(self, own: list[Part]) -> dict[int, Part]:
        """Move some of these parts away from their only contributors; return them by index."""
        sends_s, delegated = self._sends_s, dict[int, Part]()
        if not sends_s or max(sends_s.values()) <= DELEGATION_RATIO * self._least_s():
            return delegated
        left: dict[int, list[Part]] = {}
        for part in own:
            left.setdefault(part.reducer, []).append(part)
        while left.get(busiest := max(sends_s, key=lambda i: (sends_s[i], -i))):
            part = left[busiest].pop()
            then_s = {i: sends_s[i] + self._more_sent_s(part, i) for i in sends_s if i != busiest}
            taker = min(then_s, key=lambda i: (then_s[i], i), default=busiest)
            if taker == busiest or then_s[taker] >= sends_s[busiest]:
                break
            sends_s[busiest] -= self._more_sent_s(part, busiest)
            sends_s[taker] = then_s[taker]
            delegated[part.index] = replace(part, reducer=taker)
        return delegated

    def _least_s(self) -> float:
        """Return a lower bound of the busiest link's upload time."""
        sent = math.fsum(sends_s * self._members[i].bandwidth for i, sends_s in self._sends_s.items())
        return max(*self._own_s.values(), sent / math.fsum(self._members[i].bandwidth for i in self._sends_s), 0.0)

    def _busy_s(self, part: Part, reducer: int) -> float:
        """Return for how long this reducer's link is busy with the part, in each direction in which that adds to its load."""
        more_sent_s, more_received_s = self._more_sent_s(part, reducer), self._more_received_s(part, reducer)
        sends_s, receives_s = self._sends_s[reducer] + more_sent_s, self._receives_s[reducer] + more_received_s
        return max(sends_s if more_sent_s > 0 else 0.0, receives_s if more_received_s > 0 else 0.0)

    def _more_sent_s(self, part: Part, reducer: int) -> float:
        return extra_copies(part, reducer, self._ends) * part.encoded_bytes / self._members[reducer].bandwidth

    def _more_received_s(self, part: Part, reducer: int) -> float:
        """Return the seconds for the updates of others, which come in place of the result."""
        received = len(part.inputs) - (reducer in part.inputs)
        pulled = part.contributors != (reducer,)
        return (received - pulled) * part.encoded_bytes / self._members[reducer].bandwidth
