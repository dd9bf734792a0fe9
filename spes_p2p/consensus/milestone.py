"""Milestones: what the owner signs so that nobody needs the commits before it.

A milestone is a commit with the owner's signature in place of the log that leads there, and what later rounds take from that
log: the rounds of service. It stands far enough behind the last commit that no rollback and no reform reaches before it.
"""

from __future__ import annotations

from dataclasses import replace

from spes_p2p.consensus.control import owner_of
from spes_p2p.consensus.output import Identity
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Commit, Milestone

ROLLBACK_ROUNDS = 2**10
"""A rollback returns at most this many rounds, so a log that holds more of them can check it. At five minutes a round these are
three and a half days; archives keep the last 150 rounds unless set otherwise."""


def signed_milestone(milestone: Milestone, identity: Identity) -> Milestone:
    """Return the milestone, signed by this identity."""
    return replace(milestone, signature=identity.sign(_message(milestone)))


def proves_milestone(milestone: Milestone, genesis: Commit, identity: Identity) -> bool:
    """Return whether the owner of this campaign signed the milestone."""
    commit = milestone.decided.commit
    is_of_campaign = (commit.campaign, commit.helpers) == (genesis.campaign, genesis.helpers) and commit.round >= 0
    return is_of_campaign and identity.verify(owner_of(genesis), _message(milestone), milestone.signature)


def is_due(begins: int, last: int) -> bool:
    """Return whether a log from round `begins` to `last` holds ROLLBACK_ROUNDS commits that nobody needs."""
    return next_milestone(last) - begins >= ROLLBACK_ROUNDS


def next_milestone(last: int) -> int:
    """Return the round of a milestone that is signed after round `last`."""
    return last - 2 * ROLLBACK_ROUNDS


def earliest_reform(begins: int) -> int:
    """Return the first round after which the owner may open a term when its log begins at this round; -1: genesis."""
    return begins + ROLLBACK_ROUNDS if begins >= 0 else -1


def may_roll_back(round_number: int, parent: int) -> bool:
    """Return whether the round is one of the last ones to which the commit after round `parent` may go back."""
    return max(0, parent - ROLLBACK_ROUNDS) <= round_number < parent


def _message(milestone: Milestone) -> bytes:
    return b"spes milestone\0" + pack(replace(milestone, signature=b""))
