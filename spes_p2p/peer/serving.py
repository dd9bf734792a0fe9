"""What a member hands on in an exchange: the results that it reduces and, as a hub, those that it pulls for its cell."""

from __future__ import annotations

import asyncio
from collections import Counter

from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import PullRequest
from spes_p2p.net.rpc import Stream
from spes_p2p.peer.exchange_context import ExchangeContext
from spes_p2p.peer.part_frames import numbered
from spes_p2p.rounds.parts import Part, mask_bytes, pulls

MAX_BARE = 2**7
"""How often a member may ask for no parts: each of its streams does once where hubs are lost and others have only manifests."""


class Serving:
    """Results of one part table, in the order in which this member has them: none waits for another."""

    def __init__(self, context: ExchangeContext, revision: int):
        self._context, self._revision = context, revision
        me, parts = context.me, context.results.table(revision)
        self._mine = [part for part in parts if part.reducer == me or me in part.hubs]
        self._order: list[int] = []
        """Indices of the parts that are settled: here, or known not to come."""
        self._settled = set[int]()
        self._manifests = set[int]()
        """Reducers whose manifests are settled."""
        self._asked = set[tuple[int, int]]()
        """Members, and the parts for which they have asked."""
        self._bare = Counter[int]()
        """By member: how often it has asked for no parts."""
        self._news = asyncio.Event()
        self._is_over = False

    def settle(self, *indices: int) -> None:
        """Note that the results of these parts are here, or will not come."""
        new = [index for index in indices if index not in self._settled]
        if new:
            self._settled.update(new)
            self._order += new
            self._wake()

    def settle_manifest(self, reducer: int) -> None:
        """Note that a reducer's manifest is here, or will not come."""
        self._manifests.add(reducer)
        self._wake()

    def end(self) -> None:
        """Refuse what is not here from now on."""
        self._is_over = True
        self._wake()

    async def serve(self, stream: Stream, puller: int, request: PullRequest) -> None:
        """Send another member its results, then the manifests of their reducers. Raises Refused for what it has asked for.

        Nobody asks again for what broke (`Transfers`), and a stranger could do so without end.
        """
        if request.parts and len(request.parts) != mask_bytes(len(self._context.results.parts)):
            raise Refused(Code.MALFORMED, "a mask of other parts")
        its = self._of(puller, request.parts)
        left = {part.index for part in [part for part in its if pulls(part, puller)][request.lane :: request.lanes]}
        asked = {(puller, index) for index in left}
        self._bare[puller] += not asked
        if self._bare[puller] > MAX_BARE or not self._asked.isdisjoint(asked):
            raise Refused(Code.NOT_ALLOWED, "this was asked for before")
        self._asked |= asked
        seen = 0
        while left:
            if seen == len(self._order):
                self._require_going_on()
                await stream.alive(self._news.wait())
                continue
            index = self._order[seen]
            if index in left:
                left.discard(index)
                await stream.send(numbered(index), self._context.results.encoded.get(index, b""), kind=Kind.PART)
            seen += 1
        if request.lane == 0:
            column = [part for part in self._mine if part.hubs] if request.parts else its
            await self._send_manifests(stream, sorted({part.reducer for part in column}))

    def _of(self, puller: int, asked: bytes) -> list[Part]:
        """Return the parts that a member gets here. `asked`: a mask of those that it wants because its own hub is lost."""
        if not asked:
            return [part for part in self._mine if part.parent(puller) == self._context.me]
        return [part for part in self._mine if part.hubs and asked[part.index >> 3] >> (part.index & 7) & 1]

    async def _send_manifests(self, stream: Stream, reducers: list[int]) -> None:
        for reducer in reducers:
            while reducer not in self._manifests and not self._is_over:
                await stream.alive(self._news.wait())
            manifest = self._context.results.manifests.get((self._revision, reducer))
            if manifest is not None:
                await stream.send(pack(manifest), kind=Kind.MANIFEST)
            elif reducer == self._context.me:
                raise Refused(Code.NOT_HERE, "no manifest in this exchange")
        await stream.send(kind=Kind.END)

    def _require_going_on(self) -> None:
        if self._is_over:
            raise Refused(Code.CLOSED, "this exchange is over")

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
