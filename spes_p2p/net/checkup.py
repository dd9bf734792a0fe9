"""What a peer does for another one that examines itself (`spes-p2p doctor`): tell the time, dial back, move bytes.

A peer dials back to nothing but the address from which it is asked, and measures the link of one peer at a time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from spes_p2p import __version__
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import CLOCK, DIAL_BACK, PROTOCOL_VERSION, SPEED
from spes_p2p.messages.presence import Clock, DialBack, DialBackRequest, Moved, SpeedRequest
from spes_p2p.messages.refusals import Code
from spes_p2p.net.limits import Allowance
from spes_p2p.net.rpc import RpcEndpoint, Stream

CLOCK_SAMPLES = 5
MAX_PORTS = 4
DIAL_TIMEOUT_S = 4.0
GREETING = b"/multistream/"
"""The first bytes that a libp2p peer sends on a connection."""
SPEED_SECONDS = 3.0
SPEED_SHARE, SPEED_BURST, SPEED_LIMIT_S = 0.1, 8.0, 20.0
"""Share of the time that measurements for others take, how many may follow each other, and the longest that one may take."""
SPEED_BYTES = 2**27
SPEED_CHUNK_BYTES = 2**18


@dataclass(frozen=True)
class Skew:
    """How far another clock is ahead of this one, within half a round trip."""

    ahead_s: float
    uncertainty_s: float
    clock: Clock


class Checkup:
    """The answering side; every peer serves it."""

    def __init__(self, wall_time: Callable[[], float], seen_at: Callable[[str], Awaitable[tuple[str, ...]]]):
        """`seen_at(peer)`: multiaddrs of the connections with that peer, as they look from here."""
        self._wall_time = wall_time
        self._seen_at = seen_at
        self._measuring = asyncio.Lock()
        self._measurements = Allowance(SPEED_SHARE / SPEED_SECONDS, SPEED_BURST)

    async def serve(self, endpoint: RpcEndpoint) -> None:
        """Answer from now on."""
        await endpoint.serve(CLOCK, self._on_clock)
        await endpoint.serve(DIAL_BACK, self._on_dial_back)
        await endpoint.serve(SPEED, self._on_speed)

    async def _on_clock(self, stream: Stream) -> None:
        for _ in range(CLOCK_SAMPLES):
            if await stream.receive() is None:
                return
            await stream.send(pack(Clock(self._wall_time(), __version__, PROTOCOL_VERSION)))

    async def _on_dial_back(self, stream: Stream) -> None:
        ports = unpack(DialBackRequest, await stream.message()).ports[:MAX_PORTS]
        seen_at = await self._seen_at(stream.remote)
        hosts = {host for host in map(direct_host, seen_at) if host is not None}
        tried = [(host, port) for host in sorted(hosts)[:1] for port in ports if 0 < port < 2**16]
        answers = await asyncio.gather(*(is_libp2p(host, port) for host, port in tried))
        reached = tuple(port for (_, port), answer in zip(tried, answers, strict=True) if answer)
        await stream.send(pack(DialBack(seen_at[:MAX_PORTS], reached)))

    async def _on_speed(self, stream: Stream) -> None:
        if self._measuring.locked() or not self._measurements.take():
            raise Refused(Code.BUSY, "another peer measures its link just now, or several did")
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._measure(stream), SPEED_LIMIT_S)

    async def _measure(self, stream: Stream) -> None:
        async with self._measuring:
            if unpack(SpeedRequest, await stream.message()).up:
                await stream.send(pack(await _receive(stream)))
            else:
                await _send(stream)


def direct_host(address: str) -> str | None:
    """The IP address of a connection; None when it goes through a relay or is none."""
    parts = address.split("/")
    return parts[2] if len(parts) > 2 and parts[1] in ("ip4", "ip6") and "p2p-circuit" not in parts else None


async def is_libp2p(host: str, port: int) -> bool:
    """Does a libp2p peer answer on this TCP port within DIAL_TIMEOUT_S?"""

    async def greet() -> bool:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            return GREETING in await reader.readexactly(1 + len(GREETING))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    try:
        return await asyncio.wait_for(greet(), DIAL_TIMEOUT_S)
    except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
        return False


async def measure_clock(endpoint: RpcEndpoint, peer: str, wall_time: Callable[[], float]) -> Skew:
    """Compare clocks, by the fastest of CLOCK_SAMPLES questions. Raises PeerUnreachable, Refused, WireError."""
    samples = []
    async with endpoint.stream(peer, CLOCK) as stream:
        for _ in range(CLOCK_SAMPLES):
            asked = wall_time()
            await stream.send(b"")
            clock = unpack(Clock, await stream.message())
            answered = wall_time()
            samples.append(Skew(clock.wall_time - (asked + answered) / 2, (answered - asked) / 2, clock))
    return min(samples, key=lambda skew: skew.uncertainty_s)


async def ask_dial_back(endpoint: RpcEndpoint, peer: str, ports: tuple[int, ...]) -> DialBack:
    """Have a peer dial this one back. Raises PeerUnreachable, Refused, WireError."""
    request = pack(DialBackRequest(ports[:MAX_PORTS]))
    return unpack(DialBack, await endpoint.ask(peer, DIAL_BACK, request, 4 * DIAL_TIMEOUT_S))


async def measure_down(endpoint: RpcEndpoint, peer: str) -> Moved:
    """Receive for about SPEED_SECONDS. Raises PeerUnreachable, Refused, WireError."""
    async with endpoint.stream(peer, SPEED) as stream:
        await stream.send(pack(SpeedRequest(up=False)))
        return await _receive(stream)


async def measure_up(endpoint: RpcEndpoint, peer: str) -> Moved:
    """Send for about SPEED_SECONDS; what arrived there. Raises PeerUnreachable, Refused, WireError."""
    async with endpoint.stream(peer, SPEED) as stream:
        await stream.send(pack(SpeedRequest(up=True)))
        await _send(stream)
        return unpack(Moved, await stream.message())


async def _send(stream: Stream) -> None:
    clock, chunk, sent = asyncio.get_running_loop().time, os.urandom(SPEED_CHUNK_BYTES), 0
    started = clock()
    while sent < SPEED_BYTES and clock() - started < SPEED_SECONDS:
        await stream.send(chunk, kind=Kind.CONTENT)
        sent += len(chunk)
    await stream.send(kind=Kind.END)


async def _receive(stream: Stream) -> Moved:
    """Count until the sender says that it is done; the first chunk only starts the clock."""
    clock = asyncio.get_running_loop().time
    await stream.message_view(Kind.CONTENT)
    started, received = clock(), 0
    while (chunk := await stream.receive_view(Kind.CONTENT)) is not None:
        received += len(chunk)
        if received > SPEED_BYTES:
            raise Refused(Code.MALFORMED, "more than was agreed")
    return Moved(received, clock() - started)
