"""What auditors say about other members' training."""

from __future__ import annotations

from dataclasses import dataclass

from spes_p2p.messages.fields import PeerId, Real, Round, Steps


@dataclass(frozen=True)
class Audited:
    """An auditor's statement: it trained a member's phase again, and compared the update (`rounds/audits.py`)."""

    round: Round
    """The round that the phase's work went into."""
    peer: PeerId
    passed: bool
    steps: Steps
    """Steps trained again; 0: the member did not show the moments to which it had committed."""
    cosine: Real
    """Of the two updates; NaN without steps."""
    norm_ratio: Real
    """Norm of the member's update over that of the auditor's; NaN without steps."""
