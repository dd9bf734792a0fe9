"""What proves a head: votes of a majority of the electorate that its parent names, or the owner's signature under a reform."""

from __future__ import annotations

from spes_p2p.consensus.control import may_follow, owner_of
from spes_p2p.consensus.electorate import quorum
from spes_p2p.consensus.farewell import remaining
from spes_p2p.consensus.output import Identity
from spes_p2p.consensus.reform import reform_head
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Ballot, Decided, Head


def vote_message(ballot: Ballot, head_id: str) -> bytes:
    """The bytes that an elector signs to vote."""
    return b"spes accept\0" + pack(ballot) + head_id.encode()


def proves(decided: Decided, parent: Head, identity: Identity) -> bool:
    """Did the electorate that `parent` names decide this head, or did the owner open a term with it?"""
    head = decided.head
    if (head.campaign, head.parent, head.round, head.helpers) != (parent.campaign, parent.id, parent.round + 1, parent.helpers):
        return False
    if not may_follow(head.control, parent, identity):
        return False
    if head.epoch != parent.epoch:
        return proves_reform(decided, parent, identity)
    message = vote_message(decided.ballot, head.id)
    electorate = remaining(parent, decided.farewells, identity)
    valid = {
        vote.elector
        for vote in decided.votes
        if vote.elector in electorate and identity.verify(vote.elector, message, vote.signature)
    }
    return len(valid) >= quorum(electorate)


def proves_reform(decided: Decided, parent: Head, identity: Identity) -> bool:
    """Did the owner open a higher term after `parent` with this head, and change nothing else?"""
    head, owner = decided.head, owner_of(parent)
    if head.epoch <= parent.epoch or head != reform_head(parent, head.epoch, owner, "".join(head.disks)):
        return False
    message = vote_message(decided.ballot, head.id)
    return any(vote.elector == owner and identity.verify(owner, message, vote.signature) for vote in decided.votes)
