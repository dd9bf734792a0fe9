"""A network in memory: transports and a registry with delays, bandwidths and faults. Jitter comes from the seed."""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import logging
import math
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.framing import MAX_FRAME_BYTES, Kind, Message
from spes_p2p.messages.refusals import Code
from spes_p2p.net.contacts import is_shown
from spes_p2p.net.interfaces import MAX_RECORD_BYTES, Admit, Handler, admit_all
from spes_p2p.testing.virtual_loop import CURRENT_UNIT, Unit, VirtualLoop, create_task_of_unit

T = TypeVar("T")
logger = logging.getLogger(__name__)

UNREAD_FRAMES = 64
"""`send` blocks while this many frames of the channel are unread at the other end."""
BUFFERED_S = 1e-3
"""A line's end takes what passes within this time at once, as the buffers of sockets do: it saves most timers."""
HEARD_EVERY_S = 1.0
NODES_ASKED, HOLDERS = 20, 5
"""Nodes of the DHT that are asked in a search for a key, the nearest ones, and those of them that keep its records."""
RECORD_BYTES, NODE_BYTES = 770, 58
"""What a record has beside its value (key and signature), and what tells of a node."""
UNUSED_S = 35.0
"""A connection is kept for so long after its last use, at most (`net/connections.py`)."""
SEARCH_EVERY_S = 60.0
"""A peer searches the nodes that keep its records this often (`net/dht.py`)."""
EPOCH_S = 1_700_000_000.0
"""Wall time at virtual time 0."""

FrameHook = Callable[[str, str, int], None]
"""Called before a frame is sent, with sender, method, and index of the frame at the sender's end of the channel."""


@dataclass(frozen=True)
class Frame:
    """A frame that is about to be sent."""

    sender: str
    receiver: str
    method: str
    is_answer: bool
    """Whether the frame goes to the peer that opened the channel."""
    index: int
    """Number of frames that the sender sent on the channel before."""
    body: bytes
    kind: int = Kind.MESSAGE


FrameTap = Callable[[Frame], Frame]
"""Called before a frame is sent; kind and body of the returned frame are sent."""


class MemoryNetwork:
    """Peers by name, the links between them, and their registry.

    A frame occupies the sender's uplink for size / bandwidth, then the lines of its and the receiver's site, if they differ,
    travels for the link's latency, then occupies the receiver's downlink. A heartbeat only travels, and a frame under way is
    heard every second: on a real line, which streams share by packets, some bytes of each arrive all the time.
    `registry_delay_s`: time until others see a new record.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        latency_s: float = 0.0,
        jitter: float = 0.0,
        bandwidth_bytes_per_s: float = float("inf"),
        registry_delay_s: float = 0.0,
        open_timeout_s: float = 10.0,
    ):
        self.seed = seed
        self.open_timeout_s = open_timeout_s
        self.registry_delay_s = registry_delay_s
        self.hook: FrameHook | None = None
        self.tap: FrameTap | None = None
        self.sent_bytes: dict[tuple[str, str], int] = {}
        """Payload bytes sent, by (sender, receiver)."""
        self.connections: dict[str, int] = {}
        """By peer: the most others at a time to which it had channels, or which stored contacts there or it at them lately."""
        self._stored_at: dict[str, dict[str, float]] = {}
        """By peer: others with which it is connected for the registry's sake, the latest last, and when it was used last."""
        self.client_only: set[str] = set()
        """Peers to which only those can open a channel to which they opened one before."""
        self._dialled: set[tuple[Unit, Unit]] = set()
        """Who opened a channel to whom in these lives."""
        self.registry_sent, self.registry_received = Counter[str](), Counter[str]()
        """By peer: what the DHT would take for the registry's writes and reads, other than requests."""
        self._nearest: dict[str, tuple[float, list[str]]] = {}
        self._latency_s, self._jitter, self._bandwidth = latency_s, jitter, bandwidth_bytes_per_s
        self._rng = random.Random(f"network/{seed}")
        self._pair_latency: dict[frozenset[str], float] = {}
        self._links: dict[str, _Link] = {}
        self._sites: dict[str, _Link] = {}
        """By peer: the line that it shares with the others at its site."""
        self._units: dict[str, Unit] = {}
        self._paused: set[str] = set()
        self._groups: dict[str, int] = {}
        self._cut_since_s = 0.0
        self._reachable_again = asyncio.Event()
        self._held: dict[_Pipe, None] = {}
        self._records: dict[str, dict[str, list[_Record]]] = {}

    def transport(self, peer: str) -> MemoryTransport:
        """Return the peer's transport; after it was killed or closed, one of a new life under the same id."""
        unit = self._units.get(peer)
        if unit is None or not unit.alive:
            unit = self._units[peer] = Unit(peer, 0 if unit is None else unit.lives_before + 1)
        return MemoryTransport(self, unit)

    def registry(self, peer: str) -> MemoryRegistry:
        """Return the registry as this peer sees it."""
        return MemoryRegistry(self, self.transport(peer).unit)

    def run_peer(self, peer: str, main: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a peer's coroutine as a unit: `kill(peer)` ends it with all tasks that it started."""
        unit = self.transport(peer).unit
        loop = asyncio.get_running_loop()
        loop.set_task_factory(create_task_of_unit)
        context = contextvars.copy_context()
        context.run(CURRENT_UNIT.set, unit)
        return context.run(loop.create_task, main)

    def wall_time(self) -> float:
        """Return the virtual Unix time."""
        return EPOCH_S + asyncio.get_running_loop().time()

    def is_alive(self, peer: str) -> bool:
        """Return whether the peer has a transport that is neither killed nor closed."""
        unit = self._units.get(peer)
        return unit is not None and unit.alive

    def set_latency(self, a: str, b: str, latency_s: float) -> None:
        """Set the one-way latency between two peers, in both directions."""
        self._pair_latency[frozenset((a, b))] = latency_s

    def set_bandwidth(self, peer: str, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """Set the bandwidth of a peer's line, greater than 0."""
        link = self._link(peer)
        link.up, link.down = up_bytes_per_s, down_bytes_per_s

    def share_line(self, peers: Iterable[str], up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """Put peers at one site: what they exchange with others passes a line that they share, too."""
        self._sites.update(dict.fromkeys(peers, _Link(up_bytes_per_s, down_bytes_per_s)))

    def kill(self, peer: str) -> None:
        """End a peer as SIGKILL does: its tasks stop where they are, its channels break, and opens to it are refused."""
        unit = self._units.get(peer)
        if unit is None or not unit.alive:
            return
        self._end(unit)
        self.resume(peer)
        for store in unit.stores:
            store.crash()
        for task in list(unit.tasks):
            task.cancel()

    def pause(self, peer: str) -> None:
        """Hold back all that goes to and from the peer until `resume`. Nothing is lost."""
        self._paused.add(peer)

    def stop(self, peer: str) -> None:
        """Pause and suspend the peer as SIGSTOP does, until `resume`. Its timers expire meanwhile."""
        unit, loop = self._units.get(peer), asyncio.get_running_loop()
        self.pause(peer)
        if unit is not None and unit.alive and isinstance(loop, VirtualLoop):
            loop.stopped_units.setdefault(unit, [])

    def resume(self, peer: str) -> None:
        """End a pause or stop. What was held back arrives now."""
        self._paused.discard(peer)
        unit, loop = self._units.get(peer), asyncio.get_running_loop()
        if unit is not None and isinstance(loop, VirtualLoop):
            loop.continue_unit(unit)
        self._release()

    def partition(self, *groups: Iterable[str]) -> None:
        """Let frames pass only within each group, until `heal`. Peers that are in none form another group."""
        self._groups = {peer: number for number, group in enumerate(groups, start=1) for peer in group}
        self._cut_since_s = asyncio.get_running_loop().time()

    def heal(self) -> None:
        """End the partition. What was held back arrives now."""
        self._groups = {}
        self._release()

    def disconnect(self, a: str, b: str) -> None:
        """Break all channels between two peers, losing what is in flight. They can open new ones at once."""
        for one, other in ((a, b), (b, a)):
            unit = self._units.get(one)
            for channel in [] if unit is None else [each for each in unit.channels if each.remote == other]:
                channel.sever()

    def _end(self, unit: Unit) -> None:
        unit.alive = False
        for channel in list(unit.channels):
            channel.sever()

    def _release(self) -> None:
        self._reachable_again.set()
        self._reachable_again = asyncio.Event()
        held, self._held = self._held, {}
        for pipe in held:
            pipe.flush()

    def _is_cut(self, a: str, b: str) -> bool:
        return a in self._paused or b in self._paused or self._groups.get(a, 0) != self._groups.get(b, 0)

    def _delay(self, a: str, b: str) -> float:
        latency_s = self._pair_latency.get(frozenset((a, b)), self._latency_s) if self._pair_latency else self._latency_s
        return latency_s * (1.0 + self._jitter * self._rng.random()) if self._jitter else latency_s

    def _reserve_up(self, source: str, target: str, size: int) -> float:
        """Return when the frame is sent."""
        departs = self._link(source).reserve_up(asyncio.get_running_loop().time(), size)
        here, there = self._sites.get(source), self._sites.get(target)
        if here is not there:
            departs = here.reserve_up(departs, size) if here is not None else departs
            departs = there.reserve_down(departs, size) if there is not None else departs
        return departs

    def _nearest_nodes(self, key: str) -> list[str]:
        """Return the living peers whose nodes were nearest to a key at the last search of any."""
        now, (searched_at, found) = asyncio.get_running_loop().time(), self._nearest.get(key, (-math.inf, []))
        if now >= searched_at + SEARCH_EVERY_S or len(found) < NODES_ASKED:
            living = [peer for peer, unit in self._units.items() if unit.alive]
            found = heapq.nsmallest(NODES_ASKED, living, key=lambda peer: zlib.crc32(f"{key} {peer}".encode()))
            self._nearest[key] = now, found
        return found

    def _registry_moved(self, sources: Iterable[str], targets: Iterable[str], size: int) -> None:
        for source, target in itertools.product(sources, targets):
            if source != target:
                self.registry_sent[source] += size
                self.registry_received[target] += size

    def _count_connections(self, unit: Unit) -> None:
        stored, most = self._stored_at.get(unit.peer, {}), self.connections.get(unit.peer, 0)
        if len(unit.remotes) + len(stored) > most:
            since = asyncio.get_running_loop().time() - UNUSED_S
            while stored and next(iter(stored.values())) < since:
                del stored[next(iter(stored))]
            self.connections[unit.peer] = max(most, len(unit.remotes.keys() | stored.keys()))

    def _store_at(self, unit: Unit, holders: Iterable[str]) -> None:
        now = asyncio.get_running_loop().time()
        for at in [self._units[holder] for holder in holders if holder in self._units and holder != unit.peer]:
            for one, other in ((unit, at), (at, unit)):
                stored = self._stored_at.setdefault(one.peer, {})
                stored.pop(other.peer, None)
                stored[other.peer] = now
                self._count_connections(one)

    def _link(self, peer: str) -> _Link:
        return self._links.setdefault(peer, _Link(self._bandwidth, self._bandwidth))

    async def _until(self, is_possible: Callable[[], bool], what: str) -> None:
        """Wait for a condition, at most `open_timeout_s`. Raises PeerUnreachable."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.open_timeout_s
        while not is_possible():
            try:
                await asyncio.wait_for(self._reachable_again.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                raise PeerUnreachable(f"{what}: no answer for {self.open_timeout_s:g} s") from None


class MemoryTransport:
    """One peer's `Transport` on a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, unit: Unit):
        self._network = network
        self.unit = unit

    @property
    def peer_id(self) -> str:
        """Name of the peer."""
        return self.unit.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        """Placeholders to publish; dialling needs only the name."""
        return (f"/memory/{self.peer_id}/p2p/{self.peer_id}",)

    def learn_addresses(self, peer: str, addresses: Iterable[str]) -> None:
        """Do nothing: dialling needs only the name."""

    async def serve(self, method: str, handler: Handler) -> None:
        """See Transport."""
        self.unit.check_alive()
        self.unit.handlers[method] = (handler, contextvars.copy_context())

    async def open(self, peer: str, method: str) -> MemoryChannel:
        """See Transport. Takes one round trip, or `open_timeout_s` if the peer is silent."""
        network, me = self._network, self.peer_id
        self.unit.check_alive()
        if peer == me:
            raise ValueError("a peer cannot dial itself")
        await network._until(lambda: not network._is_cut(me, peer), peer)
        await asyncio.sleep(network._delay(me, peer) + network._delay(peer, me))
        self.unit.check_alive()
        unit = network._units.get(peer)
        if unit is None or not unit.alive:
            raise PeerUnreachable(f"{peer} refused the connection")
        if peer in network.client_only and (unit, self.unit) not in network._dialled:
            raise PeerUnreachable(f"{peer} cannot be dialled")
        if me in network.client_only:
            network._dialled.add((self.unit, unit))
        if method not in unit.handlers:
            raise Refused(Code.UNKNOWN_METHOD, f"{peer} does not serve {method}")
        there, back = _Pipe(network, me, peer), _Pipe(network, peer, me)
        handler, context = unit.handlers[method]
        context.copy().run(unit.start, _serve(handler, MemoryChannel(network, unit, method, back, there, is_answer=True)))
        return MemoryChannel(network, self.unit, method, there, back, is_answer=False)

    async def close(self) -> None:
        """End all channels, and refuse new ones."""
        if self.unit.alive:
            self._network._end(self.unit)


class MemoryChannel:
    """One end of a stream between two peers: a `Channel`."""

    def __init__(self, network: MemoryNetwork, unit: Unit, method: str, out: _Pipe, into: _Pipe, is_answer: bool):
        self._network, self._unit, self._method = network, unit, method
        self._is_answer = is_answer
        self._out, self._in = out, into
        self._sent = 0
        self._heard: Callable[[], None] = lambda: None
        self._admit: Admit = admit_all
        self._aborted = False
        unit.opened(self)
        network._count_connections(unit)

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


class MemoryRegistry:
    """The `Registry` of a MemoryNetwork: records expire in virtual time and become visible with a delay."""

    def __init__(self, network: MemoryNetwork, unit: Unit):
        self.keepers: tuple[str, ...] = ()
        self.is_known: Callable[[str], bool] = lambda peer: False
        self._network, self._unit = network, unit
        self._searched_at = -math.inf
        self._found = 0

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Store a value under (key, peer id). Raises ValueError if it is too large, PeerUnreachable if the peer is cut off."""
        if len(value) > MAX_RECORD_BYTES:
            raise ValueError(f"a record of {len(value)} bytes under {key}; at most {MAX_RECORD_BYTES} are allowed")
        await self._round_trip()
        now = asyncio.get_running_loop().time()
        me = self._unit.peer
        is_searched = not self.keepers or me in self.keepers or is_shown(me, self._found, EPOCH_S + now)
        nearest = self._network._nearest_nodes(key) if is_searched else []
        holders = {*nearest[:HOLDERS], *self.keepers}
        self._network._registry_moved([self._unit.peer], holders, len(value) + RECORD_BYTES)
        self._network._store_at(self._unit, holders)
        if is_searched and now >= self._searched_at + SEARCH_EVERY_S:
            self._searched_at = now
            self._network._registry_moved(nearest, [self._unit.peer], NODE_BYTES * len(nearest))
        history = self._network._records.setdefault(key, {}).setdefault(self._unit.peer, [])
        while history and history[0].expires_at <= now:
            del history[0]
        history.append(_Record(bytes(value), now + self._network.registry_delay_s, now + ttl_s, is_searched))

    async def get(self, key: str) -> dict[str, bytes]:
        """Return the values under a key that have not expired, by writer; across a partition, those from before it."""
        await self._round_trip()
        now = asyncio.get_running_loop().time()
        seen = {}
        is_plain = not self._network._groups and not self._network.registry_delay_s
        for writer, history in sorted(self._network._records.get(key, {}).items()):
            record = history[-1] if is_plain else self._latest(writer, history, now)
            if record is not None and record.expires_at > now:
                seen[writer] = record
        nearest = self._network._nearest_nodes(key)
        self._network._registry_moved(nearest, [self._unit.peer], NODE_BYTES * len(nearest))
        size = sum(len(record.value) + RECORD_BYTES for record in seen.values())
        held = sum(len(record.value) + RECORD_BYTES for record in seen.values() if record.is_at_nodes)
        self._network._registry_moved(nearest[:HOLDERS], [self._unit.peer], held)
        self._network._registry_moved(self.keepers[:1], [self._unit.peer], size)
        self._found = len(seen)
        return {writer: record.value for writer, record in seen.items()}

    def _latest(self, writer: str, history: list[_Record], now: float) -> _Record | None:
        network, me = self._network, self._unit.peer
        if writer == me:
            return history[-1]
        is_across = network._groups.get(writer, 0) != network._groups.get(me, 0)
        seen_by = network._cut_since_s if is_across else now
        return next((record for record in reversed(history) if record.visible_at <= seen_by), None)

    async def _round_trip(self) -> None:
        network, me = self._network, self._unit.peer
        self._unit.check_alive()
        await network._until(lambda: me not in network._paused, "the registry")
        await asyncio.sleep(2 * network._latency_s)
        self._unit.check_alive()


@dataclass
class _Link:
    """A peer's line: bytes per second each way, and when each way is free again."""

    up: float
    down: float
    up_free_at: float = 0.0
    down_free_at: float = 0.0

    def reserve_up(self, now: float, size: int) -> float:
        self.up_free_at = max(now, self.up_free_at) + size / self.up
        return self.up_free_at

    def reserve_down(self, now: float, size: int) -> float:
        self.down_free_at = max(now, self.down_free_at) + size / self.down
        return self.down_free_at


@dataclass(frozen=True)
class _Record:
    value: bytes
    visible_at: float
    expires_at: float
    is_at_nodes: bool
    """Not only at keepers."""


_Content = Message | None | str
"""Content of a pipe: frames, then None (finished) or why it broke."""

_FINISHED = None


@dataclass(eq=False)
class _InFlight:
    content: _Content
    arrived: bool = False


class _Pipe:
    """One direction of a channel: in flight -> landing (the receiver's downlink) -> inbox, always in order."""

    def __init__(self, network: MemoryNetwork, source: str, target: str):
        self.source, self.target = source, target
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
        while True:
            check_open()
            if self.is_ended:
                raise ValueError("nothing can be sent after finish")
            if self._writer_knows:
                raise PeerUnreachable(f"{self.target} closed the channel")
            if frame.kind == Kind.HEARTBEAT:
                delay_s = self._network._delay(self.source, self.target)
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
        departs = self._network._reserve_up(self.source, self.target, size)
        self._dispatch(frame, departs)
        self._hear_until(departs)
        if departs > now + BUFFERED_S:
            await asyncio.sleep(departs - now)
            check_open()

    async def get(self, check_open: Callable[[], None]) -> Message | None:
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
        if not self.is_ended:
            self.is_ended = True
            self._dispatch(content, self._network._reserve_up(self.source, self.target, 0))

    def break_off(self) -> None:
        self.is_ended = True
        self._in_flight.clear()
        self._room.set()
        self._dispatch(f"{self.source} broke the channel", asyncio.get_running_loop().time())

    def leave(self) -> None:
        """Record that the reader has left, which a writer learns after the link's latency."""
        if not self._reader_left:
            self._reader_left = True
            self._readable.set()
            if self.is_ended:
                return
            asyncio.get_running_loop().call_later(self._network._delay(self.target, self.source), self.flush)

    def flush(self) -> None:
        """Deliver what has arrived, unless the link is cut."""
        if self._network._is_cut(self.source, self.target):
            self._network._held[self] = None
            return
        if self._reader_left:
            self._writer_knows = True
            self._room.set()
        loop = asyncio.get_running_loop()
        while self._in_flight and self._in_flight[0].arrived:
            content = self._in_flight.popleft().content
            size = len(content.body) if isinstance(content, Message) else 0
            ready_at = self._network._link(self.target).reserve_down(loop.time(), size)
            self._landing.append(content)
            if ready_at <= loop.time() + BUFFERED_S and len(self._landing) == 1:
                self._land()
            else:
                loop.call_at(ready_at, self._land)
                self._hear_until(ready_at)

    def _beat(self, heartbeat: Message) -> None:
        if self.is_ended or self._network._is_cut(self.source, self.target):
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
            if not self._network._is_cut(self.source, self.target):
                self.heard()
            self._hear_until(self._heard_until_s)

    def _dispatch(self, content: _Content, departs: float) -> None:
        item = _InFlight(content)
        self._in_flight.append(item)
        arrives = departs + self._network._delay(self.source, self.target)
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


async def _serve(handler: Handler, channel: MemoryChannel) -> None:
    """Run a handler, whose failure ends only its channel."""
    try:
        await handler(channel)
    except Exception:
        logger.debug("the handler for a channel of %s failed", channel.remote, exc_info=True)
    finally:
        channel.abort()
