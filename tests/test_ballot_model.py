"""No interleaving of crash, loss, farewell and reform decides two commits; and the search would find one if a rule were
missing.

Within its bounds a search is exhaustive: it ends only when every reachable state was visited, or at the first wrong one.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from ballot_model import Bounds, search

from spes_p2p.consensus.acceptor import Acceptor, VoteState
from spes_p2p.consensus.certificate import proves, vote_message
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.farewell import farewell_message, signed_farewell
from spes_p2p.consensus.output import LOG, VOTES, Identity, Output, Write
from spes_p2p.consensus.participant import Participant
from spes_p2p.consensus.proposer import Proposer, Reply, Request, Send
from spes_p2p.consensus.reform import reform_commit
from spes_p2p.messages.consensus import Accept, Ballot, CertifiedCommit, Commit, Farewell, Milestone, Prepare, Promise, Vote

BOTH, BOUND = {"A decides", "B decides"}, {"a bound commit is proposed again"}
OUTBID, FEWER = {"an outbid proposer goes on with a higher ballot"}, {"a minority decides, as the others left"}
SHORT = "a log begins at a milestone"
FORK = {"a term is opened", "two terms fork", "round 1 is decided in term 1"}


def slow(*values: Any) -> ParameterSet:
    """A search that takes longer than an everyday run has time for."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("bounds", "reached", "at_least"),
    [
        (Bounds((1, 1), numbers=1, losses=1), BOTH | BOUND, 6_000),
        (Bounds((2, 0)), {"A decides"} | BOUND | OUTBID, 2_000),
        (Bounds((1, 1), numbers=1, rounds=2), BOTH | BOUND | {"round 1 is decided in term 0"}, 3_000),
        (Bounds((1, 1), numbers=1, farewells=2), BOTH | BOUND | FEWER, 3_000),
        (Bounds((1, 0), numbers=1, rounds=2, reforms=1), {"A decides"} | FORK, 400),
        (Bounds((1, 0), numbers=1, rounds=2, reforms=1, milestones=1), {"A decides", SHORT} | FORK, 1_400),
        slow(Bounds((1, 1), losses=1), BOTH | BOUND, 25_000),
        slow(Bounds((1, 1), numbers=1, rounds=2, losses=1), BOTH | BOUND | {"round 1 is decided in term 0"}, 60_000),
        slow(Bounds((2, 1)), BOTH | BOUND | OUTBID, 200_000),
        slow(Bounds((1, 1), farewells=2), BOTH | BOUND | FEWER, 12_000),
        slow(Bounds((1, 1), numbers=1, rounds=2, farewells=2), BOTH | BOUND | FEWER, 15_000),
        slow(Bounds((1, 1), numbers=1, losses=1, farewells=1), BOTH | BOUND, 10_000),
        slow(Bounds((1, 1), numbers=1, rounds=2, reforms=1), BOTH | BOUND | FORK, 45_000),
        slow(Bounds((1, 1), numbers=1, rounds=2, farewells=1, reforms=1), BOTH | BOUND | FORK, 110_000),
        slow(Bounds((1, 1), numbers=1, rounds=2, reforms=1, milestones=1), BOTH | BOUND | FORK | {SHORT}, 150_000),
        slow(Bounds((1, 1), numbers=1, rounds=2, cuts=1), BOTH | BOUND | {"round 1 is decided in term 0"}, 10_000),
    ],
    ids=lambda value: str(value) if isinstance(value, Bounds) else None,
)
def test_every_interleaving_decides_one_commit_at_most(bounds: Bounds, reached: set[str], at_least: int) -> None:
    found = search(bounds)
    columns = (*dataclasses.astuple(bounds)[1:-1], f"{found.states:,}")
    print("|", ", ".join(map(str, bounds.ballots)), "|", " | ".join(str(column or "") for column in columns), "|")
    assert found.violation is None, found.trace
    assert found.reached >= reached
    assert found.states >= at_least


# Each rule is needed -------------------------------------------------------------------------------------------------------

Broken = Callable[[pytest.MonkeyPatch], None]


def method(owner: type[Any], name: str, broken: Callable[..., Any] | property) -> Broken:
    """Replace a method."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, broken)


def function(name: str, broken: Callable[..., Any]) -> Broken:
    """Replace a function wherever the consensus core calls it."""

    def replace(monkeypatch: pytest.MonkeyPatch) -> None:
        users = [m for path, m in list(sys.modules.items()) if path.startswith("spes_p2p.consensus.") and hasattr(m, name)]
        assert users
        for user in users:
            monkeypatch.setattr(user, name, broken)

    return replace


def both(*parts: Broken) -> Broken:
    """Break two rules that guard the same thing."""

    def replace(monkeypatch: pytest.MonkeyPatch) -> None:
        for part in parts:
            part(monkeypatch)

    return replace


prepare, accept, leave = Acceptor.prepare, Acceptor.accept, Acceptor.leave
require_elector = Acceptor._require_elector
receive, next_ballot = Proposer.receive, Proposer._next_ballot
admits, open_term, take_milestone = CommitLog.admits, Participant.open_term, Participant.take_milestone


def in_memory_only(handle: Callable[..., Output[Any]]) -> Callable[..., Output[Any]]:
    """Answer before the votes are durable."""

    def forgetful(self: Acceptor, *request: Any) -> Output[Any]:
        output = handle(self, *request)
        for write in output.writes:
            assert isinstance(write.value, VoteState)
            self.apply(write.value)
        return Output(output.reply)

    return forgetful


def accept_below_promise(self: Acceptor, sender: str, request: Accept) -> Output[Vote]:
    if request.commit.parent == self.votes.parent:
        self.votes = dataclasses.replace(self.votes, promised=None)
    return accept(self, sender, request)


def promise_twice(self: Acceptor, sender: str, request: Prepare) -> Output[Promise]:
    votes = self.votes
    if votes.parent == request.parent and votes.promised == request.ballot:
        return Output(Promise(request.round - 1, True, votes.promised, votes.accepted_ballot, votes.accepted))
    return prepare(self, sender, request)


def forget_accepted(self: Acceptor, sender: str, request: Prepare) -> Output[Promise]:
    output = prepare(self, sender, request)
    return Output(dataclasses.replace(output.reply, accepted_ballot=None, accepted=None), output.writes)


def leave_after_promise(self: Acceptor) -> Output[Farewell | None]:
    if self.farewell() is None and self.may_vote and self.votes.promised is not None:
        farewell = signed_farewell(self._identity, self.votes.parent)
        return Output(farewell, (Write(VOTES, dataclasses.replace(self.votes, left=True)),))
    return leave(self)


def leave_and_vote(self: Acceptor) -> Output[Farewell | None]:
    output = leave(self)
    kept = [dataclasses.replace(write.value, left=False) for write in output.writes if isinstance(write.value, VoteState)]
    return Output(output.reply, tuple(Write(VOTES, votes) for votes in kept))


def unsigned(farewells: Iterable[Farewell], commit: Commit, identity: Identity) -> tuple[Farewell, ...]:
    return tuple(farewell for farewell in farewells if farewell.parent == commit.id)


def of_any_round(farewells: Iterable[Farewell], commit: Commit, identity: Identity) -> tuple[Farewell, ...]:
    return tuple(f for f in farewells if identity.verify(f.elector, farewell_message(f.parent), f.signature))


def vote_on_an_earlier_round(self: Acceptor) -> None:
    commit, votes = self._log.last, self.votes
    if (commit.term, commit.round + 1) < (votes.term, votes.round):
        self.votes = dataclasses.replace(votes, term=commit.term, round=commit.round + 1)
    require_elector(self)


def receive_any(self: Proposer, elector: str, request: Request, reply: Reply | None) -> tuple[Send, ...]:
    if isinstance(request, Prepare) and isinstance(reply, Promise) and reply.granted:
        request, reply = dataclasses.replace(request, ballot=self.ballot), dataclasses.replace(reply, promised=self.ballot)
    return receive(self, elector, request, reply)


def keep_answers(self: Proposer, number: int) -> tuple[Send, ...]:
    kept = {name: answer for name, answer in self._answers.items() if isinstance(answer, Promise) and answer.granted}
    sends = next_ballot(self, number)
    self._answers.update(kept)
    return sends


next_ballot = Proposer._next_ballot


def credulous(self: CommitLog, decided: CertifiedCommit) -> bool:
    return decided.commit.parent == self.last.id


def lower_term_wins(self: CommitLog, decided: CertifiedCommit) -> bool:
    commit = decided.commit
    if commit.round <= self.round and commit.id != self.commit_at(commit.round).id:
        return proves(decided, self.commit_at(commit.round - 1), self._identity)
    return admits(self, decided)


def open_as_anybody(self: Participant, round_number: int, liars: Sequence[str] = ()) -> Output[CertifiedCommit]:
    me = self._identity.peer_id
    commit = reform_commit(self.log.commit_at(round_number), self.log.last.term + 1, me, self.acceptor.incarnation, ())
    decided = CertifiedCommit(commit, Ballot(0, me), (Vote(me, self._identity.sign(vote_message(Ballot(0, me), commit.id))),))
    return Output(decided, (Write(LOG, decided),))


def open_above_parent(self: Participant, round_number: int) -> Output[CertifiedCommit]:
    parent, me = self.log.commit_at(round_number), self._identity.peer_id
    if me != "A":
        return Output(None)  # type: ignore[arg-type]
    commit = reform_commit(parent, parent.term + 1, me, self.acceptor.incarnation, ())
    decided = CertifiedCommit(commit, Ballot(0, me), (Vote(me, self._identity.sign(vote_message(Ballot(0, me), commit.id))),))
    return Output(decided, (Write(LOG, decided),))


def open_unwritten(self: Participant, round_number: int) -> Output[CertifiedCommit]:
    return Output(open_term(self, round_number).reply)


def sign_unwritten(self: Participant, milestone: Milestone) -> Output[bool]:
    output = take_milestone(self, milestone)
    return output if self._identity.peer_id != "A" else Output(output.reply)


ONE, LOSS = Bounds((1, 1), numbers=1), Bounds((1, 1), numbers=1, losses=1)
TWO_LEAVE = Bounds((1, 1), numbers=1, farewells=2)
REFORMS = Bounds((0, 1), numbers=1, rounds=2, reforms=2)
SHORTENED = Bounds((1, 0), numbers=1, rounds=2, reforms=1, milestones=1)

BROKEN: dict[str, tuple[Broken, Bounds]] = {
    "promises are forgotten by a restart": (method(Acceptor, "prepare", in_memory_only(prepare)), Bounds((2, 1), numbers=1)),
    "votes are forgotten by a restart": (method(Acceptor, "accept", in_memory_only(accept)), ONE),
    "a vote is given below the promise": (method(Acceptor, "accept", accept_below_promise), ONE),
    "one ballot is promised twice": (method(Acceptor, "prepare", promise_twice), Bounds((2, 1), numbers=1)),
    "a promise does not tell what was accepted": (method(Acceptor, "prepare", forget_accepted), ONE),
    "an elector votes with any incarnation": (method(Acceptor, "_require_elector", lambda self: None), LOSS),
    "an elector votes on an earlier round than before": (
        method(Acceptor, "_require_elector", vote_on_an_earlier_round), Bounds((2, 1), numbers=1, rounds=2, cuts=1)
    ),
    "a farewell is said after a promise": (method(Acceptor, "leave", leave_after_promise), TWO_LEAVE),
    "a farewell does not bind": (method(Acceptor, "leave", leave_and_vote), TWO_LEAVE),
    "a farewell is forgotten by a restart": (method(Acceptor, "leave", in_memory_only(leave)), TWO_LEAVE),
    "a farewell counts without its signature": (function("counted", unsigned), Bounds((1, 0), numbers=1, farewells=1)),
    "a farewell counts in later rounds": (function("counted", of_any_round), Bounds((2, 1), numbers=1, rounds=2, farewells=2)),
    "the bound commit is ignored": (function("bound_commit", lambda granted: None), ONE),
    "a minority of promises is enough": (function("has_majority", lambda granted, electorate: granted > 0), ONE),
    "a promise of another ballot counts": (method(Proposer, "receive", receive_any), Bounds((2, 1))),
    "an outbid proposer keeps its promises": (method(Proposer, "_next_ballot", keep_answers), Bounds((2, 1))),
    "a commit is learned without its certificate": (method(CommitLog, "admits", credulous), ONE),
    "anybody opens a term": (
        both(method(Participant, "open_term", open_as_anybody), function("proves_reform", lambda *certificate: True)), REFORMS
    ),
    "a term is not above all that the owner has seen": (method(Participant, "open_term", open_above_parent), REFORMS),
    "a term is told before it is durable": (method(Participant, "open_term", open_unwritten), REFORMS),
    "a term is opened before a milestone": (method(CommitLog, "earliest_reform", property(lambda self: -1)), SHORTENED),
    "a milestone is told before it is durable": (method(Participant, "take_milestone", sign_unwritten), SHORTENED),
    "the lower of two terms wins": (method(CommitLog, "admits", lower_term_wins), REFORMS),
}  # fmt: skip


SLOW = {
    "promises are forgotten by a restart", "one ballot is promised twice",
    "an elector votes with any incarnation", "an elector votes on an earlier round than before",
    "a farewell is said after a promise", "a farewell does not bind",
    "a farewell is forgotten by a restart", "a farewell counts in later rounds", "a promise of another ballot counts",
    "an outbid proposer keeps its promises",
}  # fmt: skip


@pytest.mark.parametrize("broken", [slow(name) if name in SLOW else name for name in BROKEN])
@pytest.mark.long
def test_the_search_finds_what_goes_wrong_without_a_rule(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule, bounds = BROKEN[broken]
    break_rule(monkeypatch)
    assert search(bounds).violation is not None


# Liars --------------------------------------------------------------------------------------------------------------------

ONE_LIAR = Bounds((1, 1), numbers=1, liars=1, one_commit=False)


@pytest.mark.long
def test_one_liar_of_three_has_no_invalid_commit_certified() -> None:
    found = search(ONE_LIAR)
    assert found.violation is None, found.trace
    assert found.reached >= BOTH
    assert found.states >= 2_000


def test_two_liars_of_three_may_have_an_invalid_commit_certified() -> None:
    """The limit that docs/safety.md names: a majority."""
    found = search(dataclasses.replace(ONE_LIAR, liars=2))
    assert found.violation is not None
    assert "does not follow" in found.violation


def test_without_the_validity_rule_one_liar_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Acceptor, "accept", believing(Acceptor.accept))
    found = search(ONE_LIAR)
    assert found.violation is not None
    assert "does not follow" in found.violation


def test_one_liar_may_have_two_valid_commits_certified() -> None:
    """The limit that docs/safety.md names. It takes Byzantine agreement to lift it."""
    found = search(dataclasses.replace(ONE_LIAR, one_commit=True))
    assert found.violation is not None
    assert "two are certified" in found.violation
    assert any(step.startswith("B proposes") for step in found.trace)


LIAR_AND_OWNER = Bounds((1, 1), numbers=1, rounds=2, reforms=1, liars=1, one_commit=False)
HEALED = "liars fork a log that the owner goes on with otherwise"


@pytest.mark.long
def test_a_fork_that_a_liar_makes_is_healed_by_the_owners_next_term() -> None:
    """In each state every honest elector can go over to the owner's branch, and crashes on the way do no harm."""
    found = search(LIAR_AND_OWNER)
    assert found.violation is None, found.trace
    assert HEALED in found.reached
    assert found.states >= 15_000


@pytest.mark.long
def test_without_branches_the_fork_of_a_liar_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Participant, "learn_branch", lambda self, branch: Output(False))
    found = search(LIAR_AND_OWNER)
    assert found.violation is not None
    assert "no higher term heals" in found.violation


def believing(handle: Callable[..., Output[Any]]) -> Callable[..., Output[Any]]:
    """Vote for whatever a coordinator proposes."""

    def accept_any(self: Acceptor, *request: Any) -> Output[Any]:
        self._is_valid = lambda commit: True
        return handle(self, *request)

    return accept_any


def test_an_owner_that_loses_its_disk_may_open_a_term_twice() -> None:
    """The limit that docs/safety.md names."""
    found = search(Bounds((0, 1), numbers=1, rounds=2, reforms=2, losses=1, owner_loses=True))
    assert found.violation is not None
    assert found.trace == ("A opens a term with commit 1", "A loses its disk", "A opens a term with commit 2")
