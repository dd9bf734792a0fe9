"""The peer daemon: hivemind's p2pd as our only child process, and the part of its control protocol that we speak ourselves.

The daemon is killed by the kernel when the process (the thread, to be exact) that started it dies, in whatever way. Its sockets
are named after our process id; those that a dead process left in /tmp are removed at the next start.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from spes_p2p.errors import NobodyAnswers, PeerUnreachable, Refused, UserError
from spes_p2p.messages.refusals import Code
from spes_p2p.net import die_with_parent
from spes_p2p.net.byte_stream import ByteStream

log = logging.getLogger(__name__)

SOCKET_DIRECTORY = Path("/tmp")  # the daemon's control sockets need short paths
SOCKET_NAME = re.compile(r"spes-p2p-(\d+)-.*\.sock")
EXIT_TIMEOUT_S = 5.0
CIRCUIT = "/p2p-circuit"
P2P_CODE, CIRCUIT_CODE = bytes.fromhex("a503"), bytes.fromhex("a202")
"""Of a multiaddr's components /p2p and /p2p-circuit (codes 421 and 290 as varints)."""

StreamHandler = Callable[[str, ByteStream], Awaitable[None]]
"""Called with (remote peer id, stream)."""


class Daemon(P2P):  # type: ignore[misc]
    """hivemind's P2P whose p2pd cannot outlive us, with raw streams under our own buffers and deadlines."""

    _UNIX_SOCKET_PREFIX = f"/unix{SOCKET_DIRECTORY}/spes-p2p-{os.getpid()}-"

    def __init__(self) -> None:
        super().__init__()
        self._stream_server: asyncio.AbstractServer | None = None
        self._handlers: dict[str, StreamHandler] = {}
        self._streams: set[asyncio.Task[None]] = set()

    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        wrapper = [sys.executable, "-I", "-S", str(die_with_parent.__file__), str(os.getpid())]
        if "trustedRelays" in kwargs:
            kwargs["relayDiscovery"] = False  # the daemon would look for others, and not try these
        return wrapper + list(P2P._make_process_args(*args, **kwargs))

    async def connect(self, peer: str, addresses: Sequence[str], timeout_s: float) -> None:
        """Dial a peer at these multiaddrs (none: ask the swarm where it is). Raises PeerUnreachable."""
        plain = [_dial_bytes(address) for address in addresses]
        connect = p2pd_pb2.ConnectRequest(peer=_peer_bytes(peer), addrs=plain, timeout=_whole_seconds(timeout_s))
        connection = await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect), peer)
        connection.close()

    async def open_stream(self, peer: str, protocol: str, timeout_s: float) -> ByteStream:
        """Raises PeerUnreachable, or Refused when the peer does not serve the protocol."""
        stream = p2pd_pb2.StreamOpenRequest(peer=_peer_bytes(peer), proto=[protocol], timeout=_whole_seconds(timeout_s))
        return await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=stream), peer)

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        """Call `handler` for every stream opened for `protocol`, each in a task of its own."""
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
        """Has p2pd not ended?"""
        return self._child is not None and self._child.returncode is None

    async def wait(self) -> None:
        """Returns when p2pd has ended."""
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
            await self._handlers[info.proto](str(PeerID(info.peer)), stream)
        except asyncio.CancelledError:
            stream.abort()
        except Exception:
            log.debug("an incoming stream failed", exc_info=True)
            stream.abort()
        finally:
            self._streams.discard(task)

    def _terminate(self) -> None:
        super()._terminate()
        for name in ("_daemon_listen_maddr", "_client_listen_maddr"):
            if name in vars(self):
                Path(str(vars(self)[name]).removeprefix("/unix")).unlink(missing_ok=True)


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
            raise nobody_answers(initial_peers) from None
        raise UserError(f"the peer daemon did not start: {message}") from None


def nobody_answers(initial_peers: Sequence[str]) -> NobodyAnswers:
    """The error for a person when no initial peer can be reached."""
    return NobodyAnswers(
        f"no peer answers at {', '.join(initial_peers)}; check the address (with another run-dir a peer has another "
        "id after /p2p/), that the bootstrap peer runs, and that a firewall does not block its port"
    )


def remove_stale_sockets() -> None:
    """Remove the sockets in /tmp that processes of ours, now dead, and daemons that failed to start left behind."""
    for path in SOCKET_DIRECTORY.glob("spes-p2p-*.sock"):
        match = SOCKET_NAME.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not _is_process(int(match[1]))) and not _is_listening(path):
            with suppress(OSError):
                path.unlink()


def _retrieve(task: asyncio.Task[None] | None) -> None:
    """hivemind leaves the failure of its writer unread when the daemon dies; asyncio would complain on the screen."""
    if task is not None and task.done() and not task.cancelled():
        task.exception()


def _dial_bytes(address: str) -> bytes:
    """An address without the peer's own id, in the binary form of libp2p (hivemind encodes a relay's id in another one)."""
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
        return Refused(Code.UNKNOWN_METHOD, f"{whom} does not serve this: {message}")
    return PeerUnreachable(f"{whom}: {' '.join(message.split())}")


def _is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
