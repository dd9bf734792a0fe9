"""How many connections a peer has: how many others may hold to it, and how many unused ones a trainer keeps.

hivemind's p2pd has no limits for one peer or one network, and its connection manager spares young connections. Nor does that
find unused ones: it rather keeps those with peers of p2pd's own DHT than those over which this process has streams. So this
peer looks at the open ones regularly, and has p2pd close those beyond the bounds.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Set
from contextlib import contextmanager, suppress

from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from spes_p2p.net.dht_guard import network_of

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
CONNECTIONS_PER_PEER = 8
"""Two peers that dial each other at once have two, and one behind a relay may have another."""
PEERS_PER_NETWORK = 64
"""Connected peers from one network, an IPv4 /24 or IPv6 /48: as many as have records in the registry. Loopback is exempt."""
CONNECTIONS = 2**11
"""Connections in all: twice the members of a round."""
TRAINERS_CONNECTIONS = 64
"""Above this many a trainer closes unused ones: enough for a member of a round in cells, few enough for a router at home."""
RELAYS_CONNECTIONS = 256
"""The same for a trainer through which others say that they are dialled: p2pd relays for up to 128, and others dial them."""
UNUSED_S = 30.0
"""Close only what was unused for this long: the daemon has then sent what was written to a stream before it was closed."""

Connection = tuple[str, list[str]]
"""A peer, and the multiaddrs from which it is connected."""

_RELAY = re.compile(r"/p2p/(\w+)/p2p-circuit")


class Uses:
    """With which peers this process has streams, or calls of the DHT."""

    def __init__(self) -> None:
        self._current = Counter[str]()
        self._ended: set[str] = set()

    @contextmanager
    def of(self, peer: str) -> Iterator[None]:
        """Use the connection with this peer."""
        self._current[peer] += 1
        try:
            yield
        finally:
            self._ended.add(peer)
            self._current[peer] -= 1
            if not self._current[peer]:
                del self._current[peer]

    def is_used(self, peer: str) -> bool:
        """Return whether the connection with this peer is in use."""
        return peer in self._current

    def lately(self) -> Set[str]:
        """Return the peers used now or since the last call."""
        used, self._ended = self._ended | self._current.keys(), set()
        return used


class Connections:
    """The open connections of a peer daemon, and which are too many."""

    def __init__(self, look: Callable[[], Awaitable[list[Connection]]], close: Callable[[str], Awaitable[None]], uses: Uses):
        """`look()`: the open connections. `close(peer)`: closes those of a peer."""
        self._look, self._close, self._uses = look, close, uses
        self._known: dict[str, None] = {}
        """Connected peers, the oldest first."""
        self._unused_since_s: dict[str, float] = {}
        self._needed: Set[str] = frozenset()
        self.most: Callable[[Set[str]], int] = lambda peers: CONNECTIONS
        """How many connections are kept though unused, while these peers are connected."""

    def keep_few(self, needed: Set[str], is_relay_of: Callable[[Set[str]], bool]) -> None:
        """Close unused connections from now on, as a trainer does; but none with `needed`.

        `is_relay_of(peers)`: whether one of these is dialled through this peer.
        """
        self._needed = needed
        self.most = lambda peers: RELAYS_CONNECTIONS if is_relay_of(peers) else TRAINERS_CONNECTIONS

    async def keep_bounded(self) -> None:
        """Close what is too much, again and again. Never returns."""
        while True:
            with suppress(P2PDaemonError, OSError, EOFError):
                found = await self._look()
                for peer in self.too_many(found):
                    logger.info("%s: too many connections", peer[-6:])
                    await self._close(peer)
                for peer in self.unused(found, asyncio.get_running_loop().time()):
                    if not self._uses.is_used(peer):
                        logger.debug("%s: closing an unused connection", peer[-6:])
                        await self._close(peer)
            await asyncio.sleep(LOOK_EVERY_S)

    def too_many(self, found: Iterable[Connection]) -> list[str]:
        """Return the peers whose connections are beyond the bounds. `found`: all open ones."""
        counts, networks = Counter[str](), dict[str, str]()
        for peer, addresses in found:
            counts[peer] += 1
            networks[peer] = network_of(addresses) or networks.get(peer, "")
        self._known = dict.fromkeys(peer for peer in (*self._known, *counts) if peer in counts)
        closed, left, of_network = list[str](), CONNECTIONS, Counter[str]()
        for peer in self._known:
            network, count = networks[peer], counts[peer]
            is_full = network != "" and of_network[network] >= PEERS_PER_NETWORK
            if count > CONNECTIONS_PER_PEER or count > left or is_full:
                closed.append(peer)
            else:
                of_network[network] += 1
                left -= count
        for peer in closed:
            del self._known[peer]
        return closed

    def unused(self, found: Collection[Connection], now_s: float) -> list[str]:
        """Return the peers, unused for longest, whose connections are beyond `most`. `found`: all open ones.

        A connection with a relay is used by those that lead through it.
        """
        counts = Counter(peer for peer, _ in found)
        relays = {relay for _, addresses in found for address in addresses for relay in _RELAY.findall(address)}
        kept = self._uses.lately() | relays | self._needed
        self._unused_since_s = {peer: self._unused_since_s.get(peer, now_s) for peer in counts if peer not in kept}
        closed, excess = list[str](), len(found) - self.most(counts.keys())
        for peer, since_s in sorted(self._unused_since_s.items(), key=lambda item: item[1]):
            if excess <= 0 or since_s > now_s - UNUSED_S:
                break
            closed.append(peer)
            excess -= counts[peer]
        return closed
