"""Parts: the ranges of the flat state that a round exchanges, and the way of each through reducer and hubs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from spes_p2p.model.layout import Group, Layout
from spes_p2p.rounds.cells import NO_CELL
from spes_p2p.rounds.codecs import Codec, GroupCodecs
from spes_p2p.rounds.planned import Member

PART_BYTES = 2**19
"""Bounds the encoded bytes of a part. On the slowest permitted link (1 Mbit/s) a part takes 4.2 s, so heartbeats queued behind
it arrive within the default silence_s of 10 s. Smaller parts cost more messages."""
PART_ELEMENTS = 2**20
"""Bounds the elements of a part, which members hold decoded: 4 MiB in float32, of which `int4` needs 512 KiB."""
SPREAD, SMALL_BYTES = 64, 2**14
"""Cut a group into at least this many parts, to balance its reducers, but not into parts below this size."""
MASKS = 256
"""Masks that are kept decoded: most say the same, that all members are in."""


@dataclass(frozen=True)
class Part:
    """A contiguous range `[start, stop)` of the flat state inside one group: the unit of exchange."""

    index: int
    group: Group
    start: int
    stop: int
    contributors: tuple[int, ...]
    """Members that send an update of the part, ascending."""
    reducer: int
    """Member that sums the updates, encodes the mean and serves it first."""
    codec: Codec
    """Encodes the updates and the result."""
    revision: int = 0
    """Revision of the part table that chose this reducer."""
    hubs: tuple[int, ...] = ()
    """The hub of each cell (`cells.py`), which hands on the result; empty where members exchange with the reducer."""
    summing: tuple[int, ...] = ()
    """Hubs that also sum their cell's updates, ascending; members of other cells push to the reducer."""
    cell_of: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """Each member's cell, or NO_CELL; empty without hubs."""

    @property
    def size(self) -> int:
        """Elements of the part."""
        return self.stop - self.start

    @property
    def ends(self) -> int:
        """Members that get results from the reducer where only strangers have cells; see `Cells.ends`."""
        return len(self.hubs) + self.cell_of.count(NO_CELL)

    @property
    def encoded_bytes(self) -> int:
        """Bytes of an encoded update, and of the encoded result."""
        return self.codec.encoded_bytes(self.size)

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Members whose updates or cell's means the reducer sums, ascending."""
        if not self.summing:
            return self.contributors
        return tuple(sorted({*self.summing, *(i for i in self.contributors if self.hub_of(i) not in self.summing)}))

    @property
    def is_mean(self) -> bool:
        """Whether the result is a mean: the reducer's, or that of a single cell."""
        return len(self.inputs) > 1 or bool(self.summing)

    def hub_of(self, member: int) -> int | None:
        """Return the hub of the member's cell; None if it has none."""
        cell = self.cell_of[member] if self.hubs else NO_CELL
        return None if cell == NO_CELL else self.hubs[cell]

    def parent(self, member: int) -> int:
        """Return the member from which this one pulls the result; of the reducer, itself."""
        hub = self.hub_of(member)
        return self.reducer if hub is None or hub == member else hub

    def pushed_to(self, member: int) -> int:
        """Return the member to which this one pushes its update or, as a hub, its cell's mean."""
        hub = self.hub_of(member)
        return self.reducer if hub is None or hub == member or hub not in self.summing else hub

    def pushes(self, member: int) -> bool:
        """Return whether the member pushes anything. In a revision hubs have the means already."""
        pushers = self.inputs if self.revision else (*self.contributors, *self.summing)
        return member != self.reducer and member in pushers

    def in_cell(self, hub: int) -> tuple[int, ...]:
        """Return the contributors in the cell of this hub."""
        return tuple(i for i in self.contributors if self.cell_of[i] == self.cell_of[hub])

    def of_cell(self, hub: int) -> Part:
        """Return what a hub sums for its cell, as a part that the hub reduces."""
        return replace(self, contributors=self.in_cell(hub), reducer=hub, hubs=(), summing=())

    @property
    def is_of_cell(self) -> bool:
        """Whether this is what a hub sums for its cell."""
        return bool(self.cell_of) and not self.hubs


def part_elements(codec: Codec, part_bytes: int = PART_BYTES) -> int:
    """Return the maximum number of elements of a part that is encoded in at most `part_bytes`."""
    return min(max(1, codec.elements(part_bytes)), PART_ELEMENTS)


def part_ranges(
    layout: Layout, codecs: GroupCodecs, part_bytes: int = PART_BYTES
) -> tuple[tuple[Group, int, int], ...]:
    """Return group, start and stop of all possible parts, ascending. They do not depend on the round or its members."""
    ranges = []
    for group in layout.groups:
        codec = codecs.of(group)
        spread = max(SMALL_BYTES, codec.encoded_bytes(group.size) // SPREAD)
        step = part_elements(codec, min(part_bytes, spread))
        ranges += [(group, a, min(group.stop, a + step)) for a in range(group.start, group.stop, step)]
    return tuple(ranges)


def decode_result(part: Part, encoded: bytes | memoryview, layout: Layout) -> np.ndarray:
    """Return a result, float32 `[part.size]`, with 0 for what nobody trains (`Layout.fixed`), whatever members sent."""
    update = part.codec.decode(encoded, part.size)
    fixed = [placed for placed in layout.fixed if placed.start < part.stop and part.start < placed.stop]
    if fixed:
        update = update.copy()
    for placed in fixed:
        update[max(0, placed.start - part.start) : placed.stop - part.start] = 0
    return update


def weight(member: Member, group: Group) -> int:
    """Return the tokens of the member's update of this group (for an expert: the tokens routed to it).

    The push of a part names its tokens. They are fewer where an earlier round included only some of the parts, and never count
    for more.
    """
    return member.tokens if group.expert is None else member.routed[group.expert]


def is_unwatched(members: tuple[Member, ...], group: Group, contributors: Collection[int]) -> bool:
    """Return whether only newcomers contribute to an expert, which then keeps its values."""
    return group.expert is not None and all(members[i].standing == "newcomer" for i in contributors)


def pulls(part: Part, member: int) -> bool:
    """Return whether the member fetches the part's result. Its reducer does not, nor a sole contributor, which has it."""
    return member != part.reducer and part.contributors != (member,)


def waits_for(part: Part, member: int) -> bool:
    """Return whether the member pushes to the part's reducer, or pulls from it: whether it notices one that stalls."""
    pushes = part.pushes(member) and part.pushed_to(member) == part.reducer
    return pushes or (pulls(part, member) and part.parent(member) == part.reducer)


def mask_bytes(members: int) -> int:
    """Return the bytes of a contributor mask."""
    return (members + 7) // 8


def to_mask(contributors: set[int] | tuple[int, ...], members: int) -> bytes:
    """Encode members as one bit each, member 0 in the lowest bit."""
    return sum(1 << i for i in contributors).to_bytes(mask_bytes(members), "little")


@lru_cache(MASKS)
def from_mask(mask: bytes) -> tuple[int, ...]:
    """Return the members whose bit is set, ascending."""
    bits = int.from_bytes(mask, "little")
    return tuple(i for i, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")
