"""What one peer asks of the others does not grow with their number, or grows slowly."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from spes_p2p.consensus import electorate
from spes_p2p.content import relay
from spes_p2p.content.bases import Snapshots, collect_offers, download
from spes_p2p.content.fetcher import FIRST_ASKED, MAX_CONCURRENT_DONORS, WIDENING, Fetcher
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import CommitsRequest
from spes_p2p.messages.content import PiecesRequest
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import COMMITS, LEAVE, PING, ROUND, SNAPSHOT
from spes_p2p.messages.presence import Contact
from spes_p2p.messages.refusals import Code, Refusal
from spes_p2p.net import contacts
from spes_p2p.net.contacts import registry_key
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.peer import decisions, first_base, gathering, kept_results, life, patience
from spes_p2p.peer.decisions import MAX_ASKED, PAGE_SAVING
from spes_p2p.peer.node import CONTACT_EVERY_S, CONTACTS_READ_PER_S
from spes_p2p.rounds.checks import checkers
from spes_p2p.rounds.digest import PIECE_ELEMENTS, state_digest
from spes_p2p.testing.memory_network import MemoryNetwork, MemoryTransport
from spes_p2p.testing.memory_state import UNUSED_S, Frame
from spes_p2p.testing.simulate.scenario import Scenario, peer_names
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate
from spes_p2p.testing.simulate.virtual import run_seed
from spes_p2p.testing.virtual_loop import VirtualLoop

BASE, WRONG = np.zeros(8, np.float32), np.ones(8, np.float32)
PEERS = [f"{i:03d}" for i in range(100)]
EMPTY_BYTES = 16
"""Of an answer without commits, at most."""


async def offered(bases: dict[str, np.ndarray], known: set[str], digest: str = "") -> tuple[set[str], set[str]]:
    """Return whose offers count among 100 peers, and which peers were asked."""
    network, asked = MemoryNetwork(latency_s=0.01), set[str]()
    for name in PEERS:
        board, snapshots = RpcEndpoint(network.transport(name), 2.0), Snapshots()
        if name in bases:
            snapshots.publish("h", 3, bases[name])
        await snapshots.serve(board, ContentServer(board))

    def note(frame: Frame) -> Frame:
        if frame.method == SNAPSHOT and not frame.is_answer:
            asked.add(frame.receiver)
        return frame

    network.tap = note
    offers = await collect_offers(RpcEndpoint(network.transport("me"), 2.0), PEERS, "h", BASE.size, known, digest)
    return {offer.donor for offer in offers}, asked


def test_of_many_peers_with_a_base_a_few_are_asked_members_first() -> None:
    members = set(PEERS[50:])
    donors, asked = simulate(lambda: offered(dict.fromkeys(PEERS, BASE), members))
    assert donors == asked
    assert asked <= members
    assert len(asked) == FIRST_ASKED


def test_wrong_offers_do_not_hide_a_certified_base() -> None:
    wrong = dict.fromkeys(PEERS[:FIRST_ASKED], WRONG)
    donors, _ = simulate(lambda: offered({**wrong, PEERS[-1]: BASE}, set(), state_digest(BASE)))
    assert donors == {PEERS[-1]}


async def test_the_nearest_donors_of_a_base_serve_it() -> None:
    network, asked, peers = MemoryNetwork(latency_s=0.2), set[str](), PEERS[:FIRST_ASKED]
    near, base = set(peers[::2]), np.zeros(64 * PIECE_ELEMENTS, np.float32)
    for name in peers:
        board, snapshots = RpcEndpoint(network.transport(name), 5.0), Snapshots()
        snapshots.publish("h", 3, base)
        await snapshots.serve(board, ContentServer(board))
        network.set_latency("me", name, 0.01 if name in near else 0.2)

    def note(frame: Frame) -> Frame:
        if frame.method == "base" and not frame.is_answer:
            asked.add(frame.receiver)
        return frame

    network.tap = note
    me = RpcEndpoint(network.transport("me"), 5.0)
    offers = await collect_offers(me, peers, "h", base.size)
    await download(Fetcher(me), offers, None, lambda done, total: None)
    donors, asked = [offer.donor for offer in offers], asked
    assert donors == [*PEERS[:FIRST_ASKED:2], *PEERS[1:FIRST_ASKED:2]]
    assert asked
    assert asked <= set(donors[:MAX_CONCURRENT_DONORS])


@pytest.mark.parametrize("holder", [FIRST_ASKED, 5 * FIRST_ASKED, 99])
def test_more_are_asked_until_somebody_has_it(holder: int) -> None:
    donors, asked = simulate(lambda: offered({PEERS[holder]: BASE}, set()))
    assert donors == {PEERS[holder]}
    assert len(asked) == min(100, FIRST_ASKED * (1 + WIDENING) if holder < (1 + WIDENING) * FIRST_ASKED else 100)


def test_strangers_do_not_outvote_a_member_that_is_asked_with_them() -> None:
    strangers = dict.fromkeys(PEERS[:-1], WRONG)
    donors, _ = simulate(lambda: offered({**strangers, PEERS[-1]: BASE}, {PEERS[-1]}))
    assert donors == {PEERS[-1]}


async def test_joiners_do_not_all_ask_the_peer_with_the_newest_claim_for_the_last_proposal() -> None:
    swarm = VirtualSwarm(campaign(total_steps=20000), seconds_per_step=2.0)
    swarm.start_all("ABCD")
    await swarm.until_round(1)
    node = swarm.nodes["A"]
    contact, last = node.contacts["B"], node.log.last
    assert {*"BCD"} <= last.participants
    claims = {"X": 9, "D": last.round - 1, "A": 0, "B": last.round, "C": last.round + 1}
    node.contacts = {peer: dataclasses.replace(contact, round=claim) for peer, claim in claims.items()}
    assert list(node.relay.donors()) == ["D", "B", "C", "X"]


@pytest.mark.long
async def test_no_two_of_many_joiners_get_the_last_proposal_from_the_same_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "COPIES_BYTES", 0)
    monkeypatch.setattr(relay, "FANOUT", 1)
    swarm, given = VirtualSwarm(campaign(10**6, sync={"min_peers": 12})), Counter[str]()

    def tap(frame: Frame) -> Frame:
        given[frame.sender] += frame.method == "plan" and frame.is_answer and frame.kind == Kind.CONTENT
        return frame

    swarm.network.tap = tap
    swarm.start_all("ABCDEFGHIJKL")
    await swarm.until_round(2)
    swarm.start_all("MNOPQRSTUVX")
    await swarm.until(lambda: {*"MNOPQRSTUVX"} <= {*swarm.peers["A"].node.log.last.members})
    given = +given
    assert sum(given.values()) > 5
    assert max(given.values()) == 1
    assert not {*given}.intersection("MNOPQRSTUVX"), "they are last to have it"


@pytest.mark.parametrize(("admission", "busy"), [("friends", 2), ("open", 0)])
async def test_a_member_gives_few_proposals_in_a_round_and_sends_others_elsewhere_once_unless_strangers_are_there(
    admission: str, busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_results, "ENOUGH_BYTES", 1)
    swarm, given, refused = VirtualSwarm(campaign(10**6, admission=admission)), list[int](), list[Code]()
    swarm.invitations = {name: swarm.invitation(name, ("trainer", "elector")) for name in "ABC"}
    swarm.start_all("ABC")
    await swarm.until_round(1)
    commit = swarm.nodes["A"].log.last

    async def ask(name: str) -> None:
        endpoint = RpcEndpoint(swarm.network.transport(name), 5.0)
        try:
            async with endpoint.stream("A", "plan") as stream:
                await stream.send(pack(PiecesRequest(commit.plan, (0,))))
                given.append(len(await stream.message_view(Kind.CONTENT)))
        except Refused as error:
            refused.append(error.code)

    for name in ("X", "Y", "Y", "Z", "Z"):
        await ask(name)
    given, refused = given, refused
    assert refused == [Code.BUSY] * busy
    assert len(given) == 5 - busy


@pytest.mark.long
def test_what_a_peer_does_in_a_round_does_not_grow_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records take the tree, as those of larger rounds do."""
    monkeypatch.setattr(relay, "COPIES_BYTES", 0)
    work = Counter[str]()

    def counted(place: type, name: str) -> None:
        function = getattr(place, name)

        def count(self: Any, *args: Any, **options: Any) -> Any:
            work[name] += 1
            return function(self, *args, **options)

        monkeypatch.setattr(place, name, count)

    for place, name in ((MemoryTransport, "open"), (VirtualLoop, "call_soon"), (VirtualLoop, "call_at")):
        counted(place, name)
    by_peers = dict[int, dict[str, float]]()
    for peers in (8, 24):
        work.clear()
        found = run_seed(Scenario(peer_names(peers), 4, vary=False), 0)
        assert found.violations == ()
        assert found.connections_median <= peers
        assert 3_000 < found.sent_bytes_per_round < 40_000
        assert found.control_bytes_median[0] < 120_000
        assert found.control_bytes_median[1] < 60_000
        by_peers[peers] = {name: count / peers / found.figures.rounds_committed for name, count in work.items()}
    assert by_peers[24]["open"] < 30
    for name, count in by_peers[8].items():
        assert by_peers[24][name] < 1.2 * count


async def test_among_many_peers_the_registry_connects_few_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contacts, "MANY_CONTACTS", 8)
    monkeypatch.setattr(contacts, "SHOWN_CONTACTS", 3)
    swarm = VirtualSwarm(campaign(10**6, sync={"min_peers": 16}))
    names = "ABCDEFGHIJKLMNOP"
    swarm.start_all(names)
    await swarm.until_round(8)
    since = asyncio.get_running_loop().time() - UNUSED_S
    stored = {peer: [at for at in each.values() if at > since] for peer, each in swarm.network.stored_at.items()}
    assert len(stored["W"]) == len(names), "the owner's"
    assert sorted(len(stored[name]) for name in names)[-1] < 12


async def test_who_starts_among_many_does_not_store_its_contact_where_all_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the time for which a connection with those that hold contacts stays open."""
    monkeypatch.setattr(contacts, "MANY_CONTACTS", 6)
    monkeypatch.setattr(contacts, "SHOWN_CONTACTS", 1)
    swarm = VirtualSwarm(campaign(10**6, sync={"min_peers": 24}))
    swarm.start_bootstrap()
    for number in range(24):
        swarm.start(f"P{number}")
        await asyncio.sleep(1.0)
    assert len(swarm.network.stored_at["W"]) == 24, "the owner's"
    assert max(len(each) for peer, each in swarm.network.stored_at.items() if peer != "W") < 16


@pytest.mark.parametrize(("planned", "expected"), [("nobody else", range(2)), ("a newcomer", range(3, 6))])
@pytest.mark.long
async def test_contacts_are_read_the_more_rarely_the_more_there_are_and_by_members_that_met_all_hardly_ever(
    planned: str, expected: range
) -> None:
    swarm = VirtualSwarm(campaign(total_steps=20000), seconds_per_step=2.0)
    swarm.start_all()
    await swarm.until_round(1)
    reads, node = 0, swarm.peers["A"].node
    key, own = registry_key(node.campaign_hash), node.contacts["A"]
    strangers = [swarm.network.registry(f"stranger-{i}") for i in range(400)]
    contact = Contact(own.campaign, own.protocol, "trainer", -1, "", (), 0, None)
    for stranger in strangers:
        await stranger.put(key, pack(contact), 10_000.0)
    await asyncio.sleep(2 * CONTACT_EVERY_S)
    find = node.world.registry.get

    async def count(key: str) -> dict[str, bytes]:
        nonlocal reads
        reads += 1
        return await find(key)

    if planned == "a newcomer":
        node.meet_members = lambda plan: None  # type: ignore[method-assign]
        node._planned_members = frozenset({"Z"})
    node.world.registry.get = count  # type: ignore[method-assign]
    await asyncio.sleep(4 * 400 / CONTACTS_READ_PER_S)
    assert reads in expected
    node._met.discard("B")
    reads = 0
    await asyncio.sleep(400 / CONTACTS_READ_PER_S + CONTACT_EVERY_S)
    assert reads == 1


def count_pings(swarm: VirtualSwarm) -> Counter[tuple[str, str]]:
    """Return the pings from now on, by sender and receiver."""
    pings: Counter[tuple[str, str]] = Counter()

    def note(frame: Frame) -> Frame:
        if frame.method == PING and not frame.is_answer:
            pings[frame.sender, frame.receiver] += 1
        return frame

    swarm.network.tap = note
    return pings


@pytest.mark.long
@pytest.mark.parametrize(("most_per_s", "silences"), [(gathering.MAX_PINGS_PER_S, 1.0), (0.1, 1.8)])
async def test_members_that_still_train_are_pinged_a_few_times_a_phase_or_less_often_where_they_are_many(
    monkeypatch: pytest.MonkeyPatch, most_per_s: float, silences: float
) -> None:
    monkeypatch.setattr(gathering, "MAX_PINGS_PER_S", most_per_s)
    swarm = VirtualSwarm(campaign(total_steps=20000), seconds_per_step=15.0)
    swarm.start_all("ABCD")
    await swarm.until_round(2)
    pings, began = count_pings(swarm), asyncio.get_running_loop().time()
    await swarm.until_round(4)
    passed = (asyncio.get_running_loop().time() - began) / swarm.peers["A"].node.endpoint.silence_s
    assert pings
    assert max(pings.values()) <= 2 * 4 + passed / silences


async def test_a_peer_that_waits_for_a_long_phase_asks_the_others_ever_less_often() -> None:
    swarm = VirtualSwarm(campaign(total_steps=20000), seconds_per_step=60.0)
    swarm.start_all("ABC")
    await swarm.until_round(2)
    swarm.start("D")
    await swarm.until(lambda: "D" in swarm.peers and swarm.peers["D"].coordinators.patience.waits_for != "")
    pings, began, silence_s = count_pings(swarm), asyncio.get_running_loop().time(), swarm.peers["D"].node.endpoint.silence_s
    await swarm.until_round(3)
    waited_s = asyncio.get_running_loop().time() - began
    assert waited_s > 90 * silence_s
    assert 1 < pings["D", "A"] < 1 / patience.ASK_AGAIN * (2 + math.log(waited_s / silence_s))


async def test_a_peer_that_is_no_member_does_not_tell_all_members_that_it_is_back() -> None:
    told: Counter[str] = Counter()
    swarm = VirtualSwarm(campaign(total_steps=20000), seconds_per_step=2.0)
    swarm.start_all()
    await swarm.until_round(1)
    swarm.start("D")
    await swarm.until(lambda: "D" in swarm.peers and swarm.peers["D"].node.log.round >= 0)

    def note(frame: Frame) -> Frame:
        told[frame.sender] += frame.method == LEAVE and not frame.is_answer
        return frame

    swarm.network.tap = note
    last = swarm.peers["D"].node.log.last
    assert "D" not in last.members
    await swarm.network.run_peer("D", swarm.peers["D"].node.departures.come_back())
    assert not told["D"]
    await swarm.network.run_peer("A", swarm.peers["A"].node.departures.come_back())
    assert told["A"] >= 3


@pytest.mark.parametrize("is_large", [False, True])
async def test_a_trainer_that_leaves_tells_the_coordinators_and_its_checker_and_an_elector_all_members(
    monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """But none of hundreds, each of which would be another connection of a router at home."""
    monkeypatch.setattr(electorate, "HOME_CONNECTIONS", 12 if is_large else 13)
    told: dict[str, set[str]] = {}
    swarm, names = VirtualSwarm(campaign(total_steps=20000)), "ABCDEFGHIJKL"
    swarm.start_all(names)
    await swarm.until_round(2)
    last = swarm.peers["A"].node.log.last
    elector = next(name for name in names if name in last.electorate)
    trainer = next(name for name in names if name not in last.electorate)

    def note(frame: Frame) -> Frame:
        if frame.method == LEAVE and not frame.is_answer:
            told.setdefault(frame.sender, set()).add(frame.receiver)
        return frame

    swarm.network.tap = note
    for name in (elector, trainer):
        swarm.peers[name].leave()
    await swarm.until(lambda: all(swarm.tasks[name].done() for name in (elector, trainer)))
    assert len(last.members) == 13
    checker_of, coordinators = checkers(last, "friends"), {*last.electorate, *last.helpers}
    assert told[trainer] == {*coordinators, checker_of[trainer]}
    if is_large:
        assert told[elector] == {*coordinators, checker_of[elector]} - {elector}
    else:
        assert told[elector] >= {*last.members, *last.helpers} - {elector, trainer}


async def test_a_joiner_reads_the_log_from_few_peers_and_not_from_the_one_that_all_joiners_know() -> None:
    asked, swarm = Counter[str](), VirtualSwarm(campaign(total_steps=20000))
    swarm.start_all("ABCDEFGHIJKL")
    await swarm.until_round(3)

    def note(frame: Frame) -> Frame:
        if frame.method == COMMITS and not frame.is_answer and frame.sender == "Z":
            asked["requests"] += frame.kind == Kind.MESSAGE
        if frame.method == COMMITS and frame.is_answer and frame.receiver == "Z" and len(frame.body) > EMPTY_BYTES:
            asked[frame.sender] += 1
        return frame

    swarm.network.tap = note
    swarm.start("Z")
    await swarm.until(lambda: swarm.round_of("Z") >= 3)
    assert asked.pop("requests") <= MAX_ASKED + 2
    assert 1 <= asked.total() <= 2
    assert "W" not in asked


async def test_who_starts_together_with_many_does_not_hold_the_contacts_of_all() -> None:
    swarm = VirtualSwarm(campaign(total_steps=20000))
    swarm.start_bootstrap()
    for number in range(48):
        swarm.start(f"peer-{number}")
    await swarm.until_round(2)
    counts = sorted(swarm.network.connections.values(), reverse=True)
    assert counts[2] <= 40, "apart from the bootstrap peer and the coordinator"


async def test_a_returning_peer_gets_all_commits_but_the_first_in_a_third_of_their_bytes() -> None:
    moved, swarm = Counter[str](), VirtualSwarm(campaign(total_steps=20000))
    swarm.start_all("ABCDE")
    await swarm.until_round(2)
    swarm.kill("E")
    await swarm.until(lambda: all(swarm.round_of(name) >= 12 for name in "ABCD"))

    def note(frame: Frame) -> Frame:
        if frame.method == COMMITS and frame.is_answer and frame.receiver == "E":
            moved[frame.sender] += len(frame.body)
        return frame

    swarm.network.tap = note
    swarm.start_again("E")
    await swarm.until(lambda: swarm.round_of("E") >= 12)
    first, missed = (len(swarm.nodes["A"].log.packed_page(2, count)) for count in (1, 10))
    assert 0 < max(moved.values()) < first + (missed - first) / PAGE_SAVING, "as its turn is charged"
    assert moved.total() < missed, "few give them"


async def test_a_returning_peer_asks_few_for_what_it_missed_also_if_its_trainer_takes_long_to_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin_training = first_base.begin_training

    async def slow(*args: Any) -> None:
        await asyncio.sleep(20.0)
        await begin_training(*args)

    monkeypatch.setattr(life, "begin_training", slow)
    asked_after, swarm = Counter[int](), VirtualSwarm(campaign(total_steps=20000))
    swarm.start_all("ABCDEFGH")
    await swarm.until_round(2)
    swarm.kill("E")
    await swarm.until(lambda: swarm.round_of("A") >= 6)

    def note(frame: Frame) -> Frame:
        if frame.method == COMMITS and not frame.is_answer and frame.sender == "E" and frame.body:
            asked_after[unpack(CommitsRequest, frame.body).after] += 1
        return frame

    swarm.network.tap = note
    swarm.start_again("E")
    known = swarm.nodes["E"].log.round
    await swarm.until(lambda: swarm.round_of("E") >= 6)
    assert 1 <= asked_after[known] <= decisions.FIRST_ASKED


async def test_who_comes_too_late_for_a_round_reads_its_commit_from_a_member() -> None:
    late, asked, swarm = dict[str, str](), list[bool](), VirtualSwarm(campaign(total_steps=20000))
    swarm.start_all("ABCDEFGH")
    await swarm.until_round(2)

    def note(frame: Frame) -> Frame:
        if frame.kind == Kind.REFUSAL and frame.method == ROUND and unpack(Refusal, frame.body).code == Code.BEHIND:
            late[frame.receiver] = frame.sender
        if frame.method == COMMITS and not frame.is_answer and frame.sender in late and frame.kind == Kind.MESSAGE:
            asked.append(frame.receiver == late.pop(frame.sender))
        return frame

    swarm.network.tap = note
    for number in range(16):
        swarm.start(f"Z{number}")
        await asyncio.sleep(1.0)
    await swarm.until(lambda: len(asked) >= 2)
    assert not any(asked)
