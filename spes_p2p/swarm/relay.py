"""Records that are the same for all members of a round: the coordinator sends a few of them, the members pass them on.

The coordinator sends a plan or a head to the first FANOUT members. The others get its hash and the name of a member that has it
by then, in a tree: each passes it on to at most FANOUT others. Who does not get it there asks the coordinator.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.swarm.rpc import Switchboard, Talk
from spes_p2p.swarm.wire import pack, unpack

logger = logging.getLogger(__name__)

RELAY, PASSED = "relay", b"from"
FANOUT = 8
KEPT_RECORDS = 8


@dataclass(frozen=True)
class Passed:
    """In place of a record: its hex sha256, and who has it, to be asked in this order."""

    sha256: str
    holders: tuple[str, ...]


class Relay:
    """The last records of this peer, for those that it passes them on to."""

    def __init__(self, board: Switchboard):
        self._board = board
        self._records: OrderedDict[str, bytes] = OrderedDict()
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Serve records."""
        await self._board.serve(RELAY, self._on_relay)

    def keep(self, record: bytes) -> None:
        """Have a record ready for others."""
        self._records[hashlib.sha256(record).hexdigest()] = record
        while len(self._records) > KEPT_RECORDS:
            self._records.popitem(last=False)
        self._news.set()

    def addressed(self, record: bytes, index: int, members: Sequence[str]) -> bytes:
        """What the coordinator sends to the member of this index: the record, or where it is."""
        if index < FANOUT:
            return record
        self.keep(record)
        holders = (members[index // FANOUT - 1], self._board.peer_id)
        return PASSED + pack(Passed(hashlib.sha256(record).hexdigest(), holders))

    async def received(self, message: bytes) -> bytes:
        """The record that a coordinator's message is or names. Raises PeerUnreachable, WireError."""
        if message[:4] == PASSED:
            message = await self._fetch(unpack(Passed, message[4:]))
        self.keep(message)
        return message

    async def _fetch(self, passed: Passed) -> bytes:
        for holder in passed.holders:
            try:
                record = await self._board.ask(holder, RELAY, passed.sha256.encode(), 2 * self._board.silence_s)
            except (PeerUnreachable, Refused) as error:
                logger.debug("%s passes nothing on: %s", holder[-6:], error)
                continue
            if hashlib.sha256(record).hexdigest() == passed.sha256:
                return record
            logger.warning("%s passes on another record than it was asked for", holder[-6:])
        raise PeerUnreachable("nobody passes the record on")

    async def _on_relay(self, talk: Talk) -> None:
        """Serve a record; one that is on its way to me is waited for."""
        wanted = (await talk.message()).decode(errors="replace")
        deadline = asyncio.get_running_loop().time() + self._board.silence_s
        while wanted not in self._records:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), deadline - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                raise Refused("that record is not here") from None
        await talk.send(self._records[wanted])
