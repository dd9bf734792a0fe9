"""How a round is decided: commits, ballots and votes, and the orders of the campaign's owner."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from annotated_types import MaxLen

from spes_p2p.messages.codec import Extensible, record_id
from spes_p2p.messages.fields import (
    MAX_CHANGES,
    MAX_ELECTORATE,
    MAX_EXPERTS,
    MAX_HELPERS,
    MAX_INTERVALS,
    MAX_MEMBERS,
    MAX_PAGE,
    MAX_PARTS,
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
)
from spes_p2p.messages.samples import Cursor, Interval

CampaignState = Literal["running", "paused", "stopped"]


@dataclass(frozen=True)
class Change:
    """Another schedule."""

    round: Round
    """The first round that it holds for: the phase that leads there is the first one trained by it."""
    training: Text
    """Fields of the campaign's `training` with their new values, as JSON."""


@dataclass(frozen=True)
class Control:
    """What the campaign's owner orders. It says all that holds from then on, so that the newest record is enough to know."""

    campaign: Digest
    number: Count
    """From 1; of two records the one with the higher number holds."""
    state: CampaignState
    """running: rounds go on; paused: none is planned until a newer record says so; stopped: the campaign is over, for good."""
    changes: Annotated[tuple[Change, ...], MaxLen(MAX_CHANGES)]
    """All there ever were, by round; of two that change one field the later one holds."""
    rollback: Round
    """Round whose base everybody goes back to with the commit that applies this record; -1: none."""
    signature: Signature
    """By the key of the owner, under everything above."""


@dataclass(frozen=True, order=True)
class Ballot:
    """A coordinator's turn in one round; higher ones win."""

    number: Count
    coordinator: PeerId


@dataclass(frozen=True)
class Commit:
    """A commit: the decided record of a round."""

    campaign: Digest
    term: Term
    round: Round
    parent: Digest
    plan: Digest
    """Id of the plan; empty for the genesis commit, a reform and a rollback."""
    roots: Roots
    """Root of each member's manifest, revision by revision: `[revisions][members]`; empty bytes for members without one."""
    dropped: Annotated[tuple[PartIndex, ...], MaxLen(MAX_PARTS)]
    """Parts that had contributors but are left out: the base keeps its old value there."""
    base_digest: Digest
    """Of the parent's base; of base 0 in the genesis commit, of the base gone back to in a rollback; empty in a reform."""
    step: Steps
    tokens: Count
    """Included since the campaign began."""
    members: Peers
    owners: Annotated[tuple[Annotated[tuple[MemberIndex, ...], MaxLen(MAX_MEMBERS)], ...], MaxLen(MAX_EXPERTS)]
    """For each expert, indices into `members` of who trains it next."""
    cursor: Cursor
    helpers: Annotated[tuple[PeerId, ...], MaxLen(MAX_HELPERS)]
    electorate: Electorate
    """Whose majority decides the next round."""
    incarnations: Annotated[tuple[Incarnation, ...], MaxLen(MAX_ELECTORATE)]
    """Of each elector, the id of the disk that it votes with: its votes on another one, or on none, do not count."""
    lost: Lost = ()
    """Members that were lost before each revision of the part table (indices into `members`)."""
    control: Control | None = None
    """The newest record that is applied: by everybody, with this commit or one before it. None: the owner never gave one."""

    @cached_property
    def id(self) -> str:
        """Hex sha256 of the commit's bytes."""
        return record_id(self)


@dataclass(frozen=True)
class Vote:
    """An elector's signature under one (ballot, commit)."""

    elector: PeerId
    signature: Signature


@dataclass(frozen=True)
class Farewell:
    """An elector leaves before it cast any vote in the round after `parent`, and will cast none: its seat does not count."""

    elector: PeerId
    parent: Digest
    signature: Signature


@dataclass(frozen=True)
class CertifiedCommit:
    """A commit with its certificate: accepted by a majority of the electorate in one ballot. It proves itself."""

    commit: Commit
    ballot: Ballot
    votes: Annotated[tuple[Vote, ...], MaxLen(MAX_ELECTORATE)]
    farewells: Annotated[tuple[Farewell, ...], MaxLen(MAX_ELECTORATE)] = ()
    """Electors without whom the majority is counted."""


@dataclass(frozen=True)
class Prepare:
    """A coordinator asks for promises: nobody will accept a lower ballot in this round."""

    round: Round
    parent: Digest
    ballot: Ballot


@dataclass(frozen=True)
class Promise:
    """An elector's answer to Prepare."""

    round: Round
    """Last round that the elector knows as decided; to one that is behind, the coordinator sends the missing commits first."""
    granted: bool
    promised: Ballot | None
    """The highest ballot that it has promised in this round."""
    accepted_ballot: Ballot | None
    accepted: Commit | None


@dataclass(frozen=True)
class Accept:
    """A coordinator asks for votes on one commit."""

    ballot: Ballot
    commit: Commit


@dataclass(frozen=True)
class Decide:
    """Heads with their certificates, in order."""

    decided: Annotated[tuple[CertifiedCommit, ...], MaxLen(MAX_PAGE)]


@dataclass(frozen=True)
class CommitsRequest(Extensible):
    """All certificates after this round."""

    after: Round


@dataclass(frozen=True)
class ReformRequest(Extensible):
    """A trainer finds no majority after this commit, or no base."""

    commit: Digest
    """Id of the asking peer's last commit."""


@dataclass(frozen=True)
class Leave(Extensible):
    """I leave. What the plan gave me and I did not train comes back."""

    round: Round
    untrained: Annotated[tuple[Interval, ...], MaxLen(MAX_INTERVALS)]
    farewell: Farewell | None = None
    """When I was an elector, and nobody had my vote yet."""
    back: bool = False
    """I am here again, and train what the plan gave me; my seat stays given up."""


@dataclass(frozen=True)
class ControlRequest(Extensible):
    """What do you know of the owner's orders?"""

    brought: Control | None
    """A record to take up, if it is news."""


@dataclass(frozen=True)
class Known(Extensible):
    """What a peer knows."""

    newest: Control | None
    """Applied or not."""
    applied: Count
    """Number of the record that its commit carries; 0: none."""
    round: Round
    """Of its commit."""
    step: Steps
    """Campaign step of its commit."""
    archived: Archived
    """Rounds whose bases it keeps."""
