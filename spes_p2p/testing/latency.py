"""A transport with added latency: each frame is delivered a fixed time after it arrives.

For trials on one machine, since not every kernel can delay packets itself (netem).
"""

from __future__ import annotations

import asyncio
from typing import cast

from spes_p2p.messages.framing import Message
from spes_p2p.net.interfaces import Channel, Handler, Transport
from spes_p2p.testing.wrapped import Wrapped

WAITING_FRAMES = 256
"""Maximum number of delayed frames of one channel; beyond it, the sender waits."""


def delayed(transport: Transport, latency_s: float) -> Transport:
    """Return the transport with `latency_s` added to all that it receives and to each `open`."""
    return cast(Transport, _DelayedTransport(transport, latency_s)) if latency_s else transport


class _DelayedTransport(Wrapped):
    def __init__(self, inner: Transport, latency_s: float):
        super().__init__(inner)
        self._latency_s = latency_s

    async def serve(self, method: str, handler: Handler) -> None:
        async def serve_delayed(channel: Channel) -> None:
            late = _DelayedChannel(channel, self._latency_s)
            try:
                await handler(cast(Channel, late))
            finally:
                late.end()

        await self._inner.serve(method, serve_delayed)

    async def open(self, peer: str, method: str) -> Channel:
        await asyncio.sleep(self._latency_s)
        return cast(Channel, _DelayedChannel(await self._inner.open(peer, method), self._latency_s))


class _DelayedChannel(Wrapped):
    """Reads frames as they arrive, and returns them later, in order."""

    def __init__(self, inner: Channel, latency_s: float):
        super().__init__(inner)
        self._latency_s = latency_s
        self._waiting: asyncio.Queue[tuple[float, Message | Exception | None]] = asyncio.Queue(WAITING_FRAMES)
        self._next: tuple[float, Message | Exception | None] | None = None
        self._reading = asyncio.ensure_future(self._read())

    async def receive(self) -> Message | None:
        if self._next is None:
            self._next = await self._waiting.get()
        due_at, received = self._next
        await asyncio.sleep(max(0.0, due_at - asyncio.get_running_loop().time()))
        if isinstance(received, Exception):
            raise received
        self._next = None if received is not None else self._next
        return received

    def abort(self) -> None:
        self.end()
        self._inner.abort()

    def end(self) -> None:
        """Stop reading."""
        self._reading.cancel()

    async def _read(self) -> None:
        received: Message | Exception | None = Message(b"")
        while received is not None and not isinstance(received, Exception):
            try:
                received = await self._inner.receive()
            except Exception as error:
                received = error
            await self._waiting.put((asyncio.get_running_loop().time() + self._latency_s, received))
