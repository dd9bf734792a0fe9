"""The part table: the ranges of the flat state that a round exchanges, and their reducers. Pure functions of the plan."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from spes_p2p.config.campaign import SLOWEST_LINE_BITS
from spes_p2p.model.layout import Group, Layout
from spes_p2p.rounds.cells import NO_CELL, Cells, make_cells
from spes_p2p.rounds.codecs import Codec, GroupCodecs
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.remembered import remembered

DELEGATION_RATIO = 1.5
"""Owners delegate parts when the busiest link takes this many times the least possible: less is an error of measurement."""
HUBS_DELEGATION_RATIO = 1.1
"""Owners that are hubs delegate when the busiest hub otherwise takes this many times as long."""
PART_BYTES = 2**19
"""Bounds the encoded bytes of a part. On the slowest permitted link (1 Mbit/s) a part takes 4.2 s, so heartbeats queued behind
it arrive within the default silence_s of 10 s. Smaller parts cost more messages."""
PART_ELEMENTS = 2**20
"""Bounds the elements of a part, which members hold decoded: 4 MiB in float32, of which `int4` needs 512 KiB."""
SPREAD, SMALL_BYTES = 64, 2**14
"""Cut a group into at least this many parts, to balance its reducers, but not into parts below this size."""
SHORTEST_LIMIT_S, PATIENCE = 60.0, 6.0
"""The time limit of an exchange: this long, plus this many times what the slowest line needs at the announced bandwidth. An
unmeasured line counts as 100 Mbit/s, so one of 20 Mbit/s is in time."""
MASKS = 256
"""Masks that are kept decoded: most say the same, that all members are in."""
ENOUGH_TO_CLIP = 3
"""Contributors, for a median that one liar cannot be."""
SLOWEST_BYTES_PER_S: float = SLOWEST_LINE_BITS / 8
"""The slowest permitted line. A claim of less does not lengthen the limit, and a transfer that moves less has stalled."""
ASSUMED_BYTES_PER_S = 12.5e6
"""The most that is assumed of a member that announces no bandwidth."""


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


def weight(member: Member, group: Group) -> int:
    """Return the tokens of the member's update of this group (for an expert: the tokens routed to it).

    The push of a part names its tokens. They are fewer where an earlier round included only some of the parts, and never count
    for more.
    """
    return member.tokens if group.expert is None else member.routed[group.expert]


@dataclass(frozen=True, eq=False)
class PlanMembers:
    """Members of a plan: hashing them all for each look at the last tables would take as long as to make one."""

    members: tuple[Member, ...]


_by_identity = remembered(4)(PlanMembers)


def part_table(
    layout: Layout, members: tuple[Member, ...], codecs: GroupCodecs, part_bytes: int = PART_BYTES
) -> tuple[Part, ...]:
    """Return every part of a round, ascending. Groups without contributors have no parts: the base keeps their values.

    A part's only contributor reduces it. Each other part goes to the member whose link is then busy for the shortest time: the
    reducer of a part with c contributors receives c' updates (those of others) and sends N - 1 copies, which takes
    (c' + N - 1) * encoded bytes / bandwidth.

    Then the members that would send for longest delegate parts that they alone contribute to, and send those only once. A
    round takes at least max over members of (bytes sent / upload bandwidth): a contributor sends its update once, a reducer
    `extra_copies` more. Delegation adds no bytes, since a result crosses N - 1 uplinks whoever serves it, so the optimum is at
    least max(own updates / own bandwidth, all bytes sent / all bandwidth). Members delegate if the longest time exceeds
    DELEGATION_RATIO times that bound, as long as it gets shorter.

    A large round has cells: parts go to columns of hubs (`cells.py`, `_Columns`, `_StrangersColumns`).

    If no member may reduce, there are no parts. Nor are there parts of an expert that only newcomers trained: its base keeps
    its values.
    """
    return table_of(layout, _by_identity(members), codecs, part_bytes)


@lru_cache(2)
def table_of(layout: Layout, plan: PlanMembers, codecs: GroupCodecs, part_bytes: int) -> tuple[Part, ...]:
    """See `part_table`; the tables of the last two plans are kept."""
    members = plan.members
    reducers = _reducers(members)
    if not reducers:
        return ()
    contributors_of = {group: _contributors(members, group) for group in layout.groups}
    ranges = [
        (group, start, stop, contributors_of[group])
        for group, start, stop in part_ranges(layout, codecs, part_bytes) if contributors_of[group]
    ]
    parts = [Part(k, group, a, b, senders, senders[0], codecs.of(group)) for k, (group, a, b, senders) in enumerate(ranges)]
    cells = make_cells(members, reducers)
    if cells is not None and NO_CELL not in cells.of:
        return _Columns(members, cells).table(parts)
    if cells is None:
        return _flat_table(parts, _Links(members, reducers, len(members)))
    return _StrangersColumns(members, reducers, cells).table(parts)


def _flat_table(parts: Sequence[Part], links: _Links) -> tuple[Part, ...]:
    """Return the parts with their reducers. Beside cells, few contributors push all their parts to the same one."""
    for part in parts:
        links.send_updates(part)
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


def pulls(part: Part, member: int) -> bool:
    """Return whether the member fetches the part's result. Its reducer does not, nor a sole contributor, which has it."""
    return member != part.reducer and part.contributors != (member,)


def waits_for(part: Part, member: int) -> bool:
    """Return whether the member pushes to the part's reducer, or pulls from it: whether it notices one that stalls."""
    pushes = part.pushes(member) and part.pushed_to(member) == part.reducer
    return pushes or (pulls(part, member) and part.parent(member) == part.reducer)


def traffic(parts: Sequence[Part], members: int) -> tuple[list[int], list[int]]:
    """Return by member the bytes that it sends and receives in an exchange of these parts. `members`: their number."""
    up, down = [0] * members, [0] * members
    for part, size in _alike(parts):
        pushers = {*part.contributors, *part.summing} - {part.reducer}
        for member in range(members):
            if member in pushers:
                up[member] += size
                down[part.pushed_to(member)] += size
            if pulls(part, member):
                down[member] += size
                up[part.parent(member)] += size
    return up, down


def _alike(parts: Sequence[Part], together: Callable[[int, int], int] = operator.add) -> list[tuple[Part, int]]:
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
    for part, size in _alike(parts, max):
        for member in {*part.contributors, *part.summing} - {part.reducer}:
            to, receiver = largest.setdefault(member, {}), part.pushed_to(member)
            to[receiver] = max(size, to.get(receiver, 0))
    return {member: (len(to), sum(to.values())) for member, to in largest.items()}


def moved_parts(
    parts: tuple[Part, ...], members: tuple[Member, ...], newly_lost: tuple[int, ...], lost: set[int], revision: int
) -> dict[int, Part]:
    """Move the parts of newly lost reducers to the members whose links are then least busy; return them by index.

    Contributors push the same update again, to the new reducer. With hubs, those that are left push their cells' means to one
    of them. A part without remaining contributors is not moved, nor committed. `lost`: all members lost so far.
    """
    ends = next((part.ends for part in parts if part.hubs), len(members))
    links, rooted = _Links(members, _reducers(members, lost), ends), Counter[int]()
    moved: dict[int, Part] = {}
    for part in parts:
        contributors = tuple(i for i in part.contributors if i not in lost)
        if part.reducer not in newly_lost or not contributors:
            continue
        of_all, part = part.contributors, replace(part, contributors=contributors, revision=revision)
        if part.hubs and NO_CELL not in part.cell_of:
            moved |= _moved_in_column(part, of_all, lost, rooted)
        elif links.busy_s:
            part = _without_hubs(part, of_all, lost)
            reducer = links.reduce(part, links.least_busy(part))
            hubs = tuple(reducer if hub in lost else hub for hub in part.hubs)
            moved[part.index] = replace(part, reducer=reducer, hubs=hubs)
    return moved


def _without_hubs(part: Part, of_all: Sequence[int], lost: Collection[int]) -> Part:
    """Return a part without lost hubs: members of their cells push to the reducer. `of_all`: its contributors, lost or not.

    Means of the hubs that are left may contain updates of members that were lost since.
    """
    part = replace(part, summing=tuple(hub for hub in part.summing if hub not in lost))
    return replace(part, contributors=tuple(i for i in of_all if i not in lost or part.hub_of(i) in part.summing))


def _moved_in_column(part: Part, of_all: Sequence[int], lost: set[int], rooted: Counter[int]) -> dict[int, Part]:
    """Move a part to another hub of its column, if any is left; members of lost hubs' cells exchange with that one.

    `of_all`: its contributors, lost or not. `rooted`: bytes by hub of the parts moved so far.
    """
    left = [hub for hub in part.hubs if hub not in lost]
    summing = tuple(hub for hub in part.summing if hub not in lost)
    if not left or (part.summing and not summing):
        return {}
    if summing:  # their means may contain updates of members that were lost since
        cells = {part.cell_of[hub] for hub in summing}
        part = replace(part, contributors=tuple(i for i in of_all if part.cell_of[i] in cells))
    reducer = min(summing or left, key=lambda hub: (rooted[hub], hub))
    rooted[reducer] += part.encoded_bytes
    hubs = tuple(reducer if hub in lost else hub for hub in part.hubs)
    return {part.index: replace(part, reducer=reducer, hubs=hubs, summing=summing)}


def _contributors(members: tuple[Member, ...], group: Group) -> tuple[int, ...]:
    """Return the members whose updates of this group count."""
    trained = tuple(i for i, member in enumerate(members) if weight(member, group) > 0)
    return () if is_unwatched(members, group, trained) else trained


def is_unwatched(members: tuple[Member, ...], group: Group, contributors: Collection[int]) -> bool:
    """Return whether only newcomers contribute to an expert, which then keeps its values."""
    return group.expert is not None and all(members[i].standing == "newcomer" for i in contributors)


def _reducers(members: tuple[Member, ...], lost: Collection[int] = ()) -> list[int]:
    """Return the members that may reduce: no newcomers, and proven strangers only where there is nobody else.

    Neither do members that are demoted, while others are left. Members with bandwidth 0 cannot be dialled and reduce nothing.
    """
    able = [i for i, member in enumerate(members) if member.bandwidth > 0 and member.standing != "newcomer" and i not in lost]
    able = [i for i in able if members[i].standing != "proven"] or able
    return [i for i in able if not members[i].demoted] or able


class _Links:
    """The load of each possible reducer's link."""

    def __init__(self, members: tuple[Member, ...], reducers: list[int], ends: int):
        """`ends`: see `Cells.ends`; all members in a round without cells."""
        self._ends = ends
        self.busy_s = dict.fromkeys(reducers, 0.0)
        """Seconds to receive and send for the parts that it reduces."""
        self._own_s = dict.fromkeys(reducers, 0.0)
        """Seconds to upload its own updates."""
        self._sends_s = dict.fromkeys(reducers, 0.0)
        """Seconds of upload in all."""
        self._members = members

    def send_updates(self, part: Part) -> None:
        """Count the upload of the contributors' updates."""
        for i in part.contributors:
            if i in self._sends_s:
                self._own_s[i] += part.encoded_bytes / self._members[i].bandwidth
                self._sends_s[i] = self._own_s[i]

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


class _StrangersColumns:
    """The hubs of a round in which only strangers have cells. Each reducer uses few columns, to have few neighbours."""

    def __init__(self, members: tuple[Member, ...], reducers: list[int], cells: Cells):
        self._cells, self._links = cells, _Links(members, reducers, cells.ends)
        rates = [min(members[hub].bandwidth for hub in column) for column in cells.columns]
        self._columns_of: dict[int, set[int]] = {reducer: set() for reducer in reducers}
        for place in range(max(len(reducers), len(rates))):
            self._columns_of[reducers[place % len(reducers)]].add(place % len(rates))
        self._rates, self._busy_s = rates, [0.0] * len(rates)
        self._summed: dict[tuple[int, ...], list[int]] = {}

    def table(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return the parts with their reducers and hubs."""
        chosen = _flat_table([self._with_hubs(part, 0) for part in parts], self._links)
        return tuple(self._with_hubs(part, self._column(part)) for part in chosen)

    def _column(self, part: Part) -> int:
        """Return the column of the reducer's whose hubs are then least busy."""
        columns = self._columns_of.get(part.reducer) or range(len(self._rates))
        column = min(columns, key=lambda place: (self._busy_s[place] + part.encoded_bytes / self._rates[place], place))
        self._busy_s[column] += part.encoded_bytes / self._rates[column]
        return column

    def _with_hubs(self, part: Part, column: int) -> Part:
        """Return the part with this column's hubs. Those with enough contributors to tell one that stands out sum first."""
        if part.contributors not in self._summed:
            counts = Counter(self._cells.of[i] for i in part.contributors)
            self._summed[part.contributors] = [
                cell for cell, count in counts.items() if count >= ENOUGH_TO_CLIP and cell != NO_CELL
            ]
        hubs, summed = self._cells.columns[column], self._summed[part.contributors] if not part.codec.leaves_out else []
        return replace(part, hubs=hubs, summing=tuple(sorted(hubs[cell] for cell in summed)), cell_of=self._cells.of)


class _Columns:
    """The load of each hub's line."""

    def __init__(self, members: tuple[Member, ...], cells: Cells):
        self._cells, self._members = cells, members
        self._sizes = Counter(cells.of)
        self._column_of = {hub: column for column, hubs in enumerate(cells.columns) for hub in hubs}
        self._busy_s: dict[int, float] = {}
        """Seconds in which each hub sends."""
        self._ways: dict[tuple[tuple[int, ...], Codec], tuple[tuple[int, ...], bool]] = {}
        self._at_home = Counter[int]()
        """By cell: sets of few contributors whose parts its hubs reduce."""

    def table(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return the parts with their reducers and hubs.

        A sole contributor that is a hub reduces its parts, unless the busiest hub would then send for much longer: then it
        pushes them to the hubs of its cell, each of which reduces some. Contributors push to the reducer itself in a sparse
        codec, where what is left out of a cell's mean would be lost, and where only all of them together are enough to tell one
        that stands out. If they are few, the hubs of one of their cells reduce all they push, so that each has few neighbours.
        """
        (kept, kept_s), (delegated, delegated_s) = self._taken(parts, True), self._taken(parts, False)
        taken = kept if kept_s <= HUBS_DELEGATION_RATIO * delegated_s else delegated
        return tuple(self._placed(part, *taken[part.index]) for part in parts)

    def _taken(self, parts: Sequence[Part], keeps: bool) -> tuple[dict[int, tuple[int, int]], float]:
        """Return each part's column and reducer, and for how long the busiest hub then sends.

        `keeps`: sole contributors that are hubs reduce their parts.
        """
        self._count_updates(parts)
        taken: dict[int, tuple[int, int]] = {}
        for part in sorted(parts, key=lambda part: len(part.contributors) > 1):
            own = self._column_of.get(part.contributors[0]) if keeps and len(part.contributors) == 1 else None
            columns = range(len(self._cells.columns)) if own is None else (own,)
            column = min(columns, key=lambda column: (self._then_s(part, column), column))
            root, sends_s = self._sends_s(part, column)
            taken[part.index] = column, root
            for hub, more_s in sends_s.items():
                self._busy_s[hub] += more_s
        return taken, max(self._busy_s.values())

    def _count_updates(self, parts: Sequence[Part]) -> None:
        """Count the time in which hubs send their own updates."""
        own = Counter[int]()
        for part, size in _alike(parts):
            own.update(dict.fromkeys(part.contributors, size))
        self._busy_s = {hub: own[hub] / self._members[hub].bandwidth for hub in self._column_of}

    def _way(self, part: Part) -> tuple[tuple[int, ...], bool]:
        """Return the cells whose hubs may reduce the part, and whether the hubs of its contributors' cells sum first."""
        key = part.contributors, part.codec
        if key not in self._ways:
            counts = Counter(self._cells.of[i] for i in part.contributors)
            sums, homes = not part.codec.leaves_out and min(counts.values()) >= ENOUGH_TO_CLIP, tuple(sorted(counts))
            if not sums and len(part.contributors) <= len(self._sizes):
                homes = (min(homes, key=lambda cell: (self._at_home[cell], cell)),)
                self._at_home[homes[0]] += 1
            self._ways[key] = homes, sums and len(counts) > 1
        return self._ways[key]

    def _sends_s(self, part: Part, column: int) -> tuple[int, dict[int, float]]:
        """Return the least busy possible reducer in a column, and for how long each hub sends for the part.

        A hub sends copies to its cell, and its cell's mean to the reducer, which sends copies to the other hubs.
        """
        hubs, (homes, sums) = self._cells.columns[column], self._way(part)
        size, rate_of = part.encoded_bytes, {hub: self._members[hub].bandwidth for hub in hubs}
        root_s = {hub: (len(hubs) - 1) * size / rate_of[hub] for hub in hubs}
        root = min((hubs[cell] for cell in homes), key=lambda hub: (self._busy_s[hub] + root_s[hub], hub))
        sends_s = {hub: (self._sizes[cell] - (not sums)) * size / rate_of[hub] for cell, hub in enumerate(hubs)}
        sends_s[root] += root_s[root]
        return root, sends_s

    def _then_s(self, part: Part, column: int) -> float:
        """Return for how long the busiest hub of a column sends if it takes the part."""
        _, sends_s = self._sends_s(part, column)
        return max(self._busy_s[hub] + more_s for hub, more_s in sends_s.items())

    def _placed(self, part: Part, column: int, reducer: int) -> Part:
        """Return the part with its reducer and hubs."""
        hubs, (homes, sums) = self._cells.columns[column], self._way(part)
        summing = tuple(sorted(hubs[cell] for cell in homes)) if sums else ()
        return replace(part, reducer=reducer, hubs=hubs, summing=summing, cell_of=self._cells.of)


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
