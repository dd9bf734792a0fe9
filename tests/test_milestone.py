"""A log begins at the owner's newest milestone: nobody keeps or reads the commits before it, and nothing needs them."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random

import pytest

from spes_p2p.consensus import admission, commit_log
from spes_p2p.consensus import milestone as rules
from spes_p2p.consensus.admission import Service
from spes_p2p.consensus.certificate import vote_message
from spes_p2p.consensus.control import signed
from spes_p2p.consensus.milestone import KEPT_ROUNDS, signed_milestone
from spes_p2p.consensus.output import LOG
from spes_p2p.errors import Refused
from spes_p2p.messages.consensus import Ballot, CertifiedCommit, Commit, Control, Milestone, Vote
from spes_p2p.messages.samples import Cursor
from spes_p2p.peer.durable import open_participant, perform
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.testing.simulated_identity import SimulatedIdentity

OWNER = "A"
ROUNDS = 8
"""In place of ROLLBACK_ROUNDS and KEPT_ROUNDS."""
GENESIS = Commit(
    campaign="c", term=0, round=-1, parent="", plan="", roots=(), dropped=(), base_digest="", step=0, tokens=0, members=(),
    owners=(), cursor=Cursor(), helpers=(OWNER,), electorate=("A", "B", "C"), incarnations=("a", "b", "c"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((rules, "ROLLBACK_ROUNDS"), (commit_log, "ROLLBACK_ROUNDS"), (rules, "KEPT_ROUNDS")):
        monkeypatch.setattr(module, name, ROUNDS)


class Somebody:
    """A participant on a store."""

    def __init__(self, name: str, store: MemoryStore | None = None):
        self.name, self.store = name, store or MemoryStore()
        self.part = open_participant(self.store, SimulatedIdentity(name), GENESIS, random.Random(name), lambda commit: True)
        self.log = self.part.log

    def learn(self, *decided: CertifiedCommit) -> None:
        for each in decided:
            perform(self.store, self.part, self.part.learn(each))

    def take(self, milestone: Milestone | None) -> bool:
        assert milestone is not None
        return perform(self.store, self.part, self.part.take_milestone(milestone))

    def sign(self) -> bool:
        return perform(self.store, self.part, self.part.sign_milestone())

    def open_term(self, round_number: int) -> CertifiedCommit:
        return perform(self.store, self.part, self.part.open_term(round_number))

    def restarted(self) -> Somebody:
        return Somebody(self.name, self.store.reopen())


def certified(commit: Commit) -> CertifiedCommit:
    ballot = Ballot(1, "B")
    message = vote_message(ballot, commit.id)
    return CertifiedCommit(commit, ballot, tuple(Vote(each, SimulatedIdentity(each).sign(message)) for each in "ABC"))


def after(parent: Commit, **changes: object) -> Commit:
    commit = dataclasses.replace(
        parent, round=parent.round + 1, parent=parent.id, plan="p", members=("B", "C"), heard=(0,),
        base_digest=f"d{parent.round}", step=parent.step + 1,
    )  # fmt: skip
    return dataclasses.replace(commit, **changes)  # type: ignore[arg-type]


def chain(count: int, parent: Commit = GENESIS, **changes: object) -> list[CertifiedCommit]:
    decided: list[CertifiedCommit] = []
    for _ in range(count):
        parent = after(parent, **changes)
        decided.append(certified(parent))
    return decided


def owner_after(decided: list[CertifiedCommit]) -> Somebody:
    owner = Somebody(OWNER)
    owner.learn(*decided)
    return owner


def test_a_joiner_that_knows_only_genesis_begins_at_the_milestone_and_counts_as_everybody_else() -> None:
    decided = chain(4 * ROUNDS)
    owner, joiner = owner_after(decided), Somebody("D")
    before = owner.log.services(owner.log.round)
    assert owner.sign()
    assert owner.log.begins == owner.log.round - ROUNDS
    assert joiner.take(owner.log.milestone)
    joiner.learn(*owner.log.since(owner.log.begins))
    for each in (owner, joiner, owner.restarted(), joiner.restarted()):
        assert each.log.last == decided[-1].commit
        assert [decided.commit for decided in each.log.since(-1)] == [each.commit for each in decided[each.log.begins :]]
        assert each.log.services(each.log.round) == before == {"B": Service(4 * ROUNDS)}
        assert each.log.services(each.log.round - 3) == {"B": Service(4 * ROUNDS - 3)}
        assert each.log.recent(each.log.round)[0] == each.log.last
    assert not joiner.take(owner.log.milestone)


def test_logs_stay_short_however_many_rounds_there_are() -> None:
    decided = chain(20 * ROUNDS)
    owner, other = Somebody(OWNER), Somebody("B")
    for each in decided:
        owner.learn(each)
        other.learn(each)
        if owner.log.is_long and owner.sign():
            other.take(owner.log.milestone)
        for peer in (owner, other):
            assert peer.log.round - peer.log.begins <= 2 * ROUNDS
            assert len(peer.store.records(LOG)) <= 2 * ROUNDS + 1
    assert other.restarted().log.last == decided[-1].commit


def test_newcomers_without_end_keep_no_milestone_from_being_signed_and_who_works_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "MAX_SERVED", 64)
    owner, joiner = Somebody(OWNER), Somebody("D")
    for number in range(4 * ROUNDS):
        fresh = (f"{number}-{i}" for i in range(4))
        owner.learn(certified(after(owner.log.last, members=("B", *fresh), heard=tuple(range(5)))))
    served = owner.log.services(owner.log.round)
    assert len(served) <= 64
    assert served["B"] == Service(4 * ROUNDS)
    numbers = {int(peer.split("-")[0]) for peer in served.keys() - {"B"}}
    assert min(numbers) < ROUNDS, "the oldest are not the first to go: who is away for a while has not served in vain"
    assert owner.sign()
    assert joiner.take(owner.log.milestone)
    joiner.learn(*owner.log.since(owner.log.begins))
    assert joiner.log.services(joiner.log.round) == served


def test_only_the_owner_signs_milestones() -> None:
    decided = chain(4 * ROUNDS)
    owner, other, joiner = owner_after(decided), Somebody("B"), Somebody("D")
    owner.sign()
    other.learn(*decided)
    real = owner.log.milestone
    assert real is not None
    unsigned = other.log.next_milestone()
    assert unsigned is not None
    richer = dataclasses.replace(real, served=())
    foreign = dataclasses.replace(real.decided, commit=dataclasses.replace(real.decided.commit, helpers=("B",)))
    forged = [
        signed_milestone(unsigned, SimulatedIdentity("B")), richer,
        signed_milestone(dataclasses.replace(real, decided=foreign), SimulatedIdentity("B")),
        signed_milestone(dataclasses.replace(real, decided=certified(GENESIS)), SimulatedIdentity(OWNER)),
    ]  # fmt: skip
    with pytest.raises(Refused, match="did not sign"):
        other.sign()
    for each in forged[:3]:
        with pytest.raises(Refused, match="did not sign"):
            joiner.take(each)
    assert not joiner.take(forged[3])
    assert joiner.log.round == -1


def test_the_owner_opens_no_term_before_the_milestone() -> None:
    owner = owner_after(chain(4 * ROUNDS))
    assert owner.log.earliest_reform == -1
    owner.sign()
    first = owner.log.earliest_reform
    assert first == owner.log.begins
    for number in (-1, first - 1):
        with pytest.raises(Refused, match="no term begins before"):
            owner.open_term(number)
    assert owner.open_term(first).commit.round == first + 1


def test_a_peer_on_a_branch_that_forked_before_the_milestone_takes_the_owners() -> None:
    decided = chain(4)
    owner, lost = owner_after(decided), Somebody("B")
    lost.learn(*decided, *chain(6 * ROUNDS, decided[-1].commit, tokens=7))
    reform = owner.open_term(3)
    owner.learn(*(certified_by_owner(each.commit) for each in chain(4 * ROUNDS, reform.commit)))
    owner.sign()
    assert lost.take(owner.log.milestone)
    lost.learn(*owner.log.since(owner.log.begins))
    assert lost.log.last == owner.log.last == lost.restarted().log.last
    assert lost.log.last.term == 1
    assert lost.log.gave_up(chain(6 * ROUNDS, decided[-1].commit, tokens=7)[-1].commit.id)


def certified_by_owner(commit: Commit) -> CertifiedCommit:
    ballot = Ballot(1, OWNER)
    vote = Vote(OWNER, SimulatedIdentity(OWNER).sign(vote_message(ballot, commit.id)))
    return CertifiedCommit(commit, ballot, (vote,))


def test_a_milestone_of_a_branch_that_was_given_up_is_refused() -> None:
    decided = chain(4 * ROUNDS)
    owner, other = owner_after(decided), Somebody("B")
    old = owner.log.next_milestone()
    assert old is not None
    reform = owner.open_term(3)
    other.learn(*decided[:4], reform, *(certified_by_owner(each.commit) for each in chain(4 * ROUNDS, reform.commit)))
    with pytest.raises(Refused, match="decided otherwise"):
        other.take(signed_milestone(old, SimulatedIdentity(OWNER)))
    with pytest.raises(Refused, match="decided otherwise"):
        other.learn(decided[4])


def rollback_to(round_number: int, number: int = 1) -> Control:
    order = Control(campaign="c", number=number, state="running", changes=(), rollback=round_number, signature=b"")
    return signed(order, SimulatedIdentity(OWNER))


def test_everybody_judges_each_rollback_alike_wherever_its_log_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "KEPT_ROUNDS", 2)  # as where bytes decide
    owner, whole = owner_after(chain(2 * ROUNDS)), Somebody("B")
    first = owner.log.rolled_back(owner.log.last, rollback_to(owner.log.round - ROUNDS))
    assert first is not None
    owner.learn(certified(first), *chain(2, first))
    whole.learn(*owner.log.since(-1))
    whole.learn(owner.open_term(owner.log.round))
    before_it = set[int]()
    for _ in range(5 * ROUNDS):
        decided = certified_by_owner(after(owner.log.last))
        for each in (owner, whole):
            each.learn(decided)
        if not owner.sign() and owner.log.milestone is None:
            continue
        assert owner.log.milestone is not None
        assert len(owner.log.milestone.past) <= ROUNDS
        joiner = Somebody("D")
        joiner.take(owner.log.milestone)
        joiner.learn(*owner.log.since(owner.log.begins))
        assert joiner.log.last == whole.log.last
        for number in range(whole.log.round):
            order = rollback_to(number, 2)
            commit = whole.log.rolled_back(whole.log.last, order)
            assert joiner.restarted().log.rolled_back(joiner.log.last, order) == commit
            if commit is not None and number < joiner.log.begins:
                before_it.add(number)
                joined = Somebody("E")
                joined.take(owner.log.milestone)
                joined.learn(*owner.log.since(owner.log.begins), certified_by_owner(commit))
                assert joined.log.last == commit
        assert not whole.log.rolled_back(whole.log.last, rollback_to(whole.log.round - ROUNDS - 1, 2))
    assert first.round in before_it
    assert len(before_it) > ROUNDS


def test_no_milestone_stands_at_a_commit_that_does_not_certify_the_base_before_it() -> None:
    owner = owner_after(chain(ROUNDS))
    owner.open_term(owner.log.round)
    reform, waited = owner.log.round, 0
    while owner.log.begins <= reform:
        owner.learn(certified_by_owner(after(owner.log.last)))
        waited += owner.log.is_long and not owner.sign()
        assert owner.log.begins != reform
    assert waited == 1


@pytest.mark.parametrize("members", [4, 64, 1000, 10_000])
def test_a_joiner_reads_a_bounded_number_of_bytes_whatever_the_number_of_members(
    members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "KEPT_ROUNDS", KEPT_ROUNDS)
    sizes, longest, shortest = list[int](), 0, math.inf
    for _ in range(3 * KEPT_ROUNDS):
        sizes.append(2000 + 120 * members)
        longest = max(longest, sum(sizes))
        if place := rules.place_of_next(sizes):
            assert place >= len(sizes) - 1 - place, "signed too often: a log is rewritten then"
            sizes = sizes[place:]
            shortest = min(shortest, len(sizes))
    assert longest <= max(2 * rules.KEPT_BYTES, 2 * rules.LEAST_ROUNDS * sizes[0]) + 2 * sizes[0]
    assert rules.LEAST_ROUNDS <= shortest - 1 <= KEPT_ROUNDS
    assert shortest * sizes[0] > rules.KEPT_BYTES or shortest - 1 == KEPT_ROUNDS


def test_logs_of_many_members_are_cut_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "KEPT_ROUNDS", KEPT_ROUNDS)
    monkeypatch.setattr(rules, "KEPT_BYTES", 2**16)
    owner, rounds = Somebody(OWNER), 3 * rules.LEAST_ROUNDS
    for _ in range(rounds):
        owner.learn(certified(after(owner.log.last, members=tuple(f"member {i:057}" for i in range(64)))))
        owner.sign()
    assert owner.log.begins > 0
    assert rules.LEAST_ROUNDS <= owner.log.round - owner.log.begins < 2 * rules.LEAST_ROUNDS


@pytest.mark.parametrize("point", ["write:rename", "write:done"])
def test_a_crash_while_the_log_is_cut_leaves_the_old_log_or_the_new_one(point: str) -> None:
    decided = chain(4 * ROUNDS)
    owner = owner_after(decided)

    def crash(at: str, name: str) -> None:
        if (at, name) == (point, LOG):
            raise asyncio.CancelledError

    owner.store.fault = crash
    with pytest.raises(asyncio.CancelledError):
        owner.sign()
    owner.store.fault = None
    again = owner.restarted()
    assert again.log.last == decided[-1].commit
    assert (again.log.begins == -1) == (point == "write:rename")


@pytest.mark.long
async def test_a_swarm_keeps_short_logs_and_a_late_joiner_and_those_that_were_away_go_on_with_it() -> None:
    swarm = VirtualSwarm(campaign(total_steps=100_000, sync={"min_peers": 2}))
    swarm.start_bootstrap()
    for name in "ABCE":
        swarm.start(name)
    await swarm.until(lambda: all(swarm.round_of(name) >= 3 for name in "ABCE"))
    swarm.kill("C")
    swarm.network.stop("E")
    await swarm.until(lambda: swarm.round_of("A") >= 4 * ROUNDS and swarm.round_of("B") >= 4 * ROUNDS)
    for peer in (swarm.peers["A"], swarm.peers["B"]):
        assert peer.node.log.begins > 3
    swarm.start_again("C")
    swarm.start("D")
    swarm.network.resume("E")
    reached = swarm.round_of("A") + 5
    await swarm.until(lambda: all(swarm.round_of(name) >= reached for name in "ABCDE"))
    for name in "ABCDE":
        log = swarm.peers[name].node.log
        assert log.begins > 0
        assert log.round - log.begins < 3 * ROUNDS
    assert {"C", "D", "E"} <= set(swarm.peers["A"].node.log.last.members)
    swarm.assert_same_commits()
    assert all(len(digests) == 1 for digests in swarm.digests().values())


@pytest.mark.long
async def test_who_restarts_with_a_milestone_of_another_branch_than_its_base_takes_the_newest_base() -> None:
    """The log that a milestone replaced named the branch of the base, and nobody is there to reach the round of the base."""
    swarm = VirtualSwarm(campaign(total_steps=2000, sync={"min_peers": 1, "reform_after_s": 30.0}))
    swarm.start_all("A")
    await swarm.until(lambda: swarm.round_of("A") >= 2 and swarm.helper.replica.base.round >= 2)
    swarm.network.partition(["W"], ["A"])
    await swarm.until(lambda: swarm.round_of("A") >= 5 * ROUNDS)
    swarm.kill("A")
    swarm.network.heal()
    swarm.start("B")
    await swarm.until(lambda: swarm.nodes["W"].log.last.term == 1 and swarm.nodes["W"].log.begins > ROUNDS)
    swarm.kill("B")
    swarm.start_again("A")
    await swarm.until(lambda: swarm.nodes["A"].log.last.term == 1)
    assert swarm.nodes["A"].log.begins > ROUNDS
    assert swarm.round_of("A") > swarm.nodes["W"].log.round
    swarm.restart("A")
    await swarm.until(lambda: swarm.peers["A"].replica.has_base)
    base = swarm.round_of("A")
    await swarm.until(lambda: swarm.round_of("A") < base, 200.0)
    await swarm.until(lambda: swarm.round_of("A") > base, 2000.0)
