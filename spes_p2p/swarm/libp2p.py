"""The real world of a peer: streams over libp2p, the registry in the Hivemind DHT, both behind one daemon process.

A channel is a raw libp2p stream with frames of our own: one byte of kind, four bytes of length, content. The length is checked
before anything is read. When we listen on loopback only, the daemon speaks to nobody else (no port mapping, no NAT probing).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import random
import re
import socket
import struct
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht import DHTNode
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import get_dht_time
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, P2PDaemonError
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS

from spes_p2p.addresses import (
    DEFAULT_LISTEN,
    check_listen_addresses,
    check_peer_addresses,
    host_and_port,
    is_loopback,
    is_peer_address,
    peer_of,
)
from spes_p2p.errors import NobodyAnswers, PeerUnreachable, Refused, UserError
from spes_p2p.swarm.byte_stream import ByteStream
from spes_p2p.swarm.identity import RSAIdentity, peer_id_of_public_key
from spes_p2p.swarm.interfaces import MAX_FRAME_BYTES, MAX_RECORD_BYTES, Handler, Store, World
from spes_p2p.swarm.latency import delayed, latency_of_environment
from spes_p2p.swarm.limits import UNLIMITED, Line
from spes_p2p.swarm.p2pd import Daemon, remove_stale_sockets
from spes_p2p.swarm.tasks import end_tasks

T = TypeVar("T")
log = logging.getLogger(__name__)

PROTOCOL_PREFIX = "/spes/1/"

OPEN_TIMEOUT_S = 10.0
REGISTRY_TIMEOUT_S = 15.0
START_TIMEOUT_S = 30.0
GOODBYE_TIMEOUT_S = 3.0
ADDRESSES_EVERY_S, FIND_EVERY_S = 2.0, 5.0
LINGER_S = 5.0
"""How long a finished channel still swallows what the other end sends, so that our last frames are not reset away."""

_HEADER = struct.Struct(">BI")
_DATA, _FINISHED, _REFUSED = 0, 1, 2
_EXPIRY = struct.Struct(">d")
_SUBKEY = re.compile(rb"\[owner:(ssh-rsa [A-Za-z0-9+/=]+)\]")
_EXPIRY_STEP_S = 0.001
MAX_REASON_BYTES = 1024
MAX_SIGNED_RECORD_BYTES = 2 * MAX_RECORD_BYTES


class Libp2p:
    """A running peer daemon with transport, registry and identity."""

    def __init__(self, daemon: Daemon, node: DHTNode, identity: RSAIdentity, lock: IO[bytes], addresses: tuple[str, ...]):
        self.identity = identity
        self.transport = Libp2pTransport(daemon, addresses)
        self.registry = DHTRegistry(node, identity)
        self._daemon, self._node, self._lock = daemon, node, lock
        self._keeping = asyncio.get_running_loop().create_task(self.transport.keep_addresses())

    @property
    def daemon_pid(self) -> int:
        """Process id of p2pd, our only child."""
        return self._daemon.pid

    def world(self, store: Store, line: Line = UNLIMITED) -> World:
        """The real world around a peer: this net, the wall clock, threads."""
        return World(
            transport=delayed(self.transport, latency_of_environment()),
            registry=self.registry,
            identity=self.identity,
            store=store,
            wall_time=time.time,
            rng=random.Random(),
            run_blocking=asyncio.to_thread,
            line=line,
        )

    async def wait_daemon_exit(self) -> None:
        """Returns when the daemon has ended; unless `close` was called, nothing works from then on."""
        await self._daemon.wait()

    async def keep_finding(self, addresses: Sequence[str]) -> None:
        """Dial these peers now and then, and be in one DHT with them again after they, or I, were away. Never returns."""
        others = {peer_of(address): address for address in addresses}
        others.pop(self.identity.peer_id, None)
        while True:
            await asyncio.sleep(FIND_EVERY_S)
            await asyncio.gather(*(self._find(peer, address) for peer, address in others.items()))

    async def _find(self, peer: str, address: str) -> None:
        """Each takes the other into its routing table; then mine learns who is near me in the DHT that the other is in."""
        protocol, timeout_s = self._node.protocol, OPEN_TIMEOUT_S
        known = PeerID.from_base58(peer) in protocol.routing_table.peer_id_to_uid
        with suppress(PeerUnreachable, ValidationError, asyncio.TimeoutError):
            await asyncio.wait_for(self._daemon.connect(peer, [address], timeout_s), timeout_s)
            found = await asyncio.wait_for(protocol.call_ping(PeerID.from_base58(peer)), timeout_s)
            if found is not None and not known:
                log.info("found %s again", peer[-6:])
                await asyncio.wait_for(self._node.find_nearest_nodes([self._node.node_id]), timeout_s)

    async def close(self) -> None:
        """Leave the DHT, end the daemon, remove its sockets, release the identity."""
        await end_tasks([self._keeping])
        try:
            if self._daemon.is_running:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._node.shutdown(), GOODBYE_TIMEOUT_S)
        finally:
            await self._daemon.close()
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
        node = await join_dht(daemon, identity, initial_peers, start_timeout_s, client_mode=cannot_serve)
        return Libp2p(daemon, node, identity, lock, await _visible_addresses(daemon))
    except BaseException:
        await daemon.close()
        lock.close()
        raise


class Libp2pTransport:
    """Channels over libp2p streams (`interfaces.Transport`)."""

    def __init__(self, daemon: Daemon, addresses: tuple[str, ...]):
        self.daemon = daemon
        self._addresses = addresses
        self._known: dict[str, tuple[str, ...]] = {}
        self._dialled: set[str] = set()

    @property
    def peer_id(self) -> str:
        """Base58 libp2p id."""
        return str(self.daemon.peer_id)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs under which I can be dialled, those of this machine only at the end."""
        return self._addresses

    async def keep_addresses(self) -> None:
        """Follow what the daemon finds out about them: ports that a router opened for it, relays. Never returns."""
        while True:
            await asyncio.sleep(ADDRESSES_EVERY_S)
            with suppress(ControlFailure, OSError, EOFError, ValueError):
                self._addresses = await _visible_addresses(self.daemon)

    def learn_addresses(self, peer: str, addresses: Iterable[str]) -> None:
        """Remember where to dial a peer; what is not a peer address is ignored."""
        usable = tuple(address for address in addresses if is_peer_address(address))
        if usable and usable != self._known.get(peer):
            self._known[peer] = usable
            self._dialled.discard(peer)

    async def seen_at(self, peer: str) -> tuple[str, ...]:
        """Multiaddrs of the connections that I have with a peer, as they look from here."""
        connected = await self.daemon.list_peers()
        return tuple(str(address) for info in connected if str(info.peer_id) == peer for address in info.addrs)

    async def serve(self, method: str, handler: Handler) -> None:
        """Call `handler` for each incoming stream. Its failure ends that channel only; Refused is told to the other end."""

        async def serve_stream(remote: str, stream: ByteStream) -> None:
            channel = StreamChannel(remote, stream)
            try:
                await handler(channel)
            except Refused as reason:
                await channel.refuse(str(reason))
            except Exception:
                log.debug("the handler of %s for %s failed", method, remote, exc_info=True)
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
        await self.daemon.connect(peer, addresses, OPEN_TIMEOUT_S)
        self._dialled.add(peer)
        return await self.daemon.open_stream(peer, protocol, OPEN_TIMEOUT_S)


class StreamChannel:
    """Frames over one stream (`interfaces.Channel`). One task at a time may send, one may receive."""

    def __init__(self, remote: str, stream: ByteStream):
        self._remote, self._stream = remote, stream
        self._has_finished = False
        self._aborted = False
        self._header: tuple[int, int] | None = None  # read, and its content not yet: receive may be cancelled in between
        self._is_read_out = False
        self._failure: Exception | None = None

    @property
    def remote(self) -> str:
        """The authenticated id of the other end."""
        return self._remote

    def watch(self, heard: Callable[[], None]) -> None:
        """Call this whenever bytes come."""
        self._stream.on_bytes = heard

    async def send(self, *pieces: bytes | memoryview) -> None:
        """Send one frame; waits while the stream is full. Raises PeerUnreachable."""
        size = sum(map(len, pieces))
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
        await self._write(_DATA, size, *pieces)

    async def receive(self) -> bytearray | None:
        """The next frame; None after the other end's `finish`. Raises PeerUnreachable (broken) or Refused (with its reason)."""
        if self._aborted:
            raise PeerUnreachable(f"the channel to {self._remote} was closed here")
        if self._failure is not None:
            raise self._failure
        if self._is_read_out:
            return None
        try:
            if self._header is None:
                self._header = _HEADER.unpack(await self._stream.read_exactly(_HEADER.size))
            kind, size = self._header
            if size > (MAX_FRAME_BYTES if kind == _DATA else MAX_REASON_BYTES):
                raise ValueError(f"a frame of {size} bytes")
            content = await self._stream.read_exactly(size)
            self._header = None
        except (OSError, EOFError):
            raise self._fail(PeerUnreachable(f"{self._remote} broke the channel")) from None
        except ValueError as problem:
            raise self._fail(PeerUnreachable(f"{self._remote} does not keep to the protocol: {problem}")) from None
        if kind == _DATA:
            return content
        self._is_read_out = True
        if kind == _FINISHED:
            return None
        raise self._fail(Refused(content.decode(errors="replace")))

    async def finish(self) -> None:
        """No more frames from this end."""
        if not self._has_finished:
            await self._write(_FINISHED, 0)
            self._has_finished = True

    async def refuse(self, reason: str) -> None:
        """End this direction with a reason, which the other end's `receive` raises as Refused."""
        if not self._has_finished:
            content = reason.encode()[:MAX_REASON_BYTES]
            with suppress(PeerUnreachable):
                await self._write(_REFUSED, len(content), content)
                self._has_finished = True

    def abort(self) -> None:
        """Drop the stream; what was sent before a `finish` still arrives."""
        if self._aborted:
            return
        self._aborted = True
        if not self._has_finished:
            self._stream.abort()
        elif self._is_read_out or self._failure is not None or self._stream.at_end():
            self._stream.close()
        else:
            _keep(asyncio.get_running_loop().create_task(self._linger()))

    async def _linger(self) -> None:
        """Closing with unread bytes would reset the stream, and with it our own last frames."""
        try:
            await asyncio.wait_for(self._stream.swallow(), LINGER_S)
        except (OSError, asyncio.TimeoutError):
            pass
        finally:
            self._stream.close()

    async def _write(self, kind: int, size: int, *content: bytes | memoryview) -> None:
        if self._aborted or self._stream.is_closing():
            raise PeerUnreachable(f"the channel to {self._remote} is closed")
        if self._has_finished:
            raise ValueError("nothing can be sent after finish")
        self._stream.write(_HEADER.pack(kind, size), *content)
        try:
            await self._stream.drain()
        except OSError:
            raise PeerUnreachable(f"{self._remote} broke the channel") from None

    def _fail(self, failure: Exception) -> Exception:
        self._failure = failure
        return failure


class DHTRegistry:
    """Small records in the Hivemind DHT (`interfaces.Registry`), each under a subkey that only its writer's key can sign.

    The DHT keeps the value with the latest expiry, so a record carries its own expiry, and the DHT's grows with every write.
    """

    def __init__(self, node: DHTNode, identity: RSAIdentity):
        self.node = node
        self.subkey = OwnedRecords(identity).local_public_key
        self._last_expiry: dict[str, float] = {}

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Store under (key, my id). Raises ValueError when it is too large, PeerUnreachable when no peer of the DHT took it."""
        if len(value) > MAX_RECORD_BYTES:
            raise ValueError(f"a record of {len(value)} bytes under {key}; at most {MAX_RECORD_BYTES} are allowed")
        if await self._store(key, value, ttl_s):
            return
        await self._learn_last_expiry(key)
        if not await self._store(key, value, ttl_s):
            raise PeerUnreachable(f"no peer of the DHT took the record {key}")

    async def get(self, key: str) -> dict[str, bytes]:
        """All living values under key, by the peer that wrote them. Raises PeerUnreachable after REGISTRY_TIMEOUT_S."""
        found, now = {}, get_dht_time()
        for subkey, entry in (await self._entries(key)).items():
            owner = _owner_of_subkey(subkey)
            content = entry.value
            if owner is None or not isinstance(content, bytes) or not _EXPIRY.size <= len(content) <= MAX_SIGNED_RECORD_BYTES:
                continue
            if _EXPIRY.unpack_from(content)[0] > now:
                found[owner] = content[_EXPIRY.size :]
        return found

    async def _store(self, key: str, value: bytes, ttl_s: float) -> bool:
        expires_at = get_dht_time() + ttl_s
        dht_expiry = max(expires_at, self._last_expiry.get(key, 0.0) + _EXPIRY_STEP_S)
        self._last_expiry[key] = dht_expiry
        content = _EXPIRY.pack(expires_at) + value
        return bool(await _answer(self.node.store(key, content, dht_expiry, subkey=self.subkey)))

    async def _learn_last_expiry(self, key: str) -> None:
        """A former life under this identity may have left a record that expires later than ours."""
        mine = (await self._entries(key)).get(self.subkey)
        if mine is not None:
            self._last_expiry[key] = max(self._last_expiry[key], float(mine.expiration_time))

    async def _entries(self, key: str) -> dict[Any, Any]:
        found = await _answer(self.node.get(key, latest=True))
        return found.value if found is not None and isinstance(found.value, dict) else {}


class OwnedRecords(RSASignatureValidator):  # type: ignore[misc]
    """Takes only records whose subkey names an RSA key that signed them; hivemind's own validator takes unsigned ones too."""

    def __init__(self, identity: RSAIdentity):
        super().__init__(_hivemind_key(identity.private_key))

    def validate(self, record: DHTRecord) -> bool:
        """Is it small, owned and signed by its owner?"""
        if record.subkey is None or self.PUBLIC_KEY_FORMAT[:7] not in record.subkey:
            return False
        if len(record.value) > MAX_SIGNED_RECORD_BYTES:
            return False
        try:
            return bool(super().validate(record))
        except (ValueError, UnsupportedAlgorithm):
            return False


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
        raise UserError(
            f"{path}: a running peer uses this identity; stop it, or give this one another --run-dir or --identity"
        ) from None
    return identity, is_new, file


async def _check_identity_is_free(identity: RSAIdentity, initial_peers: Sequence[str], timeout_s: float) -> None:
    """Ask the swarm, under another name, whether somebody answers to this identity."""
    if any(address.endswith(f"/p2p/{identity.peer_id}") for address in initial_peers):
        raise UserError(f"{identity.path}: this is the identity of an initial peer; choose another identity file")
    probe = await start_daemon(initial_peers, timeout_s, nat_port_map=False, auto_nat=False, use_relay=True, dht_mode="client")
    try:
        await asyncio.wait_for(probe.connect(identity.peer_id, (), OPEN_TIMEOUT_S), OPEN_TIMEOUT_S)
    except (PeerUnreachable, asyncio.TimeoutError):
        return
    finally:
        await probe.close()
    raise UserError(f"{identity.path}: a living peer has this identity; stop it, or choose another identity file")


async def _visible_addresses(daemon: Daemon) -> tuple[str, ...]:
    """Of this machine, those that lead nowhere from elsewhere at the end."""
    return tuple(sorted((str(address) for address in await daemon.get_visible_maddrs(latest=True)), key=is_loopback))


def relayed_by(relays: Sequence[str]) -> dict[str, Any]:
    """Options of `start_daemon`: a daemon that cannot be dialled asks these peers to be its relays."""
    return {"use_auto_relay": bool(relays), "trusted_relays": list(relays) or None}


async def start_daemon(initial_peers: Sequence[str], timeout_s: float, **options: Any) -> Daemon:
    """A running p2pd. Raises UserError when no initial peer can be dialled or the addresses cannot be listened on."""
    remove_stale_sockets()
    try:
        daemon: Daemon = await Daemon.create(
            initial_peers=list(initial_peers) or None, startup_timeout=timeout_s, check_if_identity_free=False, **options
        )
        return daemon
    except P2PDaemonError as error:
        remove_stale_sockets()
        message = " ".join(str(error).split())
        if initial_peers and ("bootstrap peers" in message or "failed to start in" in message):
            raise _nobody_answers(initial_peers) from None
        raise UserError(f"the peer daemon did not start: {message}") from None


async def join_dht(
    daemon: Daemon, identity: RSAIdentity, initial_peers: Sequence[str], timeout_s: float, *, client_mode: bool = False
) -> DHTNode:
    """A node of the DHT that the initial peers are in; `client_mode`: it only asks. Raises UserError."""
    joining = DHTNode.create(
        p2p=daemon,
        initial_peers=list(initial_peers) or None,
        record_validator=OwnedRecords(identity),
        cache_locally=False,
        cache_on_store=False,
        cache_nearest=0,
        cache_refresh_before_expiry=0,
        client_mode=client_mode,
    )
    try:
        return await asyncio.wait_for(joining, timeout_s)
    except (RuntimeError, P2PDaemonError, asyncio.TimeoutError):
        if initial_peers:
            raise _nobody_answers(initial_peers) from None
        raise
    except ValidationError as error:
        raise UserError(_not_admitted(initial_peers, str(error))) from None


def _not_admitted(initial_peers: Sequence[str], problem: str) -> str:
    if "local time" in problem:
        return (
            f"this machine's clock differs from that of {', '.join(initial_peers)} by more than "
            f"{MAX_DHT_TIME_DISCREPANCY_SECONDS:g} s; set the clock (timedatectl set-ntp true), or have the other one set"
        )
    return f"{', '.join(initial_peers)}: {problem}; see spes-p2p doctor"


def _nobody_answers(initial_peers: Sequence[str]) -> NobodyAnswers:
    return NobodyAnswers(
        f"no peer answers at {', '.join(initial_peers)}; check the address (with another run-dir a peer has another "
        "id after /p2p/), that the bootstrap peer runs, and that a firewall does not block its port"
    )


async def _answer(call: Coroutine[Any, Any, T]) -> T:
    try:
        return await asyncio.wait_for(call, REGISTRY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise PeerUnreachable(f"the DHT did not answer for {REGISTRY_TIMEOUT_S:g} s") from None


@lru_cache(maxsize=4096)
def _owner_of_subkey(subkey: object) -> str | None:
    """The peer id of the key that a subkey consists of; None when it is anything else."""
    match = _SUBKEY.fullmatch(subkey) if isinstance(subkey, bytes) else None
    if match is None:
        return None
    try:
        key = serialization.load_ssh_public_key(match[1])
    except (ValueError, UnsupportedAlgorithm):
        return None
    return peer_id_of_public_key(key) if isinstance(key, rsa.RSAPublicKey) else None


def _hivemind_key(key: rsa.RSAPrivateKey) -> RSAPrivateKey:
    """The same key in hivemind's wrapper, which by itself would generate a new one."""
    der = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    wrapped = RSAPrivateKey.__new__(RSAPrivateKey)
    wrapped.__setstate__({"_private_key": der})
    return wrapped


def _keep(task: asyncio.Task[None]) -> None:
    """The event loop alone would let a task be collected before it is done."""
    _LINGERING.add(task)
    task.add_done_callback(_LINGERING.discard)


_LINGERING: set[asyncio.Task[None]] = set()
