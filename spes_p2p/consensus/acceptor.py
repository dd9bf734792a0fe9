"""The acceptor: what one elector promises and votes for. Every reply is durable before it is sent.

An elector votes under an *incarnation*: the random id of its vote file. A commit lists the incarnation of each elector of the
next round, so an elector that lost its votes does not vote until a commit lists its new incarnation.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from spes_p2p.consensus.certificate import vote_message
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.control import may_follow
from spes_p2p.consensus.electorate import incarnations_of
from spes_p2p.consensus.farewell import keeps_seat, signed_farewell
from spes_p2p.consensus.output import VOTES, Identity, Output, Write
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, unpack
from spes_p2p.messages.consensus import Accept, Ballot, CertifiedCommit, Commit, Farewell, Prepare, Promise, Vote
from spes_p2p.messages.refusals import Code

logger = logging.getLogger(__name__)

BALLOT_STEP = 2**32
"""Bounds how far a ballot may exceed the last promised one, so that no coordinator exhausts a round's numbers."""
MAX_BALLOT_NUMBER = 2**62
IsValid = Callable[[Commit], bool]
"""Whether the caller has checked that this commit follows from the log's last one by what the members signed."""
INCARNATION_BYTES = 8


@dataclass(frozen=True)
class VoteState:
    """What an elector must remember across a crash. It votes on the last round only, never on an earlier one again."""

    incarnation: str
    term: int
    round: int
    """The round voted on: one more than its parent's."""
    parent: str
    promised: Ballot | None
    accepted_ballot: Ballot | None
    accepted: Commit | None
    left: bool = False
    """Whether it has left this round; it casts no vote in it then."""
    evidence: bytes = b""
    """Evidence of the accepted commit, for the coordinator that must propose it again."""
    attachments: tuple[bytes, ...] = ()
    """What the evidence names by hash."""


def fresh_votes(rng: random.Random) -> VoteState:
    """Return an empty vote state under a new incarnation."""
    incarnation = f"{rng.getrandbits(8 * INCARNATION_BYTES):0{2 * INCARNATION_BYTES}x}"
    return VoteState(incarnation, 0, -1, "", None, None, None)


def read_votes(record: bytes | None) -> VoteState | None:
    """Return the votes in the durable file; None when they are missing or damaged."""
    try:
        return unpack(VoteState, record) if record is not None else None
    except WireError:
        logger.warning("the votes of this peer are damaged")
        return None


def recovered_votes(record: bytes | None, log: CommitLog, identity: Identity, rng: random.Random) -> VoteState:
    """Return the votes to continue with. Votes that are missing, damaged or older than the log begin a new incarnation."""
    found = read_votes(record)
    if found is None:
        return fresh_votes(rng)
    for decided in map(log.at, range(log.round, log.begins, -1)):
        if (decided.commit.term, decided.commit.round) <= (found.term, found.round):
            break
        if is_later_vote(decided, log.commit_at(decided.commit.round - 1), found, identity):
            return fresh_votes(rng)
    return found


def is_later_vote(decided: CertifiedCommit, parent: Commit, votes: VoteState, identity: Identity) -> bool:
    """Return whether the incarnation of these votes signed this certificate after them: they are older than what it voted."""
    me, commit = identity.peer_id, decided.commit
    may_be = bool(commit.plan) and (parent.term, commit.round) > (votes.term, votes.round)
    if not may_be or incarnations_of(parent).get(me) != votes.incarnation:
        return False
    message = vote_message(decided.ballot, commit.id)
    if not any(vote.elector == me and identity.verify(me, message, vote.signature) for vote in decided.votes):
        return False
    logger.warning(
        "the votes of this peer are older than its vote on round %d; it votes again when a commit lists its new ones",
        commit.round,
    )
    return True


class Acceptor:
    """The votes of one peer."""

    def __init__(self, log: CommitLog, identity: Identity, votes: VoteState, is_valid: IsValid):
        """`votes`: durable before the first request is handled."""
        self._log = log
        self._identity = identity
        self._is_valid = is_valid
        self.votes = votes

    @property
    def incarnation(self) -> str:
        """Id of the vote file."""
        return self.votes.incarnation

    @property
    def may_vote(self) -> bool:
        """Whether this peer is an elector of the next round and has not lost its votes."""
        try:
            self._require_elector()
        except Refused:
            return False
        return True

    def apply(self, votes: VoteState) -> None:
        """Continue with votes that are durable now."""
        self.votes = votes

    def prepare(self, sender: str, request: Prepare) -> Output[Promise]:
        """Promise not to accept lower ballots, and report what was accepted. Raises Refused.

        Each ballot is promised once. A coordinator that starts over, even after a crash, needs a new number, so no ballot
        carries two commits.
        """
        _check_sender(sender, request.ballot)
        commit = self._log.last
        if request.round != commit.round + 1 or request.parent != commit.id:
            return Output(Promise(commit.round, False, None, None, None))
        self._require_elector()
        votes = self._current()
        _check_ballot(request.ballot, commit, votes)
        if votes.promised is not None and request.ballot <= votes.promised:
            return Output(Promise(commit.round, False, votes.promised, None, None))
        promise = Promise(commit.round, True, request.ballot, votes.accepted_ballot, votes.accepted, votes.evidence)
        return Output(promise, (Write(VOTES, replace(votes, promised=request.ballot)),))

    def accept(self, sender: str, request: Accept, attachments: tuple[bytes, ...] = ()) -> Output[Vote]:
        """Vote for a commit. Raises Refused when a higher ballot was promised, or the commit does not follow the log's or is
        not valid. `attachments`: what the request's evidence names by hash.
        """
        _check_sender(sender, request.ballot)
        commit, proposed = self._log.last, request.commit
        if proposed.round != commit.round + 1 or proposed.parent != commit.id:
            raise Refused(Code.CANNOT_VOTE, f"the elector's last commit is round {commit.round}")
        kept = (proposed.campaign, proposed.term, proposed.helpers) == (commit.campaign, commit.term, commit.helpers)
        if not kept or not self._log.leads_to(commit, proposed) or len(proposed.incarnations) != len(proposed.electorate):
            raise Refused(Code.NOT_PROVEN, "a commit that no plan of this campaign leads to")
        if not may_follow(proposed.control, commit, self._identity):
            raise Refused(Code.NOT_PROVEN, "a control record that the owner did not sign, or an old one")
        self._require_elector()
        votes = self._current()
        _check_ballot(request.ballot, commit, votes)
        if votes.promised is not None and request.ballot < votes.promised:
            raise Refused(Code.OUTBID, f"promised ballot {votes.promised.number}")
        if votes.accepted_ballot == request.ballot and votes.accepted != proposed:
            raise Refused(Code.NOT_ALLOWED, "another commit in a ballot that carries one")
        if proposed.plan and not self._is_valid(proposed):
            raise Refused(Code.NOT_PROVEN, "a commit that does not follow from its evidence")
        signature = self._identity.sign(vote_message(request.ballot, proposed.id))
        accepted = replace(
            votes, promised=request.ballot, accepted_ballot=request.ballot, accepted=proposed, evidence=request.evidence,
            attachments=attachments,
        )
        return Output(Vote(self._identity.peer_id, signature), (Write(VOTES, accepted),))

    def leave(self) -> Output[Farewell | None]:
        """Give up the seat in the next round. None when it has none, must keep it, or has promised a ballot."""
        commit, me = self._log.last, self._identity.peer_id
        if (said := self.farewell()) is not None:
            return Output(said)
        if keeps_seat(me, commit) or not self.may_vote or (votes := self._current()).promised is not None:
            return Output(None)
        return Output(signed_farewell(self._identity, commit.id), (Write(VOTES, replace(votes, left=True)),))

    def farewell(self) -> Farewell | None:
        """Return the farewell that gave up the seat in the next round; None when the seat was kept."""
        commit = self._log.last
        has_left = self.votes.parent == commit.id and self.votes.left
        return signed_farewell(self._identity, commit.id) if has_left else None

    def _require_elector(self) -> None:
        commit, me, votes = self._log.last, self._identity.peer_id, self.votes
        if me not in commit.electorate:
            raise Refused(Code.CANNOT_VOTE, "not an elector of this round")
        if incarnations_of(commit)[me] != votes.incarnation:
            raise Refused(Code.CANNOT_VOTE, "the elector lost its votes and waits for a commit that lists its new incarnation")
        if (commit.term, commit.round + 1) < (votes.term, votes.round):
            raise Refused(Code.CANNOT_VOTE, f"the elector's log was cut: it voted on round {votes.round} already")
        if votes.parent == commit.id and votes.left:
            raise Refused(Code.CANNOT_VOTE, "the elector left this round")

    def _current(self) -> VoteState:
        """Return the votes on the round after the log's last commit."""
        commit = self._log.last
        if self.votes.parent == commit.id:
            return self.votes
        return VoteState(self.votes.incarnation, commit.term, commit.round + 1, commit.id, None, None, None)


def _check_sender(sender: str, ballot: Ballot) -> None:
    """Require that the ballot is the sender's own, and that its number leaves room for higher ones. Raises Refused."""
    if sender != ballot.coordinator:
        raise Refused(Code.NOT_ALLOWED, "a ballot of another coordinator")
    if not 0 < ballot.number < MAX_BALLOT_NUMBER:
        raise Refused(Code.MALFORMED, "a ballot number out of range")


def _check_ballot(ballot: Ballot, commit: Commit, votes: VoteState) -> None:
    if ballot.coordinator not in commit.electorate:
        raise Refused(Code.NOT_ALLOWED, "the ballot's coordinator is not an elector of this round")
    if ballot.number > (votes.promised.number if votes.promised is not None else 0) + BALLOT_STEP:
        raise Refused(Code.MALFORMED, "a ballot too far above the last promised one")
