"""Streams between peers: what is done with each kind of frame, and with what is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.errors import PeerUnreachable, Refused, UserError, refusal_line
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.framing import IGNORABLE, Kind, Message
from spes_p2p.messages.methods import METHODS, PING, PREPARE
from spes_p2p.messages.refusals import LONGEST_REFUSAL, Code
from spes_p2p.messages.rounds import Ping, Pong
from spes_p2p.net.interfaces import Channel
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.virtual_loop import run_virtual

PONG = Pong(3, -1, True)
UNKNOWN = st.integers(0, IGNORABLE - 1).filter(lambda kind: kind not in set(Kind))


async def answer(stream: Stream) -> None:
    unpack(Ping, await stream.message())
    await stream.send(pack(PONG))


def told(*frames: Message) -> Message | None:
    """What a peer that serves PING sends to one that sends these frames, besides heartbeats."""

    async def main() -> Message | None:
        network = MemoryNetwork()
        await RpcEndpoint(network.transport("B"), 5.0).serve(PING, answer)
        channel = await network.transport("A").open("B", PING)
        for frame in frames:
            await channel.send(bytes(frame.body), kind=frame.kind)
        while (received := await channel.receive()) is not None and received.kind == Kind.HEARTBEAT:
            pass
        return received

    return run_virtual(main())


def hears(*frames: Message) -> bytes:
    """What a peer that asks makes of these frames; raises what it raises."""

    async def serve(channel: Channel) -> None:
        await channel.receive()
        for frame in frames:
            await channel.send(bytes(frame.body), kind=frame.kind)
        await channel.finish()
        while await channel.receive() is not None:
            pass

    async def main() -> bytes:
        network = MemoryNetwork()
        await network.transport("B").serve(PING, serve)
        return await RpcEndpoint(network.transport("A"), 5.0).ask("B", PING, pack(Ping(-1)))

    return run_virtual(main())


def code_of(message: Message | None) -> Code:
    assert message is not None
    assert message.kind == Kind.REFUSAL
    return Refused.read(message.body).code


ASKED = Message(pack(Ping(-1)))


def test_a_request_is_answered() -> None:
    assert told(ASKED) == Message(pack(PONG))


@given(st.integers(IGNORABLE, 255), st.binary(max_size=20))
def test_an_unknown_kind_that_may_be_ignored_is(kind: int, body: bytes) -> None:
    assert told(Message(body, kind), ASKED) == Message(pack(PONG))
    assert hears(Message(body, kind), Message(pack(PONG))) == pack(PONG)


async def test_a_stream_without_a_request_is_dropped_though_its_peer_lives() -> None:
    """A request that was garbled into a frame to ignore leaves one end waiting for it and the other for its answer."""

    async def ask() -> None:
        network = MemoryNetwork()
        await RpcEndpoint(network.transport("B"), 5.0).serve(PING, answer)
        async with RpcEndpoint(network.transport("A"), 5.0).stream("B", PING) as stream:
            await stream.send(b"garbled", kind=IGNORABLE + 1)
            with pytest.raises(PeerUnreachable):
                await stream.message()

    await asyncio.wait_for(ask(), 120.0)


@given(UNKNOWN, st.binary(max_size=20))
def test_an_unknown_kind_that_must_be_understood_is_refused(kind: int, body: bytes) -> None:
    assert code_of(told(Message(body, kind), ASKED)) is Code.UNKNOWN_KIND
    with pytest.raises(Refused) as refused:
        hears(Message(body, kind))
    assert refused.value.code is Code.UNKNOWN_KIND


def test_a_kind_where_another_belongs_is_malformed() -> None:
    assert code_of(told(Message(pack(Ping(-1)), Kind.PROPOSAL))) is Code.MALFORMED
    with pytest.raises(WireError, match="MESSAGE belongs"):
        hears(Message(pack(PONG), Kind.PROPOSAL))


def test_a_message_beyond_its_method_s_limit_is_refused_before_it_is_unpacked() -> None:
    limit = METHODS[PING].request_bytes
    assert code_of(told(Message(bytes(limit)))) is Code.MALFORMED
    assert code_of(told(Message(bytes(limit + 1)))) is Code.TOO_LARGE
    with pytest.raises(Refused) as refused:
        hears(Message(bytes(METHODS[PING].answer_bytes + 1)))
    assert refused.value.code is Code.TOO_LARGE


def test_a_refusal_comes_with_its_code_and_data() -> None:
    sent = Refused(Code.BUSY, "later\n" * 200, retry_s=2.5, peer="B")
    with pytest.raises(Refused) as refused:
        hears(Message(pack(sent.refusal), Kind.REFUSAL))
    assert refused.value.code is Code.BUSY
    assert refused.value.refusal == sent.refusal
    assert sent.detail == ("later " * 200)[:500]


def test_a_refused_person_reads_whom_to_ask() -> None:
    told = {code: refusal_line("P", Refused(code, "no"), 3) for code in (Code.NOT_ADMITTED, Code.BUSY)}
    assert told == {Code.NOT_ADMITTED: "refused by P: no; ask the campaign's owner", Code.BUSY: "refused by P: no"}


def test_a_refusal_of_a_newer_version_is_still_one() -> None:
    newer = pack(Refused(Code.BUSY, "x").refusal).replace(b"busy", b"idle")
    assert Refused.read(newer).code is Code.OTHER


def test_a_refusal_that_is_too_long_is_none() -> None:
    newer = msgpack.packb(["busy", "later", None, None, None, None, None, "x" * LONGEST_REFUSAL])
    with pytest.raises(WireError, match="bytes"):
        Refused.read(newer)


def test_a_garbled_refusal_breaks_the_stream() -> None:
    with pytest.raises(PeerUnreachable, match="does not keep to the protocol"):
        hears(Message(b"garbage", Kind.REFUSAL))


@given(st.lists(st.tuples(st.sampled_from([*Kind, *range(14, 20), 200]), st.binary(max_size=40)), max_size=4))
def test_garbled_frames_are_refused_or_break_the_stream_and_nothing_else(frames: list[tuple[int, bytes]]) -> None:
    messages = [Message(body, kind) for kind, body in frames]
    with_end = [*messages, Message(b"", Kind.MESSAGE)]
    with nothing_unforeseen(), contextlib.suppress(PeerUnreachable):
        reply = told(*with_end)
        assert reply is None or reply.kind in (Kind.REFUSAL, Kind.MESSAGE)
    with nothing_unforeseen(), contextlib.suppress(Refused, WireError, PeerUnreachable):
        hears(*messages)


@contextlib.contextmanager
def nothing_unforeseen() -> Iterator[None]:
    """No handler fails otherwise than by refusing: such a failure is logged as an error."""
    errors: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record)  # type: ignore[method-assign]
    logger = logging.getLogger("spes_p2p")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not errors


def test_what_ails_this_peer_is_said_without_the_request_that_met_it(caplog: pytest.LogCaptureFixture) -> None:
    async def full(stream: Stream) -> None:
        raise UserError("votes: cannot be written; make room")

    async def main() -> None:
        network = MemoryNetwork()
        await RpcEndpoint(network.transport("B"), 5.0).serve(PREPARE, full)
        channel = await network.transport("A").open("B", PREPARE)
        await channel.send(b"")
        while await channel.receive() is not None:
            pass

    with contextlib.suppress(PeerUnreachable):
        run_virtual(main())
    assert caplog.messages == ["votes: cannot be written; make room"]


@pytest.mark.parametrize("ending", [Kind.END, None])
async def test_a_sequence_ends_with_its_end_or_with_the_stream(ending: Kind | None) -> None:
    network, got = MemoryNetwork(), list[bytes]()
    done = asyncio.Event()

    async def collect(stream: Stream) -> None:
        while (chunk := await stream.receive(Kind.CONTENT)) is not None:
            got.append(chunk)
        done.set()

    await RpcEndpoint(network.transport("B"), 5.0).serve("collect", collect)
    async with RpcEndpoint(network.transport("A"), 5.0).stream("B", "collect") as stream:
        for chunk in (b"a", b"", b"c"):
            await stream.send(chunk, kind=Kind.CONTENT)
        if ending is None:
            await stream.finish()
        else:
            await stream.send(kind=ending)
        await done.wait()
    assert got == [b"a", b"", b"c"]
