"""A record reaches every member, whoever of them is gone, and the coordinator sends it a few times only."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.pieces import Body, Content, Piece
from spes_p2p.content.relay import (
    COPIES_BYTES,
    DIGEST_BYTES,
    FANOUT,
    FANOUT_LARGE,
    KEPT_RECORDS,
    LARGE_BYTES,
    PIECE_BYTES,
    Relay,
    pieces_of,
)
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.content import PIECES_PER_REQUEST, PiecesRequest
from spes_p2p.messages.framing import Kind, Message
from spes_p2p.messages.rounds import Passed
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.shares import ANSWERS_BITS, Shares
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.virtual_loop import run_virtual

RECORD = Message(random.Random(0).randbytes(5000), Kind.PROPOSAL)


def members_of(count: int) -> list[str]:
    return [f"{i:03d}" for i in range(count)]


def relay_of(network: MemoryNetwork, name: str) -> Relay:
    endpoint = RpcEndpoint(network.transport(name), 5.0)
    return Relay(endpoint, Fetcher(endpoint))


def content_of(record: bytes) -> tuple[Content, range]:
    """A record as its receivers know it in the end, and the indices of its pieces."""
    digests = [hashlib.sha256(piece).digest() for piece in pieces_of(record)]
    pieces = [Piece(digest, DIGEST_BYTES + PIECE_BYTES) for digest in digests]
    return Content("record", digests[0].hex(), pieces.__getitem__), range(len(pieces))


async def fetch(fetcher: Fetcher, record: bytes, donor: str) -> None:
    """Fetch a record from a peer that has it."""
    content, indices = content_of(record)
    assert not await fetcher.fetch(content, indices, [fetcher.peers([donor])], lambda index, body: asyncio.sleep(0))


async def spread(
    count: int, gone: set[int], liars: set[int], record: Message = RECORD, hears: bool = False, lie_after_s: float = 0.0,
    lie_from: int = 0,
) -> tuple[dict[str, Message], int]:
    """What each living member got of a coordinator "C", and the bytes that C sent. `hears`: those gone only fall silent.

    `lie_from`: index of the first piece in whose place liars hand on something else.
    """
    network, members = MemoryNetwork(latency_s=0.05), members_of(count)
    endpoints = {name: RpcEndpoint(network.transport(name), 5.0) for name in ["C", *members]}
    relays = {name: Relay(endpoint, Fetcher(endpoint)) for name, endpoint in endpoints.items()}

    for name, relay in relays.items():
        server = ContentServer(endpoints[name])
        await relay.serve(server)

        async def lie(sha256: str, index: int, relay: Relay = relay) -> Body | None:
            if index < lie_from:
                return await relay._record(sha256, index)
            await asyncio.sleep(lie_after_s)
            return b"another"

        if name != "C" and int(name) in liars:
            await server.serve("record", lie)
    living = [i for i in range(count) if i not in gone]
    for i in gone:
        (network.pause if hears else network.kill)(members[i])
    message_to = relays["C"].addressed(Kind.PROPOSAL, bytes(record.body), members, "")
    sent = {i: message_to(members[i]) for i in living}
    got = await asyncio.gather(*(network.run_peer(members[i], relays[members[i]].received(sent[i], "C")) for i in living))
    told_bytes = sum(len(message.body) for message in sent.values())
    return dict(zip([members[i] for i in living], got, strict=True)), told_bytes + endpoints["C"].sent["record"]


@given(st.integers(1, 6 * FANOUT), st.data())
@pytest.mark.long
def test_every_living_member_gets_the_record(count: int, data: st.DataObject) -> None:
    some = st.sets(st.integers(0, count - 1), max_size=5)
    gone, liars = data.draw(some), data.draw(some)
    got, _ = run_virtual(spread(count, gone, liars - gone))
    assert set(got) == {name for name in members_of(count) if int(name) not in gone}
    assert set(got.values()) <= {RECORD}


def test_the_coordinator_sends_the_record_to_a_few_only() -> None:
    _, sent = run_virtual(spread(150, set(), set()))
    assert sent < FANOUT * len(RECORD.body) + 150 * 90


def test_all_members_of_a_small_round_get_short_records_from_the_coordinator() -> None:
    members, record = members_of(32), bytes(RECORD.body[: COPIES_BYTES // 32])
    told = map(relay_of(MemoryNetwork(), "C").addressed(Kind.PROPOSAL, record, members, ""), members)
    assert {message.kind for message in told} == {Kind.PROPOSAL}


def test_a_large_record_goes_to_one() -> None:
    large = Message(random.Random(0).randbytes(LARGE_BYTES + 1), Kind.PROPOSAL)
    got, sent = run_virtual(spread(150, set(), set(), large))
    assert [*got.values()] == [large] * 150
    assert sent < len(large.body) + 150 * 90


@pytest.mark.parametrize("silent", [0, 2])
def test_only_the_children_of_a_silent_member_ask_the_coordinator(silent: int) -> None:
    large = Message(random.Random(0).randbytes(LARGE_BYTES + 1), Kind.PROPOSAL)
    got, sent = run_virtual(spread(150, {silent}, set(), large, hears=True))
    assert [*got.values()] == [large] * 149
    assert sent < (1 + FANOUT_LARGE) * len(large.body) + 150 * 90


@pytest.mark.parametrize("lie_from", [0, 1, 3])
@pytest.mark.parametrize("liar", [0, 2])
def test_only_the_children_of_a_member_that_hands_on_something_else_ask_the_coordinator(liar: int, lie_from: int) -> None:
    large = Message(random.Random(0).randbytes(LARGE_BYTES + 1), Kind.PROPOSAL)
    got, sent = run_virtual(spread(150, set(), {liar}, large, lie_from=lie_from))
    assert [*got.values()] == [large] * 150
    assert sent < (1 + FANOUT_LARGE) * len(large.body) + 150 * 90


async def test_a_large_record_is_handed_on_while_it_arrives() -> None:
    network, members, record = MemoryNetwork(latency_s=0.05), members_of(127), random.Random(0).randbytes(2 * LARGE_BYTES)
    for name in members:
        network.set_bandwidth(name, 2e5, 2e5)
    relays = {name: relay_of(network, name) for name in ("C", *members)}
    for relay in relays.values():
        await relay.serve(ContentServer(relay._endpoint))
    told = relays["C"].addressed(Kind.PROPOSAL, record, members, "")
    got = await asyncio.gather(*(network.run_peer(name, relays[name].received(told(name), "C")) for name in members))
    assert {bytes(message.body) for message in got} == {record}
    assert asyncio.get_running_loop().time() < 1.2  # the record takes 0.16 s on a line, and passes six twice


@pytest.mark.parametrize("liar", [0, 1])
def test_a_member_that_keeps_a_record_to_itself_has_its_children_ask_the_coordinator_and_nobody_else(liar: int) -> None:
    large = Message(random.Random(0).randbytes(LARGE_BYTES + 1), Kind.PROPOSAL)
    got, sent = run_virtual(spread(150, set(), {liar}, large, lie_after_s=1000.0))
    assert [*got.values()] == [large] * 150
    assert sent < (1 + FANOUT_LARGE) * len(large.body) + 150 * 90


def test_the_children_of_a_member_that_falls_silent_within_a_long_record_get_it_from_the_coordinator() -> None:
    long = Message(random.Random(0).randbytes(2 * PIECES_PER_REQUEST * PIECE_BYTES), Kind.PROPOSAL)
    got, _ = run_virtual(spread(15, set(), {0}, long, lie_after_s=1000.0, lie_from=3))
    assert [*got.values()] == [long] * 15


def test_nobody_passes_on_to_more_than_a_few() -> None:
    members = members_of(300)
    relay = relay_of(MemoryNetwork(), "C")
    told = [*map(relay.addressed(Kind.PROPOSAL, bytes(RECORD.body), members, ""), members[FANOUT:])]
    assert all(message.kind == Kind.PASSED for message in told)
    parents = [unpack(Passed, message.body).parent for message in told]
    assert max(parents.count(parent) for parent in set(parents)) <= FANOUT


@pytest.mark.parametrize(("can_be_dialled", "most"), [(200, FANOUT_LARGE), (100, 3), (40, FANOUT), (10, FANOUT)])
def test_who_can_be_dialled_hands_large_records_on_to_more_where_few_can(can_be_dialled: int, most: int) -> None:
    members, record = members_of(300), random.Random(0).randbytes(LARGE_BYTES + 1)
    hidden = members[can_be_dialled:]
    told = map(relay_of(MemoryNetwork(), "C").addressed(Kind.PROPOSAL, record, members, "", hidden), members[1:])
    parents = [unpack(Passed, message.body).parent for message in told]
    assert max(parents.count(parent) for parent in set(parents)) == most
    assert set(parents).isdisjoint(hidden) or most == FANOUT


def test_vouched_peers_that_cannot_be_dialled_are_no_parents_also_where_strangers_come_after_them() -> None:
    members, record = members_of(100), random.Random(0).randbytes(LARGE_BYTES + 1)
    vouched, hidden = members[:13], members[13:60]
    told = map(relay_of(MemoryNetwork(), "C").addressed(Kind.PROPOSAL, record, members, "", hidden), members[1:])
    assert {unpack(Passed, message.body).parent for message in told} == set(vouched)


@pytest.mark.parametrize("strangers", [1, 100])
async def test_strangers_that_ask_for_records_all_the_time_take_a_tenth_of_the_line_and_members_wait_for_none(
    strangers: int
) -> None:
    network, clock = MemoryNetwork(latency_s=0.05), asyncio.get_running_loop().time
    record = random.Random(0).randbytes(10**5)
    endpoint = RpcEndpoint(network.transport("C"), 5.0)
    endpoint.shares.is_known = lambda peer: peer.startswith("member")
    endpoint.shares.is_trusted = lambda peer: False
    relay = Relay(endpoint, Fetcher(endpoint))
    await relay.serve(ContentServer(endpoint))
    request = pack(PiecesRequest(relay.keep(record), tuple(content_of(record)[1])[:PIECES_PER_REQUEST]))

    async def greedy(name: str) -> None:
        asker = RpcEndpoint(network.transport(name), 5.0)
        while True:
            with contextlib.suppress(PeerUnreachable, Refused):
                async with asker.stream("C", "record") as stream:
                    await stream.send(request)
                    while await stream.receive_view(Kind.CONTENT) is not None:
                        pass
            await asyncio.sleep(0.1)

    attacks = [asyncio.ensure_future(greedy(f"X{i}")) for i in range(strangers) for _ in range(4)]
    await asyncio.sleep(10)
    for name in ("member A", "member B"):
        began, member = clock(), Fetcher(RpcEndpoint(network.transport(name), 5.0))
        await fetch(member, record, "C")
        assert clock() - began < 1.0
    sent = endpoint.sent["record"] - 2 * len(record)
    assert relay._given.keys() == relay._records.keys()
    for number in range(2 * KEPT_RECORDS):
        relay.keep(bytes([number]))
    assert relay._given.keys() == relay._records.keys()
    for attack in attacks:
        attack.cancel()
    assert 0.5 < (sent / (ANSWERS_BITS / 8)) / 10 < 1.5


async def test_a_member_gets_a_record_at_once_only_once() -> None:
    network, clock = MemoryNetwork(latency_s=0.05), asyncio.get_running_loop().time
    endpoint = RpcEndpoint(network.transport("C"), 5.0)
    endpoint.shares.is_trusted = lambda peer: False
    relay = Relay(endpoint, Fetcher(endpoint))
    await relay.serve(ContentServer(endpoint))
    record = random.Random(0).randbytes(10**6)
    relay.keep(record)
    fetcher, began = Fetcher(RpcEndpoint(network.transport("A"), 5.0)), clock()
    for _ in range(20):
        await fetch(fetcher, record, "C")
    assert clock() - began > 10.0


async def test_who_has_not_read_the_plan_yet_hands_it_on_at_once_to_as_many_as_may_be_its_children() -> None:
    network = MemoryNetwork(latency_s=0.05)
    endpoint = RpcEndpoint(network.transport("C"), 5.0)
    endpoint.shares = Shares(5.0, lambda: 1e5)
    endpoint.shares.is_known = lambda peer: False
    relay, record = Relay(endpoint, Fetcher(endpoint)), random.Random(0).randbytes(10**5)
    await relay.serve(ContentServer(endpoint))
    relay.keep(record)
    await endpoint.shares.answer("stranger", 2 * len(record))

    async def ask(name: str) -> None:
        fetcher = Fetcher(RpcEndpoint(network.transport(name), 5.0))
        await asyncio.wait_for(fetch(fetcher, record, "C"), 1.0)

    for child in range(FANOUT):
        await ask(f"child {child}")
    with pytest.raises(asyncio.TimeoutError):
        await ask("stranger")


async def test_strangers_that_come_and_go_do_not_fill_the_list_of_who_got_a_record() -> None:
    """Records stay while rounds wait, as in a pause."""
    relay = relay_of(MemoryNetwork(), "A")
    relay._endpoint.shares.is_known = lambda peer: peer.startswith("member")
    relay._endpoint.shares.is_trusted = lambda peer: False
    name = relay.keep(bytes(RECORD.body))
    due = [relay._is_due(f"{i}", name, index) for i in range(5 * FANOUT) for index in range(2)]
    assert due == [True] * 2 * FANOUT + [False] * 2 * 4 * FANOUT
    assert [relay._is_due("member", name, index) for index in (0, 1, 1)] == [True, True, False]
    assert len(relay._given[name]) == 2 * (FANOUT + 1)


@pytest.mark.parametrize("is_stranger", [False, True])
async def test_a_slow_parent_is_waited_for_unless_it_is_a_stranger(is_stranger: bool) -> None:
    network, record = MemoryNetwork(latency_s=0.05), random.Random(0).randbytes(10**5)
    endpoints = {name: RpcEndpoint(network.transport(name), 5.0) for name in ("C", "000", "001")}
    relays = {name: Relay(endpoint, Fetcher(endpoint)) for name, endpoint in endpoints.items()}
    for name, relay in relays.items():
        endpoints[name].shares.is_known = endpoints[name].shares.is_trusted = lambda peer: False
        relay.is_stranger = lambda peer: is_stranger
        await relay.serve(ContentServer(endpoints[name]))
    message_to = relays["C"].addressed(Kind.PROPOSAL, record, ["000", "001"], "")
    network.set_bandwidth("000", 4e4, 1e9)
    await relays["000"].received(message_to("000"), "C")
    await relays["001"].received(message_to("001"), "C")
    assert round(endpoints["C"].sent["record"] / len(record)) == is_stranger


@pytest.mark.parametrize(("named", "asked"), [
    (("one", "two"), {"one"}), (("paused", "two"), {"two"}), (("stranger", "gone"), {"other"}), ((), {"other"}),
])
async def test_who_lacks_the_last_proposal_asks_the_named_members_first_and_waits_for_no_liar(
    named: tuple[str, ...], asked: set[str]
) -> None:
    network, last = MemoryNetwork(latency_s=0.05), random.Random(0).randbytes(10**5)
    plan, names = hashlib.sha256(last).hexdigest(), ("C", "one", "two", "paused", "stranger", "other", "joiner")
    endpoints = {name: RpcEndpoint(network.transport(name), 5.0) for name in names}
    relays = {name: Relay(endpoint, Fetcher(endpoint)) for name, endpoint in endpoints.items()}
    for name in names[:-1]:
        server = ContentServer(endpoints[name])
        await relays[name].serve(server)
        await server.serve("plan", lambda name, index: asyncio.sleep(0, last))
        relays[name].proposal = lambda plan: last
    network.pause("paused")
    joiner = relays["joiner"]
    joiner.donors = lambda: ["other"]
    endpoints["joiner"].shares.is_trusted = lambda peer: peer != "stranger"
    told = relays["C"].addressed(Kind.PROPOSAL, last[::-1], ["one", "joiner"], plan, donors={"joiner": named})
    await relays["one"].received(told("one"), "C")
    assert (await network.run_peer("joiner", joiner.received(told("joiner"), "C"))).body == last[::-1]
    assert asyncio.get_running_loop().time() < 3
    assert {name for name, endpoint in endpoints.items() if endpoint.sent["plan"] > len(last)} == asked


async def test_who_is_told_of_a_record_again_keeps_what_it_has_of_it_for_its_children() -> None:
    network, members = MemoryNetwork(latency_s=0.05), members_of(40)
    relays = {name: relay_of(network, name) for name in ("C", *members)}
    for name in members:
        await relays[name].serve(ContentServer(relays[name]._endpoint))
    told = relays["C"].addressed(Kind.PROPOSAL, bytes(RECORD.body), members, "")
    parent = unpack(Passed, told("039").body).parent
    relays[parent].keep(bytes(RECORD.body))
    again = Passed(Kind.PROPOSAL, unpack(Passed, told("039").body).sha256, 2, "gone", 0, ())
    told_again = asyncio.ensure_future(relays[parent].received(Message(pack(again), Kind.PASSED), "C"))
    await asyncio.sleep(0)
    assert await relays["039"].received(told("039"), "C") == RECORD
    assert await told_again == RECORD


async def test_children_of_a_member_that_gives_up_a_record_ask_the_coordinator_at_once() -> None:
    network, members = MemoryNetwork(latency_s=0.05), members_of(150)
    relays = {name: relay_of(network, name) for name in ("C", *members)}
    for relay in relays.values():
        await relay.serve(ContentServer(relay._endpoint))
    told = relays["C"].addressed(Kind.PROPOSAL, bytes(RECORD.body), members, "")
    child = "140"
    parent = unpack(Passed, told(child).body).parent
    network.pause(unpack(Passed, told(parent).body).parent)
    waits, gets = (asyncio.ensure_future(relays[name].received(told(name), "C")) for name in (parent, child))
    await asyncio.sleep(1.0)
    waits.cancel()
    assert await asyncio.wait_for(gets, 1.0) == RECORD


async def test_a_record_that_nobody_has_is_an_error_after_a_bounded_time() -> None:
    network = MemoryNetwork(latency_s=0.05)
    member = relay_of(network, "039")
    message = relay_of(network, "C").addressed(Kind.PROPOSAL, bytes(RECORD.body), members_of(40), "")("039")
    with pytest.raises(PeerUnreachable):
        await network.run_peer("039", member.received(message, "C"))
    assert asyncio.get_running_loop().time() < 30
