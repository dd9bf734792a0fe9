"""What a peer reads from its daemon's sockets, under both event loops."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from spes_p2p.messages.framing import Message
from spes_p2p.net.byte_stream import AHEAD_BYTES, ByteStream
from spes_p2p.net.channels import StreamChannel
from spes_p2p.net.interfaces import admit_all
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.testing.memory_network import MemoryNetwork

Script = Callable[[ByteStream, ByteStream], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Callable[[Script], None]:
    """Runs a script on the two ends of a connection."""

    async def main(script: Script) -> None:
        loop, pair = asyncio.get_running_loop(), socket.socketpair()
        ends = [(await loop.create_unix_connection(ByteStream, sock=end))[1] for end in pair]
        await asyncio.wait_for(script(*ends), 10)
        for end in ends:
            end.close()

    return lambda script: (uvloop.run if request.param == "uvloop" else asyncio.run)(main(script))


@pytest.mark.parametrize("sizes", [(1,) * 50, (5, 300_000, 5, 70_000), (AHEAD_BYTES - 1, 2, AHEAD_BYTES, 0, AHEAD_BYTES + 1)])
def test_bytes_arrive_as_they_were_sent_however_they_are_cut(play: Callable[[Script], None], sizes: tuple[int, ...]):
    content = os.urandom(sum(sizes))

    async def script(here: ByteStream, there: ByteStream) -> None:
        async def send() -> None:
            for start in range(0, len(content), 10_007):
                piece = memoryview(content)[start : start + 10_007]
                here.write(piece[:5], piece[5:])
                await here.drain()

        sending, received = asyncio.ensure_future(send()), b""
        for size in sizes:
            received += await there.read_exactly(size)
        await sending
        assert received == content

    play(script)


def test_a_reader_that_was_cancelled_gets_later_what_had_come(play: Callable[[Script], None]):
    async def script(here: ByteStream, there: ByteStream) -> None:
        here.write(b"ab")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(there.read_exactly(4), 0.05)
        here.write(b"cdef")
        assert await there.read_exactly(4) == b"abcd"
        assert await there.read_exactly(2) == b"ef"

    play(script)


def test_what_was_sent_before_the_end_is_read_and_then_the_end_is_said(play: Callable[[Script], None]):
    async def script(here: ByteStream, there: ByteStream) -> None:
        here.write(b"last words")
        here.close()
        assert await there.read_exactly(4) == b"last"
        assert not there.at_end()
        assert await there.read_exactly(6) == b" words"
        with pytest.raises(EOFError):
            await there.read_exactly(1)
        assert there.at_end()
        there.abort()
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="closed"):
            await there.drain()

    play(script)


def test_a_writer_waits_for_a_reader_that_does_not_read_and_goes_on_with_it(play: Callable[[Script], None]):
    async def script(here: ByteStream, there: ByteStream) -> None:
        here.write(bytes(2**22))
        waiting = asyncio.ensure_future(here.drain())
        await asyncio.wait({waiting}, timeout=0.05)
        assert not waiting.done()
        await there.read_exactly(2**22)
        await waiting
        here.close()
        await there.swallow(2**30)
        assert there.at_end()

    play(script)


def test_a_part_of_a_frame_is_heard(play: Callable[[Script], None]):
    async def script(here: ByteStream, there: ByteStream) -> None:
        heard = asyncio.Event()
        channel = StreamChannel("far", there)
        channel.watch(heard.set, admit_all)
        reading = asyncio.ensure_future(channel.receive())
        sender = StreamChannel("near", here)
        whole: list[bytes] = []
        here.write = lambda *pieces: whole.extend(map(bytes, pieces))  # type: ignore[method-assign]
        await sender.send(bytes(10))
        del here.write
        frame = b"".join(whole)
        for part in (frame[:-3], frame[-3:]):
            assert not reading.done()
            heard.clear()
            here.write(part)
            await heard.wait()
        assert await reading == Message(bytes(10))

    play(script)


def test_a_stream_whose_other_end_has_finished_is_not_broken(play: Callable[[Script], None]):
    """A member that a coordinator sends the place of a commit fetches it from another peer after that."""

    async def script(here: ByteStream, there: ByteStream) -> None:
        endpoint = RpcEndpoint(MemoryNetwork().transport("near"), 5.0)
        stream = endpoint._stream(StreamChannel("far", here), "round", is_answer=True)
        coordinator = StreamChannel("near", there)
        await coordinator.send(b"the place of a commit")
        await coordinator.finish()
        assert await stream.message() == b"the place of a commit"
        assert await stream.alive(asyncio.sleep(0.2, "the commit")) == "the commit"
        assert await stream.receive() is None
        await stream.close()

    play(script)
