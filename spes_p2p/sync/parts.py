"""Which ranges of the flat state are exchanged, and who reduces which. Pure functions of what the plan says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spes_p2p.model.layout import Group, Layout
from spes_p2p.swarm.records import Member
from spes_p2p.sync.codecs import Codec, GroupCodecs


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


def part_ranges(layout: Layout, codecs: GroupCodecs, part_bytes: int) -> tuple[tuple[Group, int, int], ...]:
    """Group, start and stop of everything that can be a part, in order. The same in every round: who is in it plays no role."""
    steps = ((group, max(1, codecs.of(group).elements(part_bytes))) for group in layout.groups)
    return tuple((group, a, min(group.stop, a + step)) for group, step in steps for a in range(group.start, group.stop, step))


def weight(member: Member, group: Group) -> int:
    """Tokens behind the member's update of this group, or those of them that its router sent to the expert.

    Of a part that earlier rounds left out more may stand behind it, of one that they took less: its push says how many.
    """
    return member.tokens if group.expert is None else member.routed[group.expert]


def part_table(layout: Layout, members: tuple[Member, ...], codecs: GroupCodecs, part_bytes: int) -> tuple[Part, ...]:
    """Every part of a round. Groups that nobody trained have none: they are not sent, and the base keeps its value.

    A part's only contributor reduces it (no upload to anybody but the pullers) unless it cannot be dialled. All other parts go,
    one by one, to the member whose link is then busy for the shortest time: a reducer of a part with c contributors receives
    c' (those that are not itself) and sends N - 1 copies, so its time is (c' + N - 1) * encoded bytes / bandwidth. When nobody
    can be dialled there are no parts.
    """
    reducers = [i for i, member in enumerate(members) if member.bandwidth > 0]
    if not reducers:
        return ()
    load = [0.0] * len(members)
    contributors_of = {
        group: tuple(i for i, member in enumerate(members) if weight(member, group) > 0) for group in layout.groups
    }
    ranges = [
        (group, start, stop, contributors_of[group])
        for group, start, stop in part_ranges(layout, codecs, part_bytes) if contributors_of[group]
    ]

    chosen: dict[int, int] = {}
    for k, (group, start, stop, contributors) in enumerate(ranges):
        if len(contributors) == 1 and members[contributors[0]].bandwidth > 0:
            chosen[k] = contributors[0]
            encoded = codecs.of(group).encoded_bytes(stop - start)
            load[contributors[0]] += _seconds(members, contributors, contributors[0], encoded)
    for k, (group, start, stop, contributors) in enumerate(ranges):
        if k not in chosen:
            encoded = codecs.of(group).encoded_bytes(stop - start)
            best = min(reducers, key=lambda i: (load[i] + _seconds(members, contributors, i, encoded), i))
            chosen[k] = best
            load[best] += _seconds(members, contributors, best, encoded)
    return tuple(
        Part(k, group, a, b, contributors, chosen[k], codecs.of(group)) for k, (group, a, b, contributors) in enumerate(ranges)
    )


def moved_parts(
    parts: tuple[Part, ...], members: tuple[Member, ...], newly_lost: tuple[int, ...], lost: set[int], revision: int
) -> dict[int, Part]:
    """Parts of the newly lost reducers, by index, at their backups: the members that are then busy for the shortest time.

    Contributors push the same update once more, to the backup. A part whose contributors are all lost stays where it is, and is
    not committed. `lost`: all members lost so far.
    """
    reducers = [i for i, member in enumerate(members) if member.bandwidth > 0 and i not in lost]
    load = dict.fromkeys(reducers, 0.0)
    moved = {}
    for part in parts:
        contributors = tuple(i for i in part.contributors if i not in lost)
        if part.reducer not in newly_lost or not contributors or not reducers:
            continue
        if len(contributors) == 1 and contributors[0] in load:
            backup = contributors[0]
        else:
            backup = min(reducers, key=lambda i: (load[i] + _seconds(members, contributors, i, part.encoded_bytes), i))
        load[backup] += _seconds(members, contributors, backup, part.encoded_bytes)
        moved[part.index] = replace(part, contributors=contributors, reducer=backup, revision=revision)
    return moved


def _seconds(members: tuple[Member, ...], contributors: tuple[int, ...], reducer: int, encoded: int) -> float:
    received = len(contributors) - (reducer in contributors)
    return (received + len(members) - 1) * encoded / members[reducer].bandwidth


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
