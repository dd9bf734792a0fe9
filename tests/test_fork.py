"""A round that liars decided twice: it is seen, the liars are named, and the owner's next term brings everybody together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest
from electors import Elector, commit_after, decide, genesis

from spes_p2p.consensus.acceptor import VoteState
from spes_p2p.consensus.certificate import proves
from spes_p2p.consensus.fork import OtherBranches
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.compact import compressed
from spes_p2p.messages.consensus import Ballot, CertifiedCommit, Commit, CommitsRequest, Decide
from spes_p2p.messages.fields import MAX_BANNED
from spes_p2p.messages.methods import COMMITS
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.shares import Shares
from spes_p2p.peer.decisions import Decisions
from spes_p2p.peer.durable import perform
from spes_p2p.peer.validity import Validity
from spes_p2p.testing.in_memory_world import in_memory_world
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulated_identity import SimulatedIdentity

BALLOT = Ballot(1, "A")
ONE, OTHER = (decide(commit_after(genesis(), tokens=n), voters, BALLOT) for n, voters in ((1, "AB"), (2, "BC")))
"""The same ballot, with two majorities that share B."""


class Reader:
    """A peer, and what it is offered."""

    def __init__(self, name: str, *known: CertifiedCommit):
        self.elector = Elector(name)
        self.branches = OtherBranches(self.elector.log, SimulatedIdentity(name))
        for decided in known:
            assert self.offer(decided)

    @property
    def last(self) -> Commit:
        return self.elector.log.last

    def offer(self, decided: CertifiedCommit) -> bool:
        """As `Decisions.learn`."""
        try:
            return self.elector.learn(decided)
        except Refused:
            branch = self.branches.offered(decided)
            return bool(branch) and perform(self.elector.store, self.elector.part, self.elector.part.learn_branch(branch))

    def open_term(self, round_number: int, liars: tuple[str, ...] = ()) -> CertifiedCommit:
        return perform(self.elector.store, self.elector.part, self.elector.part.open_term(round_number, liars))


def test_who_signed_two_commits_in_one_ballot_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader("A", ONE)
    assert not any(reader.offer(OTHER) for _ in range(3))
    fork = reader.branches.fork
    assert fork is not None
    assert (fork.mine, fork.other, fork.liars) == (ONE, OTHER, ("B",))
    assert caplog.text.count("round 0 was decided twice: signed two commits in one ballot: B") == 1


def test_a_vote_hidden_from_a_later_ballot_makes_a_fork_that_names_nobody() -> None:
    """Honest electors vote for one commit in one ballot and for another one in the next when a promise hid the first."""
    reader = Reader("A", ONE)
    reader.offer(decide(OTHER.commit, "BC", Ballot(2, "C")))
    assert reader.branches.fork is not None
    assert reader.branches.fork.liars == ()


@pytest.mark.parametrize(
    "other",
    [
        ONE,
        decide(OTHER.commit, "B", BALLOT),
        decide(OTHER.commit, "BC", BALLOT, signed=ONE.commit),
        decide(replace(OTHER.commit, parent="another"), "BC", BALLOT),
        decide(replace(OTHER.commit, term=1), "BC", BALLOT),
        decide(replace(OTHER.commit, round=-1), "BC", BALLOT),
        decide(commit_after(OTHER.commit), "BC", BALLOT),
    ],
    ids=["the same", "a minority", "forged", "another parent", "another term", "genesis", "a later round"],
)
def test_only_two_certificates_for_one_round_are_a_fork(other: CertifiedCommit) -> None:
    reader = Reader("A", ONE)
    assert not reader.offer(other)
    assert reader.branches.fork is None


@pytest.mark.parametrize("third", [(), (decide(commit_after(genesis(), tokens=3), "BC", Ballot(3, "C")),)])
def test_both_sides_meet_on_the_branch_on_which_the_owner_opens_a_term(third: tuple[CertifiedCommit, ...]) -> None:
    """The owner is two rounds ahead on its side. The liar has no part in what follows."""
    later = decide(commit_after(OTHER.commit), "BC", BALLOT)
    owner, strayed = Reader("W", OTHER, later), Reader("A", ONE)
    for decided in (*third, OTHER, later):
        assert not strayed.offer(decided)
    assert not owner.offer(ONE)
    assert owner.branches.fork is not None
    opened = owner.open_term(1, owner.branches.fork.liars)
    assert (opened.commit.excluded, opened.commit.electorate) == (("B",), ("W",))
    assert strayed.last == ONE.commit
    assert strayed.offer(opened)
    assert strayed.last == opened.commit
    assert strayed.elector.restarted().log.last == opened.commit
    assert strayed.elector.log.commit_at(0) == OTHER.commit
    assert (owner.branches.fork, strayed.branches.fork) == (None, None)
    assert not strayed.offer(ONE), "the other side is over"
    assert strayed.branches.fork is None


def test_the_owner_keeps_its_seat_whatever_it_signed() -> None:
    owner = Reader("W", ONE)
    assert owner.open_term(0, ("B", "W")).commit.excluded == ("B",)


def test_a_branch_needs_its_certificates_and_a_later_term() -> None:
    owner, strayed = Reader("W", OTHER), Reader("A", ONE)
    opened = owner.open_term(0)
    for branch in ((OTHER,), (decide(OTHER.commit, "B", BALLOT), opened), (OTHER, replace(opened, votes=OTHER.votes))):
        with pytest.raises(Refused, match=r"does not end in a later term|does not hold"):
            strayed.elector.part.learn_branch(branch)
    assert strayed.elector.part.learn_branch((OTHER, opened)).reply


def test_a_term_frees_nobody_that_a_proof_excludes() -> None:
    parent = commit_after(genesis(), excluded=("C",))
    owner = Reader("W", decide(parent, "AB", BALLOT))
    opened = owner.open_term(0, ("B",))
    assert opened.commit.excluded == ("B", "C")
    identity = SimulatedIdentity("W")
    assert proves(opened, parent, identity)
    assert not proves(decide(replace(opened.commit, excluded=("B",)), "W", opened.ballot), parent, identity)


def test_a_term_excludes_as_many_liars_as_a_commit_may_name_beside_those_of_its_parent() -> None:
    before = tuple(f"X{number:03}" for number in range(MAX_BANNED - 1))
    parent = commit_after(genesis(), excluded=before)
    opened = Reader("W", decide(parent, "AB", BALLOT)).open_term(0, ("B", "C"))
    assert opened.commit.excluded == ("B", *before)
    assert proves(opened, parent, SimulatedIdentity("W"))


class Owner:
    """Answers requests for commits with its own."""

    silence_s = 1.0

    def __init__(self, *decided: CertifiedCommit):
        self._decided, self.shares = decided, Shares(self.silence_s, lambda: 1e9)

    async def ask_in_turn(self, peer: str, method: str, body: bytes, is_patient: bool) -> bytes:
        assert method == COMMITS
        after = unpack(CommitsRequest, body).after
        return compressed(pack(Decide(tuple(each for each in self._decided if each.commit.round > after))))


class AnythingFits:
    def recall(self, votes: VoteState) -> None: ...

    def require_fit(self, decided: CertifiedCommit) -> None: ...


def test_a_peer_fetches_a_branch_of_several_rounds_that_forks_before_its_last_one() -> None:
    more = decide(commit_after(ONE.commit), "AB", BALLOT)
    branch = [OTHER]
    for number in range(3):
        branch.append(decide(commit_after(branch[-1].commit, tokens=number), "BC", BALLOT))
    opened = Reader("W", *branch).open_term(3)
    owner = cast(RpcEndpoint, Owner(*branch, opened))
    decisions = Decisions(in_memory_world(MemoryNetwork(), "A"), owner, genesis())
    decisions.check_with(cast(Validity, AnythingFits()))

    async def fetch() -> None:
        for decided in (ONE, more):
            decisions.learn(decided)
        await decisions.learn_from("W")

    asyncio.run(fetch())
    assert decisions.log.last == opened.commit
