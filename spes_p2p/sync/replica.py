"""This peer's replica of the base: it follows the log of decided heads.

`Replica.advance` applies every decided round in order (`_apply`). Where that is not possible it takes another base as a whole
(`_jump`): the newest one when the rounds in between cannot be replayed or the branch was given up, the certified one when the
bits are wrong, an archived one after a rollback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spes_p2p.consensus.control import is_rollback
from spes_p2p.errors import PeerUnreachable, UserError
from spes_p2p.messages.consensus import Decided, Head
from spes_p2p.messages.rounds import Plan, Revision
from spes_p2p.model.layout import Layout
from spes_p2p.observe.events import DigestMismatch, Observer, WorkDropped
from spes_p2p.swarm.interfaces import Draft
from spes_p2p.swarm.node import Node
from spes_p2p.sync.accounting import Ledger
from spes_p2p.sync.apply import next_base
from spes_p2p.sync.archive import load_archived
from spes_p2p.sync.base import Base, StagedBase, stage_base
from spes_p2p.sync.base_store import BaseStore
from spes_p2p.sync.codecs import group_codecs
from spes_p2p.sync.exchange import Exchange
from spes_p2p.sync.exchanges import Exchanges
from spes_p2p.sync.kept_results import KeptResults
from spes_p2p.sync.newest_base import RETRY_S, NewestBase
from spes_p2p.sync.outer import base_size
from spes_p2p.sync.own_work import OwnWork
from spes_p2p.sync.results import Results
from spes_p2p.sync.scratch import memory_scratch
from spes_p2p.training.checkpoint import Checkpoint
from spes_p2p.training.interface import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Applied:
    """One head that was applied, for whoever reports it."""

    decided: Decided
    plan: Plan
    results: Results
    base_digest: str
    """Of the base that it gave."""


class Replica:
    """The base, and the work on top of it."""

    def __init__(self, node: Node, layout: Layout, observer: Observer, base_in_memory: bool = False):
        """`base_in_memory`: hold the base in memory, and what a round keeps beside it; otherwise both are memory-mapped."""
        sync = node.campaign.config.sync
        self.node = node
        self.layout = layout
        self.outer = node.campaign.config.outer
        self.codecs = group_codecs(sync.codec)
        scratch = memory_scratch if base_in_memory else node.world.store.scratch
        self._size = base_size(layout, self.outer)
        self.store = BaseStore(node.world, self._size, base_in_memory)
        self.work = OwnWork(node.peer_id, layout, self.codecs, scratch)
        self.results = KeptResults(node.world, layout, self.codecs)
        self.exchanges = Exchanges(node, layout, self.results, self.work, scratch)
        self.newest = NewestBase(node, self._size, self.store.snapshots)
        self.leaves: Callable[[], bool] = lambda: False
        """Was this peer asked to leave?"""
        self._observer = observer
        self._prepared: StagedBase | None = None

    @property
    def has_base(self) -> bool:
        """Is there a base yet?"""
        return self.store.current is not None

    @property
    def base(self) -> Base:
        """The current base, of a peer that has one."""
        return self.store.base

    @property
    def trainer(self) -> Trainer | None:
        """A helper has none."""
        return self.work.trainer

    @trainer.setter
    def trainer(self, trainer: Trainer) -> None:
        self.work.trainer = trainer

    @property
    def ledger(self) -> Ledger:
        """Of this peer's own work."""
        return self.work.ledger

    async def start(self) -> None:
        """Serve what is here."""
        await self.exchanges.serve()
        await self.results.serve(self.node.content)
        await self.store.snapshots.serve(self.node.board, self.node.content)

    # Getting a base ----------------------------------------------------------------------------------------------------

    def restore(self, where: str) -> bool:
        """Take up the base and the staged results of this run-dir; False when there is none. Raises UserError when damaged."""
        if not self.store.load(where):
            return False
        self.results.load()
        self.work.codes_lost = True
        return True

    async def learn_own_head(self) -> None:
        """Wait until the log reaches the base: it falls short of it when its file was harmed, and others know the rest.

        Or the base is of a branch that was given up: then `advance` takes another.
        """
        log, waited = self.node.log, 0
        while self.base.round > log.round and not log.gave_up(self.base.head):
            await self.node.learn_from_all()
            if self.base.round > log.round:
                if waited % 30 == 0:
                    logger.warning(
                        "the log of heads ends at round %d, the base is of round %d: waiting for a peer that knows the rest",
                        log.round, self.base.round,
                    )
                waited += 1
                await asyncio.sleep(RETRY_S)
                await self.node.meet()

    async def join(self, on_progress: Callable[[int, int], None]) -> None:
        """Download the newest base from whoever has it, verified; waits until somebody does."""
        while True:
            offers = await self.newest.offers_of_newest()
            if offers:
                with contextlib.suppress(PeerUnreachable):
                    self.store.install(await self.newest.download(offers, None, on_progress))
                    await self._save()
                    await self.durable()
                    self.newest.clear()
                    return
            await self.newest.look_again()

    def base_lost_since(self) -> float | None:
        """As `NewestBase.lost_since`."""
        return self.newest.lost_since()

    async def newest_at_hand(self, peers: Sequence[str]) -> int | None:
        """As `NewestBase.at_hand`."""
        return await self.newest.at_hand(peers)

    # The current round -------------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Take what is pending now as the update of the next round; a helper has none."""
        self.work.announce(self.base.values)

    def validation_loss(self) -> float:
        """Held-out loss of the base. Called between two steps."""
        return self.work.validation_loss(self.base.values)

    def open_exchange(self, plan: Plan) -> Exchange:
        """Take part in a plan with what was announced."""
        return self.exchanges.open(plan, self.base)

    def revise_exchange(self, plan: Plan, revision: Revision) -> list[Exchange]:
        """Reducers are lost: exchanges over their parts. Raises WireError when that cannot be."""
        return self.exchanges.revise(plan, revision)

    async def stage(self, results: Results) -> None:
        """Make results durable before they are reported as staged."""
        await self.results.stage(results)

    async def durable(self) -> None:
        """Wait until the base and its checkpoint are on the disk: nothing is announced before. Raises UserError (disk full)."""
        await self.store.durable()

    # Following the heads -----------------------------------------------------------------------------------------------

    async def advance(self) -> list[Applied]:
        """Apply every decided head that is not yet in the base; returns those applied, but for what a reform gave up meanwhile.

        A peer that leaves applies what it took part in first, or that would be trained again. It does not wait for a base.
        """
        applied = []
        log, fruitless = self.node.log, self.newest.fruitless
        while self.base.head != log.head.id and not (self.leaves() and self.newest.fruitless > fruitless):
            if self.base.round >= log.round or log.head_at(self.base.round).id != self.base.head:
                logger.warning("a reform of the swarm gave up my round %d: taking base %d", self.base.round, log.round)
                await self._jump_to_newest(forked=True)
                continue
            decided = log.at(self.base.round + 1)
            if is_rollback(decided.head):
                await self._roll_back(decided.head)
                continue
            if not decided.head.plan:
                await self._pass_reform(decided.head)
                continue
            if decided.head.base_digest != self.base.digest:
                await self._take_certified(decided.head.base_digest)
                continue
            results = await self._complete_results(decided.head)
            if results is None:
                await self._jump_to_newest(forked=False)
                continue
            await self._apply(decided.head, results)
            applied.append(Applied(decided, results.plan, results, self.base.digest))
        if self.base.head == log.head.id:
            self.newest.found()
        return [each for each in applied if log.has(each.decided.head.id, each.decided.head.round)]

    async def prepare(self) -> None:
        """Make the base that follows, when it is decided and its parts are here, so that `advance` finds it ready.

        From now on it is served. Nothing else changes: the trainer may be training meanwhile.
        """
        log, base = self.node.log, self.base
        if base.round >= log.round or log.head_at(base.round).id != base.head:
            return
        head = log.at(base.round + 1).head
        if head.plan and head.base_digest == base.digest:
            results = await self._complete_results(head)
            if results is not None:
                self._prepared = staged = await self._stage_base(head, results)
                self.store.snapshots.publish(head.id, head.round, staged.base.values, staged.digests)

    async def _apply(self, head: Head, results: Results) -> None:
        """A decided round becomes part of the base: every member gets the same bits."""
        staged, self._prepared = self._prepared, None
        if staged is None or staged.base.head != head.id:
            staged = await self._stage_base(head, results)
        old, new = self.base, staged.base
        committed = {part.index for part in results.committed(head)}
        self.store.snapshots.publish(head.id, head.round, new.values, staged.digests)
        exchanges, dropped = self.exchanges.of(results), 0
        if self.trainer is not None:
            dropped = await self.node.world.run_blocking(self.work.settle, old, new, results, committed, exchanges)
        self.work.codes_lost = False
        self.work.carried.settle(exchanges, results, committed)
        self.store.replace(new)
        self._tell_dropped(dropped, "left out of more than two rounds")
        del old
        await self._save(staged.draft)
        self.results.forget(new.round, self.store.snapshots.oldest_pinned_round)
        self.exchanges.forget(new.round)

    async def _complete_results(self, head: Head) -> Results | None:
        """The head's results with every committed part; None when nobody who is there has them any more."""
        peers = sorted({*head.members, *self.node.others()} - {self.node.peer_id})
        return await self.results.complete(head, self.node.fetcher, peers)

    async def _stage_base(self, head: Head, results: Results) -> StagedBase:
        ahead = await self.exchanges.finish_staging(head, results, self.base)
        if ahead is not None:
            return ahead
        plan, world = results.plan, self.node.world
        pieces = next_base(self.base.values, self.layout, results.committed(head), results.encoded, plan.merge, self.outer)
        staged: StagedBase = await world.run_blocking(stage_base, world.store, head.id, head.round, plan, pieces)
        return staged

    async def _pass_reform(self, head: Head) -> None:
        """A reform moves no weights: the same values under its head, duties are void, pending work stays."""
        base, run = replace(self.base, head=head.id, round=head.round, plan=None), self.node.world.run_blocking
        await run(self.store.snapshots.publish, base.head, base.round, base.values)
        if self.trainer is not None:
            await run(self.work.take_duty, base)
        self.store.replace(base)
        await self._save()

    # Taking another base -----------------------------------------------------------------------------------------------

    async def repair(self) -> None:
        """The bits differ from most members': download the pieces that differ; pending work stays on top.

        Raises PeerUnreachable.
        """
        if not self.node.log.has(self.base.head, self.base.round):
            raise PeerUnreachable("the branch of this round was given up")
        offers = await self.newest.offers(self.node.log.head_at(self.base.round))
        if not offers or offers[0].info.digest == self.base.digest:
            raise PeerUnreachable("nobody offers another base for this round")
        self._observer.tell(DigestMismatch(self.base.round, self.base.digest, offers[0].info.digest))
        right = await self.newest.download(offers, self.base.values, resumable=False)
        await self._jump(replace(right, plan=self.base.plan), True)

    async def _take_certified(self, digest: str) -> None:
        """The next round was decided on other bits: download the pieces that differ. Pending work stays on top."""
        offers = [o for o in await self.newest.offers(self.node.log.head_at(self.base.round)) if o.info.digest == digest]
        self._observer.tell(DigestMismatch(self.base.round, self.base.digest, digest))
        if not offers:
            await self._jump_to_newest(forked=False)
            return
        with contextlib.suppress(PeerUnreachable):
            right = await self.newest.download(offers, self.base.values, resumable=False)
            await self._jump(replace(right, plan=self.base.plan), True)

    async def _roll_back(self, head: Head) -> None:
        """Take an earlier base: from the own archive, or from peers that have it there. What was trained since is given up."""
        kept = await self._archived(head)
        if kept is None:
            await self._jump_to_newest(forked=False)
        else:
            await self._jump(Base(head.id, head.round, kept.values, kept.digest, None), False)

    async def _archived(self, head: Head) -> Base | None:
        """The base that this head goes back to, where it is kept here and whole."""
        assert head.control is not None
        world, wanted = self.node.world, head.control.rollback
        try:
            kept: Base | None = await world.run_blocking(load_archived, world.store, wanted, self._size, "archive")
        except UserError as error:
            logger.warning("%s", error)
            return None
        return kept if kept is not None and kept.digest == head.base_digest else None

    async def _jump_to_newest(self, forked: bool) -> None:
        """Take the newest base: too far behind to replay, or on a branch that was given up (`forked`).

        What was announced stays pending unless it may be in the rounds that are skipped, or the base is of another branch.
        """
        offers = await self.newest.offers_of_newest()
        try:
            if not offers:
                raise PeerUnreachable("nobody offers the newest base")
            base = await self.newest.download(offers, self.base.values)
        except PeerUnreachable as error:
            logger.debug("snapshot: %s", error)
            await self.newest.look_again()
            return
        skipped = {decided.head.plan: decided.head for decided in self.node.log.since(self.base.round)}
        may_be_in = self.exchanges.knows_any(set(skipped))
        may_be_in |= self.work.codes_lost and any(self.node.peer_id in head.members for head in skipped.values())
        await self._jump(base, not forked and not may_be_in)
        self.newest.clear()

    async def _jump(self, new: Base, keep_pending: bool) -> None:
        old, log = self.base, self.node.log
        known = min(new.round, log.round)  # a branch may be given up during a download
        rolled_back = any(map(is_rollback, map(log.head_at, range(old.round + 1, known + 1))))
        self.store.install(new)
        self._prepared = None
        if self.trainer is None:
            self.work.rebase(old, new, keep_pending, rolled_back)
        else:
            dropped = await self.node.world.run_blocking(self.work.rebase, old, new, keep_pending, rolled_back)
            self._tell_dropped(dropped, "the campaign was rolled back" if rolled_back else "the base was downloaded again")
        del old
        await self._save()

    def _tell_dropped(self, tokens: int, reason: str) -> None:
        """Work that was pending until now is given up."""
        if tokens:
            self._observer.tell(WorkDropped(self.base.round, tokens, reason))

    async def _save(self, draft: Draft | None = None) -> None:
        """Begin to make the base durable, and what the trainer has on top of it."""
        await self.store.save(None if self.trainer is None else self._checkpoint, draft)

    def _checkpoint(self, base: Base, before: str | None) -> Checkpoint:
        return self.work.checkpoint(self.node.world.store, base, before)
