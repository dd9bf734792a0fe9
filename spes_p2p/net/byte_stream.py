"""The bytes of one socket, received directly into the reader's buffer.

asyncio's StreamReader copies received bytes three times, which took a tenth of the CPU time of a round. One task at a time may
read, one may write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, cast

AHEAD_BYTES = 2**14
"""Maximum bytes buffered ahead of a read; beyond it, the other end is slowed down."""
FIRST_BYTES, GROWTH = 2**16, 8
"""A read allocates this much at first, then this many times what has come: nobody takes memory by promising bytes."""
UNSENT_BYTES = 2**18
"""Writers wait while more bytes than this are unsent."""


class ByteStream(asyncio.BufferedProtocol):
    """Both directions of a connection."""

    exchanged_bytes: ClassVar[int] = 0
    """Sent and received on all streams of this process."""

    def __init__(self, on_connected: Callable[[ByteStream], Coroutine[Any, Any, None]] | None = None):
        """`on_connected`: a server's handler, run in its own task."""
        self._transport: asyncio.Transport
        self.on_bytes: Callable[[], None] = lambda: None
        """Called whenever bytes arrive."""
        self._on_lost: Callable[[], None] = lambda: None
        self._on_connected = on_connected
        self._serving: asyncio.Task[None] | None = None
        self._ahead = memoryview(bytearray(AHEAD_BYTES))
        self._taken = self._received = 0
        self._wanted: memoryview | None = None
        """Buffer of `read_exactly`, kept with the received bytes if a call is cancelled."""
        self._filled = self._size = 0
        """Bytes of that read that have come, and that it asks for."""
        self._is_paused = False
        self._has_ended = False
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    async def read_exactly(self, size: int) -> bytearray:
        """Return the next bytes. Raises EOFError if the stream ends before, OSError if it broke.

        After a call that was cancelled the next one must ask for as many, and gets what had come by then too.
        """
        if self._wanted is None:
            self._wanted, self._filled, self._size = memoryview(bytearray(min(size, FIRST_BYTES))), 0, size
            self._take_ahead()
        while self._filled < size:
            await self._hear_more()
        content, self._wanted = self._wanted.obj, None
        assert isinstance(content, bytearray)
        return content

    readexactly = read_exactly
    """Alias for hivemind's reader of control messages."""

    async def swallow(self, at_most: int) -> None:
        """Read and discard everything until the other end finishes or has sent `at_most` bytes. Raises OSError."""
        dropped = 0
        while not self._has_ended and dropped < at_most:
            dropped += self._received
            self._taken = self._received = 0
            try:
                await self._hear_more()
            except EOFError:
                return

    def at_end(self) -> bool:
        """Return whether the other end has finished and everything is read."""
        return self._has_ended and self._taken == self._received

    def write(self, *pieces: bytes | memoryview) -> None:
        """Send the pieces in order. They must not change until they are sent."""
        ByteStream.exchanged_bytes += sum(map(len, pieces))
        self._transport.writelines(pieces)

    async def drain(self) -> None:
        """Wait while too many bytes are unsent. Raises OSError if the connection is lost."""
        await self._writable.wait()
        if self._failure is not None:
            raise self._failure

    def is_closing(self) -> bool:
        """Return whether either end has closed the connection."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Send what was written, then close."""
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call this once both ends have closed, or this one has: now if that was before."""
        if self._failure is None:
            self._on_lost = call
        else:
            call()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start serving the connection."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES)
        if self._on_connected is not None:
            self._serving = asyncio.get_running_loop().create_task(self._on_connected(self))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        if self._wanted is not None and self._filled < self._size:
            return self._wanted[self._filled :]
        return self._ahead[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        """Account for bytes received into the buffer."""
        ByteStream.exchanged_bytes += nbytes
        self.on_bytes()
        if self._wanted is not None and self._filled < self._size:
            self._filled += nbytes
            if self._filled == len(self._wanted) < self._size:
                grown = memoryview(bytearray(min(self._size, GROWTH * self._filled)))
                grown[: self._filled] = self._wanted
                self._wanted = grown
            if self._filled < self._size:
                return
        else:
            self._received += nbytes
            if self._received == AHEAD_BYTES:
                self._is_paused = True
                self._transport.pause_reading()
        self._news.set()

    def eof_received(self) -> bool:
        """Note that the other end has finished; this end may still send."""
        self._has_ended = True
        self._news.set()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake readers and writers, which then raise."""
        self._has_ended = True
        self._failure = exc if isinstance(exc, OSError) else ConnectionResetError("the connection is closed")
        self._news.set()
        self._writable.set()
        self._on_lost()

    def pause_writing(self) -> None:
        """Make writers wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let writers continue."""
        self._writable.set()

    def _take_ahead(self) -> None:
        assert self._wanted is not None
        size = min(len(self._wanted), self._received - self._taken)
        self._wanted[:size] = self._ahead[self._taken : self._taken + size]
        self._filled, self._taken = size, self._taken + size
        if self._taken == self._received:
            self._taken = self._received = 0

    async def _hear_more(self) -> None:
        if self._has_ended:
            raise self._failure or EOFError("the stream has ended")
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        self._news.clear()
        await self._news.wait()
