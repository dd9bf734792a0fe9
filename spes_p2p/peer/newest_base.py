"""Getting a base from other peers: offers, downloads, and since when nobody offers the newest one."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

import numpy as np

from spes_p2p.consensus.control import is_rollback
from spes_p2p.content.bases import Offer, PartialDownload, Snapshots, collect_offers, download, newest_bases
from spes_p2p.errors import PeerUnreachable
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.content import SnapshotInfo
from spes_p2p.net.tasks import end_tasks
from spes_p2p.peer.node import Node
from spes_p2p.rounds.base import Base

logger = logging.getLogger(__name__)

RETRY_S = 1.0
LEARN_EVERY_S = 20.0
"""Look this often whether a commit refutes the base that strangers give."""
ASK_FOR_REFORM_EVERY = 10
"""Ask the owner for a reform after this many attempts to get the newest base."""


class NewestBase:
    """Gets bases from the peers in the registry."""

    def __init__(self, node: Node, elements: int, snapshots: Snapshots):
        """`snapshots`: what this peer has itself."""
        self.failures = 0
        """Attempts to get the newest base that failed."""
        self.downloaded_round = -math.inf
        """Round of the last base that was downloaded in this life."""
        self.donors: frozenset[str] = frozenset()
        """Whom it was downloaded from: they keep the results after it for a while."""
        self.elements = elements
        self._node, self._snapshots = node, snapshots
        self._kept = PartialDownload(node.world.store)
        self._lost_after, self._lost_since = "", 0.0
        """The commit whose base is needed here, and the loop time since when no vouched peer offers it and nothing arrives."""
        self._asked_at = -math.inf
        """Loop time at which this peer last asked for the newest commit."""

    async def offers(self, commit: Commit) -> list[Offer]:
        """Return the offers of a commit's base.

        The word of those for whom the owner vouches counts until a commit certifies the digest.
        """
        node, donors = self._node, self._node.sources()
        digest, shown = self._certified_digest(commit), node.invitation if node.is_invited(node.invitation) else None
        return await collect_offers(node.endpoint, donors, commit.id, self.elements, node.vouched, digest, shown)

    async def learn_commits(self) -> None:
        """Ask other peers for the commits up to the newest one."""
        self._asked_at = asyncio.get_running_loop().time()
        await self._node.decisions.learn_from_all(self._node.sources())

    async def offers_of_newest(self) -> list[Offer]:
        """Learn the newest commit, then return the offers of its base."""
        await self.learn_commits()
        commit = self._node.log.last
        offers = [offer for offer in await self.offers(commit) if offer.info.round == commit.round]
        if any(self._is_vouched(offer.donor) for offer in offers):
            self._lost_after = ""
        elif self._lost_after != commit.id:
            self._lost_after, self._lost_since = commit.id, asyncio.get_running_loop().time()
        return offers

    def asked_s(self) -> float:
        """Return for how long this peer has not asked for the newest commit, in seconds."""
        return asyncio.get_running_loop().time() - self._asked_at

    async def download(
        self,
        offers: Sequence[Offer],
        have: np.ndarray | None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        resumable: bool = True,
    ) -> Base:
        """Download the offered base into a scratch file; what arrives says that it is not lost.

        Raises PeerUnreachable when no donor is left, or when a commit certifies another base than the one that strangers give.

        `have`: a base that shares some of its pieces. `resumable`: keep what arrives on disk until `clear`.
        """
        info, kept = offers[0].info, self._kept if resumable else None
        world = self._node.world

        def arrived(done: int, total: int) -> None:
            self._lost_since = asyncio.get_running_loop().time()
            on_progress(done, total)

        giving = asyncio.ensure_future(
            download(self._node.fetcher, offers, have, arrived, kept, world.store.scratch, world.run_blocking, world.threads)
        )
        is_proven = any(self._is_vouched(offer.donor) for offer in offers)
        try:
            while not (await asyncio.wait({giving}, timeout=None if is_proven else LEARN_EVERY_S))[0]:
                await self._node.decisions.learn_from_all(self._node.sources())
                is_proven = self._is_certified(info)
            values, digests = giving.result()
        finally:
            await end_tasks([giving])
        values.flags.writeable = False
        self.downloaded_round, self.donors = info.round, frozenset(offer.donor for offer in offers)
        return Base(info.commit, info.round, values, info.digest, None, digests)

    def clear(self) -> None:
        """Delete the kept pieces, once the downloaded base is durable."""
        self._kept.clear()

    async def wait_for_donors(self) -> None:
        """After a failed attempt: wait, then refresh the contacts; ask for a reform when nobody has the base for long.

        Raises UserError when the owner has banned this peer.
        """
        self.failures += 1
        if self.lost_since() is not None and self.failures % ASK_FOR_REFORM_EVERY == 0:
            logger.info("no reachable peer has the base of round %d; waiting for one that has it", self._node.log.round)
            if self._node.role != "helper":
                await self._node.decisions.ask_for_reform()
        await asyncio.sleep(RETRY_S)
        await self._node.refresh_contacts(only_if_due=True)
        self._node.require_admitted(self._node.controls.newest)

    def found(self) -> None:
        """Note that the base of the last commit is here."""
        self._lost_after = ""

    def lost_since(self) -> float | None:
        """Return the loop time since when no peer, this one included, has the last commit's base; None when one has it."""
        return self._lost_since if self._lost_after == self._node.log.last.id else None

    async def at_hand(self, peers: Sequence[str]) -> int | None:
        """Return the last round of the log whose base this peer or a vouched one of these has; None when there is none."""
        vouched = [peer for peer in peers if self._is_vouched(peer)]
        known = [*await newest_bases(self._node.endpoint, vouched), *self._snapshots.infos]
        return max((info.round for info in known if self._node.log.has(info.commit, info.round)), default=None)

    def _is_vouched(self, peer: str) -> bool:
        """Return whether the owner vouches for this peer, by the last commits: strangers offer what they do not have."""
        return self._node.rules.config.admission != "open" or peer in self._node.vouched

    def _is_certified(self, info: SnapshotInfo) -> bool:
        """Return whether the log certifies this base already. Raises PeerUnreachable if it certifies another one."""
        log = self._node.log
        digest = self._certified_digest(log.commit_at(info.round)) if log.has(info.commit, info.round) else ""
        if digest not in ("", info.digest):
            raise PeerUnreachable(f"round {info.round + 1} certifies another base than the one that strangers gave")
        return digest != ""

    def _certified_digest(self, commit: Commit) -> str:
        """Return the digest of this commit's base that the log certifies; "" before its next commit."""
        if commit.round < 0 or is_rollback(commit):
            return commit.base_digest
        log = self._node.log
        following = log.commit_at(commit.round + 1) if log.round > commit.round else None
        return "" if following is None or is_rollback(following) else following.base_digest
