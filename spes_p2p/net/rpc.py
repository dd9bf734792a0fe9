"""Streams between peers: typed messages with refusals and heartbeats, on top of the transport's channels.

What each kind of frame means, and what is done with a kind that is not known here: `messages/framing.py`.

While a stream is open both ends send heartbeats from their event loop. Silence beyond the bound (`detector.py`) in all streams
with a peer therefore means that it is dead, paused or cut off, never that it is busy; a broken connection counts at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.messages.codec import WireError, pack
from spes_p2p.messages.framing import IGNORABLE, Kind, Message
from spes_p2p.messages.methods import METHODS, ROUND, UNBOUNDED, Method
from spes_p2p.messages.refusals import Code
from spes_p2p.net.detector import CLOCK_ERROR_S, SilenceDetector
from spes_p2p.net.heartbeats import Heartbeats
from spes_p2p.net.intake import Intake
from spes_p2p.net.interfaces import Channel, Transport, admit_all
from spes_p2p.net.limits import UNLIMITED, Line
from spes_p2p.net.nearness import Nearness
from spes_p2p.net.pipe import pipe
from spes_p2p.net.shares import STREAM_COST, Shares
from spes_p2p.net.tasks import end_tasks
from spes_p2p.net.throughput import WINDOW_S, Throughput
from spes_p2p.net.turns import RETRY_S

logger = logging.getLogger(__name__)

T = TypeVar("T")

REFUSED_HEARTBEAT_S = 1.0
"""Read no more of an outsider's stream for so long after a heartbeat for which there is no room."""
STALLED_SILENCES = 2.0
"""Give up a stalled stream after this many times the longest silence."""
REQUEST_SILENCES = 12.0
"""A served stream without a request is dropped after this many times the longest silence: a request can queue behind the
parts of other streams on a thin line."""
OUTSIDER_SILENCES = 1.0
"""The same for outsiders, from which no parts are on their way here."""
BUSY_SILENCES = 6.0
"""A peer that is busy is asked again for this many times the longest silence."""
QUEUED_FRAMES = 8
"""Received frames that may wait to be read; beyond this the sender is slowed down."""
SEQUENCES = (Kind.CONTENT, Kind.PART, Kind.MANIFEST)
"""Kinds of which several follow each other until END."""
Count = Callable[[int, int, float], None]
"""Called per message with bytes sent, bytes received, and the start time."""


class Stream:
    """An open stream with one peer."""

    def __init__(
        self,
        channel: Channel,
        detector: SilenceDetector,
        count: Count,
        line: Line,
        method: Method,
        shares: Shares,
        is_answer: bool,
    ):
        """`is_answer`: this end opened the stream, so what arrives answers it."""
        self.remote = channel.remote
        self._channel, self._detector, self._count, self._line, self._shares = channel, detector, count, line, shares
        self._intake = Intake(channel.remote, method, shares, is_answer)
        self._incoming: asyncio.Queue[Message | None] = asyncio.Queue(QUEUED_FRAMES)
        self._news = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: PeerUnreachable | Refused | None = None
        """Why the stream broke. Once raised it refers to the frames that it passed, so `close` replaces it: no ring is left."""
        self._sending = asyncio.Lock()
        self._ended = False
        self._has_refused = False
        self._loop = asyncio.get_running_loop()
        self._reader = asyncio.create_task(self._read())
        self._heartbeats = Heartbeats(self.remote, detector, lambda: self._send(kind=Kind.HEARTBEAT), self._lose)
        channel.watch(self._heartbeats.heard, self._admit)
        self._request_due: asyncio.TimerHandle | None = None

    def expect_request(self) -> None:
        """Break the stream unless a first message arrives in time. Ignorable frames of unknown kinds do not count."""
        patience = REQUEST_SILENCES if self._shares.is_known(self.remote) else OUTSIDER_SILENCES
        limit_s = patience * self._detector.ceiling_s
        self._request_due = self._loop.call_later(limit_s, self._late, "opened a stream and sent no request for", limit_s)

    async def send(self, *pieces: bytes | memoryview, kind: int = Kind.MESSAGE) -> None:
        """Send one message, these bytes one after the other. Raises PeerUnreachable when the stream is broken."""
        size = sum(map(len, pieces))
        if self._line.up is not None:
            await self._line.up.let_pass(size)
        began = self._loop.time()
        await self._send(*pieces, kind=kind)
        self._count(size, 0, began)

    async def answer(self, make: Callable[[], bytes], cost: int) -> None:
        """Send what `make` returns, `cost` bytes or so. A stranger waits for its turn first, and has `silence_s` to read it.

        Raises PeerUnreachable, TimeoutError, and Refused where too much waits.
        """
        if self._shares.is_trusted(self.remote):
            await self.send(make())
        else:
            await self.alive(self._shares.answer(self.remote, cost))
            await _within(self.send(make()), self._detector.ceiling_s)

    async def refuse(self, refused: Refused) -> None:
        """Send a refusal, which the other end's `receive` raises."""
        if not self._has_refused:
            self._has_refused = True
            await self._send(pack(refused.refusal), kind=Kind.REFUSAL)

    async def receive(self, kind: Kind = Kind.MESSAGE) -> bytes | None:
        """Return the next message; None when the other end has finished or ended the sequence.

        Raises PeerUnreachable, Refused, WireError (a message of another kind). What came before the stream broke is delivered.
        """
        received = await self.receive_view(kind)
        return None if received is None else bytes(received)

    async def receive_view(self, kind: Kind) -> memoryview | None:
        """As `receive`, without copying: for large messages."""
        received = await self.receive_any()
        if received is None or (received.kind == Kind.END and kind in SEQUENCES):
            return None
        if received.kind != kind:
            raise WireError(f"a frame of kind {received.kind} where {kind.name} belongs")
        return memoryview(received.body)

    async def receive_any(self) -> Message | None:
        """The next message, of any kind; None when the other end has finished. Raises PeerUnreachable, Refused."""
        if self._ended:
            return None
        while self._incoming.empty():
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        received = self._incoming.get_nowait()
        self._ended = received is None
        if received is not None:
            self._intake.release(len(received.body))
        return received

    async def message(self, kind: Kind = Kind.MESSAGE) -> bytes:
        """As `receive`; a finished stream counts as broken."""
        return bytes(await self.message_view(kind))

    async def message_view(self, kind: Kind = Kind.MESSAGE) -> memoryview:
        """As `message`, without copying: for large messages."""
        received = await self.receive_view(kind)
        if received is None:
            raise PeerUnreachable(f"{self.remote[-6:]} ended the stream early")
        return received

    async def any_message(self) -> Message:
        """As `message`, of any kind."""
        received = await self.receive_any()
        if received is None:
            raise PeerUnreachable(f"{self.remote[-6:]} ended the stream early")
        return received

    async def prompt_message(self) -> memoryview:
        """As `message_view`, but a peer that lives and sends nothing for STALLED_SILENCES counts as unreachable."""
        stalled_s = STALLED_SILENCES * self._detector.ceiling_s
        try:
            return await _within(self.message_view(), stalled_s)
        except asyncio.TimeoutError:
            raise PeerUnreachable(f"{self.remote[-6:]} lives, but nothing came for {stalled_s:g} s") from None

    async def alive(self, awaited: Awaitable[T]) -> T:
        """Wait for anything as long as the other end lives. Raises PeerUnreachable or Refused when the stream breaks first."""
        task = asyncio.ensure_future(awaited)
        either: set[asyncio.Future[Any]] = {task, self._broken}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._error is not None:
                raise self._error
            return await task
        finally:
            if not task.done():
                task.cancel()
            del task, either  # its error's traceback has this frame, which would keep all that is on the stack in a ring

    async def finish(self) -> None:
        """Announce that this end sends no more messages."""
        self._heartbeats.may_send = False
        async with self._sending:
            await self._channel.finish()

    async def until_finished(self, timeout_s: float) -> None:
        """Let the other end read everything before the stream is closed. Raises PeerUnreachable, Refused."""
        timer = self._loop.call_later(timeout_s, self._late, "did not finish within", timeout_s)
        try:
            while await self.receive_any() is not None:
                pass
        finally:
            timer.cancel()

    def break_off(self, error: PeerUnreachable | Refused) -> None:
        """Raise this for local waiters; a refusal also for the other end of a stream served here."""
        if self._error is None:
            self._error = error
            self._broken.set_result(None)
            self._news.set()

    def _late(self, what: str, limit_s: float) -> None:
        self.break_off(PeerUnreachable(f"{self.remote[-6:]} {what} {limit_s:g} s"))

    async def close(self) -> None:
        """Drop the stream. Safe to call at any time."""
        self._reader.cancel()
        self._heartbeats.close()
        self._end_waiting_for_request()
        self._channel.abort()
        self._channel.watch(_ignore, admit_all)
        closed = PeerUnreachable("the stream is closed")
        self.break_off(closed)
        self._error = closed
        self._intake.close()

    async def _send(self, *pieces: bytes | memoryview, kind: int) -> None:
        async with self._sending:
            await self._channel.send(*pieces, kind=kind)

    async def _read(self) -> None:
        try:
            while (message := await self._channel.receive()) is not None:
                self._heartbeats.frame(message.kind == Kind.HEARTBEAT)
                if message.kind == Kind.REFUSAL:
                    raise Refused.read(message.body)
                says_nothing = message.kind == Kind.HEARTBEAT or message.kind >= IGNORABLE
                if not says_nothing:
                    self._end_waiting_for_request()
                with self._heartbeats.not_reading():
                    await self._take_turn(message, says_nothing)
                if says_nothing:
                    self._intake.release(len(message.body))
                    continue
                self._count(0, len(message.body), self._loop.time())
                await self._put(message)
            self._end_waiting_for_request()
            self._heartbeats.expect_no_more()
            await self._put(None)
        except (PeerUnreachable, Refused) as error:
            self.break_off(error)
        except WireError as error:
            self.break_off(PeerUnreachable(f"{self.remote[-6:]} does not keep to the protocol: {error}"))
        except asyncio.CancelledError:  # only this stream cancels it, and would be in a ring with the error's traceback
            pass

    async def _take_turn(self, message: Message, says_nothing: bool) -> None:
        """Wait for the turn of a frame. Raises Refused where too much waits, but not for a heartbeat: it breaks no stream."""
        try:
            await self._intake.take_turn(len(message.body))
        except Refused:
            if not says_nothing:
                raise
            await asyncio.sleep(REFUSED_HEARTBEAT_S)

    async def _admit(self, kind: int, size: int) -> None:
        """Refuse a frame that is not taken here, before its body is read; wait while the other end takes too much of this one.

        Raises Refused.
        """
        if (refused := self._intake.objection(kind, size)) is not None:
            with contextlib.suppress(PeerUnreachable, asyncio.TimeoutError):
                await asyncio.wait_for(self.refuse(refused), self._detector.ceiling_s)
            raise refused
        is_request = self._request_due is not None and kind < IGNORABLE and kind != Kind.HEARTBEAT
        if is_request:  # that it waits here is not its sender's delay
            self._end_waiting_for_request()
        with self._heartbeats.not_reading():
            await self._intake.hold(size)
        if is_request:
            self.expect_request()

    def _end_waiting_for_request(self) -> None:
        if self._request_due is not None:
            self._request_due.cancel()
            self._request_due = None

    async def _put(self, message: Message | None) -> None:
        """Queue a message for `receive`."""
        with self._heartbeats.not_reading():
            if self._line.down is not None and message is not None and message.body:
                await self._line.down.let_pass(len(message.body))
            await self._incoming.put(message)
        self._news.set()

    def _lose(self, error: PeerUnreachable) -> None:
        self._reader.cancel()
        self.break_off(error)


StreamHandler = Callable[[Stream], Awaitable[None]]


class RpcEndpoint:
    """Opens and serves streams by method name; a peer can stream to itself. Counts payload bytes by kind."""

    def __init__(self, transport: Transport, silence_s: float, line: Line = UNLIMITED):
        """`silence_s`: the longest silence of a living peer; the same on all peers. `line`: this peer's rate limits."""
        self.transport = transport
        self._line = line
        self.upload = Throughput(line.up.bytes_per_s if line.up is not None else None)
        self.nearness = Nearness()
        self.detector = SilenceDetector(silence_s)
        self.shares = Shares(silence_s, lambda: self.upload.last_bytes_per_s)
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.admit: Callable[[str, str], None] = lambda peer, method: None
        """Called before a stream of a peer is served; raises Refused for one that may not use the method."""
        self._handlers: dict[str, StreamHandler] = {}
        self._own: set[asyncio.Task[None]] = set()
        if line.sent is not None:
            self._own.add(asyncio.create_task(self._watch_interfaces(line.sent)))

    @property
    def peer_id(self) -> str:
        """This peer's id."""
        return self.transport.peer_id

    @property
    def silence_s(self) -> float:
        """Seconds after which any silent peer counts as dead."""
        return self.detector.ceiling_s

    async def is_there(self, peer: str, method: str, request: bytes) -> bytes | None:
        """Ask for something that is answered at once; None from a peer that is dead, silent (also a moment ago), refuses, or
        answers with anything but a message.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        if self.detector.is_lost(peer, began):
            return None
        asking = asyncio.ensure_future(self.ask(peer, method, request))
        try:
            while not asking.done():
                left_s = self.detector.dead_at(peer, began) - clock()
                if left_s <= CLOCK_ERROR_S:
                    self.detector.lost(peer, clock())
                    return None
                await asyncio.wait({asking}, timeout=left_s)
            return asking.result()
        except (PeerUnreachable, Refused, WireError) as error:
            logger.debug("%s: %s", peer[-6:], error)
            return None
        finally:
            await end_tasks([asking])
            del asking  # see `Stream.alive`

    async def serve(self, method: str, handler: StreamHandler) -> None:
        """Answer streams for `method`. What the handler raises as Refused or WireError is told to the other end."""
        self._handlers[method] = handler
        await self.transport.serve(method, lambda channel: self._answer(method, channel))

    @contextlib.asynccontextmanager
    async def stream(self, peer: str, method: str) -> AsyncIterator[Stream]:
        """Open a stream; it is closed on leaving. Raises PeerUnreachable, Refused."""
        if peer == self.peer_id:
            channel = self._call_myself(method)
        else:
            channel = await self._open(peer, method)
        stream = self._stream(channel, method, is_answer=True)
        try:
            yield stream
        finally:
            await stream.close()

    async def ask(
        self, peer: str, method: str, request: bytes, timeout_s: float | None = None, kind: int = Kind.MESSAGE
    ) -> bytes:
        """One request, one answer. Raises PeerUnreachable (also when `timeout_s` runs out), Refused."""

        async def once() -> bytes:
            async with self.stream(peer, method) as stream:
                await stream.send(request, kind=kind)
                return await stream.message()

        try:
            return await _within(once(), timeout_s)
        except asyncio.TimeoutError:
            if timeout_s is not None and timeout_s >= self.detector.bound(peer):
                self.detector.lost(peer, asyncio.get_running_loop().time())
            raise PeerUnreachable(f"{peer[-6:]} did not answer {method} within {timeout_s:g} s") from None

    async def ask_in_turn(
        self, peer: str, method: str, request: bytes, is_patient: bool = True, wait_s: float | None = None
    ) -> bytes:
        """As `ask` within `wait_s` (default: `silence_s`); if `is_patient`, a busy peer is asked again for BUSY_SILENCES."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + BUSY_SILENCES * self.silence_s
        while True:
            try:
                return await self.ask(peer, method, request, wait_s or self.silence_s)
            except Refused as refused:
                if not is_patient or refused.code is not Code.BUSY or clock() >= until_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """End the peer's streams to itself, and all else that runs here."""
        for task in tuple(self._own):
            task.cancel()

    async def _watch_interfaces(self, sent: Callable[[], Mapping[str, int]]) -> None:
        while True:
            self.upload.see(sent(), asyncio.get_running_loop().time())
            await asyncio.sleep(WINDOW_S)

    async def _answer(self, method: str, channel: Channel) -> None:
        place = self.shares.enter(channel.remote)
        if place is None:
            channel.abort()
            return
        stream = self._stream(channel, method, is_answer=False)
        place.end = partial(stream.break_off, PeerUnreachable(f"{channel.remote[-6:]} makes room for others"))
        stream.expect_request()
        try:
            await self.shares.own_pace(channel.remote, STREAM_COST)  # also of a stream that broke: its place is taken so long
            if not self.shares.is_known(channel.remote):
                await stream.alive(self.shares.turn(channel.remote, STREAM_COST))
            self.admit(channel.remote, method)
            await self._handlers[method](stream)
            await stream.finish()
            await stream.until_finished(self.silence_s)
        except Refused as error:
            await self._tell(stream, error)
        except WireError as error:
            await self._tell(stream, Refused(Code.MALFORMED, str(error)))
        except (PeerUnreachable, asyncio.TimeoutError) as error:
            logger.debug("%s from %s: %s", method, channel.remote[-6:], error)
        except UserError as error:
            logger.error("%s", error)
        except Exception:
            logger.exception("%s from %s failed", method, channel.remote[-6:])
        finally:
            await stream.close()
            self.shares.leave(place)

    async def _tell(self, stream: Stream, refused: Refused) -> None:
        with contextlib.suppress(PeerUnreachable, Refused, asyncio.TimeoutError):
            await stream.refuse(refused)
            await stream.finish()
            await stream.until_finished(self.silence_s)

    def _stream(self, channel: Channel, method: str, is_answer: bool) -> Stream:
        remote = channel.remote
        return Stream(
            channel, self.detector, self._counter(method, remote), self._line_to(remote), METHODS.get(method, UNBOUNDED),
            self.shares, is_answer,
        )

    async def _open(self, peer: str, method: str) -> Channel:
        try:
            return await _within(self.transport.open(peer, method), self.silence_s)
        except asyncio.TimeoutError:
            self.detector.lost(peer, asyncio.get_running_loop().time())
            raise PeerUnreachable(f"{peer[-6:]} did not answer within {self.silence_s:g} s") from None

    def _call_myself(self, method: str) -> Channel:
        if method not in self._handlers:
            raise Refused(Code.UNKNOWN_METHOD, f"no such method: {method}")
        near, far = pipe(self.peer_id)
        task = asyncio.create_task(self._answer(method, far))
        self._own.add(task)
        task.add_done_callback(self._own.discard)
        return near

    def _line_to(self, peer: str) -> Line:
        return UNLIMITED if peer == self.peer_id else self._line

    def _counter(self, method: str, peer: str) -> Count:
        if peer == self.peer_id:
            return lambda sent, received, began_s: None

        clock = asyncio.get_running_loop().time

        def count(sent: int, received: int, began_s: float) -> None:
            self.detector.moved(max(sent, received), clock())
            if sent and method != ROUND:  # a burst of a record's copies says little about the line
                self.upload.count(sent, began_s, clock())
            self.sent[method] += sent
            self.received[method] += received

        return count


def _ignore() -> None:
    """Take no notice of what a closed stream still hears."""


async def _within(work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
    """As `asyncio.wait_for`. Work that fails in the moment in which its caller is cancelled fails silently."""
    if timeout_s is None:
        return await work
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        await end_tasks([task])
        del task  # see `Stream.alive`
