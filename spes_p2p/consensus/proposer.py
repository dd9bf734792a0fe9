"""The proposer: the ballots by which a coordinator brings its attempt at one round to a decision.

Promises from a majority let it propose: the commit that they report as accepted in the highest ballot, or its own when they
report none. Votes from a majority make a certificate. It sends one commit in a ballot; when outbid, it tries a higher ballot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from spes_p2p.consensus.acceptor import BALLOT_STEP, IsValid
from spes_p2p.consensus.certificate import vote_message
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.electorate import quorum
from spes_p2p.consensus.farewell import counted, remaining
from spes_p2p.consensus.output import Identity
from spes_p2p.messages.consensus import Accept, Ballot, CertifiedCommit, Commit, Decide, Farewell, Prepare, Promise, Vote
from spes_p2p.messages.fields import MAX_PAGE

MAX_BALLOTS = 5
"""An attempt fails after this many ballots."""

Request = Prepare | Accept | Decide
Reply = Promise | Vote | bytes


class ProposerState(Enum):
    """What the proposer waits for."""

    IDLE = "nothing: prepare() begins"
    PREPARING = "promises"
    PROMISED = "a commit: propose() goes on"
    PROPOSING = "votes"
    DECIDED = "nothing: there is a certificate"
    FAILED = "nothing: this attempt decides nothing"


@dataclass(frozen=True)
class Send:
    """A request to an elector."""

    to: str
    request: Request


def bound_commit(granted: Iterable[Promise]) -> Commit | None:
    """Return the commit that these promises bind a proposer to, the one accepted in the highest ballot; None when free."""
    bound = [(p.accepted_ballot, p.accepted) for p in granted if p.accepted_ballot is not None]
    return max(bound, key=lambda pair: pair[0])[1] if bound else None


def has_majority(granted: int, electorate: tuple[str, ...]) -> bool:
    """Return whether this many promises let a proposer go on."""
    return granted >= quorum(electorate)


def next_number(promises: Iterable[Promise]) -> int:
    """Return the number to exceed: the highest promised, or as near to it as every elector that replied accepts; 0: none."""
    named = [promise.promised.number for promise in promises if promise.promised is not None]
    return min(max(named), min(named) + BALLOT_STEP - 1) if named else 0


def is_outbid(ballot: Ballot, promises: Iterable[Promise]) -> bool:
    """Return whether an elector refused this ballot because it promised a higher one."""
    return any(not promise.granted and promise.promised is not None and promise.promised > ballot for promise in promises)


class Proposer:
    """One attempt at the next round. Keeps nothing across a crash, since acceptors promise each ballot once."""

    def __init__(self, log: CommitLog, identity: Identity, is_valid: IsValid, number: int = 0):
        """`is_valid`: of the commits that promises name. `number`: the first ballot exceeds it."""
        self._log = log
        self._identity = identity
        self._is_valid = is_valid
        self.parent = log.last
        self.state = ProposerState.IDLE
        self.ballot = Ballot(number, identity.peer_id)
        self.bound: Commit | None = None
        """The commit that the promises bind it to; None when free."""
        self.proposal: Commit | None = None
        self.decided: CertifiedCommit | None = None
        self.failure = ""
        self._ballots = 0
        self.electorate: tuple[str, ...] = ()
        """Electors whose majority decides: without those that said farewell."""
        self._farewells: tuple[Farewell, ...] = ()
        self._answers: dict[str, Promise | Vote | None] = {}
        """Replies to the current request, by elector; None where none will come."""
        self._caught_up: set[str] = set()
        """Electors that were sent the commits they had missed."""

    @property
    def waits(self) -> bool:
        """Whether it waits for replies."""
        return self.state in (ProposerState.PREPARING, ProposerState.PROPOSING)

    def prepare(self, farewells: Iterable[Farewell]) -> tuple[Send, ...]:
        """Ask for promises."""
        assert self.state is ProposerState.IDLE
        self.hear(farewells)
        self.state = ProposerState.PREPARING
        return self._next_ballot(self.ballot.number)

    def propose(self, commit: Commit, evidence: bytes, farewells: Iterable[Farewell]) -> tuple[Send, ...]:
        """Ask for votes on a commit, which must be `bound` unless that is None."""
        assert self.state is ProposerState.PROMISED
        assert self.bound is None or commit == self.bound
        self.hear(farewells)
        self.state, self.proposal, self._answers = ProposerState.PROPOSING, commit, {}
        return self._to_all(Accept(self.ballot, commit, evidence))

    def receive(self, elector: str, request: Request, reply: Reply | None) -> tuple[Send, ...]:
        """Process an elector's reply to a request (None: it will not come). Replies to earlier ballots are ignored."""
        if elector not in self.electorate or elector in self._answers:
            return ()
        if self.state is ProposerState.PREPARING:
            if isinstance(request, Decide) and reply is not None:
                return (Send(elector, self._prepare_request()),)
            if isinstance(request, Decide) or request == self._prepare_request():
                return self._on_promise(elector, reply if isinstance(reply, Promise) else None)
        if self.state is ProposerState.PROPOSING and isinstance(request, Accept) and request.ballot == self.ballot:
            self._on_vote(elector, reply if isinstance(reply, Vote) else None)
        return ()

    def hear(self, farewells: Iterable[Farewell]) -> None:
        """Leave the electors that said farewell out of the electorate."""
        self._farewells = counted(farewells, self.parent, self._identity)
        self.electorate = remaining(self.parent, self._farewells, self._identity)

    def _on_promise(self, elector: str, promise: Promise | None) -> tuple[Send, ...]:
        if promise is not None and promise.round < self.parent.round and elector not in self._caught_up:
            self._caught_up.add(elector)
            return (Send(elector, Decide(self._log.page(promise.round, MAX_PAGE))),)
        if promise is not None and promise.granted and not self._is_honest(promise):
            promise = None
        self._answers[elector] = promise
        promises = [answer for answer in self._answers.values() if isinstance(answer, Promise)]
        granted = [promise for promise in promises if promise.granted]
        if has_majority(len(granted), self.electorate):
            self.state, self.bound = ProposerState.PROMISED, bound_commit(granted)
            return ()
        outbid = len(promises) >= quorum(self.electorate) and is_outbid(self.ballot, promises)
        if not outbid and len(self._answers) < len(self.electorate):
            return ()
        if any(promise.round > self.parent.round for promise in promises):
            return self._fail("this round is decided already")
        highest = next_number(promises)
        if not highest or len(granted) == len(promises) or self._ballots == MAX_BALLOTS:
            return self._fail(f"no quorum: {len(promises)} of {len(self.electorate)} electors answered")
        return self._next_ballot(highest)

    def _is_honest(self, promise: Promise) -> bool:
        """Return whether an honest elector can grant this promise. One that names an invalid commit would bar the round."""
        if (promise.round, promise.promised) != (self.parent.round, self.ballot):
            return False
        ballot, commit = promise.accepted_ballot, promise.accepted
        if ballot is None or commit is None:
            return (ballot, commit) == (None, None)
        valid = self._is_valid(commit) if commit.plan else self._log.leads_to(self.parent, commit)
        return valid and ballot < self.ballot

    def _on_vote(self, elector: str, vote: Vote | None) -> None:
        assert self.proposal is not None
        message = vote_message(self.ballot, self.proposal.id)
        valid = vote is not None and vote.elector == elector and self._identity.verify(elector, message, vote.signature)
        self._answers[elector] = vote if valid else None
        votes = tuple(answer for answer in self._answers.values() if isinstance(answer, Vote))
        if len(votes) >= quorum(self.electorate):
            self.state = ProposerState.DECIDED
            self.decided = CertifiedCommit(self.proposal, self.ballot, votes, self._farewells)
        elif len(self._answers) == len(self.electorate):
            self._fail(f"no quorum: {len(votes)} of {len(self.electorate)} electors voted")

    def _next_ballot(self, number: int) -> tuple[Send, ...]:
        self.ballot = Ballot(number + 1, self.ballot.coordinator)
        self._ballots += 1
        self._answers = {}
        self._caught_up = set()
        return self._to_all(self._prepare_request())

    def _prepare_request(self) -> Prepare:
        return Prepare(self.parent.round + 1, self.parent.id, self.ballot)

    def _to_all(self, request: Request) -> tuple[Send, ...]:
        return tuple(Send(elector, request) for elector in self.electorate)

    def _fail(self, reason: str) -> tuple[Send, ...]:
        self.state, self.failure = ProposerState.FAILED, reason
        return ()
