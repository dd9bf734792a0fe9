"""The real world of a peer: channels over libp2p (`transport.py`), the registry in the Hivemind DHT (`dht.py`), both behind one
daemon process (`p2pd.py`).

When it listens on loopback only, the daemon contacts no other machine (no port mapping, no NAT probing).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import random
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from hivemind.dht import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.p2p import PeerID

from spes_p2p.config.addresses import (
    DEFAULT_LISTEN,
    check_listen_addresses,
    check_peer_addresses,
    host_and_port,
    is_loopback,
    peer_of,
)
from spes_p2p.errors import PeerUnreachable, RunDirInUse, UserError
from spes_p2p.net.connections import Connection, Connections
from spes_p2p.net.daemon_process import StartedDaemon
from spes_p2p.net.dht import DHTRegistry, join_dht
from spes_p2p.net.identity import RSAIdentity, Visitor
from spes_p2p.net.interfaces import World
from spes_p2p.net.limits import UNLIMITED, Line
from spes_p2p.net.p2pd import Daemon, control_daemon, relayed_by, start_daemon
from spes_p2p.net.tasks import end_tasks
from spes_p2p.net.transport import OPEN_TIMEOUT_S, Libp2pTransport, visible_addresses
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.threads import threads_here

T = TypeVar("T")

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
GOODBYE_TIMEOUT_S = 3.0
FIND_EVERY_S = 5.0
MAX_LOOKUPS, LOOKUP_PAUSE_S = 50, 0.1
EMPTY_TABLE = "failed to find any peer in table"
"""What p2pd answers to a lookup until the initial peers, to which it has just connected, have said that they serve the DHT."""


class Libp2p:
    """A running peer daemon with transport, registry and identity."""

    def __init__(
        self,
        daemon: Daemon,
        node: DHTNode,
        registry: DHTRegistry,
        identity: RSAIdentity | Visitor,
        lock: IO[bytes] | None,
        addresses: tuple[str, ...],
    ):
        self.identity = identity
        self.transport = Libp2pTransport(daemon, addresses)
        self.registry = registry
        self._daemon, self._node, self._lock = daemon, node, lock
        self._connections = Connections(self._look, daemon.close_connections, daemon.uses)
        keeping, loop = (self.transport.keep_addresses(), self._connections.keep_bounded()), asyncio.get_running_loop()
        self._keeping = [loop.create_task(each) for each in keeping]

    async def _look(self) -> list[Connection]:
        found = await self._daemon.open_connections()
        self.transport.dial_again(found)
        return found

    @property
    def daemon_pid(self) -> int:
        """Process id of p2pd, the only child process."""
        return self._daemon.pid

    def world(self, store: Store, line: Line = UNLIMITED) -> World:
        """The real world around a peer: this net, the wall clock, threads."""
        return World(
            transport=self.transport,
            registry=self.registry,
            identity=self.identity,
            store=store,
            wall_time=time.time,
            rng=random.Random(),
            run_blocking=asyncio.to_thread,
            line=line,
            threads=threads_here(),
        )

    async def wait_daemon_exit(self) -> None:
        """Returns when the daemon has ended; unless `close` was called, nothing works from then on."""
        await self._daemon.wait()

    def keep_few_connections(self, addresses: Sequence[str]) -> None:
        """Close unused connections from now on, as trainers do, but none with the peers at these addresses."""
        self._connections.keep_few(frozenset(map(peer_of, addresses)), self.transport.is_relay_of)

    async def keep_finding(self, addresses: Sequence[str]) -> None:
        """Dial these peers regularly, to rejoin one DHT after an outage of either side. Never returns."""
        others = {peer_of(address): address for address in addresses}
        others.pop(self.identity.peer_id, None)
        while True:
            await asyncio.sleep(FIND_EVERY_S)
            await asyncio.gather(*(self._find(peer, address) for peer, address in others.items()))

    async def _find(self, peer: str, address: str) -> None:
        """Enter the peers into each other's routing tables, then look up this node's neighbours in the other's DHT."""
        protocol, timeout_s = self._node.protocol, OPEN_TIMEOUT_S
        known = PeerID.from_base58(peer) in protocol.routing_table.peer_id_to_uid
        with suppress(PeerUnreachable, ValidationError, asyncio.TimeoutError):
            await asyncio.wait_for(self._daemon.connect(peer, [address], timeout_s), timeout_s)
            found = await asyncio.wait_for(protocol.call_ping(PeerID.from_base58(peer)), timeout_s)
            if found is not None and not known:
                logger.debug("found %s again", peer[-6:])
                await asyncio.wait_for(self._node.find_nearest_nodes([self._node.node_id]), timeout_s)

    async def close(self) -> None:
        """Leave the DHT, end the daemon, remove its sockets, release the identity."""
        await end_tasks(self._keeping)
        try:
            if self._daemon.is_running:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._node.shutdown(), GOODBYE_TIMEOUT_S)
        finally:
            await self._daemon.close()
            if self._lock is not None:
                self._lock.close()


async def start_libp2p(
    identity_file: Path,
    listen: Sequence[str] = DEFAULT_LISTEN,
    announce: Sequence[str] = (),
    initial_peers: Sequence[str] = (),
    *,
    reachability: Literal["public", "private"] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Libp2p:
    """Start the daemon and join the DHT (without `initial_peers`: be its first node).

    `reachability`: public, it is a relay for others; private, it asks the initial peers to be its relays; None, the daemon
    finds out, which takes it minutes.

    Raises UserError for a malformed address, a port in use, an identity in use, or when no initial peer can be reached.
    """
    check_addresses(listen, announce, initial_peers)
    identity, is_new, lock = _take_identity(identity_file)
    try:
        is_public = not all(is_loopback(address) for address in listen)
        if initial_peers and not is_new:
            await _check_identity_is_free(identity, initial_peers, start_timeout_s)
        daemon = await start_daemon(
            initial_peers,
            start_timeout_s,
            host_maddrs=list(listen),
            announce_maddrs=list(announce) or None,
            identity_path=str(identity_file),
            nat_port_map=is_public,
            auto_nat=is_public,
            use_relay=is_public,
            force_reachability=reachability if is_public else None,
            **(relayed_by(initial_peers) if is_public else {}),
        )
    except BaseException:
        lock.close()
        raise
    try:
        cannot_serve = is_public and reachability == "private"
        node, registry = await join_dht(daemon, identity, initial_peers, start_timeout_s, client_mode=cannot_serve)
        return Libp2p(daemon, node, registry, identity, lock, await visible_addresses(daemon))
    except BaseException:
        await daemon.close()
        lock.close()
        raise


async def visit(
    started: StartedDaemon, initial_peers: Sequence[str], ask: Callable[[Libp2pTransport], Coroutine[Any, Any, T]]
) -> tuple[Libp2p, T]:
    """Connect as a client that stores nothing, over a visitor's daemon; return also what `ask` finds out meanwhile.

    Raises UserError if no initial peer can be reached, and what `ask` raises.
    """
    daemon = await control_daemon(started, initial_peers, START_TIMEOUT_S)
    asking = asyncio.ensure_future(ask(Libp2pTransport(daemon, ())))
    try:
        visitor = Visitor(str(daemon.peer_id))
        node, registry = await join_dht(daemon, visitor, initial_peers, START_TIMEOUT_S, client_mode=True)
        found = await asking
        return Libp2p(daemon, node, registry, visitor, None, ()), found
    except BaseException:
        await end_tasks([asking])
        await daemon.close()
        raise


def check_addresses(listen: Sequence[str], announce: Sequence[str], initial_peers: Sequence[str]) -> None:
    """Raises UserError for a malformed address or a port in use."""
    check_listen_addresses([*listen, *announce])
    check_peer_addresses(initial_peers)
    for address in listen:
        _check_port_is_free(address)


def _check_port_is_free(address: str) -> None:
    """The daemon would share a used port silently (SO_REUSEPORT)."""
    host, port = host_and_port(address)
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "choose another port, or 0 for any" if error.errno == errno.EADDRINUSE else "choose another address"
            raise UserError(f"cannot listen on port {port} of {host} ({error.strerror}); {advice}") from None


def _take_identity(path: Path) -> tuple[RSAIdentity, bool, IO[bytes]]:
    """The identity, whether it was made just now, and the lock on its file: held until the process ends, however it ends."""
    is_new = not path.exists()
    identity = RSAIdentity(path)
    file = path.open("rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise RunDirInUse(
            f"{path}: a running peer uses this identity; stop it, or give this one another --run-dir or --identity"
        ) from None
    return identity, is_new, file


async def _check_identity_is_free(identity: RSAIdentity, initial_peers: Sequence[str], timeout_s: float) -> None:
    """Ask the swarm, under another identity, whether a living peer uses this one."""
    if any(address.endswith(f"/p2p/{identity.peer_id}") for address in initial_peers):
        raise UserError(f"{identity.path}: this is the identity of an initial peer; choose another identity file")
    probe = await start_daemon(initial_peers, timeout_s, nat_port_map=False, auto_nat=False, use_relay=True, dht_mode="client")
    try:
        for _ in range(MAX_LOOKUPS):
            try:
                await asyncio.wait_for(probe.connect(identity.peer_id, (), OPEN_TIMEOUT_S), OPEN_TIMEOUT_S)
            except asyncio.TimeoutError:
                return
            except PeerUnreachable as error:
                if EMPTY_TABLE not in str(error):
                    return
                await asyncio.sleep(LOOKUP_PAUSE_S)
            else:
                raise UserError(f"{identity.path}: a living peer has this identity; stop it, or choose another identity file")
    finally:
        await probe.close()
