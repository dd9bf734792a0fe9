"""Channels to peers by id over a libp2p daemon (`interfaces.Transport`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from contextlib import suppress

from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure

from spes_p2p.config.addresses import is_loopback, is_peer_address, is_public
from spes_p2p.errors import PeerUnreachable
from spes_p2p.net.byte_stream import ByteStream
from spes_p2p.net.channels import StreamChannel
from spes_p2p.net.connections import Connection
from spes_p2p.net.interfaces import Handler
from spes_p2p.net.p2pd import Daemon

logger = logging.getLogger(__name__)

PROTOCOL_PREFIX = "/spes/2/"
"""Changes with the framing: a peer of an older one is told that its method is not served."""
OPEN_TIMEOUT_S = 10.0
ADDRESSES_EVERY_S = 2.0
KNOWN_PEERS = 2**14
"""Bounds the peers whose addresses are known, those named last: anybody can have ever new ones in the registry. Several times
what a look-up finds, since whoever takes part must not be forgotten for them."""


class Libp2pTransport:
    """Channels over libp2p streams (`interfaces.Transport`)."""

    def __init__(self, daemon: Daemon, addresses: tuple[str, ...]):
        self.daemon = daemon
        self._addresses = addresses
        self._known: dict[str, tuple[str, ...]] = {}
        """Those named last come last."""
        self._dialled: set[str] = set()
        self._dials: dict[str, asyncio.Lock] = {}

    @property
    def peer_id(self) -> str:
        """Base58 libp2p id."""
        return str(self.daemon.peer_id)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs at which this peer can be dialled, loopback ones last."""
        return self._addresses

    async def keep_addresses(self) -> None:
        """Keep the addresses current as the daemon learns of router ports and relays. Never returns."""
        while True:
            await asyncio.sleep(ADDRESSES_EVERY_S)
            with suppress(ControlFailure, OSError, EOFError, ValueError):
                self._addresses = await visible_addresses(self.daemon)

    def learn_addresses(self, peer: str, addresses: Iterable[str]) -> None:
        """Remember where to dial a peer; ignore malformed addresses."""
        usable = tuple(address for address in addresses if is_peer_address(address))
        if not usable:
            return
        if usable != self._known.pop(peer, None):
            self._dialled.discard(peer)
        self._known[peer] = usable
        if len(self._known) > KNOWN_PEERS:
            forgotten = next(iter(self._known))
            del self._known[forgotten]
            self._dialled.discard(forgotten)
            self._dials.pop(forgotten, None)

    def is_relay_of(self, peers: Iterable[str]) -> bool:
        """Return whether one of these peers is dialled through this one."""
        here = f"/p2p/{self.peer_id}/p2p-circuit/"
        return any(here in address for peer in peers for address in self._known.get(peer, ()))

    def dial_again(self, connections: Collection[Connection]) -> None:
        """Dial those of these peers before the next stream that are connected through relays only."""
        direct = {peer for peer, addresses in connections if not all(map(is_over_relay, addresses))}
        self._dialled.difference_update(peer for peer, _ in connections if peer not in direct)

    async def seen_at(self, peer: str) -> tuple[str, ...]:
        """Return the multiaddrs of the open connections with a peer, as seen from here."""
        return tuple((await self.daemon.connections()).get(peer, ()))

    async def serve(self, method: str, handler: Handler) -> None:
        """Call `handler` for each incoming stream. Its failure ends that channel only."""

        async def serve_stream(remote: str, stream: ByteStream) -> None:
            channel = StreamChannel(remote, stream)
            try:
                await handler(channel)
            except Exception:
                logger.debug("the handler of %s for %s failed", method, remote, exc_info=True)
            finally:
                channel.abort()

        await self.daemon.serve_streams(PROTOCOL_PREFIX + method, serve_stream)

    async def open(self, peer: str, method: str) -> StreamChannel:
        """Open a stream within OPEN_TIMEOUT_S. Raises PeerUnreachable (at once when the connection is refused) or Refused."""
        if peer == self.peer_id:
            raise ValueError("a peer cannot dial itself")
        try:
            stream = await asyncio.wait_for(self._open(peer, PROTOCOL_PREFIX + method), OPEN_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise PeerUnreachable(f"{peer}: no answer for {OPEN_TIMEOUT_S:g} s") from None
        return StreamChannel(peer, stream)

    async def close(self) -> None:
        """End all streams and the daemon."""
        await self.daemon.close()

    async def _open(self, peer: str, protocol: str) -> ByteStream:
        addresses = self._known.get(peer, ())
        if peer in self._dialled or not addresses:
            try:
                return await self.daemon.open_stream(peer, protocol, OPEN_TIMEOUT_S)
            except PeerUnreachable:
                self._dialled.discard(peer)
                if not addresses:
                    raise
        async with self._dials.setdefault(peer, asyncio.Lock()):
            if peer not in self._dialled:
                await self._dial(peer, addresses)
        return await self.daemon.open_stream(peer, protocol, OPEN_TIMEOUT_S)

    async def _dial(self, peer: str, addresses: tuple[str, ...]) -> None:
        """Connect to a peer, directly if that may succeed: libp2p does not dial while there is a relayed connection."""
        if any(map(is_public, addresses)) and not self.daemon.uses.is_used(peer):
            found = await self.seen_at(peer)
            if found and all(map(is_over_relay, found)) and not self.daemon.uses.is_used(peer):
                await self.daemon.close_connections(peer)
        await self.daemon.connect(peer, addresses, OPEN_TIMEOUT_S)
        self._dialled.add(peer)


def is_over_relay(address: str) -> bool:
    """Return whether this is the address of a relayed connection's other end."""
    return "/p2p-circuit" in address


async def visible_addresses(daemon: Daemon) -> tuple[str, ...]:
    """Return this machine's addresses, loopback ones last."""
    return tuple(sorted((str(address) for address in await daemon.get_visible_maddrs(latest=True)), key=is_loopback))
