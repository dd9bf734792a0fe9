"""Milestones: what the owner signs so that nobody needs the commits before it.

A milestone is a commit with the owner's signature in place of the log that leads there, and what later rounds take from that
log: the rounds of service, and the bases to which a rollback may go back. The owner opens no term before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spes_p2p.consensus.control import owner_of
from spes_p2p.consensus.output import Identity
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Commit, Milestone
from spes_p2p.messages.fields import MAX_PAST

ROLLBACK_ROUNDS = MAX_PAST
"""A rollback returns at most this many rounds. At five minutes a round these are three and a half days; archives keep the last
150 rounds unless set otherwise."""
KEPT_ROUNDS, KEPT_BYTES = 2**10, 2**24
"""A log is cut to this many of its last commits, or bytes of them, once as many commits go: of 1,000 members to 140 to 280
rounds. Who was away for longer drops its pending work, and no reform goes back further."""
LEAST_ROUNDS = 2**6
"""Keep at least this many commits. Plans, proofs and audits take the last 16 of them."""


def signed_milestone(milestone: Milestone, identity: Identity) -> Milestone:
    """Return the milestone, signed by this identity."""
    return replace(milestone, signature=identity.sign(_message(milestone)))


def proves_milestone(milestone: Milestone, genesis: Commit, identity: Identity) -> bool:
    """Return whether the owner of this campaign signed the milestone."""
    commit = milestone.decided.commit
    is_of_campaign = (commit.campaign, commit.helpers) == (genesis.campaign, genesis.helpers) and commit.round >= 0
    return is_of_campaign and identity.verify(owner_of(genesis), _message(milestone), milestone.signature)


def place_of_next(sizes: Sequence[int]) -> int:
    """Return the place of the next milestone among a log's commits, of these bytes each; 0: none is due."""
    kept, left = 0, KEPT_BYTES
    for size in reversed(sizes[-KEPT_ROUNDS:]):
        left -= size
        if left < 0 and kept >= LEAST_ROUNDS:
            break
        kept += 1
    place = len(sizes) - 1 - kept
    return place if place >= kept else 0


def may_roll_back(round_number: int, parent: int) -> bool:
    """Return whether the round is one of the last ones to which the commit after round `parent` may go back."""
    return max(0, parent - ROLLBACK_ROUNDS) <= round_number < parent


def _message(milestone: Milestone) -> bytes:
    return b"spes milestone\0" + pack(replace(milestone, signature=b""))
