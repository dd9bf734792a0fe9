"""Transfer of pieces between two peers: the serving end (ContentServer) and the requesting end (PeerDonor).

A request names pieces of one content. Each is answered by its size (8 bytes, big endian) and its bytes, in messages that carry
at most CHUNK_BYTES of it, or by one empty message when the serving peer lacks the piece.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from spes_p2p.content.pieces import Body, Content, Delivery, Source
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.content import ContentKind, PiecesRequest
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import STALLED_SILENCES, RpcEndpoint, Stream

CHUNK_BYTES = 2**16
"""Bounds the bytes of a piece in one message, so that progress is visible on slow lines."""
SIZE_BYTES = 8
REQUESTS_PER_PEER = 2
"""Bounds the concurrent requests of one peer at another, over all downloads."""
BUSY_RETRY_S = 1.0
"""A busy peer asks to be asked again after this long."""


Admit = Callable[[str, str], None]


class ContentServer:
    """Serves any kind of content, each kind from its own source."""

    def __init__(self, endpoint: RpcEndpoint):
        self._endpoint = endpoint
        self.admit: dict[ContentKind, Admit] = {}
        """For kinds that not everybody may have: raises Refused for a peer that may not have the content of this name."""
        self._open: dict[ContentKind, Counter[str]] = {}
        """Open requests, by kind and peer."""

    async def serve(self, kind: ContentKind, source: Source, peers_at_once: int | None = None) -> None:
        """Start to answer requests for a kind of content.

        `peers_at_once` bounds the peers served at a time, so that uploads leave room for rounds; others are refused as busy.
        """

        async def answer(stream: Stream) -> None:
            request = unpack(PiecesRequest, await stream.message())
            if kind in self.admit:
                self.admit[kind](stream.remote, request.name)
            with self._upload(kind, stream.remote, peers_at_once):
                for index in request.pieces:
                    await self._send(stream, await stream.alive(source(request.name, index)))

        await self._endpoint.serve(kind, answer)

    def uploads(self, kind: ContentKind) -> int:
        """Return the number of peers that are being served this kind of content."""
        return len(self._open.get(kind, ()))

    @contextlib.contextmanager
    def _upload(self, kind: ContentKind, peer: str, peers_at_once: int | None) -> Iterator[None]:
        """Count an upload while it runs. Raises Refused (busy) at the bound of peers, or of requests by this peer."""
        served = self._open.setdefault(kind, Counter())
        if peers_at_once is not None and (len({*served, peer}) > peers_at_once or served[peer] >= REQUESTS_PER_PEER):
            raise Refused(Code.BUSY, f"{len(served)} peers are being served", retry_s=BUSY_RETRY_S)
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
        """Send; drop a peer that stays connected but accepts nothing."""
        stalled_s = STALLED_SILENCES * self._endpoint.silence_s
        try:
            await asyncio.wait_for(stream.send(*chunk, kind=Kind.CONTENT), stalled_s)
        except asyncio.TimeoutError:
            raise PeerUnreachable(f"{stream.remote[-6:]} accepted nothing for {stalled_s:g} s") from None


@dataclass(frozen=True)
class PeerDonor:
    """A peer as a donor."""

    endpoint: RpcEndpoint
    name: str
    patience_s: float | None = None

    async def give(self, content: Content, indices: Sequence[int], delivery: Delivery) -> None:
        """Request the pieces and deliver each on arrival. Raises PeerUnreachable, Refused, WireError."""
        async with self.endpoint.stream(self.name, content.kind) as stream:
            await stream.send(pack(PiecesRequest(content.name, tuple(indices))))
            for index in indices:
                await delivery.put(index, await _receive(stream, content.piece(index).max_bytes, delivery))


async def _receive(stream: Stream, max_bytes: int, delivery: Delivery) -> Body | None:
    """Receive one piece; None when the peer lacks it. Raises WireError when it is larger than `max_bytes`."""
    message = await stream.message_view(Kind.CONTENT)
    if not message:
        return None
    if len(message) < SIZE_BYTES:
        raise WireError("a piece without a size")
    size, chunk = int.from_bytes(message[:SIZE_BYTES], "big"), message[SIZE_BYTES:]
    if size > max_bytes:
        raise WireError(f"a piece of {size} bytes, more than {max_bytes}")
    delivery.count(len(chunk))
    if len(chunk) == size:
        return chunk
    body = bytearray(chunk)
    while len(body) < size:
        chunk = await stream.message_view(Kind.CONTENT)
        if not chunk:
            raise WireError("a piece ends early")
        delivery.count(len(chunk))
        body += chunk
    if len(body) > size:
        raise WireError("a piece continues past its size")
    return memoryview(body)
