"""The process of a peer daemon, its sockets, and who answers it.

Nothing here imports hivemind, which takes about as long as the daemon's start.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.config.addresses import host_and_port, is_loopback
from spes_p2p.errors import NobodyAnswers
from spes_p2p.net.die_with_parent import under_guard
from spes_p2p.net.tasks import end_tasks

SOCKET_DIRECTORY = Path("/tmp")  # control sockets need short paths
SOCKET_NAME = re.compile(r"spes-p2p-(\d+)-.*\.sock")
ANSWER_TIMEOUT_S = 5.0
"""Bounds a TCP connection to an initial peer: three tries of the kernel. p2pd itself waits for four times as long."""


@dataclass(frozen=True)
class StartedDaemon:
    """A p2pd process that may not be ready yet."""

    process: asyncio.subprocess.Process
    socket: Path
    """Its control socket."""


async def start_visitor(initial_peers: Sequence[str]) -> StartedDaemon:
    """Start the daemon of a client: it listens nowhere, only asks the DHT, and makes itself a key that ends with it.

    Raises NobodyAnswers.
    """
    if not await is_any_listening(initial_peers):
        raise nobody_answers(initial_peers)
    remove_stale_sockets()
    control = SOCKET_DIRECTORY / f"spes-p2p-{os.getpid()}-p2pd-{secrets.token_urlsafe(8)}.sock"
    options = {
        "listen": f"/unix{control}", "noListenAddrs": 1, "b": 1, "bootstrapPeers": ",".join(initial_peers), "dhtClient": 1,
        "relay": int(not all(map(is_loopback, initial_peers))), "autonat": 0, "natPortMap": 0, "connManager": 1, "tls": 1,
        "idleTimeout": "30s",
    }
    process = await asyncio.create_subprocess_exec(
        *under_guard(), str(_program()), *(f"-{name}={value}" for name, value in options.items()),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={"GOLOG_LOG_LEVEL": "ERROR", **os.environ, "GOLOG_LOG_FMT": "json"},
    )
    return StartedDaemon(process, control)


def _program() -> Path:
    spec = importlib.util.find_spec("hivemind")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "hivemind_cli" / "p2pd"


async def is_any_listening(addresses: Sequence[str]) -> bool:
    """Return whether one of these multiaddrs accepts a TCP connection within ANSWER_TIMEOUT_S."""
    tries = [asyncio.ensure_future(_is_listening_at(address)) for address in addresses]
    try:
        for answer in asyncio.as_completed(tries):
            if await answer:
                return True
        return False
    finally:
        await end_tasks(tries)


async def _is_listening_at(address: str) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*host_and_port(address)), ANSWER_TIMEOUT_S)
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


def nobody_answers(initial_peers: Sequence[str]) -> NobodyAnswers:
    """Return the error for users when no initial peer can be reached."""
    return NobodyAnswers(
        f"no peer answers at {', '.join(initial_peers)}; check the address (with another run-dir a peer has another "
        "id after /p2p/), that the bootstrap peer runs, and that a firewall does not block its port"
    )


def remove_stale_sockets() -> None:
    """Remove the sockets in /tmp of dead processes and of daemons that failed to start."""
    for path in SOCKET_DIRECTORY.glob("spes-p2p-*.sock"):
        match = SOCKET_NAME.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not _is_process(int(match[1]))) and not _is_listening(path):
            with suppress(OSError):
                path.unlink()


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
