"""This peer's replica of the base: it follows the log of decided commits.

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
from spes_p2p.messages.consensus import CertifiedCommit, Commit
from spes_p2p.messages.rounds import Plan, Revision
from spes_p2p.model.layout import Layout
from spes_p2p.observe.events import DigestMismatch, Observer, WorkDropped
from spes_p2p.peer.base_store import BaseStore
from spes_p2p.peer.exchange import Exchange
from spes_p2p.peer.exchanges import Exchanges
from spes_p2p.peer.kept_results import KeptResults
from spes_p2p.peer.newest_base import RETRY_S, NewestBase
from spes_p2p.peer.node import Node
from spes_p2p.peer.own_work import OwnWork
from spes_p2p.rounds.accounting import Ledger
from spes_p2p.rounds.apply import next_base
from spes_p2p.rounds.archive import load_archived
from spes_p2p.rounds.base import Base, StagedBase, stage_base
from spes_p2p.rounds.codecs import group_codecs
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.results import Results
from spes_p2p.storage.interfaces import Draft
from spes_p2p.storage.scratch import memory_scratch
from spes_p2p.training.checkpoint import Checkpoint
from spes_p2p.training.interface import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Applied:
    """One commit that was applied, for whoever reports it."""

    decided: CertifiedCommit
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

    async def learn_own_commit(self) -> None:
        """Wait until the log reaches the base: it falls short of it when its file was harmed, and others know the rest.

        Or the base is of a branch that was given up: then `advance` takes another.
        """
        log, waited = self.node.log, 0
        while self.base.round > log.round and not log.gave_up(self.base.commit):
            await self.node.learn_from_all()
            if self.base.round > log.round:
                if waited % 30 == 0:
                    logger.warning(
                        "the log of commits ends at round %d, the base is of round %d: waiting for a peer that knows the rest",
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

    # Following the commits -----------------------------------------------------------------------------------------------

    async def advance(self) -> list[Applied]:
        """Apply every decided commit that is not yet in the base; returns those applied, but for what a reform gave up
        meanwhile.

        A peer that leaves applies what it took part in first, or that would be trained again. It does not wait for a base.
        """
        applied = []
        log, fruitless = self.node.log, self.newest.fruitless
        while self.base.commit != log.last.id and not (self.leaves() and self.newest.fruitless > fruitless):
            if self.base.round >= log.round or log.commit_at(self.base.round).id != self.base.commit:
                logger.warning("a reform of the swarm gave up my round %d: taking base %d", self.base.round, log.round)
                await self._jump_to_newest(forked=True)
                continue
            decided = log.at(self.base.round + 1)
            if is_rollback(decided.commit):
                await self._roll_back(decided.commit)
                continue
            if not decided.commit.plan:
                await self._pass_reform(decided.commit)
                continue
            if decided.commit.base_digest != self.base.digest:
                await self._take_certified(decided.commit.base_digest)
                continue
            results = await self._complete_results(decided.commit)
            if results is None:
                await self._jump_to_newest(forked=False)
                continue
            await self._apply(decided.commit, results)
            applied.append(Applied(decided, results.plan, results, self.base.digest))
        if self.base.commit == log.last.id:
            self.newest.found()
        return [each for each in applied if log.has(each.decided.commit.id, each.decided.commit.round)]

    async def prepare(self) -> None:
        """Make the base that follows, when it is decided and its parts are here, so that `advance` finds it ready.

        From now on it is served. Nothing else changes: the trainer may be training meanwhile.
        """
        log, base = self.node.log, self.base
        if base.round >= log.round or log.commit_at(base.round).id != base.commit:
            return
        commit = log.at(base.round + 1).commit
        if commit.plan and commit.base_digest == base.digest:
            results = await self._complete_results(commit)
            if results is not None:
                self._prepared = staged = await self._stage_base(commit, results)
                self.store.snapshots.publish(commit.id, commit.round, staged.base.values, staged.digests)

    async def _apply(self, commit: Commit, results: Results) -> None:
        """A decided round becomes part of the base: every member gets the same bits."""
        staged, self._prepared = self._prepared, None
        if staged is None or staged.base.commit != commit.id:
            staged = await self._stage_base(commit, results)
        old, new = self.base, staged.base
        committed = {part.index for part in results.committed(commit)}
        self.store.snapshots.publish(commit.id, commit.round, new.values, staged.digests)
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

    async def _complete_results(self, commit: Commit) -> Results | None:
        """The commit's results with every committed part; None when nobody who is there has them any more."""
        peers = sorted({*commit.members, *self.node.others()} - {self.node.peer_id})
        return await self.results.complete(commit, self.node.fetcher, peers)

    async def _stage_base(self, commit: Commit, results: Results) -> StagedBase:
        ahead = await self.exchanges.finish_staging(commit, results, self.base)
        if ahead is not None:
            return ahead
        plan, world = results.plan, self.node.world
        pieces = next_base(self.base.values, self.layout, results.committed(commit), results.encoded, plan.merge, self.outer)
        staged: StagedBase = await world.run_blocking(stage_base, world.store, commit.id, commit.round, plan, pieces)
        return staged

    async def _pass_reform(self, commit: Commit) -> None:
        """A reform moves no weights: the same values under its commit, assignments are void, pending work stays."""
        base, run = replace(self.base, commit=commit.id, round=commit.round, plan=None), self.node.world.run_blocking
        await run(self.store.snapshots.publish, base.commit, base.round, base.values)
        if self.trainer is not None:
            await run(self.work.take_assignment, base)
        self.store.replace(base)
        await self._save()

    # Taking another base -----------------------------------------------------------------------------------------------

    async def repair(self) -> None:
        """The bits differ from most members': download the pieces that differ; pending work stays on top.

        Raises PeerUnreachable.
        """
        if not self.node.log.has(self.base.commit, self.base.round):
            raise PeerUnreachable("the branch of this round was given up")
        offers = await self.newest.offers(self.node.log.commit_at(self.base.round))
        if not offers or offers[0].info.digest == self.base.digest:
            raise PeerUnreachable("nobody offers another base for this round")
        self._observer.tell(DigestMismatch(self.base.round, self.base.digest, offers[0].info.digest))
        right = await self.newest.download(offers, self.base.values, resumable=False)
        await self._jump(replace(right, plan=self.base.plan), True)

    async def _take_certified(self, digest: str) -> None:
        """The next round was decided on other bits: download the pieces that differ. Pending work stays on top."""
        offers = [o for o in await self.newest.offers(self.node.log.commit_at(self.base.round)) if o.info.digest == digest]
        self._observer.tell(DigestMismatch(self.base.round, self.base.digest, digest))
        if not offers:
            await self._jump_to_newest(forked=False)
            return
        with contextlib.suppress(PeerUnreachable):
            right = await self.newest.download(offers, self.base.values, resumable=False)
            await self._jump(replace(right, plan=self.base.plan), True)

    async def _roll_back(self, commit: Commit) -> None:
        """Take an earlier base: from the own archive, or from peers that have it there. What was trained since is given up."""
        kept = await self._archived(commit)
        if kept is None:
            await self._jump_to_newest(forked=False)
        else:
            await self._jump(Base(commit.id, commit.round, kept.values, kept.digest, None), False)

    async def _archived(self, commit: Commit) -> Base | None:
        """The base that this commit goes back to, where it is kept here and whole."""
        assert commit.control is not None
        world, wanted = self.node.world, commit.control.rollback
        try:
            kept: Base | None = await world.run_blocking(load_archived, world.store, wanted, self._size, "archive")
        except UserError as error:
            logger.warning("%s", error)
            return None
        return kept if kept is not None and kept.digest == commit.base_digest else None

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
        skipped = {decided.commit.plan: decided.commit for decided in self.node.log.since(self.base.round)}
        may_be_in = self.exchanges.knows_any(set(skipped))
        may_be_in |= self.work.codes_lost and any(self.node.peer_id in commit.members for commit in skipped.values())
        await self._jump(base, not forked and not may_be_in)
        self.newest.clear()

    async def _jump(self, new: Base, keep_pending: bool) -> None:
        old, log = self.base, self.node.log
        known = min(new.round, log.round)  # a branch may be given up during a download
        rolled_back = any(map(is_rollback, map(log.commit_at, range(old.round + 1, known + 1))))
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
