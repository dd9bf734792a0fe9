"""One round, one commit, whatever is lost, repeated, reordered or restarted; only the right electorate's majority proves it."""

from __future__ import annotations

import ast
import dataclasses
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from electors import ELECTORS, Elector, commit_after, decide, derived, genesis
from hypothesis import given
from hypothesis import strategies as st

import spes_p2p.consensus
from spes_p2p.consensus import commit_log
from spes_p2p.consensus.acceptor import BALLOT_STEP
from spes_p2p.consensus.certificate import proves
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.electorate import HOME_CONNECTIONS, MAX_ELECTORS, choose_electorate, coordinator_order, quorum
from spes_p2p.consensus.output import CONTROL, LOG, VOTES
from spes_p2p.consensus.proposer import Proposer, ProposerState, Reply, Send
from spes_p2p.consensus.reform import OutageWatch, has_lasted, sees_majority
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import (
    Accept,
    Ballot,
    CertifiedCommit,
    Commit,
    Control,
    Decide,
    Prepare,
    Promise,
    Verdict,
    Vote,
    Workload,
)
from spes_p2p.messages.fields import MAX_EXPERTS
from spes_p2p.messages.rounds import Pong
from spes_p2p.messages.samples import Interval
from spes_p2p.peer.durable import perform
from spes_p2p.storage.store import frame_record
from spes_p2p.testing.simulated_identity import SimulatedIdentity

# Safety -------------------------------------------------------------------------------------------------------------------


class Race:
    """Two coordinators, three electors, and a network that delivers in any order, twice, late or never."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.electors = {name: Elector(name) for name in ELECTORS}
        self.proposers: dict[str, Proposer] = {}
        self.flying: list[tuple[str, Send]] = []
        self.votes: dict[tuple[Ballot, str], set[str]] = {}
        self.certificates: list[CertifiedCommit] = []
        self.commits_made = 0

    def step(self) -> None:
        action = self.rng.random()
        if action < 0.1 or not self.flying:
            self.begin(self.rng.choice("AB"))
        elif action < 0.16:
            self.flying.pop(self.rng.randrange(len(self.flying)))
        elif action < 0.22:
            name = self.rng.choice(ELECTORS)
            self.electors[name] = self.electors[name].restarted()
        else:
            place = self.rng.randrange(len(self.flying))
            message = self.flying[place]
            if self.rng.random() < 0.9:
                self.flying.pop(place)
            self.deliver(*message)

    def begin(self, name: str) -> None:
        """A new attempt, or the first after a crash: it remembers nothing."""
        self.proposers[name] = Proposer(CommitLog(SimulatedIdentity(name), genesis()), SimulatedIdentity(name), derived)
        self.send(name, self.proposers[name].prepare(()))

    def send(self, name: str, sends: tuple[Send, ...]) -> None:
        self.flying += [(name, send) for send in sends]

    def deliver(self, name: str, send: Send) -> None:
        assert not isinstance(send.request, Decide)
        elector = self.electors[send.to]
        reply: Reply | None = None
        try:
            if isinstance(send.request, Prepare):
                reply = elector.prepare(send.request)
            else:
                reply = elector.accept(send.request)
                self.votes.setdefault((send.request.ballot, send.request.commit.id), set()).add(send.to)
        except Refused:
            pass
        if self.rng.random() < 0.8:
            self.hear(name, send, reply)

    def hear(self, name: str, send: Send, reply: Reply | None) -> None:
        proposer = self.proposers[name]
        self.send(name, proposer.receive(send.to, send.request, reply))
        if proposer.state is ProposerState.PROMISED:
            self.commits_made += 1
            commit = proposer.bound or commit_after(proposer.parent, tokens=self.commits_made)
            self.send(name, proposer.propose(commit, b"", ()))
        if proposer.decided is not None:
            self.certificates.append(proposer.decided)

    @property
    def decided(self) -> set[str]:
        return {commit for (_, commit), voters in self.votes.items() if len(voters) >= quorum(ELECTORS)}


def test_two_coordinators_never_decide_two_commits_under_loss_reordering_and_restarts() -> None:
    decided_runs, outbid = 0, 0
    for seed in range(300):
        race = Race(seed)
        for _ in range(60):
            race.step()
        assert len(race.decided) <= 1, f"seed {seed}"
        assert all(proves(each, genesis(), SimulatedIdentity("me")) for each in race.certificates)
        assert {each.commit.id for each in race.certificates} <= race.decided
        decided_runs += len(race.decided)
        outbid += any(proposer.ballot.number > 1 for proposer in race.proposers.values())
    assert decided_runs > 150
    assert outbid > 100


def test_a_ballot_is_promised_once_and_never_below_the_highest() -> None:
    voter, parent = Elector("A"), genesis()
    assert voter.prepare(Prepare(0, parent.id, Ballot(2, "B"))).granted
    for ballot in (Ballot(2, "B"), Ballot(2, "A"), Ballot(1, "C")):
        voter = voter.restarted()
        refused = voter.prepare(Prepare(0, parent.id, ballot))
        assert (refused.granted, refused.promised) == (False, Ballot(2, "B"))
    assert voter.restarted().prepare(Prepare(0, parent.id, Ballot(2, "C"))).granted


def test_an_elector_remembers_over_a_crash_what_it_accepted_and_tells_the_next_coordinator() -> None:
    voter, commit = Elector("A"), commit_after(genesis())
    voter.accept(Accept(Ballot(1, "B"), commit))
    promise = voter.restarted().prepare(Prepare(0, genesis().id, Ballot(2, "C")))
    assert (promise.accepted_ballot, promise.accepted) == (Ballot(1, "B"), commit)


def test_nothing_changes_before_a_write_is_applied() -> None:
    """A disk that is full leaves an elector as it was."""
    voter, parent = Elector("A"), genesis()
    before = voter.acceptor.votes
    voter.acceptor.prepare("B", Prepare(0, parent.id, Ballot(1, "B")))
    voter.acceptor.accept("B", Accept(Ballot(1, "B"), commit_after(parent)))
    voter.acceptor.leave()
    voter.part.learn(decide(commit_after(parent), "AB"))
    assert (voter.acceptor.votes, voter.log.round) == (before, -1)
    assert voter.acceptor.farewell() is None


def test_an_elector_votes_for_one_commit_in_a_ballot() -> None:
    """So two votes of one elector in one ballot prove that it lies."""
    voter, parent = Elector("A"), genesis()
    request = Accept(Ballot(1, "B"), commit_after(parent))
    assert voter.accept(request) == voter.restarted().accept(request)
    with pytest.raises(Refused, match="another commit in a ballot"):
        voter.restarted().accept(Accept(request.ballot, commit_after(parent, tokens=1)))


def test_an_invalid_commit_gets_no_vote_and_binds_no_proposer() -> None:
    elector = Elector("A")
    elector.acceptor._is_valid = lambda commit: commit.tokens == 0
    with pytest.raises(Refused, match="does not follow from its evidence"):
        elector.accept(Accept(Ballot(1, "B"), commit_after(genesis(), tokens=1)))
    elector.accept(Accept(Ballot(1, "B"), commit_after(genesis()), b"evidence"))
    assert elector.prepare(Prepare(0, genesis().id, Ballot(2, "B"))).evidence == b"evidence"

    def promise(ballot: Ballot | None, commit: Commit | None) -> Promise:
        return Promise(-1, True, Ballot(1, "A"), ballot, commit)

    honest, own = promise(None, None), commit_after(genesis())
    for lie in (promise(Ballot(0, "C"), commit_after(genesis(), tokens=1)), promise(Ballot(7, "C"), own),
                promise(None, own), promise(Ballot(0, "C"), None)):  # fmt: skip
        proposer = Proposer(elector.log, SimulatedIdentity("A"), lambda commit: commit.tokens == 0)
        sends = {send.to: send.request for send in proposer.prepare(())}
        proposer.receive("C", sends["C"], lie)
        proposer.receive("A", sends["A"], honest)
        assert proposer.state is ProposerState.PREPARING
        proposer.receive("B", sends["B"], honest)
        assert (proposer.state, proposer.bound) == (ProposerState.PROMISED, None)


def test_an_elector_refuses_to_accept_below_its_promise_or_on_another_parent() -> None:
    voter, parent = Elector("A"), genesis()
    voter.prepare(Prepare(0, parent.id, Ballot(3, "B")))
    with pytest.raises(Refused, match="promised ballot 3"):
        voter.accept(Accept(Ballot(2, "C"), commit_after(parent)))
    with pytest.raises(Refused, match="last commit is round -1"):
        voter.accept(Accept(Ballot(4, "B"), commit_after(commit_after(parent))))
    with pytest.raises(Refused, match="last commit is round -1"):
        voter.accept(Accept(Ballot(4, "B"), commit_after(parent, parent="other")))


def test_a_ballot_is_taken_from_its_own_coordinator_only() -> None:
    voter, parent = Elector("A"), genesis()
    for ballot, sender, reason in ((Ballot(1, "B"), "C", "another coordinator"), (Ballot(0, "B"), "B", "range"),
                                   (Ballot(2**62, "B"), "B", "range"), (Ballot(1, "X"), "X", "not an elector")):  # fmt: skip
        with pytest.raises(Refused, match=reason):
            voter.acceptor.prepare(sender, Prepare(0, parent.id, ballot))
        with pytest.raises(Refused, match=reason):
            voter.acceptor.accept(sender, Accept(ballot, commit_after(parent)))


def test_a_peer_that_is_no_elector_does_not_vote() -> None:
    stranger, parent = Elector("X"), genesis()
    with pytest.raises(Refused, match="not an elector"):
        stranger.prepare(Prepare(0, parent.id, Ballot(1, "A")))
    with pytest.raises(Refused, match="not an elector"):
        stranger.accept(Accept(Ballot(1, "A"), commit_after(parent)))


def test_no_elector_can_use_up_the_ballots_of_a_round() -> None:
    """C drives A as far as it can and is gone; B, which C told nothing, finds a ballot that both promise all the same."""
    parent, electors = genesis(), {name: Elector(name) for name in "AB"}
    far = Ballot(0, "C")
    for request in (electors["A"].prepare, lambda prepare: electors["A"].accept(Accept(prepare.ballot, commit_after(parent)))):
        with pytest.raises(Refused, match="far above"):
            request(Prepare(0, parent.id, Ballot(BALLOT_STEP + 1, "C")))
    for _ in range(3):
        far = Ballot(far.number + BALLOT_STEP, "C")
        assert electors["A"].prepare(Prepare(0, parent.id, far)).granted
    proposer = Proposer(electors["B"].log, SimulatedIdentity("B"), derived)
    run(proposer, proposer.prepare(()), electors)
    assert proposer.state is ProposerState.PROMISED
    assert far.number < proposer.ballot.number <= far.number + BALLOT_STEP


def test_votes_of_one_round_do_not_bind_the_next() -> None:
    voter = Elector("A")
    first = commit_after(voter.log.last)
    voter.prepare(Prepare(0, voter.log.last.id, Ballot(9, "C")))
    voter.accept(Accept(Ballot(9, "C"), first))
    voter.learn(decide(first, "ABC"))
    assert voter.prepare(Prepare(1, first.id, Ballot(1, "B"))) == Promise(0, True, Ballot(1, "B"), None, None)


# The proposer -------------------------------------------------------------------------------------------------------------


def run(proposer: Proposer, sends: tuple[Send, ...], electors: dict[str, Elector]) -> None:
    """Deliver everything at once; who is not among the electors does not answer."""
    waiting = list(sends)
    while waiting:
        send = waiting.pop(0)
        waiting += proposer.receive(send.to, send.request, answer(electors[send.to], send) if send.to in electors else None)


def answer(elector: Elector, send: Send) -> Reply | None:
    try:
        if isinstance(send.request, Prepare):
            return elector.prepare(send.request)
        if isinstance(send.request, Accept):
            return elector.accept(send.request)
        for decided in send.request.decided:
            elector.learn(decided)
        return b""
    except Refused:
        return None


def test_a_proposer_needs_a_majority() -> None:
    proposer = Proposer(Elector("A").log, SimulatedIdentity("A"), derived)
    run(proposer, proposer.prepare(()), {"A": Elector("A")})
    assert (proposer.state, proposer.failure) == (ProposerState.FAILED, "no quorum: 1 of 3 electors answered")


def test_a_proposer_sends_an_elector_the_commits_that_it_missed() -> None:
    electors = {name: Elector(name) for name in "AB"}
    first = commit_after(genesis())
    electors["B"].accept(Accept(Ballot(1, "A"), first))
    electors["A"].learn(decide(first, "BC"))
    proposer = Proposer(electors["A"].log, SimulatedIdentity("A"), derived)
    run(proposer, proposer.prepare(()), electors)
    assert proposer.state is ProposerState.PROMISED
    run(proposer, proposer.propose(commit_after(first), b"", ()), electors)
    assert proposer.decided is not None
    assert {vote.elector for vote in proposer.decided.votes} == set("AB")
    assert electors["B"].log.round == 0


def test_a_proposer_that_is_behind_gives_up() -> None:
    electors = {name: Elector(name) for name in "ABC"}
    for name in "BC":
        electors[name].learn(decide(commit_after(genesis()), "BC"))
    proposer = Proposer(electors["A"].log, SimulatedIdentity("A"), derived)
    run(proposer, proposer.prepare(()), electors)
    assert (proposer.state, proposer.failure) == (ProposerState.FAILED, "this round is decided already")


def test_a_promise_of_another_ballot_or_round_does_not_count() -> None:
    log = Elector("A").log
    for other in (Promise(-1, True, Ballot(2, "A"), None, None), Promise(0, True, Ballot(1, "A"), None, None)):
        proposer = Proposer(log, SimulatedIdentity("A"), derived)
        for send in proposer.prepare(()):
            proposer.receive(send.to, send.request, other)
        assert proposer.state is ProposerState.FAILED


def test_a_forged_vote_does_not_count() -> None:
    electors = {name: Elector(name) for name in "ABC"}
    proposer = Proposer(electors["A"].log, SimulatedIdentity("A"), derived)
    run(proposer, proposer.prepare(()), electors)
    accepts = proposer.propose(commit_after(genesis()), b"", ())
    for send in accepts:
        proposer.receive(send.to, send.request, Vote(send.to, b"forged"))
    assert (proposer.state, proposer.failure) == (ProposerState.FAILED, "no quorum: 0 of 3 electors voted")


# Farewells ----------------------------------------------------------------------------------------------------------------


def test_the_majority_is_counted_without_an_elector_that_left() -> None:
    electors = {name: Elector(name) for name in "AB"}
    farewell = Elector("C").leave()
    assert farewell is not None
    left_too = electors.pop("B").leave()
    assert left_too is not None
    proposer = Proposer(electors["A"].log, SimulatedIdentity("A"), derived)
    run(proposer, proposer.prepare((farewell, left_too)), electors)
    run(proposer, proposer.propose(commit_after(genesis()), b"", (farewell, left_too)), electors)
    assert proposer.decided is not None
    assert proves(proposer.decided, genesis(), SimulatedIdentity("me"))
    unsigned = tuple(dataclasses.replace(each, signature=b"") for each in proposer.decided.farewells)
    assert not proves(dataclasses.replace(proposer.decided, farewells=unsigned), genesis(), SimulatedIdentity("me"))


def test_an_elector_that_left_promises_nothing_and_says_so_again_after_a_restart() -> None:
    voter = Elector("A")
    farewell = voter.leave()
    again = voter.restarted()
    assert farewell is not None
    assert farewell == again.acceptor.farewell() == again.leave()
    with pytest.raises(Refused, match="the elector left"):
        again.prepare(Prepare(0, genesis().id, Ballot(1, "B")))
    with pytest.raises(Refused, match="the elector left"):
        again.accept(Accept(Ballot(1, "B"), commit_after(genesis())))


def test_an_elector_that_promised_a_helper_and_a_lone_elector_keep_their_seats() -> None:
    promised = Elector("A")
    promised.prepare(Prepare(0, genesis().id, Ballot(1, "B")))
    assert promised.leave() is None
    assert Elector("A", parent=genesis(helpers=("A",))).leave() is None
    assert Elector("A", parent=genesis(("A",))).leave() is None
    assert Elector("X").leave() is None


# Reforms ------------------------------------------------------------------------------------------------------------------


def owner() -> Elector:
    return Elector("A", parent=genesis(helpers=("A",)))


def test_the_owner_alone_opens_a_term_and_everybody_takes_the_higher_one() -> None:
    helper, voter = owner(), Elector("B", parent=genesis(helpers=("A",)))
    first = commit_after(helper.log.last)
    for elector in (helper, voter):
        elector.learn(decide(first, "BC"))
    with pytest.raises(Refused, match="owner"):
        voter.part.open_term(0)
    voter.learn(decide(commit_after(first), "BC"))
    opened = perform(helper.store, helper.part, helper.part.open_term(0))
    assert (opened.commit.term, opened.commit.round, opened.commit.electorate) == (1, 1, ("A",))
    assert voter.learn(opened)
    assert helper.restarted().log.last == voter.log.last == opened.commit
    assert voter.log.gave_up(commit_after(first).id)
    with pytest.raises(Refused, match="decided otherwise"):
        voter.learn(decide(commit_after(first), "BC"))


def test_each_term_is_above_all_that_the_owner_has_seen() -> None:
    helper = owner()
    terms = [perform(helper.store, helper.part, helper.part.open_term(-1)).commit.term for _ in range(3)]
    assert terms == [1, 2, 3]


@pytest.mark.parametrize("change", [
    {"term": 0}, {"electorate": ("B",)}, {"tokens": 5}, {"round": 1}, {"base_digest": "x"}, {"plan": "p"},
])  # fmt: skip
def test_a_reform_that_is_anything_but_a_new_term_of_the_owner_is_refused(change: dict[str, object]) -> None:
    helper, voter = owner(), Elector("B", parent=genesis(helpers=("A",)))
    commit = dataclasses.replace(helper.part.open_term(-1).reply.commit, **change)  # type: ignore[arg-type]
    with pytest.raises(Refused):
        voter.learn(decide(commit, "A", Ballot(0, "A")))


def test_an_outage_lasts_until_a_majority_is_seen_or_something_is_decided() -> None:
    watch = OutageWatch()
    assert watch.saw("commit", True, 0.0) is None
    first = watch.saw("commit", False, 10.0)
    assert first is not None
    assert watch.saw("commit", False, 35.0) is first
    assert [has_lasted(first.since, now, 30.0) for now in (39.9, 40.0)] == [False, True]
    assert watch.saw("commit", True, 41.0) is None
    again = watch.saw("commit", False, 42.0)
    assert again is not None
    assert again.since == 42.0
    after = watch.saw("next commit", False, 50.0)
    assert after is not None
    assert after.since == 50.0


def test_a_majority_is_seen_in_electors_that_can_vote_or_may_once_they_caught_up() -> None:
    votes, lost, behind = Pong(5, -1, True), Pong(5, -1, False), Pong(4, -1, False)
    for pongs, expected in (((votes, votes, None), True), ((votes, lost, None), False), ((votes, behind, None), True),
                            ((None, None, votes), False)):  # fmt: skip
        assert sees_majority(pongs, ELECTORS, 5) == expected


# Lost disks ---------------------------------------------------------------------------------------------------------------


def voted_on_round_0(voter: Elector) -> None:
    """It voted on round 0 and learned what was decided with its vote."""
    commit = commit_after(genesis())
    voter.accept(Accept(Ballot(1, "B"), commit))
    voter.learn(decide(commit, "AB"))


def test_an_elector_that_lost_its_votes_does_not_vote_until_a_commit_lists_its_new_incarnation() -> None:
    parent, voter = genesis(), Elector("A", seed="another disk")
    assert not voter.acceptor.may_vote
    with pytest.raises(Refused, match="lost its votes"):
        voter.prepare(Prepare(0, parent.id, Ballot(1, "B")))
    with pytest.raises(Refused, match="lost its votes"):
        voter.accept(Accept(Ballot(1, "B"), commit_after(parent)))
    assert voter.leave() is None
    voter.learn(decide(commit_after(parent, incarnations=(voter.acceptor.incarnation, *parent.incarnations[1:])), "BC"))
    assert voter.acceptor.may_vote
    assert voter.prepare(Prepare(1, voter.log.last.id, Ballot(1, "B"))).granted


@pytest.mark.parametrize("harm", ["deleted", "cut", "one byte", "one bit", "from before the vote"])
def test_votes_that_are_lost_damaged_or_older_than_the_log_begin_another_incarnation(
    harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    voter = Elector("A")
    first = voter.acceptor.incarnation
    before = bytes(voter.store.read(VOTES) or b"")
    voted_on_round_0(voter)
    voter = voter.restarted()
    assert voter.acceptor.incarnation == first
    now = bytes(voter.store.read(VOTES) or b"")
    harmed = {"cut": now[:-1], "one byte": b"x", "one bit": now[:40] + bytes([now[40] ^ 1]) + now[41:],
              "from before the vote": before}
    if harm == "deleted":
        voter.store.delete(VOTES)
    else:
        voter.store.write(VOTES, [harmed[harm]])
    again = Elector("A", voter.store, seed="another disk")
    assert again.acceptor.incarnation != first
    assert not again.acceptor.may_vote
    damaged = "the file 'votes' in this run-dir is damaged; this peer casts no vote until a commit lists its new ones"
    older = "the votes of this peer are older than its vote on round 0; it votes again when a commit lists its new ones"
    told = {"deleted": [], "from before the vote": [older]}.get(harm, [damaged])
    assert [message.split(", as a rule")[0] for message in caplog.messages] == told
    assert again.restarted().acceptor.incarnation == again.acceptor.incarnation


def test_an_elector_restored_from_an_old_copy_begins_another_incarnation_once_it_learns_how_it_voted() -> None:
    voter = Elector("A")
    old = voter.store.copied()
    voted_on_round_0(voter)
    decided = voter.log.at(0)
    voter.accept(Accept(Ballot(1, "B"), commit_after(decided.commit)))
    voter = Elector("A", old, seed="another disk")
    assert voter.acceptor.may_vote
    voter.learn(decided)
    with pytest.raises(Refused, match="lost its votes"):
        voter.prepare(Prepare(1, decided.commit.id, Ballot(2, "C")))
    voter = voter.restarted()
    assert not voter.acceptor.may_vote
    listed = commit_after(decided.commit, incarnations=(voter.acceptor.incarnation, *decided.commit.incarnations[1:]))
    voter.learn(decide(listed, "BC"))
    assert voter.acceptor.may_vote


def test_a_vote_that_somebody_else_put_into_a_certificate_takes_no_incarnation() -> None:
    voter = Elector("A")
    decided = decide(commit_after(genesis()), "BC")
    forged = dataclasses.replace(decided, votes=(*decided.votes, Vote("A", SimulatedIdentity("B").sign(b"anything"))))
    for _ in range(2):
        voter.learn(forged)
        assert voter.acceptor.may_vote
        voter = voter.restarted()


@pytest.mark.parametrize(("electors", "follows"), [
    ("AB", "no round is decided without the votes of this peer, so rounds wait until the owner's bootstrap peer reforms"),
    ("A", "no round is decided without the votes of this peer, so rounds wait until the owner's bootstrap peer reforms"),
    ("ABC", "this peer casts no vote until a commit lists its new ones, as a rule in two rounds"),
    ("B", "it is made anew"),
])
def test_who_lost_its_votes_says_what_that_means_for_the_rounds(
    electors: str, follows: str, caplog: pytest.LogCaptureFixture
) -> None:
    voter = Elector("A")
    voter.store.write(VOTES, [b"x"])
    Elector("A", voter.store, genesis(tuple(electors)))
    [message] = caplog.messages
    assert message.startswith(f"the file 'votes' in this run-dir is damaged; {follows}")


@pytest.mark.parametrize(("name", "follows"), [
    ("A", "other peers have the owner's orders"),
    ("W", "an order that no round has applied yet is lost unless other peers have it; repeat what spes-p2p status does"),
])
def test_the_owner_is_told_that_an_order_may_be_lost_with_its_file(
    name: str, follows: str, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Elector(name)
    peer.store.write(CONTROL, [b"x"])
    peer.restarted()
    [message] = caplog.messages
    assert message.startswith(f"the file 'control' in this run-dir is damaged; {follows}")


@pytest.mark.parametrize("of_another", [b"x", pack(Control("another", 1, "paused", (), -1, b""))])
@pytest.mark.parametrize(("name", "follows"), [("A", "other peers have the owner's orders"), ("W", "an order that no round")])
def test_an_order_that_is_not_this_campaigns_is_dropped_and_told(
    of_another: bytes, name: str, follows: str, caplog: pytest.LogCaptureFixture
) -> None:
    peer = Elector(name)
    peer.store.write(CONTROL, [frame_record(of_another)])
    assert peer.restarted().part.controls.newest is None
    [message] = caplog.messages
    assert message.startswith(f"the control record of this peer is damaged, or another campaign's; {follows}")


def test_an_elector_that_lost_the_end_of_its_log_does_not_vote_on_an_earlier_round_than_before() -> None:
    voter = Elector("A")
    voted_on_round_0(voter)
    decided = voter.log.at(0)
    voter.prepare(Prepare(1, decided.commit.id, Ballot(1, "B")))
    voter.store.delete(LOG)
    voter = voter.restarted()
    with pytest.raises(Refused, match="log was cut"):
        voter.prepare(Prepare(0, genesis().id, Ballot(9, "B")))
    voter.learn(decided)
    assert not voter.prepare(Prepare(1, decided.commit.id, Ballot(1, "B"))).granted
    assert voter.prepare(Prepare(1, decided.commit.id, Ballot(2, "B"))).granted


# Certificates -------------------------------------------------------------------------------------------------------------


def test_a_majority_of_the_parents_electorate_proves_a_commit() -> None:
    parent = genesis()
    commit = commit_after(parent, electorate=("X", "Y", "Z"))
    assert proves(decide(commit, "AB"), parent, SimulatedIdentity("me"))
    assert proves(decide(commit, "ABC"), parent, SimulatedIdentity("me"))


WRONG: dict[str, CertifiedCommit] = {
    "too few votes": decide(commit_after(genesis()), "A"),
    "one elector's vote twice": decide(commit_after(genesis()), "AA"),
    "votes of strangers": decide(commit_after(genesis()), "AXY"),
    "votes of the new electorate": decide(commit_after(genesis(), electorate=("X", "Y", "Z")), "XYZ"),
    "votes for another commit": decide(commit_after(genesis()), "ABC", signed=commit_after(genesis(), tokens=5)),
    "votes of another ballot": dataclasses.replace(decide(commit_after(genesis()), "ABC"), ballot=Ballot(2, "A")),
    "another parent": decide(commit_after(genesis(), parent="other"), "ABC"),
    "another campaign": decide(commit_after(genesis(), campaign="other"), "ABC"),
    "a round too far": decide(commit_after(genesis(), round=1), "ABC"),
    "forged signatures": CertifiedCommit(
        commit_after(genesis()), Ballot(1, "A"), tuple(Vote(name, b"\x00" * 16) for name in "ABC")),
    "no votes": decide(commit_after(genesis()), ""),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_certificate_that_does_not_hold_is_refused_and_leaves_no_trace(wrong: str) -> None:
    reader = Elector("me")
    with pytest.raises(Refused):
        reader.learn(WRONG[wrong])
    assert reader.restarted().log.round == -1


def test_the_log_is_a_chain_that_survives_a_restart() -> None:
    reader = Elector("me")
    log = reader.log
    for number in range(3):
        assert reader.learn(decide(commit_after(log.last, tokens=number), "AC"))
    assert not reader.learn(log.at(1))
    with pytest.raises(Refused, match="decided otherwise"):
        reader.learn(decide(commit_after(log.commit_at(0), tokens=99), "AB"))
    reopened = reader.restarted().log
    assert reopened.since(-1) == log.since(-1)
    assert reopened.commit_at(-1) == genesis()
    with pytest.raises(IndexError):
        reopened.at(3)


def test_records_of_a_log_that_do_not_follow_are_dropped_for_good() -> None:
    reader = Elector("me")
    for number in range(3):
        reader.learn(decide(commit_after(reader.log.last, tokens=number), "AC"))
    records = reader.store.records(LOG)
    reader.store.delete(LOG)
    for record in (records[0], records[2], records[1]):
        reader.store.append(LOG, record)
    assert reader.restarted().log.round == 0
    assert reader.store.reopen().records(LOG)[:1] == records[:1]
    again = reader.restarted()
    assert again.store.records(LOG) == records[:1]


@pytest.mark.parametrize("damaged", [None, 10, 90])
def test_of_a_long_log_only_the_last_commits_are_read_whole_at_a_start(
    damaged: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, work = CommitLog(SimulatedIdentity("A"), genesis()), (Workload(1, (Interval(0, 1, 2),)), Workload(2, ()))
    for number in range(100):
        last, verdicts = log.last, (Verdict("A", "B", 1, number % 7 > 0),)
        made: dict[str, Any] = {"members": ("A", "B"), "owners": ((0,), (1,)), "heard": (0, 1)}
        made |= {"workloads": work, "verdicts": verdicts}
        log.put(CertifiedCommit(dataclasses.replace(last, round=number, parent=last.id, **made), Ballot(1, "A"), ()))
    records, read = [pack(each) for each in log.since(-1)], list[type]()
    if damaged is not None:
        records[damaged] = pack(log.at(damaged + 1))

    def count(cls: type[Any], data: bytes) -> Any:
        read.append(cls)
        return unpack(cls, data)

    monkeypatch.setattr(commit_log, "unpack", count)
    again, known = CommitLog(SimulatedIdentity("A"), genesis(), records), damaged or 100
    if damaged is None:
        assert len(read) <= commit_log.KEPT_READ + 3
    assert again.intact == known
    assert len(again._decided._last) == min(known, commit_log.KEPT_READ)
    assert again.since(-1) == log.since(-1, known)
    assert again.recent(known - 1) == log.recent(known - 1)
    assert all(again.services(number) == log.services(number) for number in range(known))
    assert again.packed_page(3, 5) == log.packed_page(3, 5)
    assert again._decided._lists == log._decided._lists[:known]


# The electorate -----------------------------------------------------------------------------------------------------------

NAMES = st.sets(st.sampled_from("ABCDEFGHIJ"))


@given(helpers=st.sets(st.sampled_from("XY")), members=NAMES, last=NAMES)
def test_helpers_then_the_longest_serving_members_are_electors(helpers: set[str], members: set[str], last: set[str]) -> None:
    chosen = choose_electorate(tuple(sorted(helpers)), members, tuple(sorted(last)))
    assert len(chosen) <= MAX_ELECTORS
    assert chosen == tuple(sorted(set(chosen)))
    assert set(chosen) <= helpers | members
    if len(members) != 1:
        there = min(MAX_ELECTORS, len(helpers | members))
        assert len(chosen) == there - (there > 0 and there % 2 == 0), "an odd number"
        assert helpers <= set(chosen) or not members
        if (members & last) - set(chosen):
            assert set(chosen) <= helpers | last


@given(st.integers(1, MAX_ELECTORS))
def test_any_two_majorities_share_an_elector(count: int) -> None:
    assert 2 * quorum(tuple("ABCDEFG"[:count])) > count


def test_helpers_coordinate_what_is_too_much_for_a_home_router() -> None:
    first = commit_after(Elector("me").log.last)
    few = dataclasses.replace(first, helpers=("X", "Y"), electorate=("A", "B", "C", "X", "Y"))
    many = dataclasses.replace(few, members=tuple(f"{i:03}" for i in range(HOME_CONNECTIONS + 1)))
    limit = dataclasses.replace(few, members=many.members[1:])
    for commit in (few, limit):
        assert set(coordinator_order(commit)[-2:]) == {"X", "Y"}
    assert set(coordinator_order(many)[:2]) == {"X", "Y"}
    assert sorted(coordinator_order(many)) == sorted(many.electorate)
    assert len({coordinator_order(dataclasses.replace(many, round=number))[:2] for number in range(9)}) == 2, "they take turns"


# Without I/O --------------------------------------------------------------------------------------------------------------

FOREIGN = {"asyncio", "hivemind", "torch", "numpy", "socket"}
PURE = {
    "__future__", "collections", "dataclasses", "enum", "hashlib", "json", "logging", "random", "re", "typing", "time.gmtime",
    "time.strftime",
}  # fmt: skip
"""What the package may import beside records and errors: no clock, file, thread or network."""
IMPURE_BUILTINS = {"open", "input", "print", "exec", "eval", "__import__"}


def test_the_package_imports_nothing_but_records_errors_and_what_does_no_io() -> None:
    (folder,) = map(Path, spes_p2p.consensus.__path__)
    imported, named = set[str](), set[str]()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported.update(name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, file
                imported.update(f"{node.module}.{name.name}" for name in node.names)
            elif isinstance(node, ast.Name):
                named.add(node.id)
    allowed = ("spes_p2p.consensus.", "spes_p2p.messages.", "spes_p2p.errors.")
    foreign = {name for name in imported if not name.startswith(allowed)}
    assert not {name for name in foreign if not {name, name.split(".")[0]} & PURE}
    assert not named & IMPURE_BUILTINS


def test_the_package_can_be_taken_alone() -> None:
    load = "import sys, spes_p2p.consensus.participant, spes_p2p.consensus.proposer, spes_p2p.consensus.reform; "
    show = "print(*sorted({name.split('.')[0] for name in sys.modules} | {n for n in sys.modules if n.startswith('spes_p2p')}))"
    output = subprocess.run([sys.executable, "-c", load + show], capture_output=True, text=True, check=True).stdout.split()
    assert not FOREIGN & set(output)
    packages = {".".join(name.split(".")[:2]) for name in output if name.startswith("spes_p2p")}
    assert packages == {"spes_p2p", "spes_p2p.consensus", "spes_p2p.messages", "spes_p2p.errors"}


# A long log ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [640, MAX_EXPERTS])
def test_a_page_of_commits_with_many_experts_can_be_read(experts: int) -> None:
    log, last = CommitLog(SimulatedIdentity("A"), genesis()), genesis()
    for _ in range(300):
        last = dataclasses.replace(last, round=last.round + 1, parent=last.id, owners=((0,),) * experts)
        log.put(CertifiedCommit(last, Ballot(1, "A"), ()))
    first, read = -1, 0
    while page := log.page(first, 200):
        assert unpack(Decide, log.packed_page(first, 200)).decided == page
        first, read = page[-1].commit.round, read + len(page)
    assert read == 300


def test_a_long_log_returns_what_was_put_and_gives_up_a_branch_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    log, chain = CommitLog(SimulatedIdentity("A"), genesis()), [genesis()]

    def following(parent: Commit, term: int) -> CertifiedCommit:
        commit = dataclasses.replace(parent, term=term, round=parent.round + 1, parent=parent.id)
        return CertifiedCommit(commit, Ballot(1, "A"), ())

    for _ in range(100):
        log.put(following(chain[-1], 0))
        chain.append(log.last)
    assert [log.commit_at(number) for number in range(-1, 100)] == chain
    assert [each.commit for each in log.since(10, 3)] == chain[12:15]
    assert [each.commit for each in log.since(97, 8)] == chain[99:]
    assert log.page(97, 8) == log.since(97, 8)
    assert log.page(10, 3) == log.since(10, 3)
    monkeypatch.setattr(commit_log, "PAGE_BYTES", 2 * len(pack(log.since(98)[0])) + 20)
    assert log.page(10, 50) == log.since(10, 2)
    monkeypatch.setattr(commit_log, "PAGE_BYTES", 1)
    assert log.page(10, 50) == log.since(10, 1)
    with monkeypatch.context() as patched:
        for reads_or_packs in ("unpack", "pack"):
            patched.delattr(commit_log, reads_or_packs)
        page = log.packed_page(10, 50)
    assert page == pack(Decide(log.since(10, 1)))
    log.put(following(chain[50], 1))
    assert (log.round, log.last.term) == (50, 1)
    assert log.gave_up(chain[51].id)
    assert log.gave_up(chain[100].id)
    assert not log.gave_up(chain[50].id)
    assert log.recent(50) == (log.last, *reversed(chain[44:51]))
    assert [log.commit_at(number) for number in range(-1, 50)] == chain[:51]
