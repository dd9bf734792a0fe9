"""Channels over libp2p streams, with the frames of `messages/framing.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from spes_p2p.errors import PeerUnreachable
from spes_p2p.messages.framing import HEADER, MAX_FRAME_BYTES, Kind, Message
from spes_p2p.net.byte_stream import ByteStream
from spes_p2p.net.interfaces import Admit, admit_all

LINGER_S = 5.0
"""Time for which a finished channel discards incoming data; closing at once would reset its own last frames."""


class StreamChannel:
    """Frames over one stream (`interfaces.Channel`). One task at a time may send, one may receive."""

    def __init__(self, remote: str, stream: ByteStream):
        self._remote, self._stream = remote, stream
        self._has_finished = False
        self._aborted = False
        self._header: tuple[int, int] | None = None  # kept while its content is not read, since receive may be cancelled
        self._is_read_out = False
        self._failure: Exception | None = None
        self._admit: Admit = admit_all

    @property
    def remote(self) -> str:
        """Authenticated id of the other end."""
        return self._remote

    def watch(self, heard: Callable[[], None], admit: Admit) -> None:
        """Call `heard` whenever bytes come, and `admit` before the body of a frame is read."""
        self._stream.on_bytes, self._admit = heard, admit

    async def send(self, *pieces: bytes | memoryview, kind: int = Kind.MESSAGE) -> None:
        """Send one frame; wait while the stream is full. Raises PeerUnreachable."""
        size = sum(map(len, pieces))
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed")
        await self._write(kind, size, *pieces)

    async def receive(self) -> Message | None:
        """Return the next frame, or None after the other end's `finish`. Raises PeerUnreachable."""
        if self._aborted:
            raise PeerUnreachable(f"the channel to {self._remote} was closed here")
        if self._failure is not None:
            raise self._failure
        if self._is_read_out:
            return None
        try:
            if self._header is None:
                self._header = HEADER.unpack(await self._stream.read_exactly(HEADER.size))
            kind, size = self._header
            if size > (0 if kind == Kind.FINISHED else MAX_FRAME_BYTES):
                raise ValueError(f"a frame of {size} bytes")
            if kind != Kind.FINISHED:
                await self._admit(kind, size)
            content = await self._stream.read_exactly(size)
            self._header = None
        except (OSError, EOFError):
            raise self._fail(PeerUnreachable(f"{self._remote} broke the channel")) from None
        except ValueError as problem:
            raise self._fail(PeerUnreachable(f"{self._remote} does not keep to the protocol: {problem}")) from None
        if kind != Kind.FINISHED:
            return Message(content, kind)
        self._is_read_out = True
        return None

    async def finish(self) -> None:
        """Tell the other end that no more frames follow."""
        if not self._has_finished:
            await self._write(Kind.FINISHED, 0)
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
        """Discard incoming data, then close: closing with unread bytes would reset the stream, with its last sent frames."""
        try:
            await asyncio.wait_for(self._stream.swallow(MAX_FRAME_BYTES), LINGER_S)
        except (OSError, asyncio.TimeoutError):
            pass
        finally:
            self._stream.close()

    async def _write(self, kind: int, size: int, *content: bytes | memoryview) -> None:
        if self._aborted or self._stream.is_closing():
            raise PeerUnreachable(f"the channel to {self._remote} is closed")
        if self._has_finished:
            raise ValueError("nothing can be sent after finish")
        self._stream.write(HEADER.pack(kind, size), *content)
        try:
            await self._stream.drain()
        except OSError:
            raise PeerUnreachable(f"{self._remote} broke the channel") from None

    def _fail(self, failure: Exception) -> Exception:
        self._failure = failure
        return failure


def _keep(task: asyncio.Task[None]) -> None:
    """Keep a reference to a task until it is done: the event loop holds only weak ones."""
    _LINGERING.add(task)
    task.add_done_callback(_LINGERING.discard)


_LINGERING: set[asyncio.Task[None]] = set()
