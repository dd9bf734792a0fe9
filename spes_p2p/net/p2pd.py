"""The peer daemon: hivemind's p2pd as the only child process, and the part of its control protocol that this module implements.

The kernel kills the daemon when the thread that started it dies, in any way. The names of its sockets contain the process id;
the next start removes sockets that dead processes left in /tmp.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.messages.refusals import Code
from spes_p2p.net.byte_stream import ByteStream
from spes_p2p.net.connections import CONNECTIONS, Uses
from spes_p2p.net.daemon_process import (
    SOCKET_DIRECTORY,
    StartedDaemon,
    is_any_listening,
    nobody_answers,
    remove_stale_sockets,
)
from spes_p2p.net.dht_guard import MAX_REQUEST_BYTES, DHTGuard
from spes_p2p.net.die_with_parent import under_guard

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 5.0
CIRCUIT = "/p2p-circuit"
P2P_CODE, CIRCUIT_CODE = bytes.fromhex("a503"), bytes.fromhex("a202")
"""Codes of the multiaddr components /p2p and /p2p-circuit: 421 and 290 as varints."""

StreamHandler = Callable[[str, ByteStream], Awaitable[None]]
"""Called with (remote peer id, stream)."""


class Daemon(P2P):  # type: ignore[misc]
    """hivemind's P2P, but p2pd ends with this process, and streams are raw, with own buffers and deadlines."""

    _UNIX_SOCKET_PREFIX = f"/unix{SOCKET_DIRECTORY}/spes-p2p-{os.getpid()}-"

    def __init__(self) -> None:
        super().__init__()
        self._stream_server: asyncio.AbstractServer | None = None
        self._handlers: dict[str, StreamHandler] = {}
        self._streams: set[asyncio.Task[None]] = set()
        self.guard: DHTGuard | None = None
        """Decides about requests to the DHT node; None: there is no node."""
        self.uses = Uses()

    @classmethod
    async def of(cls, started: StartedDaemon, timeout_s: float) -> Daemon:
        """Connect to this daemon, as `create` does with its own. Raises P2PDaemonError."""
        self, ready = cls(), asyncio.get_running_loop().create_future()
        self._child, self._alive = started.process, True
        self._daemon_listen_maddr = Multiaddr(f"/unix{started.socket}")
        self._client_listen_maddr = Multiaddr(f"{cls._UNIX_SOCKET_PREFIX}p2pclient-{secrets.token_urlsafe(8)}.sock")
        self._reader_task = asyncio.create_task(self._read_outputs(ready))
        try:
            await asyncio.wait_for(ready, timeout_s)
            self._client = await p2pclient.Client.create(self._daemon_listen_maddr, self._client_listen_maddr)
            await self._ping_daemon()
            return self
        except BaseException as error:
            self._terminate()
            if isinstance(error, asyncio.TimeoutError):
                raise P2PDaemonError(f"Daemon failed to start in {timeout_s:g} seconds") from None
            raise

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        if "trustedRelays" in kwargs:
            kwargs["relayDiscovery"] = False  # otherwise the daemon searches for other relays and does not try these
        # p2pd would close idle connections above 512, down to 256: fewer than the members of a round. It would also start two
        # relay services, of which the last to start counts. The one left has libp2p's bounds, 128 KiB and two minutes for each
        # connection; the other takes 32 MiB of memory for each, and carries 4 GiB for anybody.
        kwargs.update(connHi=CONNECTIONS, connLo=CONNECTIONS // 2, relayService=0)
        return under_guard() + list(P2P._make_process_args(*args, **kwargs))

    async def _add_protobuf_unary_handler(
        self, handle_name: str, handler: Callable[..., Awaitable[Any]], input_protobuf_type: Any, balanced: bool = False
    ) -> None:
        """Add a handler of the DHT. A request is parsed only if small, and handled only if the guard passes it."""

        async def answer(request: bytes, remote: PeerID) -> bytes:
            guard, sender = self.guard, str(remote)
            if guard is None or len(request) > MAX_REQUEST_BYTES or guard.is_too_fast(sender):
                raise ValueError("refused")
            parsed = input_protobuf_type.FromString(request)
            with self.uses.of(sender):
                await guard.check(sender, parsed)
                reply: bytes = (await handler(parsed, P2PContext(handle_name, self.peer_id, remote))).SerializeToString()
                guard.count_answer(sender, len(reply))
                return reply

        await self._client.add_unary_handler(handle_name, answer, balanced=balanced)

    async def _call_unary_protobuf_handler(self, peer_id: PeerID, *arguments: Any) -> Any:
        """Call a handler of another peer's DHT node."""
        with self.uses.of(str(peer_id)):
            return await super()._call_unary_protobuf_handler(peer_id, *arguments)

    async def connections(self) -> dict[str, list[str]]:
        """Return the multiaddrs of the open connections, by peer."""
        found: dict[str, list[str]] = {}
        for peer, addresses in await self.open_connections():
            found.setdefault(peer, []).extend(addresses)
        return found

    async def open_connections(self) -> list[tuple[str, list[str]]]:
        """Return each open connection's peer and multiaddrs."""
        return [(str(info.peer_id), [str(address) for address in info.addrs]) for info in await self.list_peers()]

    async def close_connections(self, peer: str) -> None:
        """Close all connections with a peer."""
        await self._client.disconnect(PeerID.from_base58(peer))

    async def connect(self, peer: str, addresses: Sequence[str], timeout_s: float) -> None:
        """Dial a peer at these multiaddrs; without any, look it up in the DHT. Raises PeerUnreachable."""
        plain = [_dial_bytes(address) for address in addresses]
        connect = p2pd_pb2.ConnectRequest(peer=_peer_bytes(peer), addrs=plain, timeout=_whole_seconds(timeout_s))
        with self.uses.of(peer):
            connection = await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect), peer)
        connection.close()

    async def open_stream(self, peer: str, protocol: str, timeout_s: float) -> ByteStream:
        """Open a stream. Raises PeerUnreachable, or Refused if the peer does not serve the protocol."""
        stream = p2pd_pb2.StreamOpenRequest(peer=_peer_bytes(peer), proto=[protocol], timeout=_whole_seconds(timeout_s))
        with contextlib.ExitStack() as use:
            use.enter_context(self.uses.of(peer))
            opened = await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=stream), peer)
            opened.when_lost(use.pop_all().close)
            return opened

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        """Call `handler` for each stream opened for `protocol`, in its own task."""
        address = f"{self._UNIX_SOCKET_PREFIX}streams-{id(self):x}.sock"
        if self._stream_server is None:
            path = address.removeprefix("/unix")
            loop = asyncio.get_running_loop()
            self._stream_server = await loop.create_unix_server(lambda: ByteStream(self._accept), path)
            self._stream_socket = Path(path)
        self._handlers[protocol] = handler
        register = p2pd_pb2.StreamHandlerRequest(addr=Multiaddr(address).to_bytes(), proto=[protocol], balanced=False)
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=register)
        connection = await self._request(request, "the peer daemon")
        connection.close()

    @property
    def pid(self) -> int:
        """Process id of p2pd."""
        return int(self._child.pid)

    @property
    def is_running(self) -> bool:
        """Whether p2pd is running."""
        return self._child is not None and self._child.returncode is None

    async def wait(self) -> None:
        """Wait until p2pd exits."""
        await self._child.wait()

    async def close(self) -> None:
        """End p2pd and remove the sockets."""
        for task in list(self._streams):
            task.cancel()
        if self._stream_server is not None:
            self._stream_server.close()
            self._stream_socket.unlink(missing_ok=True)
        self._terminate()
        _retrieve(self._client.control._write_task)
        try:
            await asyncio.wait_for(self._child.wait(), EXIT_TIMEOUT_S)
        except asyncio.TimeoutError:
            self._child.kill()
            await self._child.wait()

    async def _request(self, request: Any, whom: str) -> ByteStream:
        path = str(self._daemon_listen_maddr["unix"])
        try:
            _, stream = await asyncio.get_running_loop().create_unix_connection(ByteStream, path)
        except OSError as error:
            raise PeerUnreachable(f"the peer daemon of this machine does not answer ({error.strerror})") from None
        try:
            await write_pbmsg(stream, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(stream, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise _explain(whom, response.error.msg)
        except (OSError, EOFError):
            stream.abort()
            raise PeerUnreachable(f"{whom}: the peer daemon of this machine closed the connection") from None
        except BaseException:
            stream.abort()
            raise
        return stream

    async def _accept(self, stream: ByteStream) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            info = p2pd_pb2.StreamInfo()
            await read_pbmsg_safe(stream, info)
            remote = str(PeerID(info.peer))
            with self.uses.of(remote):
                await self._handlers[info.proto](remote, stream)
        except asyncio.CancelledError:
            stream.abort()
        except Exception:
            logger.debug("an incoming stream failed", exc_info=True)
            stream.abort()
        finally:
            self._streams.discard(task)

    def _terminate(self) -> None:
        super()._terminate()
        for name in ("_daemon_listen_maddr", "_client_listen_maddr"):
            if name in vars(self):
                Path(str(vars(self)[name]).removeprefix("/unix")).unlink(missing_ok=True)


def relayed_by(relays: Sequence[str]) -> dict[str, Any]:
    """Return options of `start_daemon` for a daemon that others cannot dial: use these peers as relays."""
    return {"use_auto_relay": bool(relays), "trusted_relays": list(relays) or None}


async def start_daemon(initial_peers: Sequence[str], timeout_s: float, **options: Any) -> Daemon:
    """Start p2pd. Raises UserError if no initial peer can be dialled, or it cannot listen on the addresses."""
    if initial_peers and not await is_any_listening(initial_peers):
        raise nobody_answers(initial_peers)
    remove_stale_sockets()
    with _explained(initial_peers):
        daemon: Daemon = await Daemon.create(
            initial_peers=list(initial_peers) or None, startup_timeout=timeout_s, check_if_identity_free=False, **options
        )
        return daemon


async def control_daemon(started: StartedDaemon, initial_peers: Sequence[str], timeout_s: float) -> Daemon:
    """Connect to a daemon that this process has started. Raises UserError as `start_daemon`."""
    with _explained(initial_peers):
        return await Daemon.of(started, timeout_s)


@contextlib.contextmanager
def _explained(initial_peers: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except P2PDaemonError as error:
        remove_stale_sockets()
        message = " ".join(str(error).split())
        if initial_peers and ("bootstrap peers" in message or "failed to start in" in message):
            raise nobody_answers(initial_peers) from None
        raise UserError(f"the peer daemon did not start: {message}") from None


def _retrieve(task: asyncio.Task[None] | None) -> None:
    """Retrieve the exception of hivemind's writer after the daemon died; otherwise asyncio would log it."""
    if task is not None and task.done() and not task.cancelled():
        task.exception()


def _dial_bytes(address: str) -> bytes:
    """Return an address without the peer's id in libp2p's binary format; hivemind encodes relay ids differently."""
    transport, *ids = address.split("/p2p/")
    encoded: bytes = Multiaddr(transport).to_bytes()
    for relay in ids[:-1]:
        relay_id = _peer_bytes(relay.removesuffix(CIRCUIT))
        encoded += P2P_CODE + bytes([len(relay_id)]) + relay_id + CIRCUIT_CODE
    return encoded


def _peer_bytes(peer: str) -> bytes:
    try:
        return bytes(PeerID.from_base58(peer).to_bytes())
    except ValueError:
        raise PeerUnreachable(f"{peer!r} is not a peer id") from None


def _whole_seconds(timeout_s: float) -> int:
    return max(1, round(timeout_s))


def _explain(whom: str, message: str) -> Exception:
    if "protocols not supported" in message:
        return Refused(Code.UNKNOWN_METHOD, f"{whom} does not serve this")
    words = " ".join(message.split())
    _, is_dialling, causes = words.partition("all dials failed")  # after a chain of errors with the peer's id in each
    if not is_dialling:
        return PeerUnreachable(f"{whom}: {words}")
    first, *more = causes.removeprefix(" * ").split(" * ")
    others = f" (nor at {len(more)} more)" if more else ""
    return PeerUnreachable(f"{whom} cannot be dialled: {first}{others}")
