"""How many connections others may hold to this peer: each of them, those from one network, and all.

hivemind's p2pd has no such limits, and its connection manager spares young connections. So this peer looks at the open ones
regularly, and has p2pd close those beyond the bounds, the youngest first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

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

Connection = tuple[str, list[str]]
"""A peer, and the multiaddrs from which it is connected."""


class Connections:
    """The open connections of a peer daemon, and which are too many."""

    def __init__(self, look: Callable[[], Awaitable[list[Connection]]], close: Callable[[str], Awaitable[None]]):
        """`look()`: the open connections. `close(peer)`: closes those of a peer."""
        self._look, self._close = look, close
        self._known: dict[str, None] = {}
        """Connected peers, the oldest first."""

    async def keep_bounded(self) -> None:
        """Close what is too much, again and again. Never returns."""
        while True:
            with suppress(P2PDaemonError, OSError, EOFError):
                found = await self._look()
                for peer in self.too_many(found):
                    logger.info("%s: too many connections", peer[-6:])
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
