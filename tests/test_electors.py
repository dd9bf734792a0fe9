"""One round, one head, whatever is lost, repeated, reordered or restarted; only the right electorate's majority proves it."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.data.slices import Cursor
from spes_p2p.errors import Refused
from spes_p2p.swarm.electors import (
    BALLOT_STEP,
    LOG,
    MAX_ELECTORS,
    VOTES,
    Accept,
    Elector,
    HeadLog,
    Prepare,
    Promise,
    bound_head,
    choose_electorate,
    open_votes,
    proves,
    quorum,
    vote_message,
    weigh,
)
from spes_p2p.swarm.identity import SimulatedIdentity
from spes_p2p.swarm.records import Ballot, Decided, Head, Vote
from spes_p2p.swarm.store import MemoryStore

ELECTORS = ("A", "B", "C")


def genesis(electorate: tuple[str, ...] = ELECTORS) -> Head:
    return Head(
        campaign="c", epoch=0, round=-1, parent="", plan="", roots=(), dropped=(), base_digest="", step=0, tokens=0,
        members=(), owners=(), cursor=Cursor(), helpers=(), electorate=electorate, disks=tuple(map(disk_of, electorate)),
    )


def disk_of(name: str) -> str:
    """Id of the first disk of this elector, as `elector` makes it."""
    return open_votes(MemoryStore(), random.Random(name)).disk


def head_after(before: Head, tokens: int = 0, **changes: object) -> Head:
    head = dataclasses.replace(before, round=before.round + 1, parent=before.id, plan="p", tokens=tokens)
    return dataclasses.replace(head, **changes)  # type: ignore[arg-type]


def elector(name: str, store: MemoryStore, parent: Head | None = None) -> Elector:
    identity = SimulatedIdentity(name)
    return Elector(HeadLog(store, identity, parent or genesis()), store, identity, random.Random(name))


def decide(head: Head, voters: str, ballot: Ballot | None = None, signed: Head | None = None) -> Decided:
    ballot = ballot or Ballot(1, "A")
    message = vote_message(ballot, (signed or head).id)
    return Decided(head, ballot, tuple(Vote(name, SimulatedIdentity(name).sign(message)) for name in voters))


# Safety -------------------------------------------------------------------------------------------------------------------


class Coordinator:
    """Runs ballots as `Coordination` does; each time it begins anew it remembers nothing and proposes another head."""

    def __init__(self, name: str):
        self.name = name
        self.number = 0
        self.promises: dict[str, Promise] = {}
        self.proposed: Head | None = None

    def begin(self, forget: bool) -> None:
        self.number = 1 if forget else self.number + 1
        self.promises, self.proposed = {}, None

    @property
    def ballot(self) -> Ballot:
        return Ballot(self.number, self.name)


class Race:
    """Two coordinators, three electors, and a network that delivers in any order, twice, late or never."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.parent = genesis()
        self.stores = {name: MemoryStore() for name in ELECTORS}
        self.electors = {name: elector(name, store) for name, store in self.stores.items()}
        self.coordinators = [Coordinator("A"), Coordinator("B")]
        self.flying: list[tuple[Coordinator, str, Prepare | Accept]] = []
        self.votes: dict[tuple[Ballot, str], set[str]] = {}
        self.heads_made = 0

    def step(self) -> None:
        action = self.rng.random()
        if action < 0.12 or not self.flying:
            self.begin(self.rng.choice(self.coordinators))
        elif action < 0.2:
            self.flying.pop(self.rng.randrange(len(self.flying)))
        elif action < 0.28:
            self.restart(self.rng.choice(ELECTORS))
        else:
            place = self.rng.randrange(len(self.flying))
            message = self.flying[place]
            if self.rng.random() < 0.9:
                self.flying.pop(place)
            self.deliver(*message)

    def begin(self, coordinator: Coordinator) -> None:
        coordinator.begin(forget=self.rng.random() < 0.5)
        request = Prepare(0, self.parent.id, coordinator.ballot)
        self.flying += [(coordinator, name, request) for name in ELECTORS]

    def restart(self, name: str) -> None:
        self.stores[name] = self.stores[name].reopen()
        self.electors[name] = elector(name, self.stores[name])

    def deliver(self, coordinator: Coordinator, name: str, request: Prepare | Accept) -> None:
        reply_arrives = self.rng.random() < 0.8 and request.ballot == coordinator.ballot
        if isinstance(request, Prepare):
            promise = self.electors[name].prepare(request)
            if reply_arrives:
                self.on_promise(coordinator, name, promise)
            return
        try:
            vote = self.electors[name].accept(request)
        except Refused:
            return
        self.votes.setdefault((request.ballot, request.head.id), set()).add(vote.elector)

    def on_promise(self, coordinator: Coordinator, name: str, promise: Promise) -> None:
        if not promise.granted:
            if promise.promised is not None and promise.promised.number >= coordinator.number:
                coordinator.number = promise.promised.number
            return
        coordinator.promises[name] = promise
        if coordinator.proposed is None and len(coordinator.promises) >= quorum(ELECTORS):
            bound = bound_head(coordinator.promises.values())
            self.heads_made += 1
            coordinator.proposed = bound if bound is not None else head_after(self.parent, tokens=self.heads_made)
            request = Accept(coordinator.ballot, coordinator.proposed)
            self.flying += [(coordinator, elector_name, request) for elector_name in ELECTORS]

    @property
    def decided(self) -> set[str]:
        return {head for (_, head), voters in self.votes.items() if len(voters) >= quorum(ELECTORS)}


def test_two_coordinators_never_decide_two_heads_under_loss_reordering_and_restarts() -> None:
    decided_runs = 0
    for seed in range(400):
        race = Race(seed)
        for _ in range(60):
            race.step()
        assert len(race.decided) <= 1, f"seed {seed}"
        decided_runs += len(race.decided)
    assert decided_runs > 200


def test_a_ballot_is_promised_once_and_never_below_the_highest() -> None:
    store = MemoryStore()
    parent = genesis()
    assert elector("A", store).prepare(Prepare(0, parent.id, Ballot(2, "B"))).granted
    for ballot in (Ballot(2, "B"), Ballot(2, "A"), Ballot(1, "C")):
        refused = elector("A", store := store.reopen()).prepare(Prepare(0, parent.id, ballot))
        assert (refused.granted, refused.promised) == (False, Ballot(2, "B"))
    assert elector("A", store.reopen()).prepare(Prepare(0, parent.id, Ballot(2, "C"))).granted


def test_an_elector_remembers_over_a_crash_what_it_accepted_and_tells_the_next_coordinator() -> None:
    store, parent = MemoryStore(), genesis()
    head = head_after(parent)
    elector("A", store).accept(Accept(Ballot(1, "B"), head))
    promise = elector("A", store.reopen()).prepare(Prepare(0, parent.id, Ballot(2, "C")))
    assert (promise.accepted_ballot, promise.accepted) == (Ballot(1, "B"), head)


def test_an_elector_refuses_to_accept_below_its_promise_or_on_another_parent() -> None:
    store, parent = MemoryStore(), genesis()
    voter = elector("A", store)
    voter.prepare(Prepare(0, parent.id, Ballot(3, "B")))
    with pytest.raises(Refused, match="promised ballot 3"):
        voter.accept(Accept(Ballot(2, "C"), head_after(parent)))
    with pytest.raises(Refused, match="my head is round -1"):
        voter.accept(Accept(Ballot(4, "B"), head_after(head_after(parent))))
    with pytest.raises(Refused, match="my head is round -1"):
        voter.accept(Accept(Ballot(4, "B"), head_after(parent, parent="other")))


def test_who_is_not_an_elector_does_not_vote() -> None:
    parent = genesis()
    with pytest.raises(Refused, match="not an elector"):
        elector("X", MemoryStore()).prepare(Prepare(0, parent.id, Ballot(1, "A")))
    with pytest.raises(Refused, match="not an elector"):
        elector("X", MemoryStore()).accept(Accept(Ballot(1, "A"), head_after(parent)))


def test_no_elector_can_use_up_the_ballots_of_a_round() -> None:
    """C drives A as far as it can and is gone; B, which C told nothing, finds a ballot that both promise all the same."""
    parent, electors = genesis(), {name: elector(name, MemoryStore()) for name in "AB"}
    far = Ballot(0, "C")
    for request in (electors["A"].prepare, lambda prepare: electors["A"].accept(Accept(prepare.ballot, head_after(parent)))):
        with pytest.raises(Refused, match="far above"):
            request(Prepare(0, parent.id, Ballot(BALLOT_STEP + 1, "C")))
    for _ in range(10):
        far = Ballot(far.number + BALLOT_STEP, "C")
        assert electors["A"].prepare(Prepare(0, parent.id, far)).granted
    number, tries = 0, 0
    while not (found := weigh(
        [voter.prepare(Prepare(0, parent.id, Ballot(number + 1, "B"))) for voter in electors.values()], ELECTORS
    )).won:
        number, tries = found.highest, tries + 1
    assert far.number < number + 1 <= far.number + BALLOT_STEP
    assert tries <= 12


def test_votes_of_one_round_do_not_bind_the_next() -> None:
    store, identity = MemoryStore(), SimulatedIdentity("A")
    log = HeadLog(store, identity, genesis())
    voter = Elector(log, store, identity, random.Random("A"))
    first = head_after(log.head)
    voter.prepare(Prepare(0, log.head.id, Ballot(9, "C")))
    voter.accept(Accept(Ballot(9, "C"), first))
    log.append(decide(first, "ABC"))
    promise = voter.prepare(Prepare(1, first.id, Ballot(1, "B")))
    assert promise == Promise(0, True, Ballot(1, "B"), None, None)


# Lost disks ---------------------------------------------------------------------------------------------------------------


def voted_on_round_0(store: MemoryStore) -> HeadLog:
    """A's disk after it voted on round 0 and learned what was decided with its vote."""
    head = head_after(genesis())
    elector("A", store).accept(Accept(Ballot(1, "B"), head))
    log = HeadLog(store, SimulatedIdentity("A"), genesis())
    log.append(decide(head, "AB"))
    return log


def test_who_lost_its_votes_does_not_vote_until_a_head_lists_its_new_disk() -> None:
    parent, store = genesis(), MemoryStore()
    identity = SimulatedIdentity("A")
    log = HeadLog(store, identity, parent)
    voter = Elector(log, store, identity, random.Random("another disk"))
    assert not voter.may_vote
    with pytest.raises(Refused, match="votes were lost"):
        voter.prepare(Prepare(0, parent.id, Ballot(1, "B")))
    with pytest.raises(Refused, match="votes were lost"):
        voter.accept(Accept(Ballot(1, "B"), head_after(parent)))
    log.append(decide(head_after(parent, disks=(voter.disk, *parent.disks[1:])), "BC"))
    assert voter.may_vote
    assert voter.prepare(Prepare(1, log.head.id, Ballot(1, "B"))).granted


@pytest.mark.parametrize("harm", ["deleted", "cut", "one bit", "from before the vote"])
def test_votes_that_are_lost_damaged_or_older_than_the_log_are_another_disk(harm: str) -> None:
    store = MemoryStore()
    first = elector("A", store).disk
    before = bytes(store.read(VOTES) or b"")
    voted_on_round_0(store)
    store = store.reopen()
    assert elector("A", store).disk == first
    now = bytes(store.read(VOTES) or b"")
    harmed = {"cut": now[:-1], "one bit": now[:40] + bytes([now[40] ^ 1]) + now[41:], "from before the vote": before}
    if harm == "deleted":
        store.delete(VOTES)
    else:
        store.write(VOTES, [harmed[harm]])
    identity = SimulatedIdentity("A")
    log = HeadLog(store, identity, genesis())
    restarted = Elector(log, store, identity, random.Random("another disk"))
    assert restarted.disk != first
    assert not restarted.may_vote


def test_who_lost_the_end_of_its_log_does_not_vote_on_an_earlier_round_than_before() -> None:
    store = MemoryStore()
    log = voted_on_round_0(store)
    elector("A", store).prepare(Prepare(1, log.head.id, Ballot(1, "B")))
    store.delete(LOG)
    with pytest.raises(Refused, match="log was cut"):
        elector("A", store).prepare(Prepare(0, genesis().id, Ballot(9, "B")))
    HeadLog(store, SimulatedIdentity("A"), genesis()).append(log.at(0))
    assert not elector("A", store).prepare(Prepare(1, log.head.id, Ballot(1, "B"))).granted
    assert elector("A", store).prepare(Prepare(1, log.head.id, Ballot(2, "B"))).granted


# Certificates -------------------------------------------------------------------------------------------------------------


def test_a_majority_of_the_parents_electorate_proves_a_head() -> None:
    parent = genesis()
    head = head_after(parent, electorate=("X", "Y", "Z"))
    assert proves(decide(head, "AB"), parent, SimulatedIdentity("me"))
    assert proves(decide(head, "ABC"), parent, SimulatedIdentity("me"))


WRONG: dict[str, Decided] = {
    "too few votes": decide(head_after(genesis()), "A"),
    "one elector's vote twice": decide(head_after(genesis()), "AA"),
    "votes of strangers": decide(head_after(genesis()), "AXY"),
    "votes of the new electorate": decide(head_after(genesis(), electorate=("X", "Y", "Z")), "XYZ"),
    "votes for another head": decide(head_after(genesis()), "ABC", signed=head_after(genesis(), tokens=5)),
    "votes of another ballot": dataclasses.replace(decide(head_after(genesis()), "ABC"), ballot=Ballot(2, "A")),
    "another parent": decide(head_after(genesis(), parent="other"), "ABC"),
    "another campaign": decide(head_after(genesis(), campaign="other"), "ABC"),
    "a round too far": decide(head_after(genesis(), round=1), "ABC"),
    "forged signatures": Decided(head_after(genesis()), Ballot(1, "A"), tuple(Vote(name, b"\x00" * 16) for name in "ABC")),
    "no votes": decide(head_after(genesis()), ""),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_certificate_that_does_not_hold_is_refused_and_leaves_no_trace(wrong: str) -> None:
    store = MemoryStore()
    log = HeadLog(store, SimulatedIdentity("me"), genesis())
    with pytest.raises(Refused):
        log.append(WRONG[wrong])
    assert HeadLog(store.reopen(), SimulatedIdentity("me"), genesis()).round == -1


def test_the_log_is_a_chain_that_survives_a_restart() -> None:
    store, identity = MemoryStore(), SimulatedIdentity("me")
    log = HeadLog(store, identity, genesis())
    for number in range(3):
        assert log.append(decide(head_after(log.head, tokens=number), "AC"))
    assert not log.append(log.at(1))
    with pytest.raises(Refused, match="decided otherwise"):
        log.append(decide(head_after(log.head_at(0), tokens=99), "AB"))
    reopened = HeadLog(store.reopen(), identity, genesis())
    assert reopened.since(-1) == log.since(-1)
    assert reopened.head_at(-1) == genesis()
    with pytest.raises(IndexError):
        reopened.at(3)


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
