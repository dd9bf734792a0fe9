"""How a round is decided: commits, ballots and votes, and the orders of the campaign's owner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from annotated_types import Ge, Le, MaxLen

from spes_p2p.messages.codec import Extensible, Listing, record_id
from spes_p2p.messages.fields import (
    MAX_BANNED,
    MAX_CHANGES,
    MAX_ELECTORATE,
    MAX_EXPERTS,
    MAX_HELPERS,
    MAX_INTERVALS,
    MAX_MEMBERS,
    MAX_PAGE,
    MAX_PARTS,
    MAX_PAST,
    MAX_SERVED,
    MAX_VERDICTS,
    Archived,
    Count,
    Digest,
    Electorate,
    Incarnation,
    Lost,
    MemberIndex,
    PartIndex,
    PeerId,
    Peers,
    Roots,
    Round,
    Signature,
    Steps,
    Term,
    Text,
    Version,
)
from spes_p2p.messages.framing import MAX_FRAME_BYTES
from spes_p2p.messages.samples import Cursor, Interval

PackedEvidence = Annotated[bytes, MaxLen(MAX_FRAME_BYTES)]
"""A packed Evidence (rounds.py); empty for a commit without a plan."""
CampaignState = Literal["running", "paused", "stopped"]


@dataclass(frozen=True)
class Change:
    """A change of the schedule."""

    round: Round
    """The first round that it applies to: the phase before this round is the first one trained with it."""
    training: Text
    """Fields of the campaign's `training` with their new values, as JSON."""


@dataclass(frozen=True)
class Requirement:
    """Peers below this protocol version are excluded from a round on."""

    protocol: Version
    from_round: Round


@dataclass(frozen=True)
class Pardon:
    """The end of an exclusion by proof."""

    peer: PeerId
    round: Round
    """Proofs about this round and earlier ones no longer count."""


@dataclass(frozen=True)
class Control:
    """An order of the campaign's owner. It is complete: the newest record replaces all earlier ones."""

    campaign: Digest
    number: Count
    """From 1; the highest number applies."""
    state: CampaignState
    """paused: no round is planned until a newer record resumes; stopped: the campaign has ended permanently."""
    changes: Annotated[tuple[Change, ...], MaxLen(MAX_CHANGES)]
    """All changes so far, by round; a later change of a field replaces an earlier one."""
    rollback: Round
    """Round whose base the commit that applies this record returns to; -1: none."""
    signature: Signature
    """By the owner's key, over all other fields."""
    requires: Requirement | None = None
    banned: Annotated[tuple[PeerId, ...], MaxLen(MAX_BANNED)] = ()
    """Peers that take no part from the commit on that applies this record. Sorted."""
    pardons: Annotated[tuple[Pardon, ...], MaxLen(MAX_BANNED)] = ()
    """At most one of each peer, sorted. Each ends an exclusion with the first commit whose record has it."""
    audited: Annotated[tuple[PeerId, ...], MaxLen(MAX_BANNED)] = ()
    """Peers of which each phase is drawn for an audit, where phases are audited. Sorted."""
    by_guard: bool = False
    """Whether the owner's bootstrap peer ordered the pause, or else the rollback, by itself: the held-out loss ran away."""


@dataclass(frozen=True)
class Signed:
    """A record with the signature of the peer that made it, so that others can pass it on as evidence."""

    peer: PeerId
    record: Annotated[bytes, MaxLen(MAX_FRAME_BYTES)]
    signature: Signature
    """Over the kind of the record and its bytes."""


@dataclass(frozen=True, order=True)
class Ballot:
    """A coordinator's turn in one round; higher ballots win."""

    number: Count
    coordinator: PeerId


@dataclass(frozen=True)
class Workload:
    """What a commit gives one member to train in the next phase."""

    steps: Steps
    slices: Annotated[tuple[Interval, ...], MaxLen(MAX_INTERVALS)]


@dataclass(frozen=True)
class Verdict:
    """What an auditor found when it trained a member's phase again (`rounds/audits.py`)."""

    auditor: PeerId
    peer: PeerId
    round: Round
    """The round that the phase's work went into."""
    passed: bool


@dataclass(frozen=True)
class Commit:
    """The decided record of a round."""

    campaign: Digest
    term: Term
    round: Round
    parent: Digest
    plan: Digest
    """Id of the plan; empty for the genesis commit, a reform and a rollback."""
    roots: Roots
    """Roots of the members' manifests, flattened from `[revisions][members]`; empty bytes for a member without one."""
    dropped: Annotated[tuple[PartIndex, ...], MaxLen(MAX_PARTS)]
    """Parts that had contributors but are left out: the base keeps their old values."""
    base_digest: Digest
    """Digest of the parent's base; in the genesis commit of base 0, in a rollback of the restored base, in a reform empty."""
    step: Steps
    tokens: Count
    """Tokens included since the campaign began."""
    members: Peers
    owners: Annotated[tuple[Annotated[tuple[MemberIndex, ...], MaxLen(MAX_MEMBERS)], ...], MaxLen(MAX_EXPERTS)]
    """For each expert, its next owners, as indices into `members`."""
    cursor: Cursor
    helpers: Annotated[tuple[PeerId, ...], MaxLen(MAX_HELPERS)]
    electorate: Electorate
    """The peers whose majority decides the next round."""
    incarnations: Annotated[tuple[Incarnation, ...], MaxLen(MAX_ELECTORATE)]
    """For each elector, the incarnation whose votes count."""
    lost: Lost = ()
    """Members lost before each revision of the part table (indices into `members`)."""
    control: Control | None = None
    """The newest control record that this commit or an earlier one applied; None: there has been none."""
    heard: Annotated[tuple[MemberIndex, ...], MaxLen(MAX_MEMBERS)] = ()
    """Members whose updates of shared weights are in the new base, as indices into `members`."""
    workloads: Annotated[tuple[Workload, ...], MaxLen(MAX_MEMBERS)] = ()
    """By member: the next phase. With `heard` this bounds what it may announce."""
    excluded: Annotated[tuple[PeerId, ...], MaxLen(MAX_BANNED)] = ()
    """Peers that take no part from this commit on, since it is proven that they made a wrong result or signed two commits in
    one ballot, in this round or an earlier one. Sorted."""
    disputed: Annotated[tuple[MemberIndex, ...], MaxLen(MAX_MEMBERS)] = ()
    """Members of which one did not show its checker what a mean was made from: both, as indices into `members`."""
    rejected: Annotated[tuple[MemberIndex, ...], MaxLen(MAX_MEMBERS)] = ()
    """Members that trained an expert whose step is left out as harmful (`rounds/gate.py`), as indices into `members`."""
    verdicts: Annotated[tuple[Verdict, ...], MaxLen(MAX_VERDICTS)] = ()
    """Audits of training that auditors announced for this round."""
    convicted: Annotated[tuple[MemberIndex, ...], MaxLen(MAX_MEMBERS)] = ()
    """Members that enough auditors failed by this round, as indices into `members`."""
    vouched: Annotated[tuple[MemberIndex, ...], MaxLen(MAX_MEMBERS)] = ()
    """Trainers for whom the owner vouches, among friends all, as indices into `members`."""
    drawn: Peers = ()
    """Peers that the last commit draws for an audit of the phase whose work it took up. Sorted."""
    suspected: Annotated[tuple[MemberIndex, ...], MaxLen(MAX_MEMBERS)] = ()
    """Members past probation for whom the owner does not vouch, that trained shared weights which are left out as harmful, as
    indices into `members`."""
    withholding: Annotated[tuple[MemberIndex, ...], MaxLen(MAX_MEMBERS)] = ()
    """Members for whom the owner does not vouch, that trained and gave no update of shared weights, but others, as indices into
    `members`: nobody can audit these."""

    @cached_property
    def id(self) -> str:
        """Return the hex sha256 of the commit's bytes."""
        return record_id(self)

    @cached_property
    def participants(self) -> frozenset[str]:
        """Return all peers that this commit names."""
        return frozenset((*self.members, *self.helpers, *self.electorate))

    @cached_property
    def trusted(self) -> frozenset[str]:
        """Return the peers that this commit names and for whom the owner vouches, among friends all."""
        return frozenset((*self.helpers, *self.electorate, *(self.members[i] for i in self.vouched)))


@dataclass(frozen=True)
class Vote:
    """An elector's signature over one (ballot, commit)."""

    elector: PeerId
    signature: Signature


@dataclass(frozen=True)
class Farewell:
    """An elector has cast no vote in the round after `parent` and will cast none: its seat does not count."""

    elector: PeerId
    parent: Digest
    signature: Signature


@dataclass(frozen=True)
class CertifiedCommit:
    """A commit with the votes of a majority of the electorate in one ballot, which prove it."""

    commit: Commit
    ballot: Ballot
    votes: Annotated[tuple[Vote, ...], MaxLen(MAX_ELECTORATE)]
    farewells: Annotated[tuple[Farewell, ...], MaxLen(MAX_ELECTORATE)] = ()
    """Electors whose seats do not count towards the majority."""


@dataclass(frozen=True)
class Served:
    """What one peer has done since it came, or since its probation began again (`admission.add_service`)."""

    peer: PeerId
    rounds: Annotated[int, Ge(0), Le(2**40)]
    """With its work."""
    audits: Annotated[int, Ge(0), Le(2**40)] = 0
    """Of its training, passed."""


@dataclass(frozen=True)
class PastBase:
    """The base of a round, as far as a rollback to it needs the commits around it."""

    digest: Digest
    """Empty where the log certifies none."""
    step: Steps


@dataclass(frozen=True)
class Milestone:
    """A commit with the owner's word in place of the log before it, for joiners and for logs that grow long."""

    decided: CertifiedCommit
    served: Annotated[tuple[Served, ...], MaxLen(MAX_SERVED)]
    """Up to this commit, since genesis. Sorted."""
    signature: Signature
    """By the owner's key, over all other fields."""
    past: Annotated[tuple[PastBase, ...], MaxLen(MAX_PAST)] = ()
    """Of the rounds just before this commit, oldest first."""


@dataclass(frozen=True)
class Prepare:
    """A coordinator asks electors to promise that they accept no lower ballot in this round."""

    round: Round
    parent: Digest
    ballot: Ballot


@dataclass(frozen=True)
class Promise:
    """An elector's answer to Prepare."""

    round: Round
    """The elector's last decided round; the coordinator first sends commits that the elector lacks."""
    granted: bool
    promised: Ballot | None
    """The highest ballot promised in this round."""
    accepted_ballot: Ballot | None
    accepted: Commit | None
    evidence: PackedEvidence = b""
    """Evidence of the accepted commit."""


@dataclass(frozen=True)
class Accept:
    """A coordinator asks for votes on a commit."""

    ballot: Ballot
    commit: Commit
    evidence: PackedEvidence = b""
    """Electors fetch the plan's proposal and the manifests, which the commit names by their hashes, where they lack them."""


@dataclass(frozen=True)
class Decide(Listing):
    """Certified commits, in order."""

    decided: Annotated[tuple[CertifiedCommit, ...], MaxLen(MAX_PAGE)]


@dataclass(frozen=True)
class CommitsRequest(Extensible):
    """Ask for all certified commits after a round. Refused with `not_here` when the log begins at a later milestone."""

    after: Round


@dataclass(frozen=True)
class MilestoneRequest(Extensible):
    """Ask for the milestone at which a log begins. Refused with `not_here` when it begins no later than `after`."""

    after: Round


@dataclass(frozen=True)
class ReformRequest(Extensible):
    """Ask the owner for a reform: rounds after this commit find no majority, or no base."""

    commit: Digest
    """Id of the asking peer's last commit."""


@dataclass(frozen=True)
class Leave(Extensible):
    """A peer leaves and returns the samples that it did not train, or comes back."""

    parent: Digest
    """It leaves the round after this commit."""
    untrained: Annotated[tuple[Interval, ...], MaxLen(MAX_INTERVALS)]
    farewell: Farewell | None = None
    """From an elector that has not voted."""
    back: bool = False
    """The peer is back and trains its assignment; a seat that it gave up stays given up."""


@dataclass(frozen=True)
class ControlRequest(Extensible):
    """Ask for the newest control record."""

    brought: Control | None
    """A record for the asked peer to take if it is newer."""


@dataclass(frozen=True)
class Known(Extensible):
    """A peer's answer to ControlRequest."""

    newest: Control | None
    """Applied or not."""
    applied: Count
    """Number of the record that its last commit carries; 0: none."""
    round: Round
    """Its last committed round."""
    step: Steps
    """Campaign step of its last commit."""
    archived: Archived
    """Rounds whose bases it has archived."""
    excluded: Annotated[tuple[PeerId, ...], MaxLen(MAX_BANNED)] = ()
    """Peers that proofs exclude, by its last commit."""
