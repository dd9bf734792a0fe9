"""A limited line carries what it may, in both directions, whoever streams over it; heartbeats do not wait for it."""

from __future__ import annotations

import asyncio

import pytest
from exchange_round import SILENCE_S

from spes_p2p.errors import UserError
from spes_p2p.net.limits import LINE_OVERHEAD, UNLIMITED, limited_line
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.testing.memory_network import MemoryNetwork

FRAME = bytes(2**17)
FRAMES_PER_STREAM = 20


@pytest.mark.parametrize("direction", ["upload", "download"])
@pytest.mark.parametrize("streams", [1, 3])
async def test_a_limit_is_used_and_kept_within_5_percent(direction: str, streams: int) -> None:
    bits_per_s = 20e6
    network, finished = MemoryNetwork(latency_s=0.02), []
    limited = limited_line(bits_per_s, None) if direction == "upload" else limited_line(None, bits_per_s)
    lines = (limited, UNLIMITED) if direction == "upload" else (UNLIMITED, limited)
    endpoint, other = (RpcEndpoint(network.transport(p), SILENCE_S, line) for p, line in zip("AB", lines, strict=True))

    async def take(stream: Stream) -> None:
        for _ in range(FRAMES_PER_STREAM):
            await stream.message()
        finished.append(asyncio.get_running_loop().time())
        await stream.send(b"")

    async def push() -> None:
        async with endpoint.stream("B", "take") as stream:
            for _ in range(FRAMES_PER_STREAM):
                await stream.send(FRAME)
            await stream.message()

    await other.serve("take", take)
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*(push() for _ in range(streams)))
    on_the_line = 8 * streams * FRAMES_PER_STREAM * len(FRAME) * LINE_OVERHEAD / (max(finished) - began)
    assert 0.95 * bits_per_s <= on_the_line <= 1.05 * bits_per_s


async def test_a_slow_line_is_no_dead_peer() -> None:
    """At 1 Mbit/s a part takes a second; five streams wait for each other longer than a peer may be silent."""
    network = MemoryNetwork(latency_s=0.02)
    endpoint = RpcEndpoint(network.transport("A"), SILENCE_S, limited_line(1e6, None))
    other = RpcEndpoint(network.transport("B"), SILENCE_S)

    async def take(stream: Stream) -> None:
        await stream.message()
        await stream.send(b"")

    async def push() -> None:
        async with endpoint.stream("B", "take") as stream:
            await stream.send(FRAME)
            await stream.message()

    await other.serve("take", take)
    await asyncio.gather(*(push() for _ in range(5)))


@pytest.mark.parametrize("rate", ["fast", "0mbit", "-1mbit", "20"])
def test_a_rate_that_is_none_is_refused(rate: str) -> None:
    from spes_p2p.config.quantities import parse_bits_per_second

    with pytest.raises(UserError, match=r"--max-upload '.*': must be a rate such as 100mbit or 1gbit"):
        parse_bits_per_second(rate, "--max-upload")
