"""Channels of the in-memory network, and the pipes that carry their frames each way."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.errors import PeerUnreachable
from spes_p2p.messages.framing import MAX_FRAME_BYTES, Kind, Message
from spes_p2p.net.interfaces import Admit, Handler, admit_all
from spes_p2p.testing.memory_nat import Circuit
from spes_p2p.testing.memory_state import Frame, NetworkState
from spes_p2p.testing.virtual_loop import Unit

logger = logging.getLogger(__name__)

UNREAD_FRAMES = 64
"""`send` blocks while this many frames of the channel are unread at the other end."""
BUFFERED_S = 1e-3
"""A line's end takes what passes within this time at once, as the buffers of sockets do: it saves most timers."""
HEARD_EVERY_S = 1.0


class MemoryChannel:
    """One end of a stream between two peers: a `Channel`."""

    def __init__(
        self, network: NetworkState, unit: Unit, method: str, out: Pipe, into: Pipe, is_answer: bool, circuit: Circuit | None
    ):
        self.circuit = circuit
        """The relayed connection that carries it; None: a direct one."""
        self._network, self._unit, self._method = network, unit, method
        self._is_answer = is_answer
        self._out, self._in = out, into
        self._sent = 0
        self._heard: Callable[[], None] = lambda: None
        self._admit: Admit = admit_all
        self._aborted = False
        unit.opened(self)
        network.count_connections(unit)

    @property
    def remote(self) -> str:
        """Peer at the other end."""
        return self._in.source

    def watch(self, heard: Callable[[], None], admit: Admit) -> None:
        """See Channel."""
        self._heard = self._in.heard = heard
        self._admit = admit

    async def send(self, *pieces: bytes | memoryview, kind: int = Kind.MESSAGE) -> None:
        """See Channel. Waits for the uplink, and while UNREAD_FRAMES frames are unread."""
        body = b"".join(pieces)
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(body)} bytes; at most {MAX_FRAME_BYTES} are allowed")
        self._check_open()
        if self._network.hook is not None:
            self._network.hook(self._unit.peer, self._method, self._sent)
        self._sent += 1
        if self._network.tap is not None:
            frame = Frame(self._unit.peer, self.remote, self._method, self._is_answer, self._sent - 1, body, kind)
            changed = self._network.tap(frame)
            body, kind = changed.body, changed.kind
        await self._out.put(Message(body, kind), self._check_open)

    async def receive(self) -> Message | None:
        """See Channel."""
        frame = await self._in.get(self._check_open)
        self._heard()
        if frame is None:
            self._forget_when_done()
        else:
            await self._admit(frame.kind, len(frame.body))
        return frame

    async def finish(self) -> None:
        """See Channel."""
        self._check_open()
        self._out.end(_FINISHED)
        self._forget_when_done()

    def abort(self) -> None:
        """See Channel. What was sent before a `finish` still arrives."""
        if not self._out.is_ended:
            self.sever()
        elif not self._aborted:
            self._aborted = True
            self._in.leave()
            self._unit.closed(self)

    def sever(self) -> None:
        """Drop the stream with all that is in flight."""
        self._aborted = True
        self._out.break_off()
        self._in.leave()
        self._unit.closed(self)

    def _check_open(self) -> None:
        self._unit.check_alive()
        if self._aborted:
            raise PeerUnreachable(f"the channel to {self.remote} was closed here")

    def _forget_when_done(self) -> None:
        if self._out.is_ended and self._in.is_read_out:
            self._unit.closed(self)


_Content = Message | None | str
"""Content of a pipe: frames, then None (finished) or why it broke."""

_FINISHED = None


@dataclass(eq=False)
class _InFlight:
    content: _Content
    arrived: bool = False


class Pipe:
    """One direction of a channel: in flight -> landing (the receiver's downlink) -> inbox, always in order."""

    def __init__(self, network: NetworkState, source: str, target: str):
        self.source, self.target = source, target
        self._lines = network.lines
        self.is_ended = False
        self.is_read_out = False
        self._network = network
        self._in_flight: deque[_InFlight] = deque()
        self._landing: deque[_Content] = deque()
        self._inbox: deque[_Content] = deque()
        self._unread = 0
        self._reader_left = False
        self._writer_knows = False
        self._readable = asyncio.Event()
        self._room = asyncio.Event()
        self.heard: Callable[[], None] = lambda: None
        """Called when bytes of a frame arrive that is not whole yet."""
        self._heard_until_s, self._hears = 0.0, False
        """Until when such bytes arrive, and whether a timer says so."""

    async def put(self, frame: Message, check_open: Callable[[], None]) -> None:
        """Send a frame; wait for the uplink, and while UNREAD_FRAMES frames are unread."""
        while True:
            check_open()
            if self.is_ended:
                raise ValueError("nothing can be sent after finish")
            if self._writer_knows:
                raise PeerUnreachable(f"{self.target} closed the channel")
            if frame.kind == Kind.HEARTBEAT:
                delay_s = self.delay_s()
                if delay_s:
                    asyncio.get_running_loop().call_later(delay_s, self._beat, frame)
                else:
                    self._beat(frame)
                return
            if self._unread < UNREAD_FRAMES:
                break
            self._room.clear()
            await self._room.wait()
        self._unread += 1
        pair, size = (self.source, self.target), len(frame.body)
        self._network.sent_bytes[pair] = self._network.sent_bytes.get(pair, 0) + size
        now = asyncio.get_running_loop().time()
        departs = self._leave(now, size)
        self._dispatch(frame, departs, size)
        self._hear_until(departs)
        if departs > now + BUFFERED_S:
            await asyncio.sleep(departs - now)
            check_open()

    async def get(self, check_open: Callable[[], None]) -> Message | None:
        """Return the next frame; None after the last. Raises PeerUnreachable if the pipe broke."""
        while True:
            check_open()
            if self._inbox:
                break
            self._readable.clear()
            await self._readable.wait()
        content = self._inbox[0]
        if isinstance(content, Message):
            self._inbox.popleft()
            self._unread -= 1
            self._room.set()
            return content
        self.is_read_out = True
        if content is None:
            return None
        raise PeerUnreachable(content)

    def end(self, content: _Content) -> None:
        """Let nothing follow but this."""
        if not self.is_ended:
            self.is_ended = True
            self._dispatch(content, self._leave(asyncio.get_running_loop().time(), 0), 0)

    def break_off(self) -> None:
        """Lose what is in flight, and tell the reader."""
        self.is_ended = True
        self._in_flight.clear()
        self._room.set()
        self._dispatch(f"{self.source} broke the channel", asyncio.get_running_loop().time(), 0)

    def leave(self) -> None:
        """Record that the reader has left, which a writer learns after the link's latency."""
        if not self._reader_left:
            self._reader_left = True
            self._readable.set()
            if self.is_ended:
                return
            asyncio.get_running_loop().call_later(self.delay_s(), self.flush)

    def flush(self) -> None:
        """Deliver what has arrived, unless the link is cut."""
        if self.is_cut():
            self._network.held[self.flush] = None
            return
        if self._reader_left:
            self._writer_knows = True
            self._room.set()
        loop = asyncio.get_running_loop()
        while self._in_flight and self._in_flight[0].arrived:
            content = self._in_flight.popleft().content
            size = len(content.body) if isinstance(content, Message) else 0
            ready_at = self._lines.of(self.target).reserve_down(loop.time(), size)
            self._landing.append(content)
            if ready_at <= loop.time() + BUFFERED_S and len(self._landing) == 1:
                self._land()
            else:
                loop.call_at(ready_at, self._land)
                self._hear_until(ready_at)

    def _beat(self, heartbeat: Message) -> None:
        if self.is_ended or self.is_cut():
            return
        if self._in_flight or self._landing:
            self.heard()
        elif self._unread < UNREAD_FRAMES:
            self._unread += 1
            self._inbox.append(heartbeat)
            self._readable.set()

    def _hear_until(self, end_s: float) -> None:
        self._heard_until_s, loop = max(self._heard_until_s, end_s), asyncio.get_running_loop()
        if loop.time() + HEARD_EVERY_S < end_s and not self._hears:
            self._hears = True
            loop.call_later(HEARD_EVERY_S, self._hear)

    def _hear(self) -> None:
        self._hears = False
        if self._in_flight or self._landing:
            if not self.is_cut():
                self.heard()
            self._hear_until(self._heard_until_s)

    def _leave(self, now: float, size: int) -> float:
        return self._lines.leave(self.source, self.target, now, size)

    def delay_s(self, size: int = 0) -> float:
        """Return how long a frame travels."""
        return self._lines.delay(self.source, self.target, size)

    def is_cut(self) -> bool:
        """Return whether nothing passes now."""
        return self._network.is_cut(self.source, self.target)

    def _dispatch(self, content: _Content, departs: float, size: int) -> None:
        item = _InFlight(content)
        self._in_flight.append(item)
        self._arrive_at(departs + self.delay_s(size), item)

    def _arrive_at(self, arrives: float, item: _InFlight) -> None:
        loop = asyncio.get_running_loop()
        if arrives <= loop.time():
            self._arrive(item)
        else:
            loop.call_at(arrives, self._arrive, item)

    def _arrive(self, item: _InFlight) -> None:
        item.arrived = True
        self.flush()

    def _land(self) -> None:
        self._inbox.append(self._landing.popleft())
        self._readable.set()


class RelayedPipe(Pipe):
    """A pipe through a relay: frames pass both legs, and the relay's line down and up."""

    def __init__(self, network: NetworkState, source: str, target: str, circuit: Circuit):
        super().__init__(network, source, target)
        self._circuit, self._relay = circuit, circuit.relay.peer

    def _leave(self, now: float, size: int) -> float:
        return self._lines.leave(self.source, self._relay, now, size)

    def delay_s(self, size: int = 0) -> float:
        """See Pipe."""
        return self._lines.delay(self.source, self._relay, size) + self._lines.delay(self._relay, self.target, size)

    def is_cut(self) -> bool:
        """See Pipe."""
        return self._network.is_cut(self.source, self._relay) or self._network.is_cut(self._relay, self.target)

    def _dispatch(self, content: _Content, departs: float, size: int) -> None:
        item = _InFlight(content)
        self._in_flight.append(item)
        reaches_relay = departs + self._lines.delay(self.source, self._relay, size)
        asyncio.get_running_loop().call_at(reaches_relay, self._pass_on, item, size)

    def _pass_on(self, item: _InFlight, size: int) -> None:
        arrived = self._lines.of(self._relay).reserve_down(asyncio.get_running_loop().time(), size)
        departs = self._lines.leave(self._relay, self.target, arrived, size)
        self._hear_until(departs)
        self._arrive_at(departs + self._lines.delay(self._relay, self.target, size), item)
        self._circuit.carried(self.source, size)


async def serve(handler: Handler, channel: MemoryChannel) -> None:
    """Run a handler, whose failure ends only its channel."""
    try:
        await handler(channel)
    except Exception:
        logger.debug("the handler for a channel of %s failed", channel.remote, exc_info=True)
    finally:
        channel.abort()
