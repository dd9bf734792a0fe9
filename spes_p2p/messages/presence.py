"""What a peer reports: contact, status and history, and its answers to `spes-p2p doctor`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import msgpack
from annotated_types import MaxLen
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from spes_p2p.messages.audits import Audited
from spes_p2p.messages.codec import Extensible
from spes_p2p.messages.fields import (
    MAX_ADDRESSES,
    MAX_AUDITS,
    MAX_ELECTORATE,
    MAX_EXPERTS,
    MAX_MEMBERS,
    MAX_NAMES,
    MAX_PAGE,
    MAX_STAGES,
    MAX_TASK_SCORES,
    Addresses,
    Continuations,
    Count,
    Digest,
    Loss,
    Name,
    Port,
    Real,
    Round,
    Seconds,
    UnixTime,
    Version,
    Word,
)
from spes_p2p.messages.methods import PROTOCOL_VERSION


@dataclass(frozen=True)
class Contact(Extensible):
    """A peer's entry in the registry; must stay below 1 KB."""

    campaign: Digest
    """Campaign hash."""
    protocol: Version
    role: Word
    """trainer or helper."""
    round: Round
    """Number of the last committed round; -1 before the first."""
    commit: Digest
    addresses: Addresses
    control: Count = 0
    """Number of the newest control record that it holds; 0: none. Peers with an older one ask for it."""
    validation_loss: Loss | None = None
    """Held-out loss of the base of `commit`, if this peer evaluated it; no announcement follows the last round to carry it."""
    is_vouched: bool = False
    """Whether the owner of an open campaign vouches for it, by its own word: for people to see who is missing."""


@dataclass(frozen=True)
class Probation:
    """What a peer has served for whom the owner of an open campaign does not vouch, since it came or its probation began again,
    and what ends the probation.
    """

    rounds: Count
    """Committed ones with its work."""
    rounds_needed: Count
    audits: Count
    """Of its training, passed since it last failed one or was away when it was drawn."""
    audits_needed: Count


@checked_dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class PeerStatus:
    """A peer's report on itself. Unknown fields are ignored; missing ones have their defaults."""

    peer_id: Word
    role: Word
    """trainer, helper."""
    campaign: Word
    campaign_hash: Word
    total_rounds: Count
    """Rounds of the campaign that move weights: 1 to total_rounds."""
    protocol: Count = PROTOCOL_VERSION
    stage: Word = "joining"
    """See events.StateEntered."""
    stage_seconds: Real = 0.0
    """Time in this stage."""
    stages: Annotated[tuple[tuple[Word, Real], ...], MaxLen(MAX_STAGES)] = ()
    """Stages since the last commit, with the seconds since each started; the current one is last."""
    round: Count = 0
    """The last round in its base; 0 before any. Round 0 moves no weights, so this counts the rounds that have."""
    campaign_step: Count = 0
    total_steps: Count = 0
    total_tokens: Count = 0
    """Tokens of all peers in the base."""
    steps_done: Count = 0
    """Local steps of the current phase."""
    steps_planned: Count = 0
    tokens_per_second: Real = 0.0
    """Training speed of this peer."""
    loss: Real = math.nan
    """Training loss of the last committed round over all members, in nats per token."""
    validation_loss: Real = math.nan
    """Held-out loss of the last evaluated base, in nats per token."""
    validation_round: Count = 0
    """The last round in that base."""
    local_loss: Real = math.nan
    """This peer's training loss in its last finished phase."""
    learning_rate: Real = math.nan
    merge_alpha: Real = 0.0
    owned: Annotated[tuple[Count, ...], MaxLen(MAX_EXPERTS)] = ()
    """Experts that this peer trains."""
    owners: Annotated[tuple[Annotated[tuple[Word, ...], MaxLen(MAX_MEMBERS)], ...], MaxLen(MAX_EXPERTS)] = ()
    """For each expert, the ids of the peers that train it."""
    members: Annotated[tuple[Word, ...], MaxLen(MAX_MEMBERS)] = ()
    """Members of the last committed round."""
    base_digest: Word = ""
    round_tokens: Count = 0
    """Tokens of all members in the last committed round."""
    round_sent_bytes: Count = 0
    """By this peer in the last committed round."""
    round_received_bytes: Count = 0
    round_seconds: Annotated[dict[Word, Real], MaxLen(MAX_STAGES)] = field(default_factory=dict)
    """Seconds of the last committed round, by stage: train, announce, exchange, commit, apply."""
    sent_bytes: Count = 0
    """By this peer in all rounds since it started."""
    received_bytes: Count = 0
    trainers_alive: Count = 0
    vouched_alive: Count | None = None
    """Of these, those that say that the owner vouches for them; None where the schedule needs none."""
    helpers_alive: Count = 0
    electorate: Annotated[tuple[Word, ...], MaxLen(MAX_ELECTORATE)] = ()
    """Peers whose majority decides the next round."""
    dropped_tokens: Count = 0
    """This peer's tokens discarded since it started."""
    failures: Annotated[dict[Word, Count], MaxLen(MAX_STAGES)] = field(default_factory=dict)
    """Attempts that did not commit since this peer started, by reason."""
    digest_mismatches: Count = 0
    seconds_left: Real = math.nan
    """Time to the campaign's last round, from the pace of recent rounds; NaN before a round, and in a pause."""
    uptime_s: Real = 0.0
    state: Word = "running"
    """State of the campaign: running, paused, stopped."""
    control: Word = ""
    """The owner's orders in words; empty for none."""
    scores: Annotated[dict[Word, Real], MaxLen(MAX_MEMBERS)] = field(default_factory=dict)
    """By member of the round that this peer judged last: nats per token by which its experts' steps lower the held-out loss."""
    task_round: Count = 0
    """The last round in the base on which this peer ran the campaign's tasks."""
    task_scores: Annotated[tuple[tuple[Word, Word, Real, Real], ...], MaxLen(MAX_TASK_SCORES)] = ()
    """What it measured there, a claim of this peer: task, metric, value, standard error (NaN if unknown)."""
    upload: Real = 0.0
    """Measured upload rate of its link, in bytes per second; 0: unknown."""
    name: Name | None = None
    """What this peer calls itself; empty: nothing, None: it is of a version that does not say it here."""
    team: Name = ""
    continued_round: Count = 0
    """The last round in the base with which this peer continued the campaign's prompts."""
    continuations: Continuations = ()
    """What that base wrote, by this peer's account."""
    audits: Annotated[tuple[Audited, ...], MaxLen(MAX_AUDITS)] = ()
    """Its last audits of others, for whom the owner does not vouch."""
    failing: Annotated[dict[Word, Count], MaxLen(MAX_STAGES)] = field(default_factory=dict)
    """Attempts at the next round that did not commit, by reason."""
    min_peers: Count = 0
    """Trainers that round 0 waits for."""
    pending: Word = ""
    """The owner's orders that no round has applied yet, in words. Who shows statuses reads it in the signed order."""
    standing: Word = ""
    """In an open campaign: vouched, proven (past probation), newcomer; empty where the last commits do not name the peer. Who
    shows statuses reads it, and `probation`, in the commits."""
    probation: Probation | None = None
    """None of a peer that is vouched for."""

    @property
    def has_begun(self) -> bool:
        """Whether round 0 has assigned the experts. Later all their owners may be away, and strangers train shared weights."""
        return any(self.owners) or self.campaign_step > 0

    def to_bytes(self) -> bytes:
        """Return the msgpack that `from_bytes` reads."""
        packed: bytes = msgpack.packb(_STATUS.dump_python(self))
        return packed

    @staticmethod
    def from_bytes(data: bytes) -> PeerStatus:
        """Read another peer's status. Raises ValueError (one line) for anything else."""
        try:
            return _STATUS.validate_python(msgpack.unpackb(data))
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise ValueError(f"not a peer's status: {where or 'it is no mapping'}") from None
        except (ValueError, TypeError, msgpack.UnpackException):
            raise ValueError("not a peer's status: no msgpack") from None


_STATUS = TypeAdapter(PeerStatus)


@dataclass(frozen=True)
class Contribution:
    """One peer's work in a committed round."""

    peer: Word
    tokens: Count
    """Trained and included."""
    expert_steps: Count
    """Local steps times experts trained in them."""


@dataclass(frozen=True)
class Named:
    """What a member called itself in the announcement that it signed."""

    peer: Word
    name: Name
    team: Name


@dataclass(frozen=True)
class RoundRecord:
    """One committed round. Fields up to `teller` are the same on every peer."""

    round: Count
    campaign_step: Count
    tokens: Count
    """Tokens of all members in this round."""
    total_tokens: Count
    loss: Real
    """Training loss of all members, in nats per token; NaN without training, or when unknown."""
    validation_loss: Real
    """Held-out loss of the base after this round, in nats per token; NaN if not evaluated."""
    learning_rate: Real
    merge_alpha: Real
    members: Count
    base_digest: Word
    dropped_parts: Count
    teller: Word
    """The peer that wrote this record and measured the following fields."""
    time: Real
    """Unix time at which it had the new base."""
    seconds: Annotated[tuple[tuple[Word, Real], ...], MaxLen(MAX_STAGES)]
    """By stage, in the order of the round: train, announce, exchange, commit, apply."""
    sent_bytes: Count
    received_bytes: Count
    failed_attempts: Count
    """Attempts of this peer at this round that did not commit."""
    control: Word = ""
    """The owner's orders by then, in words; empty for none. The same on every peer."""
    contributions: Annotated[tuple[Contribution, ...], MaxLen(MAX_MEMBERS)] = ()
    """By member. The same on every peer."""
    names: Annotated[tuple[Named, ...], MaxLen(MAX_NAMES)] = ()
    """Members whose name or team was new to `teller`."""
    continuations: Continuations = ()
    """What the base after this round writes after the campaign's prompts, as some peer says; empty if not told."""


@dataclass(frozen=True)
class HistoryRequest(Extensible):
    """Ask for the first records after a round."""

    after: Round
    at_most: Count


@dataclass(frozen=True)
class HistoryPage(Extensible):
    """A page of a peer's round records."""

    now: UnixTime
    """Unix time of the peer that answers."""
    records: Annotated[tuple[RoundRecord, ...], MaxLen(MAX_PAGE)]
    """By round; at most RECORDS_PER_MESSAGE records with CONTRIBUTIONS_PER_MESSAGE contributions in all."""


@dataclass(frozen=True)
class Clock(Extensible):
    """A peer's wall clock, program version and protocol."""

    wall_time: UnixTime
    version: Word
    protocol: Version


@dataclass(frozen=True)
class DialBackRequest(Extensible):
    """Ask a peer to connect to these TCP ports at the address that it sees for the asking peer."""

    ports: Annotated[tuple[Port, ...], MaxLen(MAX_ADDRESSES)]


@dataclass(frozen=True)
class DialBack(Extensible):
    """The outcome of a DialBackRequest."""

    seen_at: Addresses
    """Multiaddrs of the asking peer's connections, as the answering peer sees them."""
    reached: Annotated[tuple[Port, ...], MaxLen(MAX_ADDRESSES)]
    """Ports where a libp2p peer answered."""


@dataclass(frozen=True)
class SpeedRequest(Extensible):
    """Measure the link: the asked peer sends, or (`up`) the asking one."""

    up: bool


@dataclass(frozen=True)
class Moved(Extensible):
    """The payload received in a speed measurement."""

    num_bytes: Count
    seconds: Seconds

    @property
    def bits_per_second(self) -> float:
        """Return the speed of the link."""
        return 8 * self.num_bytes / max(self.seconds, 1e-9)
