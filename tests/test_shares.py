"""What an outsider sends takes bounded memory, streams and time of a peer, and members do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import tracemalloc
from functools import partial

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages import consensus, content, presence, refusals, rounds
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.compact import expanded
from spes_p2p.messages.fields import MAX_INTERVALS, MAX_MEMBERS
from spes_p2p.messages.framing import HEADER, IGNORABLE, MAX_FRAME_BYTES, Kind
from spes_p2p.messages.methods import ACCEPT, ACCUSE, COMMITS, DECIDE, HISTORY, METHODS, PING, PREPARE, PUSH, ROUND, UPDATE
from spes_p2p.messages.presence import Contribution, HistoryRequest, RoundRecord
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Ping
from spes_p2p.net.byte_stream import FIRST_BYTES, ByteStream
from spes_p2p.net.channels import StreamChannel
from spes_p2p.net.interfaces import Channel
from spes_p2p.net.limits import LINE_OVERHEAD
from spes_p2p.net.rpc import BUSY_SILENCES, OUTSIDER_SILENCES, RpcEndpoint, Stream
from spes_p2p.net.shares import (
    ANSWERS_BITS,
    FRAME_COST,
    FURTHER_SHARE,
    GREEDY_STRANGERS,
    HELD_BY_OUTSIDERS,
    HELD_PER_PEER,
    HELD_PER_STRANGER,
    OUTSIDER_BITS,
    OUTSIDER_FRAME_BYTES,
    OUTSIDERS_BURST_S,
    OWN_BYTES,
    STREAM_COST,
    STREAMS_OF_OUTSIDERS,
    STREAMS_PER_OUTSIDER,
    STREAMS_PER_PEER,
    Place,
    Shares,
)
from spes_p2p.net.tasks import end_tasks
from spes_p2p.net.turns import RETRY_S, WAITING_S
from spes_p2p.net.unpacking import unpack_beside
from spes_p2p.observe.rounds import Rounds
from spes_p2p.peer.history_sync import serving
from spes_p2p.peer.part_frames import INDEX_BYTES, WEIGHT_BYTES
from spes_p2p.rounds.parts import PART_BYTES
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.virtual_loop import run_virtual

SILENCE_S = 5.0


class Host:
    """A peer B that knows nobody, or everybody, and what its handler of PING took."""

    def __init__(self, knows: bool = False):
        self.network = MemoryNetwork()
        self.endpoint = RpcEndpoint(self.network.transport("B"), SILENCE_S)
        self.endpoint.shares.is_known = lambda peer: knows or peer.startswith("member")
        self.open = self.frames = 0

    async def serve(self) -> None:
        """Take frames without end."""

        async def take(stream: Stream) -> None:
            self.open += 1
            try:
                while await stream.receive_any() is not None:
                    self.frames += 1
            finally:
                self.open -= 1

        await self.endpoint.serve(PING, take)

    async def channel(self, peer: str) -> Channel:
        """Open a channel to B."""
        return await self.network.transport(peer).open("B", PING)


async def test_streams_of_outsiders_are_capped_each_and_in_all() -> None:
    host = Host()
    await host.serve()
    kept = [await host.channel("X") for _ in range(1000)]
    await asyncio.sleep(0.1)
    assert host.open <= STREAMS_PER_OUTSIDER
    kept += [await host.channel(f"X{i}") for i in range(40) for _ in range(STREAMS_PER_OUTSIDER)]
    await asyncio.sleep(0.1)
    assert len(host.endpoint.shares._places) <= STREAMS_OF_OUTSIDERS
    assert sum(map(len, host.endpoint.shares._places.values())) == STREAMS_OF_OUTSIDERS
    members = [await host.channel("member") for _ in range(100)]
    for channel in members:
        await channel.send(b"here")
    await asyncio.sleep(0.1)
    assert host.frames == 100
    await asyncio.sleep(2 * SILENCE_S)
    assert host.endpoint.shares._places.keys() <= {"member"}, "streams without a request have ended"


def test_a_common_start_of_64_peers_finds_room_for_three_streams_of_each() -> None:
    shares = Shares(SILENCE_S, lambda: 1e9)
    shares.is_known = lambda peer: False
    assert all(shares.enter(f"joiner {i}") for _ in range(3) for i in range(64))


def test_outsiders_that_hold_all_streams_make_room_for_another_newcomer() -> None:
    shares, ended = Shares(SILENCE_S, lambda: 1e9), list[str]()
    shares.is_known = lambda peer: False
    greedy = [f"greedy {i}" for i in range(STREAMS_OF_OUTSIDERS // STREAMS_PER_OUTSIDER)]
    for name in greedy * STREAMS_PER_OUTSIDER:
        place = shares.enter(name)
        assert place is not None
        place.end = partial(ended.append, name)
    assert shares.enter(greedy[0]) is None, "it has as many as the others"
    held = [shares.enter("newcomer") for _ in range(STREAMS_PER_OUTSIDER - 2)]
    assert all(held)
    assert len(ended) == len(held)
    assert max(map(ended.count, greedy)) == 1, "of those that have most"
    assert sum(map(len, shares._places.values())) == STREAMS_OF_OUTSIDERS
    for place in held:
        assert place is not None
        shares.leave(place)
    assert "newcomer" not in shares._places


def test_streams_that_break_at_once_keep_their_places_as_long_as_others() -> None:
    async def main() -> int:
        host, taken = Host(), 0
        await host.serve()
        enter = host.endpoint.shares.enter

        def counted(peer: str) -> Place | None:
            nonlocal taken
            place = enter(peer)
            taken += place is not None
            return place

        host.endpoint.shares.enter = counted  # type: ignore[method-assign]
        for _ in range(2000):
            with contextlib.suppress(PeerUnreachable, Refused):
                (await host.channel("X")).abort()
            await asyncio.sleep(0.01)
        return taken

    burst = round(OUTSIDERS_BURST_S * OUTSIDER_BITS / 8 / STREAM_COST)
    assert run_virtual(main()) < burst + 20 * OUTSIDER_BITS / 8 / STREAM_COST + STREAMS_PER_OUTSIDER


def test_frames_of_a_stranger_are_read_at_a_pace_and_those_of_a_member_at_once() -> None:
    async def taken(peer: str, body: bytes) -> int:
        host = Host()
        await host.serve()
        channel = await host.channel(peer)

        async def flood() -> None:
            with contextlib.suppress(PeerUnreachable):
                for _ in range(10_000):
                    await channel.send(body)

        flooding = asyncio.ensure_future(flood())
        await asyncio.sleep(20.0)
        flooding.cancel()
        return host.frames

    assert run_virtual(taken("member", b"x")) == 10_000
    burst_and_20_s = 24 * 2**14 / (FRAME_COST + 1)
    assert 0.5 * burst_and_20_s < run_virtual(taken("X", b"x")) < 1.1 * burst_and_20_s


def test_an_outsider_whose_request_waits_for_its_turn_is_not_given_up() -> None:
    async def main() -> float:
        host = Host()
        await host.endpoint.serve(PING, answered)
        asking = [RpcEndpoint(host.network.transport(f"X{i}"), SILENCE_S) for i in range(140)]
        await asyncio.gather(*(each.ask("B", PING, bytes(4000)) for each in asking))
        return asyncio.get_running_loop().time()

    assert run_virtual(asyncio.wait_for(main(), 100.0)) > 1.2 * OUTSIDER_SILENCES * SILENCE_S


@pytest.mark.parametrize("body", [OUTSIDER_FRAME_BYTES - 2**12, 1])
async def test_identities_that_come_and_go_keep_no_newcomer_waiting(body: int) -> None:
    """Twenty a second, for some seconds, each with all that one may send at once, or with as many streams as it may have."""
    host, tasks, clock = Host(), list[asyncio.Task[None]](), asyncio.get_running_loop().time
    await host.endpoint.serve(ROUND, answered)

    async def attack(name: str) -> None:
        streams, transport = 1 if body > 1 else STREAMS_PER_OUTSIDER, host.network.transport(name)
        channels = [await transport.open("B", ROUND) for _ in range(streams)]
        with contextlib.suppress(PeerUnreachable):
            for channel in channels:
                await channel.send(bytes(body))
        await asyncio.sleep(0.1)
        for channel in channels:
            channel.abort()

    took, me = list[float](), RpcEndpoint(host.network.transport("honest"), SILENCE_S)
    for i in range(240):
        tasks.append(asyncio.ensure_future(attack(f"X{i}")))
        if i % 80 == 79:
            began = clock()
            assert await me.ask("B", ROUND, bytes(1000), 60.0) == b"here"
            took.append(clock() - began)
        await asyncio.sleep(0.05)
    await asyncio.gather(*tasks)
    assert max(took) < SILENCE_S


async def answered(stream: Stream) -> None:
    await stream.message()
    await stream.send(b"here")


async def test_a_header_without_its_body_takes_nobody_s_time() -> None:
    """200 identities each promise the longest frame that they may send, and leave."""
    host, serving = Host(), list[asyncio.Task[None]]()
    await host.endpoint.serve(ROUND, answered)
    for i in range(200):
        wire = ByteStream()
        wire.connection_made(NoTransport())
        serving.append(asyncio.ensure_future(host.endpoint._answer(ROUND, StreamChannel(f"X{i}", wire))))
        header = HEADER.pack(Kind.MESSAGE, OUTSIDER_FRAME_BYTES)
        await asyncio.sleep(0.01)
        wire.get_buffer(-1)[: len(header)] = header
        wire.buffer_updated(len(header))
        await asyncio.sleep(0.01)
        wire.connection_lost(None)
    began = asyncio.get_running_loop().time()
    await RpcEndpoint(host.network.transport("honest"), SILENCE_S).ask("B", ROUND, bytes(1000), 1000.0)
    took_s = asyncio.get_running_loop().time() - began
    await asyncio.gather(*serving)
    assert took_s < 0.1


class NoTransport(asyncio.Transport):
    """The socket of an attacker."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing, as all others."""

    def writelines(self, list_of_data: object) -> None:
        """Drop it."""

    def is_closing(self) -> bool:
        """It is not."""
        return False

    def close(self) -> None:
        """Do nothing."""

    abort = pause_reading = resume_reading = close


async def test_where_too_much_waits_those_that_took_most_are_refused_and_turns_are_given_up_for_nothing() -> None:
    shares, last = Shares(SILENCE_S, lambda: 1e9), STREAMS_OF_OUTSIDERS
    shares.is_known = lambda peer: False
    waiting = [asyncio.ensure_future(shares.pace(f"X{i}", OUTSIDER_FRAME_BYTES)) for i in range(last)]
    await asyncio.sleep(0.5)
    assert WAITING_S / 2 < shares._turns.waiting_s <= WAITING_S
    small = asyncio.ensure_future(shares.pace("small", 1000))
    await asyncio.wait_for(small, 1.5)
    refused = [each.exception() for each in waiting if each.done() and each.exception() is not None]
    assert all(isinstance(each, Refused) and each.code is Code.BUSY for each in refused)
    assert last - 15 < len(refused) < last
    for each in waiting:
        each.cancel()
    await asyncio.sleep(0)
    assert shares._turns.waiting_s == 0.0
    await asyncio.wait_for(shares.pace("another", OUTSIDER_FRAME_BYTES), 1.5)


async def test_long_answers_to_outsiders_have_a_pace_and_newcomers_and_members_do_not_wait_behind_it() -> None:
    host, rounds, taken = Host(), Rounds("B"), list[int]()
    for number in range(300):
        rounds.add(a_record(number))
    await host.endpoint.serve(HISTORY, serving(rounds, lambda: 0.0))

    async def ask(name: str, timeout_s: float) -> int:
        asker = RpcEndpoint(host.network.transport(name), SILENCE_S)
        return len(expanded(await asker.ask("B", HISTORY, pack(HistoryRequest(-1, 256)), timeout_s)))

    async def greedy(name: str) -> None:
        while True:
            try:
                taken.append(await ask(name, 60.0))
            except (Refused, PeerUnreachable):
                await asyncio.sleep(0.2)

    attacks = [asyncio.ensure_future(greedy(f"X{i}")) for i in range(8) for _ in range(4)]
    await asyncio.sleep(10)
    assert await ask("member", 0.5) > 200_000
    assert await ask("newcomer", 2.0) > 200_000
    for attack in attacks:
        attack.cancel()
    assert 2**21 < sum(taken) < (10 + OUTSIDERS_BURST_S + 3) * ANSWERS_BITS / 8


async def test_who_is_refused_a_long_answer_has_not_taken_it_and_gets_one_among_newcomers() -> None:
    shares, page = Shares(SILENCE_S, lambda: 1e9), 2**18
    shares.is_known = lambda peer: False

    async def come(name: str) -> None:
        with contextlib.suppress(Refused):
            await shares.answer(name, page)

    async def newcomers() -> None:
        for number in itertools.count():
            coming.append(asyncio.ensure_future(come(f"X{number}")))
            await asyncio.sleep(0.2)

    coming = list[asyncio.Future[None]]()
    coming.append(asyncio.ensure_future(newcomers()))
    await asyncio.sleep(2 * OUTSIDERS_BURST_S + 10)
    for _ in range(3):
        for _ in range(100):
            try:
                await shares.answer("late", page)
                break
            except Refused as refused:
                await asyncio.sleep(refused.refusal.retry_s or 0.0)
        else:
            raise AssertionError("newcomers keep it out")
    await end_tasks(coming)


def test_long_answers_to_outsiders_take_a_tenth_of_a_thin_line() -> None:
    async def main() -> float:
        clock = asyncio.get_running_loop().time
        shares = Shares(SILENCE_S, lambda: 1.25e6)
        for _ in range(8):
            await shares.answer("X", 2**18)
        return clock()

    in_burst_s = OUTSIDERS_BURST_S * LINE_OVERHEAD
    assert run_virtual(main()) == pytest.approx(8 * 2**18 / 1.25e5 * LINE_OVERHEAD - in_burst_s, abs=3.0)


async def test_members_for_whom_the_owner_does_not_vouch_wait_for_long_answers_too() -> None:
    host, clock = Host(knows=True), asyncio.get_running_loop().time
    host.endpoint.shares.is_trusted = lambda peer: peer == "vouched"

    async def answer(stream: Stream) -> None:
        await stream.message()
        await stream.answer(lambda: bytes(2**20), 2**20)

    await host.endpoint.serve(COMMITS, answer)

    async def taken(name: str) -> float:
        began, asker = clock(), RpcEndpoint(host.network.transport(name), SILENCE_S)
        for _ in range(8):
            await asker.ask_in_turn("B", COMMITS, b"x")
        return clock() - began

    assert await taken("vouched") < 0.1
    assert await taken("newcomer") > 2.0


async def test_an_answer_that_alone_takes_longer_than_anybody_may_wait_is_given() -> None:
    shares = Shares(SILENCE_S, lambda: 62.5e3)
    for _ in range(2):
        await shares.answer("X", 2**20)


@pytest.mark.parametrize("busy", [5, 10**6])
async def test_a_newcomer_asks_a_busy_peer_again_and_not_for_ever(busy: int) -> None:
    host, asked, clock = Host(), list[str](), asyncio.get_running_loop().time

    async def answer(stream: Stream) -> None:
        await stream.message()
        asked.append(stream.remote)
        if len(asked) <= busy:
            raise Refused(Code.BUSY, "too many newcomers ask at a time")
        await stream.send(b"a page")

    await host.endpoint.serve(COMMITS, answer)
    newcomer = RpcEndpoint(host.network.transport("newcomer"), SILENCE_S)
    if busy < 10:
        assert await newcomer.ask_in_turn("B", COMMITS, b"x") == b"a page"
    else:
        with pytest.raises(Refused):
            await newcomer.ask_in_turn("B", COMMITS, b"x")
    assert clock() == pytest.approx(min(busy * RETRY_S, BUSY_SILENCES * SILENCE_S), abs=RETRY_S)


def a_record(number: int) -> RoundRecord:
    """Of a round with sixteen members."""
    contributions = tuple(Contribution(f"Qm{i:044d}", 1000, 10) for i in range(16))
    return RoundRecord(
        number, 10 * number, 1000, 1000 * number, 2.0, 2.0, 1e-3, 0.0, 16, "", 0, "B", 1.0, (), 0, 0, 0, "", contributions
    )


async def test_an_outsider_that_does_not_read_its_answer_keeps_no_memory() -> None:
    host = Host()
    ended = asyncio.Event()

    async def answer(stream: Stream) -> None:
        try:
            await stream.message()
            await stream.answer(lambda: bytes(2**20), 2**20)
        finally:
            ended.set()

    await host.endpoint.serve(COMMITS, answer)
    channel = await host.network.transport("X").open("B", COMMITS)
    await channel.send(b"x")
    host.network.set_bandwidth("X", 1e6, 1e3)
    await asyncio.wait_for(ended.wait(), 1.5 * SILENCE_S)


async def test_a_heartbeat_for_which_there_is_no_room_breaks_no_stream() -> None:
    host, refused = Host(), list[int]()

    async def pace(peer: str, cost: int) -> None:
        if cost == FRAME_COST:
            refused.append(cost)
            raise Refused(Code.BUSY, "too many")

    async def slow(stream: Stream) -> None:
        await stream.message()
        await stream.alive(asyncio.sleep(10 * SILENCE_S))
        await stream.send(b"done")

    host.endpoint.shares.pace = pace  # type: ignore[method-assign]
    await host.endpoint.serve(PING, slow)
    outsider = RpcEndpoint(host.network.transport("X"), SILENCE_S)
    async with outsider.stream("B", PING) as stream:
        await stream.send(b"request")
        assert await stream.alive(stream.message()) == b"done"
    assert len(refused) > 3


async def test_all_outsiders_together_have_a_pace() -> None:
    host = Host()
    await host.serve()
    floods = []
    for i in range(30):
        channel = await host.channel(f"X{i}")

        async def flood(channel: Channel = channel) -> None:
            with contextlib.suppress(PeerUnreachable):
                while True:
                    await channel.send(bytes(1000))

        floods.append(asyncio.ensure_future(flood()))
    await asyncio.sleep(20.0)
    assert host.frames * (1000 + FRAME_COST) < 1.2 * 24 * 2**16
    for each in floods:
        each.cancel()


@pytest.mark.parametrize("peer", ["X", "member"])
async def test_a_frame_is_refused_by_its_header(peer: str) -> None:
    """A stranger's also where the method takes more from members."""
    host = Host()
    await host.endpoint.serve(ROUND, lambda stream: stream.message())  # type: ignore[arg-type, return-value]
    channel = await host.network.transport(peer).open("B", ROUND)
    longest = METHODS[ROUND].request_bytes if peer == "member" else OUTSIDER_FRAME_BYTES
    await channel.send(bytes(longest + 1))
    while (answer := await channel.receive()) is not None and answer.kind != Kind.REFUSAL:
        pass
    assert answer is not None
    assert Refused.read(answer.body).code is Code.TOO_LARGE


def test_a_promise_of_bytes_takes_no_memory() -> None:
    async def main() -> None:
        loop, pair = asyncio.get_running_loop(), socket.socketpair()
        here, there = [(await loop.create_unix_connection(ByteStream, sock=end))[1] for end in pair]
        tracemalloc.start()
        receiving = asyncio.ensure_future(StreamChannel("X", there).receive())
        here.write(HEADER.pack(Kind.MESSAGE, MAX_FRAME_BYTES), b"x")
        await asyncio.sleep(0.1)
        assert tracemalloc.get_traced_memory()[1] < 4 * FIRST_BYTES
        here.write(bytes(MAX_FRAME_BYTES - 1))
        message = await asyncio.wait_for(receiving, 10)
        tracemalloc.stop()
        assert message is not None
        assert bytes(message.body) == b"x" + bytes(MAX_FRAME_BYTES - 1)
        here.close()
        there.close()

    asyncio.run(main())


async def test_the_bytes_held_for_outsiders_are_bounded_each_and_in_all() -> None:
    shares = Shares(SILENCE_S, lambda: 1e9)
    shares.is_known = lambda peer: False
    for i in range(HELD_BY_OUTSIDERS // HELD_PER_STRANGER - 1):
        await shares.hold(f"X{i}", HELD_PER_STRANGER)
    waiting = [asyncio.ensure_future(shares.hold("X0", 1))]
    await asyncio.sleep(1)
    await asyncio.wait_for(shares.hold("Y", HELD_PER_STRANGER // 2), 1)
    await asyncio.wait_for(shares.hold("Z", HELD_PER_STRANGER // 2), 1)
    waiting.append(asyncio.ensure_future(shares.hold("Z", 1)))
    await asyncio.sleep(1)
    assert not any(each.done() for each in waiting)
    shares.release("X0", HELD_PER_STRANGER)
    await asyncio.wait_for(asyncio.gather(*waiting), 1)


@pytest.mark.parametrize(("is_vouched", "most"), [(True, HELD_PER_PEER), (False, HELD_PER_STRANGER)])
async def test_the_bytes_held_for_a_member_are_bounded_and_free_again_when_its_streams_end(is_vouched: bool, most: int) -> None:
    shares = Shares(SILENCE_S, lambda: 1e9)
    shares.is_trusted = lambda peer: is_vouched
    await shares.hold("A", most)
    waiting = asyncio.ensure_future(shares.hold("A", 1))
    other = asyncio.ensure_future(shares.hold("B", most))
    await asyncio.sleep(1)
    assert other.done()
    assert not waiting.done()
    shares.release("A", most)
    await asyncio.wait_for(waiting, 1)


def shares_of_an_open_campaign() -> Shares:
    shares = Shares(SILENCE_S, lambda: 1e9)
    shares.is_trusted = lambda peer: peer == "vouched"
    return shares


@pytest.mark.parametrize("size", [OWN_BYTES, OWN_BYTES + 1, UPDATE, MAX_FRAME_BYTES])
async def test_all_members_for_whom_the_owner_does_not_vouch_hold_bounded_bytes_however_many_they_are(size: int) -> None:
    shares = shares_of_an_open_campaign()
    frames = [asyncio.ensure_future(shares.hold(f"X{i}", size)) for _ in range(8) for i in range(MAX_MEMBERS)]
    await asyncio.sleep(1)
    held = sum(shares._held.values())
    assert held == sum(size for each in frames if each.done())
    await asyncio.wait_for(shares.hold("vouched", HELD_PER_PEER), 1)
    await end_tasks(frames)
    assert held <= GREEDY_STRANGERS * HELD_PER_STRANGER + MAX_MEMBERS * OWN_BYTES


async def test_greedy_members_for_whom_the_owner_does_not_vouch_keep_nobody_waiting() -> None:
    shares = shares_of_an_open_campaign()
    greedy = [asyncio.ensure_future(shares.hold(f"greedy {i}", UPDATE)) for _ in range(8) for i in range(200)]
    await asyncio.sleep(1)
    assert all(shares._held[f"greedy {i}"] for i in range(200))
    assert sum(shares._held.values()) > FURTHER_SHARE * GREEDY_STRANGERS * HELD_PER_STRANGER
    for i in range(100):
        await asyncio.wait_for(shares.hold(f"honest {i}", UPDATE), 1)  # its frames come one at a time
    further = asyncio.ensure_future(shares.hold("honest 0", UPDATE))
    await asyncio.sleep(1)
    assert not further.done()
    shares.release("honest 0", UPDATE)
    await asyncio.wait_for(further, 1)
    await end_tasks(greedy)


async def test_where_strange_members_hold_all_only_long_frames_wait_and_the_longest_gets_room() -> None:
    shares, vouched = shares_of_an_open_campaign(), {"vouched", "fallen"}
    shares.is_trusted = vouched.__contains__
    await shares.hold("fallen", HELD_PER_PEER)
    greedy = [f"greedy {i}" for i in range(GREEDY_STRANGERS)]
    for name in greedy:
        await shares.hold(name, HELD_PER_STRANGER + OWN_BYTES)
    vouched.remove("fallen")
    assert shares.enter("fallen")
    waiting = asyncio.ensure_future(shares.hold("honest", MAX_FRAME_BYTES))
    await asyncio.wait_for(shares.hold("honest", OWN_BYTES), 1)
    await asyncio.wait_for(shares.hold("vouched", HELD_PER_PEER), 1)
    await asyncio.sleep(1)
    assert not waiting.done()
    shares.release("honest", OWN_BYTES)
    shares.release("fallen", HELD_PER_PEER)
    for name in greedy[:2]:
        shares.release(name, HELD_PER_STRANGER)
    await asyncio.wait_for(waiting, 1)


async def test_who_becomes_a_member_or_vouched_for_while_its_bytes_are_held_leaves_nothing_in_the_account() -> None:
    shares, standing = shares_of_an_open_campaign(), {"A": 0}
    shares.is_known, shares.is_trusted = lambda peer: standing[peer] > 0, lambda peer: standing[peer] > 1
    for order in itertools.permutations(range(3)):
        for standing["A"] in order:
            await shares.hold("A", UPDATE)
        for standing["A"] in order:
            shares.release("A", UPDATE)
        assert shares._shared == sum(shares._held.values()) == len(shares._outsiders | shares._strange_members) == 0


async def test_frames_of_one_peer_that_wait_for_room_do_not_all_look_for_it_at_each_release() -> None:
    shares, looks = shares_of_an_open_campaign(), list[str]()
    await shares.hold("greedy", HELD_PER_STRANGER)
    waiting = [asyncio.ensure_future(shares.hold("greedy", UPDATE)) for _ in range(1000)]
    await asyncio.sleep(1)
    shares.is_known = lambda peer: not looks.append(peer)  # type: ignore[func-returns-value]
    shares.release("another", 1)
    await asyncio.sleep(1)
    await end_tasks(waiting)
    assert len(looks) < 10


LONG_FRAMES = [
    (DECIDE, Kind.MESSAGE), (ACCUSE, Kind.MESSAGE), (ACCEPT, Kind.MESSAGE), (ACCEPT, Kind.COMPACT), (ROUND, Kind.REPORT),
]


@pytest.mark.parametrize(("method", "kind"), LONG_FRAMES)
async def test_a_frame_that_only_vouched_members_send_is_refused_from_others_by_its_header(method: str, kind: Kind) -> None:
    host, taken = Host(knows=True), list[str]()
    host.endpoint.shares.is_trusted = lambda peer: peer == "vouched"

    async def take(stream: Stream) -> None:
        taken.append(stream.remote)
        await stream.any_message()
        await stream.send(b"taken")

    await host.endpoint.serve(method, take)

    async def sent(peer: str, size: int) -> bytes:
        asker = RpcEndpoint(host.network.transport(peer), SILENCE_S)
        return await asker.ask("B", method, bytes(size), 10.0, kind)

    longest = METHODS[method].stranger_bytes
    assert longest < METHODS[method].longest(kind, to_asker=False) == MAX_FRAME_BYTES
    assert await sent("vouched", MAX_FRAME_BYTES) == await sent("newcomer", longest) == b"taken"
    with pytest.raises(Refused, match="at most") as refused:
        await sent("newcomer", longest + 1)
    assert refused.value.code is Code.TOO_LARGE


def test_no_member_may_send_a_long_frame_for_which_the_owner_does_not_vouch_but_a_part_of_its_update() -> None:
    kinds = [Kind.MESSAGE, *Kind]
    longest = {min(each.stranger_bytes, each.longest(kind, False)) for each in METHODS.values() for kind in kinds}
    assert max(longest) == METHODS[PUSH].stranger_bytes == UPDATE
    assert PART_BYTES + INDEX_BYTES + WEIGHT_BYTES <= UPDATE


def test_streams_of_members_for_whom_the_owner_does_not_vouch_are_capped_in_all_and_those_with_most_give_way() -> None:
    shares = Shares(SILENCE_S, lambda: 1e9)
    shares.is_trusted = lambda peer: peer == "vouched"
    assert all(shares.enter(f"greedy {i}") for i in range(GREEDY_STRANGERS) for _ in range(STREAMS_PER_PEER))
    assert all(shares.enter(peer) for peer in ("honest", "vouched") for _ in range(100))
    shown = {peer: len(places) for peer, places in shares._places.items()}
    assert (shown.pop("vouched"), shown["honest"]) == (100, 100)
    assert sum(shown.values()) == GREEDY_STRANGERS * STREAMS_PER_PEER


async def test_a_swarm_s_members_are_no_outsiders_to_each_other() -> None:
    from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(1)
    for node in swarm.nodes.values():
        for is_known in (node.endpoint.shares.is_known, node.world.registry.is_known):
            assert {peer for peer in "WABCX" if is_known(peer)} == set("WABC")
    swarm.start("D")
    await swarm.until(lambda: "D" in swarm.nodes["A"].log.last.members)
    assert swarm.nodes["A"].endpoint.shares.is_known("D")


# Any bytes --------------------------------------------------------------------------------------------------------------

RECORDS = (
    consensus.Accept, consensus.Decide, consensus.Commit, consensus.ControlRequest, consensus.Leave, rounds.Announcement,
    content.CampaignRecord, content.PiecesRequest, presence.Contact, presence.HistoryPage, refusals.Refusal,
)
HEADS = st.sampled_from([
    b"\x9f", b"\xdc\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xde\xff\xff", b"\xdf\x00\xff\xff\xff", b"\xc6\x7f\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff", b"\xc9\x7f\xff\xff\xff\x01", b"\x91", b"\x90", b"\x80", b"\xc0",
])
BYTES = st.lists(HEADS | st.binary(max_size=8), max_size=60).map(b"".join)
FRAMES = st.lists(st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=30)), max_size=5)
PER_BYTE, BASE_BYTES = 400, 2**20
"""Memory that reading takes: for each byte, a record of three numbers takes most; and whatever the libraries hold."""


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
@settings(deadline=None)
@given(start=st.integers(0, 200), garbage=BYTES, repeats=st.integers(1, 200))
def test_reading_any_bytes_raises_nothing_untyped_and_takes_memory_by_their_number(
    cls: type[object], start: int, garbage: bytes, repeats: int
) -> None:
    data = b"\x9f" * start + garbage * repeats
    tracemalloc.start()
    try:
        with contextlib.suppress(WireError):
            unpack(cls, data)
        assert tracemalloc.get_traced_memory()[1] <= BASE_BYTES + PER_BYTE * len(data)
    finally:
        tracemalloc.stop()


def test_lists_within_lists_that_promise_much_take_no_memory() -> None:
    """Each level would allocate the list that it promises; `test_wire.py` has the same for exceptions."""
    data = pack(Ping(1)) + (b"\xdd\x00\x7f\xff\xff" * 900).ljust(MAX_FRAME_BYTES - 2, b"\0")
    for cls in (Ping, rounds.Announcement, consensus.Commit):
        tracemalloc.start()
        with pytest.raises(WireError):
            unpack(cls, data[2:])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 * len(data)


def test_more_items_than_a_field_may_have_are_refused_before_they_are_read() -> None:
    announcement = [*["c" * 64, 10, 1, 0, 0.0, "d" * 64, "e" * 64, 0, [], 0, 0.0, 0.0, 0.0, None], [[0, 1, 2]] * 2**20]
    data = msgpack.packb(announcement)
    tracemalloc.start()
    with pytest.raises(WireError, match=f"at most {MAX_INTERVALS}"):
        unpack(rounds.Announcement, data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * len(data)


def commits(workloads: list[list[object]] | None = None, owners: list[list[int]] | None = None) -> bytes:
    """A page of one commit that gives its members these workloads, or its experts these owners."""
    commit = ["c" * 64, 0, 1, "p" * 64, "", [], [], "d" * 64, 0, 0, ["a"], owners or [], [], ["h"], ["h"], ["i" * 16]]
    packed: bytes = msgpack.packb([[[[*commit, [], None, [], workloads] if workloads else commit, [0, "x"], []]]])
    return packed


FULL = [0, [[0, 0, 1]] * MAX_INTERVALS]


@pytest.mark.parametrize("data", [commits(workloads=[FULL] * 40), commits(owners=[[0] * 1024] * 4096)], ids=["lists", "values"])
def test_a_record_of_more_lists_and_values_than_any_honest_one_takes_little_memory(data: bytes) -> None:
    """Each list within its field's bound; made into objects, they took ninety times their bytes."""
    tracemalloc.start()
    with pytest.raises(WireError, match="more than"):
        unpack(consensus.Decide, data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


def test_as_many_intervals_as_a_field_may_have_are_read() -> None:
    data = msgpack.packb(["p" * 64, FULL[1]])
    assert len(unpack(consensus.Leave, data).untrained) == MAX_INTERVALS


@pytest.mark.parametrize("peer", ["X", "member"])
def test_an_answer_of_an_outsider_is_refused_by_its_header(peer: str) -> None:
    async def main() -> int:
        host = Host()

        async def answer(stream: Stream) -> None:
            await stream.message()
            await stream.send(bytes(METHODS[PREPARE].outsider_bytes + 1))

        await RpcEndpoint(host.network.transport(peer), SILENCE_S).serve(PREPARE, answer)
        return len(await host.endpoint.ask(peer, PREPARE, b"", 10.0))

    if peer == "member":
        assert run_virtual(main()) == METHODS[PREPARE].outsider_bytes + 1
        return
    with pytest.raises(Refused, match="at most") as refused:
        run_virtual(main())
    assert refused.value.code is Code.TOO_LARGE


def test_a_members_record_does_not_wait_behind_those_of_outsiders() -> None:
    async def main() -> None:
        data = commits(workloads=[FULL] * 2)
        hostile = [asyncio.ensure_future(unpack_beside(consensus.Decide, data, is_known=False)) for _ in range(12)]
        honest = await unpack_beside(consensus.Decide, commits(workloads=[FULL]))
        assert len(honest.decided[0].commit.workloads[0].slices) == MAX_INTERVALS
        assert not hostile[-1].done()
        await asyncio.gather(*hostile)

    asyncio.run(main())


@settings(deadline=None)
@given(FRAMES, st.binary(max_size=12))
def test_any_headers_end_a_stream_with_a_refusal_or_a_break(frames: list[tuple[int, int, bytes]], tail: bytes) -> None:
    """Kinds, lengths and bodies that do not fit together, over a real socket."""

    async def main() -> None:
        loop, pair = asyncio.get_running_loop(), socket.socketpair()
        here, there = [(await loop.create_unix_connection(ByteStream, sock=end))[1] for end in pair]
        endpoint = RpcEndpoint(MemoryNetwork().transport("B"), 0.05)
        endpoint.shares.is_known = lambda peer: False
        ended = asyncio.ensure_future(endpoint._answer(PING, StreamChannel("X", there)))
        endpoint._handlers[PING] = lambda stream: stream.message()  # type: ignore[assignment, return-value]
        for kind, size, body in frames:
            here.write(HEADER.pack(kind, size), body)
        here.write(tail)
        await asyncio.wait_for(ended, 10)
        assert sum(endpoint.shares._held.values()) == len(endpoint.shares._places) == 0
        here.abort()
        there.abort()

    asyncio.run(main())


async def test_ignorable_frames_are_limited_too() -> None:
    host = Host(knows=True)
    await host.serve()
    channel = await host.channel("A")
    await channel.send(bytes(METHODS[PING].longest(IGNORABLE, to_asker=False) + 1), kind=IGNORABLE)
    while (answer := await channel.receive()) is not None and answer.kind != Kind.REFUSAL:
        pass
    assert answer is not None
