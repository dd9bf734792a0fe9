"""A longer line: everything comes, in order, so much later and no slower."""

from __future__ import annotations

import asyncio

import pytest
from echo import echo

from spes_p2p.messages.framing import Message
from spes_p2p.net.interfaces import Channel
from spes_p2p.testing.latency import delayed
from spes_p2p.testing.memory_network import MemoryNetwork

LATENCY_S, FRAMES = 0.5, 100


async def connected() -> Channel:
    network = MemoryNetwork()
    await delayed(network.transport("b"), LATENCY_S).serve("echo", echo)
    return await delayed(network.transport("a"), LATENCY_S).open("b", "echo")


async def test_a_hundred_frames_take_one_round_trip() -> None:
    channel, loop = await connected(), asyncio.get_running_loop()
    began = loop.time()
    for number in range(FRAMES):
        await channel.send(bytes([number]))
    await channel.finish()
    received = [await channel.receive() for _ in range(FRAMES + 1)]
    received, seconds = received, loop.time() - began
    assert received == [*(Message(bytes([number])) for number in range(FRAMES)), None]
    assert seconds == pytest.approx(2 * LATENCY_S)


async def test_a_receive_that_is_cancelled_loses_no_frame() -> None:
    channel = await connected()
    await channel.send(b"frame")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(channel.receive(), 1.5 * LATENCY_S)
    assert await channel.receive() == Message(b"frame")
