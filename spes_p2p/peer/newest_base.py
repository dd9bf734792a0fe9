"""Getting a base from others: which ones are offered for a commit, downloading one, since when the newest one is missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import numpy as np

from spes_p2p.consensus.control import is_rollback
from spes_p2p.content.bases import KeptPieces, Offer, Snapshots, collect_offers, download, newest_bases
from spes_p2p.messages.consensus import Commit
from spes_p2p.peer.node import Node
from spes_p2p.rounds.base import Base

logger = logging.getLogger(__name__)

RETRY_S = 1.0
ASK_EVERY = 10
"""Ask the helpers to go on without the newest base after this many fruitless looks for it."""


class NewestBase:
    """Looks for bases at the peers that are there."""

    def __init__(self, node: Node, elements: int, snapshots: Snapshots):
        """`snapshots`: what this peer has itself."""
        self.fruitless = 0
        """How often the newest base could not be had."""
        self._node, self._elements, self._snapshots = node, elements, snapshots
        self._kept = KeptPieces(node.world.store)
        self._lost_after, self._lost_since = "", 0.0
        """The commit whose base is needed here and offered by nobody, and since when."""

    async def offers(self, commit: Commit) -> list[Offer]:
        """Of a commit's base. What its members say counts; whether that was right the next commit's certificate tells."""
        node = self._node
        return await collect_offers(node.board, node.others(), commit.id, self._elements, {*commit.members, *commit.helpers})

    async def offers_of_newest(self) -> list[Offer]:
        """Offers of the newest commit that living peers have, after learning its certificate."""
        await self._node.learn_from_all()
        commit = self._node.log.last
        offers = [offer for offer in await self.offers(commit) if offer.info.round == commit.round]
        if commit.round < 0 or is_rollback(commit):
            offers = [offer for offer in offers if offer.info.digest == commit.base_digest]
        if offers:
            self._lost_after = ""
        elif self._lost_after != commit.id:
            self._lost_after, self._lost_since = commit.id, asyncio.get_running_loop().time()
        return offers

    async def download(
        self,
        offers: Sequence[Offer],
        have: np.ndarray | None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        resumable: bool = True,
    ) -> Base:
        """The offered base, in a file until it is written as a base. Raises PeerUnreachable when no donor is left.

        `have`: a base that has some of its pieces. `resumable`: keep what arrives on disk until `clear`.
        """
        info, kept = offers[0].info, self._kept if resumable else None
        values = await download(self._node.fetcher, offers, have, on_progress, kept, self._node.world.store.scratch)
        values.flags.writeable = False
        return Base(info.commit, info.round, values, info.digest, None)

    def clear(self) -> None:
        """The downloaded base is used and safe: forget what was kept of it."""
        self._kept.clear()

    async def look_again(self) -> None:
        """The newest base could not be had: wait a while, and see who is there then."""
        self.fruitless += 1
        if self.lost_since() is not None and self.fruitless % ASK_EVERY == 0:
            logger.info("nobody who is there has the base of round %d; waiting for a peer that has it", self._node.log.round)
            if self._node.role != "helper":
                await self._node.ask_for_reform()
        await asyncio.sleep(RETRY_S)
        await self._node.meet()

    def found(self) -> None:
        """The base of the last commit is here."""
        self._lost_after = ""

    def lost_since(self) -> float | None:
        """Loop time since when nobody has the base of the last commit, this peer included; None when none is known to miss."""
        return self._lost_since if self._lost_after == self._node.log.last.id else None

    async def at_hand(self, peers: Sequence[str]) -> int | None:
        """The last round of the log whose base is here, or at one of these peers; None when there is none."""
        known = [*await newest_bases(self._node.board, peers), *self._snapshots.infos]
        return max((info.round for info in known if self._node.log.has(info.commit, info.round)), default=None)
