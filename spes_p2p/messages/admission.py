"""The owner's invitations: signed statements of who may do what in a campaign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MaxLen

from spes_p2p.messages.fields import Count, Digest, PeerId, Signature

Role = Literal["trainer", "elector", "helper"]
"""trainer: trains. elector: a trainer that may also vote and coordinate. helper: votes and reduces, does not train."""

Standing = Literal["vouched", "invited", "proven", "newcomer"]
"""What a member of a round may do, beyond training. vouched: vote, coordinate, reduce. invited: reduce. In an open campaign,
proven: reduce when no vouched member can, own an expert alone; newcomer: neither."""


@dataclass(frozen=True)
class Invitation:
    """What the owner allows one peer, or whoever holds the invitation."""

    campaign: Digest
    peer: PeerId
    """Empty: any peer that presents the invitation (a bearer invitation), which can only train."""
    roles: Annotated[tuple[Role, ...], MaxLen(3)]
    expires: Count
    """Unix time, in seconds."""
    signature: Signature
    """By the owner's key, over all other fields."""
