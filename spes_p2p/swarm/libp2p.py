"""The real world of a peer: streams over libp2p, the registry in the Hivemind DHT, both behind one daemon process.

A channel is a raw libp2p stream with frames of our own: one byte of kind, four bytes of length, content. The length is checked
before anything is read. When we listen on loopback only, the daemon speaks to nobody else (no port mapping, no NAT probing).
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import logging
import re
import socket
import struct
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht import DHTNode
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import get_dht_time
from hivemind.dht.validation import DHTRecord
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.multiaddr import Multiaddr

from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.swarm.identity import RSAIdentity, peer_id_of_public_key
from spes_p2p.swarm.interfaces import MAX_FRAME_BYTES, MAX_RECORD_BYTES, Handler
from spes_p2p.swarm.p2pd import Daemon, remove_stale_sockets

T = TypeVar("T")
log = logging.getLogger(__name__)

PROTOCOL_PREFIX = "/spes/1/"
DEFAULT_LISTEN = ("/ip4/0.0.0.0/tcp/0",)
EXAMPLE_ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
EXAMPLE_LISTEN = "/ip4/0.0.0.0/tcp/31337"

OPEN_TIMEOUT_S = 10.0
REGISTRY_TIMEOUT_S = 15.0
START_TIMEOUT_S = 30.0
LINGER_S = 5.0
"""How long a finished channel still swallows what the other end sends, so that our last frames are not reset away."""

_HEADER = struct.Struct(">BI")
_DATA, _FINISHED, _REFUSED = 0, 1, 2
_EXPIRY = struct.Struct(">d")
_EXPIRY_STEP_S = 0.001
_RECORD_OVERHEAD_BYTES = 1024


class Libp2p:
    """A running peer daemon with transport, registry and identity."""

    def __init__(self, daemon: Daemon, node: DHTNode, identity: RSAIdentity, lock: IO[bytes], addresses: tuple[str, ...]):
        self.identity = identity
        self.transport = Libp2pTransport(daemon, addresses)
        self.registry = DHTRegistry(node, identity)
        self._daemon, self._node, self._lock = daemon, node, lock

    async def wait_daemon_exit(self) -> None:
        """Returns when the daemon has ended; unless `close` was called, nothing works from then on."""
        await self._daemon.wait()

    async def close(self) -> None:
        """Leave the DHT, end the daemon, remove its sockets, release the identity."""
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._node.shutdown(), OPEN_TIMEOUT_S)
        finally:
            await self._daemon.close()
            self._lock.close()


async def start_libp2p(
    identity_file: Path,
    listen: Sequence[str] = DEFAULT_LISTEN,
    announce: Sequence[str] = (),
    initial_peers: Sequence[str] = (),
    *,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Libp2p:
    """Start the daemon and join the DHT (without `initial_peers`: be its first node).

    Raises UserError for a malformed address, a port in use, an identity in use, or when no initial peer can be reached.
    """
    for address in [*listen, *announce]:
        _check_listen_address(address)
    for address in initial_peers:
        check_peer_address(address)
    for address in listen:
        _check_port_is_free(address)
    existed = identity_file.exists()
    identity = RSAIdentity(identity_file)
    lock = _lock_identity(identity_file)
    try:
        is_public = not all(_is_loopback(address) for address in listen)
        if existed and initial_peers:
            await _check_identity_is_free(identity, initial_peers, start_timeout_s)
        daemon = await _start_daemon(
            initial_peers,
            start_timeout_s,
            host_maddrs=list(listen),
            announce_maddrs=list(announce) or None,
            identity_path=str(identity_file),
            nat_port_map=is_public,
            auto_nat=is_public,
            use_relay=is_public,
            use_auto_relay=is_public and bool(initial_peers),
        )
    except BaseException:
        lock.close()
        raise
    try:
        node = await _join_dht(daemon, identity, initial_peers, start_timeout_s)
        addresses = tuple(str(address) for address in await daemon.get_visible_maddrs(latest=True))
    except BaseException:
        await daemon.close()
        lock.close()
        raise
    return Libp2p(daemon, node, identity, lock, tuple(sorted(addresses, key=_is_loopback)))


class Libp2pTransport:
    """Channels over libp2p streams (`interfaces.Transport`)."""

    def __init__(self, daemon: Daemon, addresses: tuple[str, ...]):
        self._daemon = daemon
        self._addresses = addresses
        self._known: dict[str, tuple[str, ...]] = {}
        self._dialled: set[str] = set()
        self._channels: set[StreamChannel] = set()

    @property
    def peer_id(self) -> str:
        """Base58 libp2p id."""
        return str(self._daemon.peer_id)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs under which I can be dialled, those of this machine only at the end."""
        return self._addresses

    def learn_addresses(self, peer: str, addresses: Iterable[str]) -> None:
        """Remember where to dial a peer; what is not a peer address is ignored."""
        usable = tuple(address for address in addresses if _peer_address_problem(address) is None)
        if usable and usable != self._known.get(peer):
            self._known[peer] = usable
            self._dialled.discard(peer)

    async def serve(self, method: str, handler: Handler) -> None:
        """Call `handler` for each incoming stream. Its failure ends that channel only; Refused is told to the other end."""

        async def serve_stream(remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = StreamChannel(remote, reader, writer)
            try:
                await handler(channel)
            except Refused as reason:
                await channel.refuse(str(reason))
            except Exception:
                log.debug("the handler of %s for %s failed", method, remote, exc_info=True)
            finally:
                channel.abort()

        await self._daemon.serve_streams(PROTOCOL_PREFIX + method, serve_stream)

    async def open(self, peer: str, method: str) -> StreamChannel:
        """Open a stream within OPEN_TIMEOUT_S. Raises PeerUnreachable (at once when the connection is refused) or Refused."""
        if peer == self.peer_id:
            raise ValueError("a peer cannot dial itself")
        try:
            reader, writer = await asyncio.wait_for(self._open(peer, PROTOCOL_PREFIX + method), OPEN_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise PeerUnreachable(f"{peer}: no answer for {OPEN_TIMEOUT_S:g} s") from None
        return StreamChannel(peer, reader, writer)

    async def close(self) -> None:
        """End all streams and the daemon."""
        await self._daemon.close()

    async def _open(self, peer: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        addresses = self._known.get(peer, ())
        if peer in self._dialled or not addresses:
            try:
                return await self._daemon.open_stream(peer, protocol, OPEN_TIMEOUT_S)
            except PeerUnreachable:
                self._dialled.discard(peer)
                if not addresses:
                    raise
        await self._daemon.connect(peer, addresses, OPEN_TIMEOUT_S)
        self._dialled.add(peer)
        return await self._daemon.open_stream(peer, protocol, OPEN_TIMEOUT_S)


class StreamChannel:
    """Frames over one stream (`interfaces.Channel`). One task at a time may send, one may receive."""

    def __init__(self, remote: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._remote, self._reader, self._writer = remote, reader, writer
        self._has_finished = False
        self._aborted = False
        self._end: _End | None = None
        writer.transport.set_write_buffer_limits(high=4 * 2**16)

    @property
    def remote(self) -> str:
        """The authenticated id of the other end."""
        return self._remote

    async def send(self, frame: bytes | memoryview) -> None:
        """Send one frame; waits while the stream is full. Raises PeerUnreachable."""
        size = len(frame) if isinstance(frame, bytes) else frame.nbytes
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
        await self._write(_DATA, frame, size)

    async def receive(self) -> bytes | None:
        """The next frame; None after the other end's `finish`. Raises PeerUnreachable (broken) or Refused (with its reason)."""
        if self._end is None:
            try:
                kind, size = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                if kind == _DATA and size <= MAX_FRAME_BYTES:
                    return await self._reader.readexactly(size)
                self._end = await self._read_end(kind, size)
            except (OSError, asyncio.IncompleteReadError):
                self._end = PeerUnreachable(f"{self._remote} broke the channel")
        if self._aborted:
            raise PeerUnreachable(f"the channel to {self._remote} was closed here")
        if self._end is _FINISH:
            return None
        assert isinstance(self._end, Exception)
        raise self._end

    async def finish(self) -> None:
        """No more frames from this end."""
        if not self._has_finished:
            await self._write(_FINISHED, b"", 0)
            self._has_finished = True

    async def refuse(self, reason: str) -> None:
        """End this direction with a reason, which the other end's `receive` raises as Refused."""
        if not self._has_finished:
            content = reason.encode()[:_RECORD_OVERHEAD_BYTES]
            with suppress(PeerUnreachable):
                await self._write(_REFUSED, content, len(content))
                self._has_finished = True

    def abort(self) -> None:
        """Drop the stream; what was sent before a `finish` still arrives."""
