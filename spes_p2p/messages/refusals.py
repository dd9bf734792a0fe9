"""A typed refusal: a code that programs look at, data with declared types, and a text that only people read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from annotated_types import MaxLen, Predicate

from spes_p2p.messages.codec import Extensible
from spes_p2p.messages.fields import Digest, PeerId, Round, Seconds, Version, Word


class Code(str, Enum):
    """Why a peer refuses. The values are the wire; a code that the receiver does not know reads as OTHER."""

    VERSION = "version"
    """The asking peer speaks another protocol; `protocol` is the one that is spoken here."""
    CAMPAIGN = "campaign"
    """The asking peer is in another campaign; `campaign` is the one here."""
    BEHIND = "behind"
    """The asking peer lacks decided rounds; `round` is the last one."""
    COORDINATOR_BEHIND = "coordinator_behind"
    """The coordinator lacks decided rounds; `round` is the last one that it has."""
    DIGEST = "digest"
    """The base of the asking peer differs from what most members have."""
    CLOSED = "closed"
    """Too late for this attempt at a round; the next one is open."""
    ALIVE = "alive"
    """A coordinator of higher rank, `peer`, is there."""
    NOT_COORDINATOR = "not_coordinator"
    """Another peer coordinates this attempt."""
    FAILED = "failed"
    """The attempt at the round will not come to a decision."""
    LEAVING = "leaving"
    """The peer leaves the swarm."""
    NOT_ALLOWED = "not_allowed"
    """The asking peer has no part in what it asks for."""
    CANNOT_VOTE = "cannot_vote"
    """No elector of this round, or without the votes that it needs for it."""
    OUTBID = "outbid"
    """A higher ballot was promised."""
    NOT_PROVEN = "not_proven"
    """A commit or a control record that does not follow, or without the signatures that it needs."""
    NO_REFORM = "no_reform"
    """There is no reason to open a new term, or not for long enough."""
    NOT_HERE = "not_here"
    """What was asked for is not here."""
    BUSY = "busy"
    """Enough others are served; worth another try after `retry_s`."""
    MALFORMED = "malformed"
    """The request is not what the method takes."""
    UNKNOWN_KIND = "unknown_kind"
    """A frame that the receiver must understand and does not."""
    TOO_LARGE = "too_large"
    """A message beyond the limit of its method."""
    UNKNOWN_METHOD = "unknown_method"
    """The method is not served here."""
    OTHER = "other"
    """Any code that this version does not know."""

    @staticmethod
    def of(text: str) -> Code:
        """The code of this name; OTHER for one that a newer version may know."""
        return Code(text) if text in Code._value2member_map_ else Code.OTHER


LONGEST_DETAIL = 500
LONGEST_REFUSAL = 2**13
"""Bytes: a detail of 500 characters of four bytes, and the data."""


@dataclass(frozen=True)
class Refusal(Extensible):
    """The body of a refusal. Which data comes with which code: Code."""

    code: Word
    """A value of Code, or one that a newer version may know."""
    detail: Annotated[str, MaxLen(LONGEST_DETAIL), Predicate(str.isprintable)]
    """For people."""
    round: Round | None = None
    peer: PeerId | None = None
    campaign: Digest | None = None
    protocol: Version | None = None
    retry_s: Seconds | None = None
