"""The reducers of a round's parts, chosen by the load of members' links.

A part's only contributor reduces it. Each other part goes to the member whose link is then busy for the shortest time: the
reducer of a part with c contributors receives c' updates (those of others) and sends N - 1 copies, which takes
(c' + N - 1) * encoded bytes / bandwidth.

Then the members that would send for longest delegate parts that they alone contribute to, and send those only once. A round
takes at least max over members of (bytes sent / upload bandwidth): a contributor sends its update once, a reducer
`extra_copies` more. One without an update of its own has no mean to send until others have sent their updates; what one member
alone contributes it hands on as it comes. Delegation adds no bytes, since a result crosses N - 1 uplinks whoever serves it, so
the optimum is at least max(own updates / own bandwidth, all bytes sent / all bandwidth). Members delegate if the longest time
exceeds DELEGATION_RATIO times that bound, as long as it gets shorter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median_low

from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Member

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
    """Return the parts with their reducers. Beside cells, few contributors push all their parts to the same one."""
    for part in parts:
        links.send_updates(part)
    links.wait_for_updates()
    own = [part for part in parts if len(part.contributors) == 1 and part.reducer in links.busy_s]
    chosen = {part.index: part for part in own}
    for part in own:
        links.reduce(part, part.reducer)
    reducer_of: dict[tuple[int, ...], int] = {}
    for part in parts:
        if part.index not in chosen and not part.summing and len(part.contributors) <= len(part.hubs):
            reducer = reducer_of.setdefault(part.contributors, links.least_busy(part))
            chosen[part.index] = replace(part, reducer=links.reduce(part, reducer))
    for part in parts:
        if part.index not in chosen:
            chosen[part.index] = replace(part, reducer=links.reduce(part, links.least_busy(part)))
    chosen.update(links.delegate(own))
    return tuple(chosen[part.index] for part in parts)


def extra_copies(part: Part, reducer: int, ends: int) -> int:
    """Return the copies of a part that its reducer sends, in addition to its own update, which counts as one copy.

    `ends` - 1 members get the result from it, except a sole contributor that delegated the part: it has the result.
    """
    return ends - 1 - (reducer in part.contributors or len(part.contributors) == 1)


class Links:
    """The load of each possible reducer's link."""

    def __init__(self, members: tuple[Member, ...], reducers: list[int], ends: int):
        """`ends`: see `Cells.ends`; all members in a round without cells."""
        self._ends = ends
        self.busy_s = dict.fromkeys(reducers, 0.0)
        """Seconds to receive and send for the parts that it reduces."""
        self._own_s = dict.fromkeys(reducers, 0.0)
        """Seconds to upload its own updates."""
        self._averaged_s = dict.fromkeys(reducers, 0.0)
        """Those of parts to which others contribute, too."""
        self._sends_s = dict.fromkeys(reducers, 0.0)
        """Seconds until it has sent all."""
        self._members = members

    def send_updates(self, part: Part) -> None:
        """Count the upload of the contributors' updates."""
        for i in part.contributors:
            if i in self._sends_s:
                seconds = part.encoded_bytes / self._members[i].bandwidth
                self._own_s[i] += seconds
                self._averaged_s[i] += seconds * (len(part.contributors) > 1)

    def wait_for_updates(self) -> None:
        """Count the time until there are means, for reducers without an update of their own, such as helpers."""
        waited_s = median_low([averaged_s for averaged_s in self._averaged_s.values() if averaged_s] or [0.0])
        for i, own_s in self._own_s.items():
            self._sends_s[i] = own_s or waited_s

    def reduce(self, part: Part, reducer: int) -> int:
        """Assign the part to this reducer and return it."""
        self.busy_s[reducer] += self._added_busy_s(part, reducer)
        self._sends_s[reducer] += self._extra_s(part, reducer)
        return reducer

    def least_busy(self, part: Part) -> int:
        """Return the member whose link is busy for the shortest time if it reduces the part."""
        return min(self.busy_s, key=lambda i: (self.busy_s[i] + self._added_busy_s(part, i), i))

    def delegate(self, own: list[Part]) -> dict[int, Part]:
        """Move some of these parts away from their only contributors; return them by index."""
        sends_s, delegated = self._sends_s, dict[int, Part]()
        if len(self._members) < 3 or max(sends_s.values()) <= DELEGATION_RATIO * self._least_s():
            return delegated
        left: dict[int, list[Part]] = {}
        for part in own:
            left.setdefault(part.reducer, []).append(part)
        while left.get(busiest := max(sends_s, key=lambda i: (sends_s[i], -i))):
            part = left[busiest].pop()
            then_s = {i: sends_s[i] + self._extra_s(part, i) for i in sends_s if i != busiest}
            taker = min(then_s, key=lambda i: (then_s[i], i), default=busiest)
            if taker == busiest or then_s[taker] >= sends_s[busiest]:
                break
            sends_s[busiest] -= self._extra_s(part, busiest)
            sends_s[taker] = then_s[taker]
            delegated[part.index] = replace(part, reducer=taker)
        return delegated

    def _least_s(self) -> float:
        """Return a lower bound of the busiest link's upload time."""
        sent = sum(sends_s * self._members[i].bandwidth for i, sends_s in self._sends_s.items())
        return max(*self._own_s.values(), sent / sum(self._members[i].bandwidth for i in self._sends_s), 0.0)

    def _added_busy_s(self, part: Part, reducer: int) -> float:
        received = len(part.inputs) - (reducer in part.inputs)
        return (received + self._ends - 1) * part.encoded_bytes / self._members[reducer].bandwidth

    def _extra_s(self, part: Part, reducer: int) -> float:
        return extra_copies(part, reducer, self._ends) * part.encoded_bytes / self._members[reducer].bandwidth
