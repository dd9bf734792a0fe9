"""The interfaces between a peer and the world: transport, registry, identity, store, clock.

Each has a real form (libp2p, the Hivemind DHT, an RSA key, a directory) and one in memory (`testing/in_memory_world.py`) with
delays and faults. A peer's code sees only these protocols, so the simulator runs the same code.
Time inside a peer is the running event loop's time (`loop.time()`, `asyncio.sleep`, `asyncio.wait_for`): the simulator gives a
loop whose time is virtual. Wall-clock time (for records that others read) comes from `World.wall_time`.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from spes_p2p.consensus.output import Identity
from spes_p2p.messages.framing import Kind, Message
from spes_p2p.messages.methods import OLDEST_PROTOCOL, PROTOCOL_VERSION
from spes_p2p.net.limits import UNLIMITED, Line
from spes_p2p.storage.interfaces import Store

T = TypeVar("T")

MAX_RECORD_BYTES = 1024
"""The largest value that may be put into the registry."""


Admit = Callable[[int, int], Awaitable[None]]
"""Called with the kind of a frame and the size that its header claims. Its body is read when this returns; what it raises,
`receive` raises."""


async def admit_all(kind: int, size: int) -> None:
    """Admit every frame."""


class Channel(Protocol):
    """A bidirectional stream of frames with one peer, authenticated and encrypted by the transport."""

    @property
    def remote(self) -> str:
        """The peer at the other end, as the transport authenticated it."""

    def watch(self, heard: Callable[[], None], admit: Admit) -> None:
        """Call `heard` whenever bytes arrive from the other end, even part of a frame, and `admit` before each body is read."""

    async def send(self, *pieces: bytes | memoryview, kind: int = Kind.MESSAGE) -> None:
        """Send one frame, these bytes one after the other; waits while the other end is slow. They must not change any more.

        Raises PeerUnreachable when the stream is gone.
        """

    async def receive(self) -> Message | None:
        """The next frame; None after the other end called `finish`. Raises PeerUnreachable when the stream broke."""

    async def finish(self) -> None:
        """Announce that this end sends no more frames; the other direction stays open."""

    def abort(self) -> None:
        """Drop the stream in both directions, now. Safe to call twice, and after `finish`."""


Handler = Callable[[Channel], Awaitable[None]]


class Transport(Protocol):
    """Streams to peers by id. Connecting, encryption, relays and NAT are the transport's business."""

    @property
    def peer_id(self) -> str:
        """This peer's id (base58 libp2p peer id)."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs at which others can dial this peer, each ending in /p2p/<its id>."""

    def learn_addresses(self, peer: str, addresses: Iterable[str]) -> None:
        """Remember the addresses at which a peer says it can be dialled."""

    async def serve(self, method: str, handler: Handler) -> None:
        """Call `handler` for every stream that a peer opens for `method`. The channel is dropped when the handler returns."""

    async def open(self, peer: str, method: str) -> Channel:
        """Open a stream. Raises PeerUnreachable when the peer is gone, Refused when it does not serve the method."""

    async def close(self) -> None:
        """End all streams and child processes."""


class Registry(Protocol):
    """The DHT: small values that expire, `key -> {peer id: value}`. A peer can write only under its own id."""

    keepers: tuple[str, ...]
    """Peers that keep this peer's records beside the nodes that the DHT chooses. The first that has any is read, too."""
    is_known: Callable[[str], bool]
    """Whether a peer takes part in the rounds, or the owner vouches for it: what all others look up here is bounded."""

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Store `value` (at most MAX_RECORD_BYTES) under (key, this peer's id) for `ttl_s` seconds."""

    async def get(self, key: str) -> dict[str, bytes]:
        """All living values under key, by the peer that wrote them."""


@dataclass(frozen=True)
class World:
    """Everything impure that a peer touches, passed in from outside."""

    transport: Transport
    registry: Registry
    identity: Identity
    store: Store
    wall_time: Callable[[], float]
    rng: random.Random
    run_blocking: Callable[..., Awaitable[Any]]
    """`await run_blocking(f, *args)`: a worker thread in the real world, inline (with modelled seconds) in the simulator."""
    line: Line = UNLIMITED
    """This peer's rate limits."""
    threads: int = 1
    """Threads in which work on the whole state is divided; the results do not depend on it."""
    protocol: int = PROTOCOL_VERSION
    oldest_protocol: int = OLDEST_PROTOCOL
    """The protocol versions that this peer speaks: both of these and all between."""
