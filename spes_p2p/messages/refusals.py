"""Typed refusals: a code and data for programs, and a text for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from annotated_types import MaxLen, Predicate

from spes_p2p.messages.codec import Extensible
from spes_p2p.messages.fields import Digest, PeerId, Round, Seconds, Version, Word


class Code(str, Enum):
    """Why a peer refuses. The values are on the wire; an unknown one reads as OTHER."""

    VERSION = "version"
    """The asking peer's protocol is too old; `protocol` is the oldest that is accepted here."""
    CAMPAIGN = "campaign"
    """The asking peer is in another campaign; `campaign` is this peer's."""
    BEHIND = "behind"
    """The asking peer lacks decided rounds; `round` is the last one."""
    COORDINATOR_BEHIND = "coordinator_behind"
    """The coordinator lacks decided rounds; `round` is its last one."""
    DIGEST = "digest"
    """The asking peer's base differs from that of most members."""
    CLOSED = "closed"
    """Too late for this attempt; the next one is open."""
    ALIVE = "alive"
    """A coordinator whose turn comes before, `peer`, is alive."""
    NOT_COORDINATOR = "not_coordinator"
    """Another peer coordinates this attempt."""
    FAILED = "failed"
    """This attempt will not decide the round."""
    LEAVING = "leaving"
    """The peer is leaving the swarm."""
    NOT_ADMITTED = "not_admitted"
    """The owner banned the asking peer, or it lacks the invitation for what it does."""
    NOT_ALLOWED = "not_allowed"
    """The asking peer is not entitled to what it asks for."""
    CANNOT_VOTE = "cannot_vote"
    """Not an elector of this round, or without the vote file that it needs."""
    OUTBID = "outbid"
    """The elector has promised a higher ballot."""
    NOT_PROVEN = "not_proven"
    """A commit or control record that does not follow the last one, or lacks signatures."""
    NO_REFORM = "no_reform"
    """There is no reason to open a new term, or not yet."""
    NOT_HERE = "not_here"
    """The peer does not have what was asked for."""
    BUSY = "busy"
    """The peer serves enough others; try again after `retry_s`."""
    MALFORMED = "malformed"
    """Not a request of this method."""
    UNKNOWN_KIND = "unknown_kind"
    """A frame that the receiver does not know and may not ignore."""
    TOO_LARGE = "too_large"
    """A message over its method's limit."""
    UNKNOWN_METHOD = "unknown_method"
    """The method is not served here."""
    OTHER = "other"
    """A code that this version does not know."""

    @staticmethod
    def of(text: str) -> Code:
        """Return the code of this value, OTHER for an unknown one."""
        return Code(text) if text in Code._value2member_map_ else Code.OTHER


LONGEST_DETAIL = 500
LONGEST_REFUSAL = 2**13
"""Bytes: a detail of 500 characters of four bytes, and the data."""


@dataclass(frozen=True)
class Refusal(Extensible):
    """The body of a refusal. Code says which data belong to each code."""

    code: Word
    """A value of Code, or of a newer version's."""
    detail: Annotated[str, MaxLen(LONGEST_DETAIL), Predicate(str.isprintable)]
    """For people."""
    round: Round | None = None
    peer: PeerId | None = None
    campaign: Digest | None = None
    protocol: Version | None = None
    retry_s: Seconds | None = None
