"""Jumps of the replica: to a base that is taken as a whole, where the rounds in between cannot be applied.

The newest one when these rounds cannot be replayed or the branch was given up, the certified one when the bits are wrong, an
archived one after a rollback.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from spes_p2p.consensus.control import is_rollback
from spes_p2p.content.bases import Offer
from spes_p2p.errors import PeerUnreachable, UserError
from spes_p2p.messages.consensus import Commit
from spes_p2p.observe.events import DigestMismatch, Observer, WorkDropped
from spes_p2p.peer.base_store import BaseStore
from spes_p2p.peer.exchanges import Exchanges
from spes_p2p.peer.newest_base import NewestBase
from spes_p2p.peer.node import Node
from spes_p2p.peer.own_work import OwnWork
from spes_p2p.rounds.archive import load_archived
from spes_p2p.rounds.base import Base

logger = logging.getLogger(__name__)


class Jumps:
    """Takes another base, and moves the pending work onto it or drops it."""

    def __init__(
        self, node: Node, store: BaseStore, newest: NewestBase, work: OwnWork, exchanges: Exchanges,
        save: Callable[[], Awaitable[None]], observer: Observer,
    ):
        """`save` begins to make base and work durable."""
        self._node, self._store, self._newest, self._work, self._exchanges = node, store, newest, work, exchanges
        self._save, self._observer = save, observer

    async def repair(self) -> None:
        """Fetch the pieces whose digests differ from the majority's. Pending work stays on top. Raises PeerUnreachable."""
        wrong, log = self._store.base, self._node.log
        if not log.has(wrong.commit, wrong.round):
            raise PeerUnreachable("the branch of this round was given up")
        offers = await self._newest.offers(log.commit_at(wrong.round))
        if not offers or offers[0].info.digest == wrong.digest:
            raise PeerUnreachable("no peer offers another base for this round")
        await self._correct(wrong, offers)

    async def take_certified(self, digest: str) -> None:
        """Fetch the pieces that differ from the base that the next commit certifies. Pending work stays on top."""
        wrong = self._store.base
        offers = await self._newest.offers(self._node.log.commit_at(wrong.round))
        if not offers:
            self._observer(DigestMismatch(wrong.round, wrong.digest, digest))
            await self.take_newest(forked=False)
            return
        with contextlib.suppress(PeerUnreachable):
            await self._correct(wrong, offers)

    async def _correct(self, wrong: Base, offers: Sequence[Offer]) -> None:
        self._observer(DigestMismatch(wrong.round, wrong.digest, offers[0].info.digest))
        right = await self._newest.download(offers, wrong.values, resumable=False)
        await self.to(replace(right, plan=wrong.plan), True)

    async def roll_back(self, commit: Commit) -> None:
        """Take an earlier base, from this peer's archive or another's. Work since then is dropped."""
        kept = await self._archived(commit)
        if kept is None:
            await self.take_newest(forked=False)
        else:
            await self.to(replace(kept, commit=commit.id, round=commit.round, plan=None), False)

    async def take_newest(self, forked: bool) -> None:
        """Take the newest base: this peer is too far behind to replay, or on a branch that was given up (`forked`).

        Pending work is kept unless a skipped round may include it, or the base is of another branch.
        """
        offers = await self._newest.offers_of_newest()
        try:
            if not offers:
                raise PeerUnreachable("no peer offers the newest base")
            base = await self._newest.download(offers, self._store.base.values)
        except PeerUnreachable as error:
            logger.debug("snapshot: %s", error)
            await self._newest.wait_for_donors()
            return
        skipped = {decided.commit.plan: decided.commit for decided in self._node.log.since(self._store.base.round)}
        may_be_in = self._exchanges.knows_any(set(skipped))
        may_be_in |= self._work.sent_update_lost and any(self._node.peer_id in commit.members for commit in skipped.values())
        await self.to(base, not forked and not may_be_in)
        self._newest.clear()

    async def to(self, new: Base, keep_pending: bool) -> None:
        """Use this base from now on."""
        old, log = self._store.base, self._node.log
        known = min(new.round, log.round)  # a branch may be given up during a download
        skipped = log.since(old.round, max(0, known - old.round))
        rolled_back = any(is_rollback(each.commit) for each in skipped)
        await self._store.install(new)
        dropped = await self._node.world.run_blocking(self._work.rebase, old, new, keep_pending, rolled_back)
        if dropped:
            reason = "the campaign was rolled back" if rolled_back else "the base was downloaded again"
            self._observer(WorkDropped(self._store.base.round, dropped, reason))
        del old
        await self._save()

    async def _archived(self, commit: Commit) -> Base | None:
        """Return the base that this commit goes back to, if it is archived here undamaged."""
        assert commit.control is not None
        world, wanted = self._node.world, commit.control.rollback
        try:
            kept: Base | None = await world.run_blocking(
                load_archived, world.store, wanted, self._newest.elements, "archive", world.threads
            )
        except UserError as error:
            logger.warning("%s", error)
            return None
        return kept if kept is not None and kept.digest == commit.base_digest else None
