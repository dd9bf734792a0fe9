"""What a peer says of itself: its contact, its status, what it remembers, and what it does for `spes-p2p doctor`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import msgpack
from annotated_types import MaxLen
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from spes_p2p.messages.codec import Extensible
from spes_p2p.messages.fields import (
    MAX_ADDRESSES,
    MAX_ELECTORATE,
    MAX_EXPERTS,
    MAX_MEMBERS,
    MAX_PAGE,
    MAX_PHASES,
    Addresses,
    Count,
    Digest,
    Loss,
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
    """What a peer publishes of itself in the registry; must stay below 1 KB."""

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
    """Number of the newest control record that it holds; 0: none. Who has an older one asks for it."""
    validation_loss: Loss | None = None
    """Held-out loss of the base of `commit`, when this peer evaluated it. After the last round no announcement carries it."""


@checked_dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class PeerStatus:
    """One peer, as it says of itself. Fields that a version does not know are ignored, missing ones keep their default."""

    peer_id: Word
    role: Word
    """trainer, helper."""
    campaign: Word
    campaign_hash: Word
    total_rounds: Count
    """Rounds of the campaign that move weights: 1 to total_rounds."""
    protocol: Count = PROTOCOL_VERSION
    phase: Word = "joining"
    """See events.PhaseEntered."""
    phase_seconds: Real = 0.0
    """For so long it has been in this phase."""
    phases: Annotated[tuple[tuple[Word, Real], ...], MaxLen(MAX_PHASES)] = ()
    """Since the last commit: each phase, and how many seconds ago it began; the present one is the last."""
    round: Count = 0
    """The last round in its base, 0 also before any. Round 0 only assembles the swarm: so many rounds have moved weights."""
    campaign_step: Count = 0
    total_steps: Count = 0
    total_tokens: Count = 0
    """Trained by anybody and in the base."""
    steps_done: Count = 0
    """Local steps of the phase under way."""
    steps_planned: Count = 0
    tokens_per_second: Real = 0.0
    """Training speed of this peer."""
    loss: Real = math.nan
    """Training loss of the last committed round, all members, nats a token."""
    validation_loss: Real = math.nan
    """Held-out loss of the last evaluated base, nats a token."""
    validation_round: Count = 0
    """The last round in that base."""
    local_loss: Real = math.nan
    """Training loss of this peer alone in the last phase that it finished."""
    learning_rate: Real = math.nan
    merge_alpha: Real = 0.0
    owned: Annotated[tuple[Count, ...], MaxLen(MAX_EXPERTS)] = ()
    """Experts that this peer trains."""
    owners: Annotated[tuple[Annotated[tuple[Word, ...], MaxLen(MAX_MEMBERS)], ...], MaxLen(MAX_EXPERTS)] = ()
    """For each expert, the ids of the peers that train it."""
    members: Annotated[tuple[Word, ...], MaxLen(MAX_MEMBERS)] = ()
    """Of the last committed round."""
    base_digest: Word = ""
    round_tokens: Count = 0
    """Of the last committed round, all members."""
    round_sent_bytes: Count = 0
    """By this peer in the last committed round."""
    round_received_bytes: Count = 0
    round_seconds: Annotated[dict[Word, Real], MaxLen(MAX_PHASES)] = field(default_factory=dict)
    """Of the last committed round, by phase: train, announce, exchange, commit, apply."""
    sent_bytes: Count = 0
    """By this peer in all rounds since it started."""
    received_bytes: Count = 0
    trainers_alive: Count = 0
    helpers_alive: Count = 0
    electorate: Annotated[tuple[Word, ...], MaxLen(MAX_ELECTORATE)] = ()
    """Peers whose majority decides the next round."""
    dropped_tokens: Count = 0
    """Work of this peer that was given up since it started."""
    failures: Annotated[dict[Word, Count], MaxLen(MAX_PHASES)] = field(default_factory=dict)
    """Attempts that did not commit since this peer started, by reason."""
    digest_mismatches: Count = 0
    seconds_left: Real = math.nan
    """Until the last round of the campaign, from the pace of the last rounds; NaN before there is one, and in a pause."""
    uptime_s: Real = 0.0
    state: Word = "running"
    """Of the campaign, as its owner wants it: running, paused, stopped."""
    control: Word = ""
    """What the owner has ordered, in words; empty for nothing."""

    def to_bytes(self) -> bytes:
        """The msgpack that `from_bytes` reads."""
        packed: bytes = msgpack.packb(_STATUS.dump_python(self))
        return packed

    @staticmethod
    def from_bytes(data: bytes) -> PeerStatus:
        """Read what another peer sent. Raises ValueError (one line) for anything that is no status."""
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
    """Work of one peer that is in the base."""

    peer: Word
    tokens: Count
    """Trained and included."""
    expert_steps: Count
    """Local steps times experts trained in them."""


@dataclass(frozen=True)
class RoundRecord:
    """One committed round. Everything but what is marked as the teller's own is the same on every peer."""

    round: Count
    campaign_step: Count
    tokens: Count
    """Of this round, all members."""
    total_tokens: Count
    loss: Real
    """Training loss of all members, nats a token; NaN when nobody trained or nobody remembers."""
    validation_loss: Real
    """Held-out loss of the base after this round, nats a token; NaN when it was not evaluated."""
    learning_rate: Real
    merge_alpha: Real
    members: Count
    base_digest: Word
    dropped_parts: Count
    teller: Word
    """The peer that wrote this record; what follows is its own."""
    time: Real
    """Unix time at which it had the new base."""
    seconds: Annotated[tuple[tuple[Word, Real], ...], MaxLen(MAX_PHASES)]
    """By phase, in the order of the round: train, announce, exchange, commit, apply."""
    sent_bytes: Count
    received_bytes: Count
    failed_attempts: Count
    """Attempts of this peer at this round that did not commit."""
    control: Word = ""
    """What the campaign's owner had ordered by then, in words; empty for nothing. The same on every peer."""
    contributions: Annotated[tuple[Contribution, ...], MaxLen(MAX_MEMBERS)] = ()
    """By member. The same on every peer."""


@dataclass(frozen=True)
class HistoryRequest(Extensible):
    """The first records after a round."""

    after: Round
    at_most: Count


@dataclass(frozen=True)
class HistoryPage(Extensible):
    """Some of what a peer remembers."""

    now: UnixTime
    """Unix time of the peer that answers."""
    records: Annotated[tuple[RoundRecord, ...], MaxLen(MAX_PAGE)]
    """By round, at most RECORDS_A_MESSAGE. They hold at most CONTRIBUTIONS_A_MESSAGE, unless the first alone has more."""


@dataclass(frozen=True)
class Clock(Extensible):
    """A peer's wall clock, and what program it is."""

    wall_time: UnixTime
    version: Word
    protocol: Version


@dataclass(frozen=True)
class DialBackRequest(Extensible):
    """Try to connect to these TCP ports of the address that you see me at."""

    ports: Annotated[tuple[Port, ...], MaxLen(MAX_ADDRESSES)]


@dataclass(frozen=True)
class DialBack(Extensible):
    """What came of it."""

    seen_at: Addresses
    """Multiaddrs of my connections to the peer that answers, as it sees them."""
    reached: Annotated[tuple[Port, ...], MaxLen(MAX_ADDRESSES)]
    """Ports where a libp2p peer answered."""


@dataclass(frozen=True)
class SpeedRequest(Extensible):
    """Measure the link: you send to me, or (`up`) I send to you."""

    up: bool


@dataclass(frozen=True)
class Moved(Extensible):
    """Payload that arrived."""

    num_bytes: Count
    seconds: Seconds

    @property
    def bits_per_second(self) -> float:
        """Speed of the link."""
        return 8 * self.num_bytes / max(self.seconds, 1e-9)
