"""A piece on its way between two peers: one peer serves what it has, the other is a donor to it.

A request names pieces of one content; each comes back as its size (8 bytes, big endian) and its bytes, in messages of at most
CHUNK_BYTES; an empty message stands for a piece that is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spes_p2p.content.pieces import Body, Content, Delivery, Source
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.content import ContentKind, PiecesRequest
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import STALLED_SILENCES, RpcEndpoint, Stream

CHUNK_BYTES = 2**16
"""Bytes in one message: what a download's progress is measured in."""
SIZE_BYTES = 8
REQUESTS_A_PEER = 2
"""Requests that one peer may have open at another, over all downloads."""
BUSY_RETRY_S = 1.0
"""A busy donor is asked again after this long."""


class ContentServer:
    """A peer's end that serves: any kind of content, each from its own source."""

    def __init__(self, board: RpcEndpoint):
        self._board = board
        self._open: dict[ContentKind, Counter[str]] = {}
        """Requests that are being answered, by kind and peer."""

    async def serve(self, kind: ContentKind, source: Source, peers_at_once: int | None = None) -> None:
        """Answer requests for a kind of content from now on.

        `peers_at_once`: others are told that this peer is busy, so that uploads leave room for its own rounds. None: no limit.
        """

        async def answer(stream: Stream) -> None:
            request = unpack(PiecesRequest, await stream.message())
            with self._upload(kind, stream.remote, peers_at_once):
                for index in request.pieces:
                    await self._send(stream, await stream.alive(source(request.name, index)))

        await self._board.serve(kind, answer)

    def uploads(self, kind: ContentKind) -> int:
        """Peers that are served this kind of content now."""
        return len(self._open.get(kind, ()))

    @contextlib.contextmanager
    def _upload(self, kind: ContentKind, peer: str, peers_at_once: int | None) -> Iterator[None]:
        """Raises Refused when too many peers are served, or this one in too many requests."""
        served = self._open.setdefault(kind, Counter())
        if peers_at_once is not None and (len({*served, peer}) > peers_at_once or served[peer] >= REQUESTS_A_PEER):
            raise Refused(Code.BUSY, f"{len(served)} peers are served", retry_s=BUSY_RETRY_S)
        served[peer] += 1
        try:
            yield
        finally:
            served[peer] -= 1
            if not served[peer]:
                del served[peer]

    async def _send(self, stream: Stream, body: Body | None) -> None:
        if body is None:
            await self._unless_stalled(stream, b"")
            return
        view = memoryview(body)
        await self._unless_stalled(stream, len(view).to_bytes(SIZE_BYTES, "big"), view[:CHUNK_BYTES])
        for start in range(CHUNK_BYTES, len(view), CHUNK_BYTES):
            await self._unless_stalled(stream, view[start : start + CHUNK_BYTES])

    async def _unless_stalled(self, stream: Stream, *chunk: bytes | memoryview) -> None:
        """A peer that stays connected and takes nothing frees its place."""
        stalled_s = STALLED_SILENCES * self._board.silence_s
        try:
            await asyncio.wait_for(stream.send(*chunk, kind=Kind.CONTENT), stalled_s)
        except asyncio.TimeoutError:
            raise PeerUnreachable(f"{stream.remote[-6:]} lives, but takes nothing for {stalled_s:g} s") from None


@dataclass(frozen=True)
class PeerDonor:
    """Another peer, asked over its streams."""

    board: RpcEndpoint
    name: str
    patience_s: float | None = None

    async def give(self, content: Content, indices: Sequence[int], delivery: Delivery) -> None:
        """Ask for the pieces and pass them on as they come. Raises PeerUnreachable, Refused, WireError."""
        async with self.board.stream(self.name, content.kind) as stream:
            await stream.send(pack(PiecesRequest(content.name, tuple(indices))))
            for index in indices:
                await delivery.put(index, await _receive(stream, content.piece(index).max_bytes, delivery))


async def _receive(stream: Stream, max_bytes: int, delivery: Delivery) -> Body | None:
    """One piece of at most this size, or None. Raises WireError when it is larger than allowed."""
    message = await stream.message_view(Kind.CONTENT)
    if not message:
        return None
    if len(message) < SIZE_BYTES:
        raise WireError("a piece without its size")
    size, chunk = int.from_bytes(message[:SIZE_BYTES], "big"), message[SIZE_BYTES:]
    if size > max_bytes:
        raise WireError(f"a piece of {size} bytes, at most {max_bytes} are right")
    delivery.count(len(chunk))
    if len(chunk) == size:
        return chunk
    body = bytearray(chunk)
    while len(body) < size:
        chunk = await stream.message_view(Kind.CONTENT)
        if not chunk:
            raise WireError("a piece that ends too soon")
        delivery.count(len(chunk))
        body += chunk
    if len(body) > size:
        raise WireError("more bytes than the piece has")
    return memoryview(body)
