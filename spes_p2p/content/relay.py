"""Records that are the same for all members of a round: the coordinator sends a few of them, the members pass them on.

The coordinator sends a plan or a commit to the first FANOUT members. The others get its hash and the name of a member that has
it by then, in a tree: each passes it on to at most FANOUT others. Who does not get it there asks the coordinator.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.pieces import Body, from_hex, single
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.framing import MAX_FRAME_BYTES, Kind, Message
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Passed
from spes_p2p.net.rpc import RpcEndpoint

FANOUT = 8
KEPT_RECORDS = 8


class Relay:
    """The last records of this peer, for those that it passes them on to."""

    def __init__(self, board: RpcEndpoint, fetcher: Fetcher):
        self._board, self._fetcher = board, fetcher
        self._records: OrderedDict[str, bytes] = OrderedDict()
        self._news = asyncio.Event()

    async def serve(self, server: ContentServer) -> None:
        """Serve records, to every member at once: a record is small, and each of them passes it on to few."""
        await server.serve("record", self._record)

    def keep(self, record: bytes) -> None:
        """Have a record ready for others."""
        self._records[hashlib.sha256(record).hexdigest()] = record
        while len(self._records) > KEPT_RECORDS:
            self._records.popitem(last=False)
        self._news.set()

    def addressed(self, message: Message, index: int, members: Sequence[str]) -> Message:
        """What the coordinator sends to the member of this index: the plan or decided commit, or where it is."""
        if index < FANOUT:
            return message
        self.keep(bytes(message.body))
        holders = (members[index // FANOUT - 1], self._board.peer_id)
        return Message(pack(Passed(message.kind, hashlib.sha256(message.body).hexdigest(), holders)), Kind.PASSED)

    async def received(self, message: Message) -> Message:
        """The plan or decided commit that a coordinator's message is or names. Raises PeerUnreachable, WireError."""
        if message.kind == Kind.PASSED:
            passed = unpack(Passed, message.body)
            message = Message(await self._fetch(passed), passed.kind)
        if message.kind not in (Kind.PLAN, Kind.DECIDED):
            raise WireError(f"a frame of kind {message.kind} where a plan or a commit belongs")
        self.keep(bytes(message.body))
        return message

    async def _fetch(self, passed: Passed) -> bytes:
        """Ask one holder after the other: each of them waits for the record itself, so that only a lost one is passed over."""
        content = single("record", passed.sha256, from_hex(passed.sha256), MAX_FRAME_BYTES)
        return bytes(await self._fetcher.fetch_single(content, [self._fetcher.peers([holder]) for holder in passed.holders]))

    async def _record(self, sha256: str, index: int) -> Body | None:
        """A record as it is served; one that is on its way here is waited for."""
        deadline = asyncio.get_running_loop().time() + self._board.silence_s
        while sha256 not in self._records:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), deadline - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                raise Refused(Code.NOT_HERE, "that record is not here") from None
        return self._records[sha256] if index == 0 else None
