"""A channel of a peer to itself, inside one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from spes_p2p.errors import PeerUnreachable
from spes_p2p.messages.framing import Kind, Message
from spes_p2p.net.interfaces import Admit, admit_all

T = TypeVar("T")

QUEUED_FRAMES = 8


class PipeEnd:
    """One end (`interfaces.Channel`)."""

    def __init__(self, remote: str, outgoing: asyncio.Queue[Message | None], incoming: asyncio.Queue[Message | None]):
        self.remote = remote
        self._outgoing, self._incoming = outgoing, incoming
        self._heard: Callable[[], None] = lambda: None
        self._admit: Admit = admit_all
        self._peer: PipeEnd | None = None
        self._aborted = asyncio.Event()

    def watch(self, heard: Callable[[], None], admit: Admit) -> None:
        """Call `heard` whenever a frame is received, and `admit` before it is returned."""
        self._heard, self._admit = heard, admit

    async def send(self, *pieces: bytes | memoryview, kind: int = Kind.MESSAGE) -> None:
        """Send one frame. Raises PeerUnreachable."""
        if self._aborted.is_set():
            raise PeerUnreachable("closed")
        put = asyncio.ensure_future(self._outgoing.put(Message(b"".join(pieces), kind)))
        await self._or_aborted(put)

    async def receive(self) -> Message | None:
        """The next frame; None after `finish`. Raises PeerUnreachable."""
        if self._incoming.empty() and self._aborted.is_set():
            raise PeerUnreachable("closed")
        frame = await self._or_aborted(asyncio.ensure_future(self._incoming.get()))
        self._heard()
        if frame is not None:
            await self._admit(frame.kind, len(frame.body))
        return frame

    async def finish(self) -> None:
        """No more frames from this end."""
        if not self._aborted.is_set():
            await self._or_aborted(asyncio.ensure_future(self._outgoing.put(None)))

    def abort(self) -> None:
        """Drop the channel."""
        self._aborted.set()
        if self._peer is not None:
            self._peer._aborted.set()

    async def _or_aborted(self, task: asyncio.Future[T]) -> T:
        stop = asyncio.ensure_future(self._aborted.wait())
        either: set[asyncio.Future[Any]] = {task, stop}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise PeerUnreachable("closed")
            return task.result()
        finally:
            task.cancel()
            stop.cancel()


def pipe(peer: str) -> tuple[PipeEnd, PipeEnd]:
    """Return both ends of a new channel of this peer to itself."""
    there: asyncio.Queue[Message | None] = asyncio.Queue(QUEUED_FRAMES)
    back: asyncio.Queue[Message | None] = asyncio.Queue(QUEUED_FRAMES)
    near, far = PipeEnd(peer, there, back), PipeEnd(peer, back, there)
    near._peer, far._peer = far, near
    return near, far
