"""Which ranges of the flat state are exchanged, and who reduces which. Pure functions of what the plan says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_p2p.messages.rounds import Member
from spes_p2p.model.layout import Group, Layout
from spes_p2p.rounds.codecs import Codec, GroupCodecs

WORTH_HANDING_ON = 1.5
"""Bandwidths are measured, and lines that are alike differ by less: their owners go on serving their own experts."""
PART_BYTES = 2**19
"""Most encoded bytes of one part. On the slowest line that a peer may have (1 Mbit/s) a part takes 4.2 s, less than the default
silence_s of 10 s, within which the heartbeats behind it must arrive; smaller parts cost a round time in messages."""
SPREAD, SMALL_BYTES = 64, 2**14


@dataclass(frozen=True)
class Part:
    """A contiguous range `[start, stop)` of the flat state inside one group: the unit of exchange."""

    index: int
    group: Group
    start: int
    stop: int
    contributors: tuple[int, ...]
    """Members that send an update for it, in member order."""
    reducer: int
    """Member that sums, encodes and first serves it."""
    codec: Codec
    """Of its updates and of its result."""
    revision: int = 0
    """Of the part table in which it got this reducer."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def encoded_bytes(self) -> int:
        """Length of an encoded update."""
        return self.codec.encoded_bytes(self.size)


def part_ranges(
    layout: Layout, codecs: GroupCodecs, part_bytes: int = PART_BYTES
) -> tuple[tuple[Group, int, int], ...]:
    """Group, start and stop of everything that can be a part, in order. The same in every round: who is in it plays no role.

    A group is cut into SPREAD parts at least, so that its reducers get alike shares of it, but not below SMALL_BYTES each
    (its last part may be smaller).
    """
    ranges = []
    for group in layout.groups:
        codec = codecs.of(group)
        spread = max(SMALL_BYTES, codec.encoded_bytes(group.size) // SPREAD)
        step = max(1, codec.elements(min(part_bytes, spread)))
        ranges += [(group, a, min(group.stop, a + step)) for a in range(group.start, group.stop, step)]
    return tuple(ranges)


def weight(member: Member, group: Group) -> int:
    """Tokens behind the member's update of this group, or those of them that its router sent to the expert.

    Of a part that earlier rounds left out more may stand behind it, of one that they took less: its push says how many.
    """
    return member.tokens if group.expert is None else member.routed[group.expert]


def part_table(
    layout: Layout, members: tuple[Member, ...], codecs: GroupCodecs, part_bytes: int = PART_BYTES
) -> tuple[Part, ...]:
    """Every part of a round. Groups that nobody trained have none: they are not sent, and the base keeps its value.

    A part's only contributor reduces it. All other parts go, one by one, to the member whose line is then busy for the shortest
    time: a reducer of a part with c contributors receives c' (those that are not itself) and sends N - 1 copies, so its time is
    (c' + N - 1) * encoded bytes / bandwidth.

    Then lines that would send for longest hand on parts of their own, which they send only once then. A round takes at least
    max over members of (bytes sent / upload bandwidth): each contributor sends its update once, a reducer `extra_copies` more.
    Handing on costs no byte, since a result crosses N - 1 uplinks, whoever serves it; no assignment takes less than
    max(own updates / own bandwidth, all bytes sent / all bandwidth). It is done where owners would take WORTH_HANDING_ON times
    that, while it shortens the longest time.

    Members with bandwidth 0 cannot be dialled and reduce nothing; when nobody can be there are no parts.
    """
    reducers = [i for i, member in enumerate(members) if member.bandwidth > 0]
    if not reducers:
        return ()
    contributors_of = {
        group: tuple(i for i, member in enumerate(members) if weight(member, group) > 0) for group in layout.groups
    }
    ranges = [
        (group, start, stop, contributors_of[group])
        for group, start, stop in part_ranges(layout, codecs, part_bytes) if contributors_of[group]
    ]
    parts = [Part(k, group, a, b, who, who[0], codecs.of(group)) for k, (group, a, b, who) in enumerate(ranges)]
    lines = _Lines(members, reducers)
    for part in parts:
        lines.send_updates(part)
    own = [part for part in parts if len(part.contributors) == 1 and part.reducer in lines.busy_s]
    chosen = {part.index: part for part in own}
    for part in own:
        lines.reduce(part, part.reducer)
    for part in parts:
        if part.index not in chosen:
            chosen[part.index] = replace(part, reducer=lines.reduce(part, lines.freest(part)))
    chosen.update(lines.hand_on(own))
    return tuple(chosen[part.index] for part in parts)


def extra_copies(part: Part, reducer: int, members: int) -> int:
    """Copies of a part that this member sends as its reducer, beyond the one that it sends as a contributor.

    N - 1 others get the result; a sole contributor that handed its part on has it already.
    """
    return members - 1 - (reducer in part.contributors or len(part.contributors) == 1)


def pulls(part: Part, member: int) -> bool:
    """Does the member fetch the part's result? Not its reducer, nor its only contributor, whose codes are the result."""
    return member != part.reducer and part.contributors != (member,)


def moved_parts(
    parts: tuple[Part, ...], members: tuple[Member, ...], newly_lost: tuple[int, ...], lost: set[int], revision: int
) -> dict[int, Part]:
    """Parts of the newly lost reducers, by index, at their backups: the members that are then busy for the shortest time.

    Contributors push the same update once more, to the backup. A part whose contributors are all lost stays where it is, and is
    not committed. `lost`: all members lost so far.
    """
    lines = _Lines(members, [i for i, member in enumerate(members) if member.bandwidth > 0 and i not in lost])
    moved = {}
    for part in parts:
        contributors = tuple(i for i in part.contributors if i not in lost)
        if part.reducer in newly_lost and contributors and lines.busy_s:
            again = replace(part, contributors=contributors, revision=revision)
            moved[part.index] = replace(again, reducer=lines.reduce(again, lines.freest(again)))
    return moved


class _Lines:
    """What the line of each member that can be a reducer has to carry."""

    def __init__(self, members: tuple[Member, ...], reducers: list[int]):
        self.busy_s = dict.fromkeys(reducers, 0.0)
        """Seconds, both ways, with what it reduces."""
        self._own_s = dict.fromkeys(reducers, 0.0)
        self._sends_s = dict.fromkeys(reducers, 0.0)
        """Seconds, upwards, with its own updates."""
        self._members = members

    def send_updates(self, part: Part) -> None:
        """Each contributor sends its update once."""
        for i in part.contributors:
            if i in self._sends_s:
                self._own_s[i] += part.encoded_bytes / self._members[i].bandwidth
                self._sends_s[i] = self._own_s[i]

    def reduce(self, part: Part, reducer: int) -> int:
        """Give it to this member, which is returned."""
        self.busy_s[reducer] += self._busy_s_with(part, reducer)
        self._sends_s[reducer] += self._extra_s(part, reducer)
        return reducer

    def freest(self, part: Part) -> int:
        """Whose line is busy for the shortest time when it reduces the part."""
        return min(self.busy_s, key=lambda i: (self.busy_s[i] + self._busy_s_with(part, i), i))

    def hand_on(self, own: list[Part]) -> dict[int, Part]:
        """Which of these parts, each at its only contributor, go elsewhere; by index."""
        sends_s, handed = self._sends_s, dict[int, Part]()
        if len(self._members) < 3 or max(sends_s.values()) <= WORTH_HANDING_ON * self._least_s():
            return handed
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
            handed[part.index] = replace(part, reducer=taker)
        return handed

    def _least_s(self) -> float:
        """No assignment lets the busiest line send for less."""
        sent = sum(sends_s * self._members[i].bandwidth for i, sends_s in self._sends_s.items())
        return max(*self._own_s.values(), sent / sum(self._members[i].bandwidth for i in self._sends_s), 0.0)

    def _busy_s_with(self, part: Part, reducer: int) -> float:
        received = len(part.contributors) - (reducer in part.contributors)
        return (received + len(self._members) - 1) * part.encoded_bytes / self._members[reducer].bandwidth

    def _extra_s(self, part: Part, reducer: int) -> float:
        return extra_copies(part, reducer, len(self._members)) * part.encoded_bytes / self._members[reducer].bandwidth


def mask_bytes(members: int) -> int:
    """Bytes of one contributor mask."""
    return (members + 7) // 8


def to_mask(contributors: set[int] | tuple[int, ...], members: int) -> bytes:
    """One bit a member, member 0 in the lowest bit."""
    return sum(1 << i for i in contributors).to_bytes(mask_bytes(members), "little")


def from_mask(mask: bytes) -> tuple[int, ...]:
    """The members whose bit is set, ascending."""
    bits = int.from_bytes(mask, "little")
    return tuple(i for i in range(8 * len(mask)) if bits >> i & 1)
