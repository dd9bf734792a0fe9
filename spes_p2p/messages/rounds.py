"""The messages of one round: announcements, proposal, exchange of updates, and reports of the results held."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from annotated_types import Ge, Le, MaxLen

from spes_p2p.messages.admission import Invitation
from spes_p2p.messages.audits import Audited
from spes_p2p.messages.codec import Extensible, pack, record_id
from spes_p2p.messages.consensus import Ballot, Control, Signed
from spes_p2p.messages.fields import (
    MAX_AUDITS,
    MAX_BANNED,
    MAX_EXPERTS,
    MAX_INTERVALS,
    MAX_MEMBERS,
    MAX_PARTS,
    MAX_REVISIONS,
    MAX_ROOTS,
    MAX_UNANSWERED,
    UPDATES_PER_SIGNATURE,
    Archived,
    Count,
    Digest,
    Donors,
    Electorate,
    ExpertCount,
    FrameKind,
    Incarnation,
    Lane,
    Loss,
    Lost,
    Mask,
    MemberIndex,
    Name,
    PartIndex,
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
    Tokens,
    Version,
    Word,
)
from spes_p2p.messages.framing import MAX_FRAME_BYTES
from spes_p2p.messages.samples import Interval


@dataclass(frozen=True)
class Unanswered:
    """A checker's statement: this reducer did not show what its mean was made from."""

    round: Round
    peer: PeerId


@dataclass(frozen=True)
class Announcement(Extensible):
    """A member's report to the coordinator when its phase is done."""

    campaign: Digest
    protocol: Version
    round: Round
    """The next round: one more than its commit's."""
    attempt: Count
    waited_s: Seconds
    """Time since its phase ended. A new coordinator needs it to tell how long members have already waited for stragglers."""
    commit: Digest
    base_digest: Digest
    tokens: Tokens
    """Trained tokens that no base includes yet."""
    routed: Routed
    """For each expert, routed tokens that no base includes yet; 0 without pending work."""
    capacity: ExpertCount
    """The most experts that it can train."""
    tokens_per_second: Rate
    bandwidth: Rate
    """Measured upload, in bytes per second; 0: cannot be dialled, or does not reduce."""
    loss: Loss
    """Mean training loss over `tokens`, in nats per token; 0 without tokens."""
    validation_loss: Loss | None
    """Held-out loss of the base, if this member evaluated it."""
    untrained: Annotated[tuple[Interval, ...], MaxLen(MAX_INTERVALS)]
    """Samples that return to the cursor."""
    trains: bool = True
    """False for a helper, which gets no experts and no samples."""
    in_flight: bool = False
    """Whether a phase runs during this round; its work goes with the next one (`sync.overlap`)."""
    archived: Archived = ()
    """Rounds whose bases it has archived."""
    invitation: Invitation | None = None
    """The owner's, where the campaign's rule of admission asks for one."""
    unanswered: Annotated[tuple[Unanswered, ...], MaxLen(MAX_UNANSWERED)] = ()
    """Reducers that this member checked and that did not show their inputs."""
    name: Name = ""
    """What lists of contributors call it."""
    team: Name = ""
    moments: Root = b""
    """Digest of the optimizer's state before the phase, to which it commits where phases are audited; empty: not kept."""
    audited: Annotated[tuple[Audited, ...], MaxLen(MAX_AUDITS)] = ()
    """This member's audits of others that no commit has yet."""
    near: Mask = b""
    """Members of the last commit to whom it lately sent over no slower line than its own (`rounds/regions.py`)."""


@dataclass(frozen=True)
class Update:
    """One contributor's encoded update of a part, or the mean that a hub made of its cell's updates."""

    part: PartIndex
    tokens: Tokens
    """Its weight in the mean, before bounds."""
    digest: Root
    """BLAKE3 of the encoded update."""
    members: Mask = b""
    """Of a cell's mean: its contributors."""
    clipped: Mask = b""
    """Those of them whose update was clipped."""
    inputs: Root = b""
    """Digest of what it was made from (`rounds/sums.py`)."""


@dataclass(frozen=True)
class Pushed:
    """What a contributor pushes, which it signs: a reducer can neither invent an update nor its contributor deny one."""

    plan: Digest
    updates: Annotated[tuple[Update, ...], MaxLen(UPDATES_PER_SIGNATURE)]


@dataclass(frozen=True)
class Inputs:
    """The signed updates from which a reducer made one result."""

    updates: Annotated[tuple[Signed, ...], MaxLen(MAX_MEMBERS)]
    """For each contributor that the manifest names, in their order, a Pushed with its update; the reducer's own included. In a
    round with cells: for each hub that names some of them, a Pushed with its cell's mean."""


@dataclass(frozen=True)
class CellInputs:
    """The signed updates from which a hub made its cell's mean of a part."""

    hub: MemberIndex
    inputs: Inputs
    """For each contributor that the mean names, in their order."""


@dataclass(frozen=True)
class WrongSum:
    """Proof that a committed result is not what the inputs give that its reducer named in its manifest.

    Whoever has the plan and the manifests of the commit can check it: it needs the encoded updates, by their digests, and the
    result.
    """

    round: Round
    commit: Digest
    """The commit that contains the result."""
    part: PartIndex
    inputs: Inputs
    cell: CellInputs | None = None
    """If a hub made a wrong mean instead, which is one of these inputs: what it was made from."""

    @cached_property
    def id(self) -> str:
        """Return the hex sha256 of the proof's bytes."""
        return record_id(self)


@dataclass(frozen=True)
class Accused:
    """A reducer or hub that a proof excludes from this round on."""

    peer: PeerId
    proof: Digest
    """Id of a WrongSum."""


@dataclass(frozen=True)
class Proposal:
    """What a coordinator proposes for a round: the inputs from which every peer derives the plan itself."""

    round: Round
    parent: Digest
    """The commit that the round follows."""
    ballot: Ballot
    announcements: Annotated[tuple[Signed, ...], MaxLen(MAX_MEMBERS)]
    """Each member's Announcement to this coordinator, sorted by peer id."""
    returned: Annotated[tuple[Signed, ...], MaxLen(MAX_MEMBERS)] = ()
    """Each Leave by which a peer that is no member left this round, sorted by peer id."""
    absent: Electorate = ()
    """Electors that are no members and do not answer, sorted: they lose their seats."""
    donors: Donors | None = None
    """For a merge that is due; None leaves it out."""
    straggler_delay: Annotated[tuple[Share, ...], MaxLen(MAX_MEMBERS)] = ()
    """For members with an assignment: how much later than the first half of the work each announced, as a share of the time
    until then. Later rounds derive their straggler timeout from it."""
    control: Control | None = None
    """The control record that this round applies."""
    accused: Annotated[tuple[Accused, ...], MaxLen(MAX_BANNED)] = ()
    """Reducers whose results were proven wrong, and that no commit excludes yet, sorted by peer id."""

    @cached_property
    def id(self) -> str:
        """Return the hex sha256 of the proposal's bytes, which also names its plan."""
        return record_id(self)


@dataclass(frozen=True)
class Manifest:
    """A reducer's results for its parts, in the order of the part table."""

    plan: Digest
    reducer: MemberIndex
    revision: RevisionNumber
    """Revision of the part table: 0 for the plan's own, then one more each time that reducers are lost."""
    digests: Annotated[bytes, MaxLen(32 * MAX_PARTS)]
    """BLAKE3 of each encoded result, 32 bytes each; zeros for a part without contributions."""
    masks: Annotated[bytes, MaxLen(MAX_FRAME_BYTES)]
    """For each part, its contributors: one bit per member, ceil(members / 8) bytes."""
    clipped: Annotated[bytes, MaxLen(MAX_FRAME_BYTES)]
    """In the same form, the contributors whose update was clipped."""
    inputs: Annotated[bytes, MaxLen(32 * MAX_PARTS)]
    """For each part, the digest of what its mean was made from (`rounds/sums.py`); zeros for a part that is not a mean."""

    @cached_property
    def root(self) -> bytes:
        """Return the manifest's sha256, 32 bytes."""
        return hashlib.sha256(pack(self)).digest()


@dataclass(frozen=True)
class Staged(Extensible):
    """A member's report that it holds results durably."""

    plan: Digest
    manifests: Annotated[tuple[Root, ...], MaxLen(MAX_REVISIONS + 1)]
    """Roots of the member's own, one for each revision in which it reduces parts."""
    revision: RevisionNumber
    """The last revision that the report covers."""
    missing: Annotated[tuple[RootIndex, ...], MaxLen(MAX_ROOTS)]
    """Manifests that the member lacks, as indices into the flattened `[revisions][members]`; none of members without parts."""
    roots_digest: Root
    """sha256 over the other roots; usually the same for all members."""
    roots: Roots
    """Those roots, with empty bytes for the missing ones, once the coordinator asks because members' manifests differ."""
    parts: Annotated[bytes, MaxLen(MAX_PARTS // 8)]
    """One bit per part of the plan: held, and matching its manifest. Empty: all are."""
    incarnation: Incarnation
    """The member's incarnation, if the commit makes it an elector."""
    judged: bool = False
    """Whether this member measured what the steps of groups do to the held-out loss (`rounds/gate.py`)."""
    harmful: Annotated[tuple[Word, ...], MaxLen(MAX_EXPERTS + 2)] = ()
    """Names of the groups whose step makes it worse. Sorted."""


@dataclass(frozen=True)
class Report(Extensible):
    """A member's Staged, signed, and the manifests that it names by their roots."""

    staged: Signed
    manifests: Annotated[tuple[Manifest, ...], MaxLen(MAX_REVISIONS + 1)]


@dataclass(frozen=True)
class Evidence:
    """What a commit follows from, besides its plan and the manifests that it names by their hashes."""

    reports: Annotated[tuple[Signed, ...], MaxLen(MAX_MEMBERS)]
    """Each reporting member's Staged, sorted by peer id."""


@dataclass(frozen=True)
class Revision:
    """The coordinator reassigns the parts of lost reducers during the exchange."""

    plan: Digest
    lost: Lost
    """Members lost before each revision, as in the commit."""


@dataclass(frozen=True)
class Stalled(Extensible):
    """A member's complaint: nothing moves between it and a reducer that lives, while it waits for nothing else."""

    plan: Digest
    revision: RevisionNumber
    reducer: MemberIndex


@dataclass(frozen=True)
class Pong(Extensible):
    """Answer to a ping, from the peer's main loop."""

    round: Round
    """Last committed round."""
    failed_to_coordinate: Round
    """The last round that this peer failed to decide as its coordinator; -1 for none."""
    votes: bool
    """Whether it is an elector of its next round, and may vote."""
    announced: Round = -1
    """The last round to which it has brought its work: its phase before that is over."""
    exchanging: Round = -1
    """The round whose updates it exchanges now, while something moves; -1: none."""
    waits_for: PeerId = ""
    """The coordinator of the next round for which it waits; empty: none."""
    known_s: Seconds = 0.0
    """Seconds since it learned the last committed round."""


@dataclass(frozen=True)
class Ping(Extensible):
    """Ask whether a peer is alive. `stop_after`: end the phase after this round at its next step, and announce; -1: go on.

    A peer does so for the coordinator whose turn it is, once half of the phase's trainers are done.
    """

    stop_after: Round


@dataclass(frozen=True)
class Passed:
    """In place of a proposal, certified commit or request for votes: where to fetch it, or else from the coordinator."""

    kind: FrameKind
    """Kind of the frame that this one replaces."""
    sha256: Root
    """Of the record's first piece; each piece begins with that of the next one."""
    pieces: Annotated[int, Ge(1), Le(2**11)]
    """Of 4 KiB each, in which it is handed on."""
    parent: PeerId
    """The peer that has the record, or gets it."""
    tier: Annotated[int, Ge(0), Le(2**4)]
    """Peers on the way from the coordinator to the parent."""
    donors: Annotated[tuple[PeerId, ...], MaxLen(2)] = ()
    """Peers to ask first for the proposal that is the dictionary of this one, for a receiver that lacks it."""


@dataclass(frozen=True)
class PushHeader(Extensible):
    """First message of a push."""

    plan: Digest
    revision: RevisionNumber = 0


@dataclass(frozen=True)
class InputsRequest(Extensible):
    """A member that checks a reducer or hub asks for the inputs of one of its means."""

    plan: Digest
    part: PartIndex
    of_cell: bool = False
    """Whether of its cell's mean, as a hub."""


@dataclass(frozen=True)
class PullRequest(Extensible):
    """Ask a reducer or hub for every `lanes`-th of its results from number `lane` on, and in lane 0 for their manifests."""

    plan: Digest
    revision: RevisionNumber = 0
    lane: Lane = 0
    lanes: Lane = 1
    """At most 16 (PULL_STREAMS)."""
    parts: Annotated[bytes, MaxLen(MAX_PARTS // 8)] = b""
    """One bit per part: those wanted from the hub of another cell. Empty: what the plan has the asked peer hand on."""
