"""Transfer of pieces between two peers: the serving end (ContentServer) and the requesting end (PeerDonor).

A request names pieces of one content. Each is answered by its size (8 bytes, big endian) and its bytes, in messages that carry
at most CHUNK_BYTES of it, or by one empty message when the serving peer lacks the piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from spes_p2p.config.campaign import SLOWEST_LINE_BITS
from spes_p2p.content.pieces import Body, Content, Delivery, Source
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.content import ContentKind, PiecesRequest
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import STALLED_SILENCES, RpcEndpoint, Stream

CHUNK_BYTES = 2**16
"""Bounds the bytes of a piece in one message, so that progress is visible on slow lines."""
STRANGERS_BYTES = 2**14
"""The same of a stranger's download: the messages of a round wait behind few bytes of each."""
SIZE_BYTES = 8
REQUESTS_PER_PEER = 2
"""Bounds the concurrent requests of one peer at another, over all downloads."""
BUSY_RETRY_S, MAX_BUSY_RETRY_S = 1.0, 10.0
"""A busy peer asks to be asked again after this long, times the number of peers that wait, at most the second."""
PLACE_RETRIES = 3.0
"""Who does not ask again for so many times that long loses its place."""
MAX_WAITING = 256
"""Peers that can have a place."""
HELD_S, HELD_BYTES = 5.0, 2**18
"""A peer that was served more than this keeps its turn for so long between two requests of a download: a slow line takes
seconds to carry what this end believes to be sent."""
SETTLED_S = 10.0
"""After this long an upload that is slower than the slowest permitted line makes room for a peer that waits."""
UNEVEN = 4.0
"""It does not where this peer's own line may be the reason: all uploads together have more than such a line, and none is this
many times faster."""

SLOWEST_BYTES_PER_S = SLOWEST_LINE_BITS / 8

Admit = Callable[[str, str], None]


@dataclass
class _Upload:
    """What one peer is being served of a kind."""

    began_s: float
    """When it began, later by what it has waited for its turn among strangers."""
    sent: int = 0
    streams: set[Stream] = field(default_factory=set)
    has_waited: bool = False
    """Whether the peer had a place before, which was not given back to it."""
    rested_s: float = 0.0
    """Since when it has no stream, if it has none."""

    def is_held(self, now_s: float) -> bool:
        """Return whether the peer, which has no stream, keeps its turn."""
        return self.sent > HELD_BYTES and now_s - self.rested_s <= HELD_S

    def rate(self, now_s: float) -> float | None:
        """Bytes per second so far; None while it is too early to tell."""
        took_s = now_s - self.began_s
        return self.sent / took_s if took_s >= SETTLED_S else None


@dataclass
class _Turns:
    """Who is being served a kind of content, and who waits: members, then others, each in the order of coming.

    So whoever began ends first, and then serves others.
    """

    uploads: dict[str, _Upload] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    """By peer: when it loses its place."""
    given_back: set[str] = field(default_factory=set)
    """Peers whose place was."""

    def admit(self, peer: str, at_once: int, now_s: float, is_known: Callable[[str], bool], enough: float = math.inf) -> bool:
        """Return whether the peer has waited for its turn. Raises Refused (busy) before that, or with too many requests.

        `enough`: a peer that was sent more bytes makes room for one that waits.
        """
        self.uploads = {other: each for other, each in self.uploads.items() if each.streams or each.is_held(now_s)}
        self.waiting = {other: ends_s for other, ends_s in self.waiting.items() if ends_s > now_s}
        if peer in self.uploads:
            if len(self.uploads[peer].streams) >= REQUESTS_PER_PEER:
                raise self._busy("this one has enough", BUSY_RETRY_S)
            return False
        first = [other for other in self.waiting if is_known(other) >= is_known(peer)]
        before = first.index(peer) if peer in first else len(first)
        if before < at_once - len(self.uploads) or (before == 0 and self._makes_room(now_s, enough)):
            has_waited = self.waiting.pop(peer, None) is not None and peer not in self.given_back
            self.given_back &= self.waiting.keys()
            return has_waited
        retry_s = min(BUSY_RETRY_S * (1 + before), MAX_BUSY_RETRY_S)
        if before < MAX_WAITING:
            self.waiting[peer] = now_s + PLACE_RETRIES * retry_s
        raise self._busy(f"{before} wait before this one", retry_s)

    def give_back(self, peer: str, now_s: float) -> None:
        """Give a peer that has waited for nothing its place back, once, before all others: what it wanted is gone."""
        if self.uploads.pop(peer).has_waited:
            self.waiting = {peer: now_s + PLACE_RETRIES * BUSY_RETRY_S, **self.waiting}
            self.given_back.add(peer)

    def _makes_room(self, now_s: float, enough: float) -> bool:
        """End an upload that had enough, or the slowest if neither a permitted line nor this peer's is as slow.

        Return whether there was one.
        """
        if (had_enough := next((peer for peer, upload in self.uploads.items() if upload.sent > enough), None)) is not None:
            self._end(had_enough, "others wait")
            return True
        found = ((upload.rate(now_s), peer) for peer, upload in self.uploads.items())
        rates = sorted((rate, peer) for rate, peer in found if rate is not None)
        if not rates or rates[0][0] >= SLOWEST_BYTES_PER_S:
            return False
        (least, slowest), (most, _) = rates[0], rates[-1]
        all_together = len(self.uploads) * sum(rate for rate, _ in rates) / len(rates)
        if all_together >= SLOWEST_BYTES_PER_S and most < UNEVEN * least:
            return False
        self._end(slowest, "this one is too slow")
        return True

    def _end(self, peer: str, why: str) -> None:
        for stream in self.uploads.pop(peer).streams:
            stream.break_off(self._busy(why, BUSY_RETRY_S))

    def _busy(self, why: str, retry_s: float) -> Refused:
        return Refused(Code.BUSY, f"{len(self.uploads)} peers are being served, {why}", retry_s=retry_s)


class ContentServer:
    """Serves any kind of content, each kind from its own source."""

    def __init__(self, endpoint: RpcEndpoint):
        self._endpoint = endpoint
        self.admit: dict[ContentKind, Admit] = {}
        """For kinds that not everybody may have: raises Refused for a peer that may not have the content of this name."""
        self.is_exchanging: Callable[[], bool] = lambda: False
        """Whether an exchange is under way."""
        self.paced: Mapping[ContentKind, float] = {}
        """By kind: the share of the line that all together get during an exchange for which the owner does not vouch."""
        self.is_due: dict[ContentKind, Callable[[str, str, int], bool]] = {}
        """For kinds with another rule: whether a peer gets this piece of the content of this name at once, instead of in its
        turn among the long answers to strangers."""
        self._turns: dict[tuple[ContentKind, bool], _Turns] = {}
        """By kind, apart for peers for which the owner vouches: the others' pace would keep their places taken."""

    async def serve(
        self,
        kind: ContentKind,
        source: Source,
        peers_at_once: int | None = None,
        enough: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Start to answer requests for a kind of content.

        `peers_at_once` bounds the peers served at a time, so that uploads leave room for rounds: as many for which the owner
        vouches, and as many others. More are refused as busy and told how many wait before them; one that is too slow makes
        room, or that was sent more than `enough` bytes.
        """

        async def answer(stream: Stream) -> None:
            request = unpack(PiecesRequest, await stream.message())
            if len({*request.pieces}) < len(request.pieces):
                raise Refused(Code.MALFORMED, "a request that names a piece twice")
            if kind in self.admit:
                self.admit[kind](stream.remote, request.name)
            with self._upload(kind, stream, peers_at_once, enough()) as upload:
                for index in request.pieces:
                    body = await stream.alive(source(request.name, index))
                    if body and kind in self.is_due and not self.is_due[kind](stream.remote, request.name, index):
                        await stream.alive(self._endpoint.shares.answer(stream.remote, len(body)))
                    await self._send(stream, body, upload, self.paced.get(kind))

        await self._endpoint.serve(kind, answer)

    def uploads(self, kind: ContentKind) -> int:
        """Return the number of peers that are being served this kind of content."""
        turns = (turns for (of, _), turns in self._turns.items() if of == kind)
        return sum(bool(each.streams) for each_turns in turns for each in each_turns.uploads.values())

    @contextlib.contextmanager
    def _upload(self, kind: ContentKind, stream: Stream, peers_at_once: int | None, enough: float) -> Iterator[_Upload]:
        """Count an upload while it runs. Raises Refused (busy) at the bound of peers, or of requests by this peer."""
        shares, clock = self._endpoint.shares, asyncio.get_running_loop().time
        turns, has_waited = self._turns.setdefault((kind, shares.is_trusted(stream.remote)), _Turns()), False
        if peers_at_once is not None:
            has_waited = turns.admit(stream.remote, peers_at_once, clock(), shares.is_known, enough)
        upload = turns.uploads.setdefault(stream.remote, _Upload(clock(), has_waited=has_waited))
        upload.streams.add(stream)
        try:
            yield upload
        except Refused:
            if not upload.sent and turns.uploads.get(stream.remote) is upload:
                turns.give_back(stream.remote, clock())
            raise
        finally:
            upload.streams.discard(stream)
            upload.rested_s = clock()
            if peers_at_once is None and not upload.streams:
                turns.uploads.pop(stream.remote, None)

    async def _send(self, stream: Stream, body: Body | None, upload: _Upload, share: float | None) -> None:
        """Send a piece. `share`: of the line, for all strangers during an exchange; None: all of it."""
        if body is None:
            await self._unless_stalled(stream, b"")
            return
        view, shares, start = memoryview(body), self._endpoint.shares, 0
        size = len(view).to_bytes(SIZE_BYTES, "big")
        while not start or start < len(view):
            is_paced = share is not None and not shares.is_trusted(stream.remote)
            chunk = view[start : start + (STRANGERS_BYTES if is_paced else CHUNK_BYTES)]
            if share is not None and is_paced and self.is_exchanging():
                await self._wait_for_turn(stream, len(chunk), upload, share)
            await self._unless_stalled(stream, *((chunk,) if start else (size, chunk)))
            upload.sent += len(chunk)
            start += max(1, len(chunk))

    async def _wait_for_turn(self, stream: Stream, size: int, upload: _Upload, share: float) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await stream.alive(self._endpoint.shares.upload(stream.remote, size, share))
        upload.began_s += (clock() - began_s) / max(1, len(upload.streams))

    async def _unless_stalled(self, stream: Stream, *chunk: bytes | memoryview) -> None:
        """Send; drop a peer that stays connected but accepts nothing."""
        stalled_s = STALLED_SILENCES * self._endpoint.silence_s
        try:
            await asyncio.wait_for(stream.alive(stream.send(*chunk, kind=Kind.CONTENT)), stalled_s)
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
                body = await _receive(stream, content.piece(index).max_bytes, delivery)
                await delivery.put(index, None if body is None else content.unpacked(body))


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
