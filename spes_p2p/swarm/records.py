"""What peers tell each other about a round. The words are those of docs/architecture.md."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from spes_p2p.data.slices import Cursor, Interval
from spes_p2p.swarm.wire import pack, record_id

CampaignState = Literal["running", "paused", "stopped"]


@dataclass(frozen=True)
class Change:
    """Another schedule."""

    round: int
    """The first round that it holds for: the phase that leads there is the first one trained by it."""
    training: str
    """Fields of the campaign's `training` with their new values, as JSON."""


@dataclass(frozen=True)
class Control:
    """What the campaign's owner orders. It says all that holds from then on, so that the newest record is enough to know."""

    campaign: str
    number: int
    """From 1; of two records the one with the higher number holds."""
    state: CampaignState
    """running: rounds go on; paused: none is planned until a newer record says so; stopped: the campaign is over, for good."""
    changes: tuple[Change, ...]
    """All there ever were, by round; of two that change one field the later one holds."""
    rollback: int
    """Round whose base everybody goes back to with the head that applies this record; -1: none."""
    signature: bytes
    """By the key of the owner, under everything above."""


@dataclass(frozen=True)
class Contact:
    """What a peer publishes of itself in the registry; must stay below 1 KB."""

    campaign: str
    """Campaign hash."""
    protocol: int
    role: str
    """trainer or helper."""
    round: int
    """Number of the last committed round; -1 before the first."""
    head: str
    addresses: tuple[str, ...]
    control: int = 0
    """Number of the newest control record that it holds; 0: none. Who has an older one asks for it."""


@dataclass(frozen=True)
class Announcement:
    """A member's report to the coordinator when its phase is done."""

    campaign: str
    protocol: int
    round: int
    """The round it wants to take part in: one more than its head's."""
    attempt: int
    waited_s: float
    """Seconds since its phase was done: a new coordinator counts how long everybody has waited for a straggler already."""
    head: str
    base_digest: str
    tokens: int
    """Trained and not yet included in a base."""
    routed: tuple[int, ...]
    """For each expert, tokens its router sent there and not yet included; 0 where it has no pending work."""
    capacity: int
    """Most experts that it can train."""
    tokens_per_second: float
    bandwidth: float
    """Bytes a second that it can send, as measured; 0: cannot be dialled or will not reduce."""
    loss: float
    """Mean training loss over `tokens`; 0 when there are none."""
    validation_loss: float | None
    """Held-out loss of the base, from the member that evaluated it."""
    untrained: tuple[Interval, ...]
    """What comes back to the cursor."""
    trains: bool = True
    """A helper does not: it gets no experts and no samples."""
    in_flight: bool = False
    """Does a phase go on during this round? Its work comes with the next one (`sync.overlap`)."""
    archived: tuple[int, ...] = ()
    """Rounds whose bases it keeps."""


@dataclass(frozen=True)
class Member:
    """A peer in the plan, with the weight of what it contributes."""

    peer: str
    tokens: int
    routed: tuple[int, ...]
    bandwidth: float
    trains: bool = True


@dataclass(frozen=True)
class Duty:
    """What one member does in the next phase."""

    member: int
    """Index into the plan's members."""
    owned: tuple[int, ...]
    steps: int
    slices: tuple[Interval, ...]


@dataclass(frozen=True)
class Merge:
    """An expert merge after the round: w <- w + alpha (mean(donors) - w)."""

    alpha: float
    donors: tuple[tuple[tuple[int, ...], ...], ...]
    """Donors of each expert in each layer: `[layers][experts][k]`, chosen from the base before the round."""


@dataclass(frozen=True)
class Plan:
    """Who is in the round, with which weights, what happens after it, and the next phase's duties. The same for all members."""

    campaign: str
    epoch: int
    round: int
    parent: str
    ballot: Ballot
    base_digest: str
    """Of the parent's base: everybody starts from these bits."""
    members: tuple[Member, ...]
    """Sorted by peer id."""
    tokens: int
    """Of this round, over all members."""
    loss: float
    validation_loss: float | None
    """Held-out loss of the parent's base, where a member evaluated it."""
    step: int
    """Campaign step that is reached with this round."""
    merge: Merge | None
    duties: tuple[Duty, ...]
    """One a member, in the members' order."""
    cursor: Cursor
    lateness: tuple[float, ...] = ()
    """Of members that had a duty: how much later than the first half of the work each announced, as a share of the time until
    then. The next rounds' patience with stragglers is learnt from it."""
    phase_step: int = 0
    """Campaign step at which the duties begin: `step`, and the phase that goes on during this round on top (`sync.overlap`)."""
    control: Control | None = None
    """What holds after this round."""

    def index(self, peer: str) -> int | None:
        """The peer's place among the members, or None."""
        return next((i for i, member in enumerate(self.members) if member.peer == peer), None)

    @cached_property
    def id(self) -> str:
        """Hex sha256 of the plan's bytes."""
        return record_id(self)


@dataclass(frozen=True, order=True)
class Ballot:
    """A coordinator's turn in one round; higher ones win."""

    number: int
    coordinator: str


@dataclass(frozen=True)
class Manifest:
    """What a reducer made of its parts, in the order of the plan's part table."""

    plan: str
    reducer: int
    revision: int
    """Of the part table: 0 for the plan's own, then one more each time that reducers were lost."""
    digests: bytes
    """BLAKE3 of each encoded result, 32 bytes each; zeros for a part that got no contribution."""
    masks: bytes
    """For each part, who is in it: one bit a member, ceil(members / 8) bytes each."""

    @property
    def root(self) -> bytes:
        """32 bytes that stand for the whole manifest."""
        return hashlib.sha256(pack(self)).digest()


@dataclass(frozen=True)
class Staged:
    """A member's report that it holds results durably."""

    plan: str
    manifests: tuple[Manifest, ...]
    """My own: one for each revision in which I reduce parts."""
    revision: int
    """The last one that this report is about."""
    missing: tuple[int, ...]
    """Which manifests I do not have, of the places `[revisions][members]`."""
    roots_digest: bytes
    """sha256 over the roots of the others: usually everybody has the same."""
    roots: tuple[bytes, ...]
    """Those roots, empty bytes for the missing ones, when the coordinator asked for them: somebody got other manifests."""
    parts: bytes
    """One bit a part of the plan: held here, matching its manifest."""
    disk: str
    """What I vote with, if the head makes me an elector."""


@dataclass(frozen=True)
class Revision:
    """Reducers were lost: their parts go to others. Sent by the coordinator while the exchange goes on."""

    plan: str
    lost: tuple[tuple[int, ...], ...]
    """Members lost before each revision, in order: what the head will say."""


@dataclass(frozen=True)
class Head:
    """A commit: the decided record of a round."""

    campaign: str
    epoch: int
    round: int
    parent: str
    plan: str
    """Id of the plan; empty for the genesis head, a reform and a rollback."""
    roots: tuple[bytes, ...]
    """Root of each member's manifest, revision by revision: `[revisions][members]`; empty bytes for members without one."""
    dropped: tuple[int, ...]
    """Parts that had contributors but are left out: the base keeps its old value there."""
    base_digest: str
    """Of the parent's base; of base 0 in the genesis head, of the base gone back to in a rollback; empty in a reform."""
    step: int
    tokens: int
    """Included since the campaign began."""
    members: tuple[str, ...]
    owners: tuple[tuple[int, ...], ...]
    """For each expert, indices into `members` of who trains it next."""
    cursor: Cursor
    helpers: tuple[str, ...]
    electorate: tuple[str, ...]
    """Whose majority decides the next round."""
    disks: tuple[str, ...]
    """Of each elector, the id of the disk that it votes with: its votes on another one, or on none, do not count."""
    lost: tuple[tuple[int, ...], ...] = ()
    """Members that were lost before each revision of the part table (indices into `members`)."""
    control: Control | None = None
    """The newest record that is applied: by everybody, with this head or one before it. None: the owner never gave one."""

    @cached_property
    def id(self) -> str:
        """Hex sha256 of the head's bytes."""
        return record_id(self)


@dataclass(frozen=True)
class Vote:
    """An elector's signature under one (ballot, head)."""

    elector: str
    signature: bytes


@dataclass(frozen=True)
class Farewell:
    """An elector leaves before it cast any vote in the round after `parent`, and will cast none: its seat does not count."""

    elector: str
    parent: str
    signature: bytes


@dataclass(frozen=True)
class Decided:
    """A head with its certificate: accepted by a majority of the electorate in one ballot. It proves itself."""

    head: Head
    ballot: Ballot
    votes: tuple[Vote, ...]
    farewells: tuple[Farewell, ...] = ()
    """Electors without whom the majority is counted."""


@dataclass(frozen=True)
class Pong:
    """Answer to a ping, from the peer's main loop."""

    round: int
    """Last committed round."""
    phase: str
    failed_to_coordinate: int
    """Last round that this peer could not bring to a decision as its coordinator; -1 when none."""
    votes: bool
    """Is it an elector of the round after its last one, and may it vote?"""


@dataclass(frozen=True)
class CampaignRequest:
    """Ask a peer for its campaign."""

    protocol: int


@dataclass(frozen=True)
class CampaignRecord:
    """The campaign as a bootstrap or any member serves it."""

    campaign_json: bytes
    genesis: Head
    blobs: tuple[tuple[str, int], ...] = field(default=())
    """sha256 and bytes of each file that can be fetched: tokenizer, manifests."""
    folders: tuple[str, ...] = ()
    """Where the token files lie on the machine that answers: worth a look on the same machine, or one set up alike."""
