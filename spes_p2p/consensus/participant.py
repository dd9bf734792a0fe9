"""One peer's consensus state: commit log, votes and control records, recovered from disk together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from spes_p2p.consensus.acceptor import Acceptor, IsValid, VoteState, fresh_votes, is_later_vote, recovered_votes
from spes_p2p.consensus.certificate import vote_message
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.control import ControlRecords, owner_of
from spes_p2p.consensus.milestone import signed_milestone
from spes_p2p.consensus.output import CONTROL, LOG, VOTES, Identity, Output, Write
from spes_p2p.consensus.reform import reform_commit
from spes_p2p.errors import Refused
from spes_p2p.messages.consensus import Ballot, CertifiedCommit, Commit, Control, Milestone, Vote
from spes_p2p.messages.fields import MAX_BANNED
from spes_p2p.messages.refusals import Code


@dataclass(frozen=True)
class Files:
    """Contents of a peer's durable files; None for a file that is missing or damaged."""

    votes: bytes | None = None
    log: Sequence[bytes] = ()
    control: bytes | None = None


class Participant:
    """The durable state machine of one peer. Its state is exactly what its writes made durable.

    A handler changes nothing. It returns an Output: make each of its writes durable, apply it, then send the reply:

        output = participant.acceptor.prepare(sender, request)
        for write in output.writes:
            store(write.file, write.record)
            participant.apply(write)
        send(output.reply)
    """

    def __init__(self, identity: Identity, genesis: Commit, files: Files, rng: random.Random, is_valid: IsValid):
        """`rng`: draws an incarnation if the votes are lost or old. `is_valid`: see IsValid.

        Make `recovery` durable before handling requests.
        """
        self._identity, self._rng = identity, rng
        self.log = CommitLog(identity, genesis, files.log)
        self.controls = ControlRecords(self.log, identity, files.control)
        recovered = recovered_votes(files.votes, self.log, identity, rng)
        self.acceptor = Acceptor(self.log, identity, recovered, is_valid)
        votes = Write(VOTES, self.acceptor.votes)
        self.recovery: tuple[Write, ...] = () if votes.record == files.votes else (votes,)

    def apply(self, write: Write) -> None:
        """Apply a write that is durable now."""
        if write.file == LOG and isinstance(write.value, CertifiedCommit):
            self.log.put(write.value)
        elif write.file == LOG and isinstance(write.value, Milestone):
            self.log.begin_at(write.value)
        elif write.file == VOTES and isinstance(write.value, VoteState):
            self.acceptor.apply(write.value)
        elif write.file == CONTROL and isinstance(write.value, Control):
            self.controls.apply(write.value)
        else:
            raise TypeError(f"no record of {write.file}: {write.value!r}")

    def learn(self, decided: CertifiedCommit) -> Output[bool]:
        """Append a certified commit; False when it is known. Raises Refused when it does not follow or is not proven.

        One with a vote that this peer does not remember begins a new incarnation: its files are from an old copy.
        """
        if not self.log.admits(decided):
            return Output(False)
        kept = self.controls.before_new_term() if decided.commit.term > self.log.last.term else ()
        parent, votes = self.log.commit_at(decided.commit.round - 1), self.acceptor.votes
        is_old = is_later_vote(decided, parent, votes, self._identity)
        renewed = (Write(VOTES, fresh_votes(self._rng)),) if is_old else ()
        return Output(True, (*kept, *renewed, Write(LOG, decided)))

    def learn_branch(self, branch: Sequence[CertifiedCommit]) -> Output[bool]:
        """Go over to the owner's branch of a fork that liars made. Raises Refused when it does not end in a later term."""
        self.log.require_branch(branch)
        return Output(True, (*self.controls.before_new_term(), *(Write(LOG, decided) for decided in branch)))

    def open_term(self, round_number: int, liars: Sequence[str] = ()) -> Output[CertifiedCommit]:
        """Open a term after this round of the log: the owner alone decides the round after that. Raises Refused for others.

        The term is above all that the owner has seen, and durable before it is announced. `liars`: electors that signed two
        commits in one ballot; it excludes them.
        """
        me = self._identity.peer_id
        if me != owner_of(self.log.genesis):
            raise Refused(Code.NOT_ALLOWED, "only the owner of the campaign opens a term")
        if round_number < self.log.earliest_reform:
            raise Refused(Code.NO_REFORM, f"no term begins before round {self.log.earliest_reform}, by the owner's milestone")
        parent = self.log.commit_at(round_number)
        named = dict.fromkeys((*parent.excluded, *liars))  # as many as a commit may name
        excluded = tuple(sorted([peer for peer in named if peer != me][:MAX_BANNED]))
        commit = reform_commit(parent, self.log.last.term + 1, me, self.acceptor.incarnation, excluded)
        ballot = Ballot(0, me)
        decided = CertifiedCommit(commit, ballot, (Vote(me, self._identity.sign(vote_message(ballot, commit.id))),))
        return Output(decided, (*self.controls.before_new_term(), Write(LOG, decided)))

    def take_milestone(self, milestone: Milestone) -> Output[bool]:
        """Begin the log at a milestone; False when it begins no earlier. Raises Refused when the owner did not sign it."""
        if not self.log.admits_milestone(milestone):
            return Output(False)
        kept = self.controls.before_new_term() if milestone.decided.commit.term > self.log.last.term else ()
        return Output(True, (*kept, Write(LOG, milestone)))

    def sign_milestone(self) -> Output[bool]:
        """Begin the owner's log at a milestone; False when none is due."""
        milestone = self.log.next_milestone()
        return Output(False) if milestone is None else self.take_milestone(signed_milestone(milestone, self._identity))
