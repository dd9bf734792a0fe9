"""One round: who is in it, the plan, the exchange of updates, and what each member holds of the results."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from annotated_types import MaxLen

from spes_p2p.messages.codec import Extensible, pack, record_id
from spes_p2p.messages.consensus import Ballot, Control
from spes_p2p.messages.fields import (
    MAX_EXPERTS,
    MAX_INTERVALS,
    MAX_LAYERS,
    MAX_MEMBERS,
    MAX_PARTS,
    MAX_REVISIONS,
    MAX_ROOTS,
    Archived,
    Count,
    Digest,
    ExpertCount,
    Experts,
    FrameKind,
    Incarnation,
    Lane,
    Loss,
    Lost,
    MemberIndex,
    PeerId,
    Rate,
    RevisionNumber,
    Root,
    RootIndex,
    Roots,
    Round,
    Routed,
    Seconds,
    Share,
    Steps,
    Term,
    Tokens,
    Version,
    Weight,
    Word,
)
from spes_p2p.messages.framing import MAX_FRAME_BYTES
from spes_p2p.messages.samples import Cursor, Interval


@dataclass(frozen=True)
class Announcement(Extensible):
    """A member's report to the coordinator when its phase is done."""

    campaign: Digest
    protocol: Version
    round: Round
    """The round it wants to take part in: one more than its commit's."""
    attempt: Count
    waited_s: Seconds
    """Seconds since its phase was done: a new coordinator counts how long everybody has waited for a straggler already."""
    commit: Digest
    base_digest: Digest
    tokens: Tokens
    """Trained and not yet included in a base."""
    routed: Routed
    """For each expert, tokens its router sent there and not yet included; 0 where it has no pending work."""
    capacity: ExpertCount
    """Most experts that it can train."""
    tokens_per_second: Rate
    bandwidth: Rate
    """Bytes a second that it can send, as measured; 0: cannot be dialled or will not reduce."""
    loss: Loss
    """Mean training loss over `tokens`; 0 when there are none."""
    validation_loss: Loss | None
    """Held-out loss of the base, from the member that evaluated it."""
    untrained: Annotated[tuple[Interval, ...], MaxLen(MAX_INTERVALS)]
    """What comes back to the cursor."""
    trains: bool = True
    """A helper does not: it gets no experts and no samples."""
    in_flight: bool = False
    """Does a phase go on during this round? Its work comes with the next one (`sync.overlap`)."""
    archived: Archived = ()
    """Rounds whose bases it keeps."""


@dataclass(frozen=True)
class Member:
    """A peer in the plan, with the weight of what it contributes."""

    peer: PeerId
    tokens: Tokens
    routed: Routed
    bandwidth: Rate
    trains: bool = True


@dataclass(frozen=True)
class Assignment:
    """What one member does in the next phase."""

    member: MemberIndex
    """Index into the plan's members."""
    owned: Experts
    steps: Steps
    slices: Annotated[tuple[Interval, ...], MaxLen(MAX_INTERVALS)]


@dataclass(frozen=True)
class Merge:
    """An expert merge after the round: w <- w + alpha (mean(donors) - w)."""

    alpha: Weight
    donors: Annotated[tuple[Annotated[tuple[Experts, ...], MaxLen(MAX_EXPERTS)], ...], MaxLen(MAX_LAYERS)]
    """Donors of each expert in each layer: `[layers][experts][k]`, chosen from the base before the round."""


@dataclass(frozen=True)
class Plan:
    """Who is in the round, with which weights, what happens after it, and the next phase's assignments. The same for all
    members."""

    campaign: Digest
    term: Term
    round: Round
    parent: Digest
    ballot: Ballot
    base_digest: Digest
    """Of the parent's base: everybody starts from these bits."""
    members: Annotated[tuple[Member, ...], MaxLen(MAX_MEMBERS)]
    """Sorted by peer id."""
    tokens: Count
    """Of this round, over all members."""
    loss: Loss
    validation_loss: Loss | None
    """Held-out loss of the parent's base, where a member evaluated it."""
    step: Steps
    """Campaign step that is reached with this round."""
    merge: Merge | None
    assignments: Annotated[tuple[Assignment, ...], MaxLen(MAX_MEMBERS)]
    """One a member, in the members' order."""
    cursor: Cursor
    straggler_delay: Annotated[tuple[Share, ...], MaxLen(MAX_MEMBERS)] = ()
    """Of members that had an assignment: how much later than the first half of the work each announced, as a share of the time
    until then. The next rounds' patience with stragglers is learnt from it."""
    phase_step: Steps = 0
    """Campaign step at which the assignments begin: `step`, and the phase that goes on during this round on top
    (`sync.overlap`)."""
    control: Control | None = None
    """What holds after this round."""

    def index(self, peer: str) -> int | None:
        """The peer's place among the members, or None."""
        return next((i for i, member in enumerate(self.members) if member.peer == peer), None)

    @cached_property
    def id(self) -> str:
        """Hex sha256 of the plan's bytes."""
        return record_id(self)


@dataclass(frozen=True)
class Manifest:
    """What a reducer made of its parts, in the order of the plan's part table."""

    plan: Digest
    reducer: MemberIndex
    revision: RevisionNumber
    """Of the part table: 0 for the plan's own, then one more each time that reducers were lost."""
    digests: Annotated[bytes, MaxLen(32 * MAX_PARTS)]
    """BLAKE3 of each encoded result, 32 bytes each; zeros for a part that got no contribution."""
    masks: Annotated[bytes, MaxLen(MAX_FRAME_BYTES)]
    """For each part, who is in it: one bit a member, ceil(members / 8) bytes each."""

    @property
    def root(self) -> bytes:
        """32 bytes that stand for the whole manifest."""
        return hashlib.sha256(pack(self)).digest()


@dataclass(frozen=True)
class Staged(Extensible):
    """A member's report that it holds results durably."""

    plan: Digest
    manifests: Annotated[tuple[Manifest, ...], MaxLen(MAX_REVISIONS + 1)]
    """My own: one for each revision in which I reduce parts."""
    revision: RevisionNumber
    """The last one that this report is about."""
    missing: Annotated[tuple[RootIndex, ...], MaxLen(MAX_ROOTS)]
    """Which manifests I do not have, of the places `[revisions][members]`."""
    roots_digest: Root
    """sha256 over the roots of the others: usually everybody has the same."""
    roots: Roots
    """Those roots, empty bytes for the missing ones, when the coordinator asked for them: somebody got other manifests."""
    parts: Annotated[bytes, MaxLen(MAX_PARTS // 8)]
    """One bit a part of the plan: held here, matching its manifest."""
    incarnation: Incarnation
    """What I vote with, if the commit makes me an elector."""


@dataclass(frozen=True)
class Revision:
    """Reducers were lost: their parts go to others. Sent by the coordinator while the exchange goes on."""

    plan: Digest
    lost: Lost
    """Members lost before each revision, in order: what the commit will say."""


@dataclass(frozen=True)
class Pong(Extensible):
    """Answer to a ping, from the peer's main loop."""

    round: Round
    """Last committed round."""
    phase: Word
    failed_to_coordinate: Round
    """Last round that this peer could not bring to a decision as its coordinator; -1 when none."""
    votes: bool
    """Is it an elector of the round after its last one, and may it vote?"""


@dataclass(frozen=True)
class Ping(Extensible):
    """Are you there? `stop_after`: end the phase after this round's current step and announce; -1: take your time."""

    stop_after: Round


@dataclass(frozen=True)
class Passed:
    """In place of a plan or a decided commit: where it is."""

    kind: FrameKind
    """Of the frame that would have held the record."""
    sha256: Digest
    """Of the record's bytes, hex."""
    holders: Annotated[tuple[PeerId, ...], MaxLen(2)]
    """Peers that have it, to be asked in this order."""


@dataclass(frozen=True)
class PushHeader(Extensible):
    """First message of a push: for which plan."""

    plan: Digest
    revision: RevisionNumber = 0


@dataclass(frozen=True)
class PullRequest(Extensible):
    """The results that the asked member reduces and the asking one pulls: every `lanes`-th of them from number `lane` on, and
    after those of lane 0 its manifest."""

    plan: Digest
    revision: RevisionNumber = 0
    lane: Lane = 0
    lanes: Lane = 1
    """At most 16 (PULL_TALKS)."""
