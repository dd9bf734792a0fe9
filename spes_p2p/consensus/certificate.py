"""What proves a commit: votes of a majority of the electorate that its parent names, or the owner's signature on a reform."""

from __future__ import annotations

from spes_p2p.consensus.control import may_follow, owner_of
from spes_p2p.consensus.electorate import quorum
from spes_p2p.consensus.farewell import remaining
from spes_p2p.consensus.output import Identity
from spes_p2p.consensus.reform import reform_commit
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Ballot, CertifiedCommit, Commit


def vote_message(ballot: Ballot, commit_id: str) -> bytes:
    """Return the bytes that an elector signs to vote."""
    return b"spes accept\0" + pack(ballot) + commit_id.encode()


def proves(decided: CertifiedCommit, parent: Commit, identity: Identity) -> bool:
    """Return whether the electorate that `parent` names decided this commit, or the owner opened a term with it."""
    commit = decided.commit
    follows = (parent.campaign, parent.id, parent.round + 1, parent.helpers)
    if (commit.campaign, commit.parent, commit.round, commit.helpers) != follows:
        return False
    if not may_follow(commit.control, parent, identity):
        return False
    if commit.term != parent.term:
        return proves_reform(decided, parent, identity)
    message = vote_message(decided.ballot, commit.id)
    electorate = remaining(parent, decided.farewells, identity)
    valid = {
        vote.elector
        for vote in decided.votes
        if vote.elector in electorate and identity.verify(vote.elector, message, vote.signature)
    }
    return len(valid) >= quorum(electorate)


def equivocators(one: CertifiedCommit, other: CertifiedCommit, identity: Identity) -> tuple[str, ...]:
    """Return the electors that signed both commits in the same ballot, which no honest elector does."""
    if one.ballot != other.ballot or one.commit.id == other.commit.id:
        return ()

    def signers(decided: CertifiedCommit) -> set[str]:
        message = vote_message(decided.ballot, decided.commit.id)
        return {vote.elector for vote in decided.votes if identity.verify(vote.elector, message, vote.signature)}

    return tuple(sorted(signers(one) & signers(other)))


def proves_reform(decided: CertifiedCommit, parent: Commit, identity: Identity) -> bool:
    """Return whether the owner opened a higher term after `parent` with this commit, and changed nothing else.

    Whom it excludes is its word, as with a ban.
    """
    commit, owner = decided.commit, owner_of(parent)
    made = reform_commit(parent, commit.term, owner, "".join(commit.incarnations), commit.excluded)
    if commit.term <= parent.term or commit != made or not {*parent.excluded} <= {*commit.excluded} - {owner}:
        return False
    message = vote_message(decided.ballot, commit.id)
    return any(vote.elector == owner and identity.verify(owner, message, vote.signature) for vote in decided.votes)
