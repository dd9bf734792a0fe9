"""This peer's replica of the base: it follows the log of decided commits.

`Replica.advance` applies every decided round in order (`_apply`). Where that is not possible it takes another base as a whole
(`_jump`): the newest one when the rounds in between cannot be replayed or the branch was given up, the certified one when the
bits are wrong, an archived one after a rollback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from spes_p2p.consensus.control import is_rollback
from spes_p2p.content.fetcher import widening
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.messages.consensus import CertifiedCommit, Commit
from spes_p2p.model.layout import Layout
from spes_p2p.observe.events import DigestMismatch, Observer, WorkDropped
from spes_p2p.peer.base_store import BaseStore
from spes_p2p.peer.exchange import Exchange
from spes_p2p.peer.exchanges import Exchanges
from spes_p2p.peer.newest_base import RETRY_S, NewestBase
from spes_p2p.peer.node import Node
from spes_p2p.peer.own_work import OwnWork
from spes_p2p.peer.validity import Validity
from spes_p2p.rounds.accounting import Ledger
from spes_p2p.rounds.archive import load_archived
from spes_p2p.rounds.base import Base, BuiltBase
from spes_p2p.rounds.codecs import group_codecs
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.results import KEPT_ROUNDS, Results, replayable_rounds
from spes_p2p.storage.interfaces import Draft
from spes_p2p.storage.scratch import memory_scratch
from spes_p2p.training.checkpoint import Checkpoint, load_checkpoint, newest_checkpoint
from spes_p2p.training.interface import Trainer

logger = logging.getLogger(__name__)

MakeTrainer = Callable[[np.ndarray, tuple[int, ...]], Trainer]
"""Builds the trainer on a base (flat float32) with these owned experts."""


@dataclass(frozen=True)
class Applied:
    """One commit that was applied, for the report."""

    decided: CertifiedCommit
    plan: Plan
    results: Results
    base_digest: str
    """Digest of the new base."""
    bounded: tuple[tuple[str, float], ...]
    """By name, the groups whose step was scaled down, and the factor."""


class Replica:
    """The base, and the pending work on top of it."""

    def __init__(
        self, node: Node, layout: Layout, observer: Observer, base_in_memory: bool = False, checkpoint_every_s: float = 0.0,
        arrays_in_memory: bool = False,
    ):
        """`base_in_memory`: hold the base and a round's arrays in memory, `arrays_in_memory`: only these; otherwise both are
        memory-mapped.

        `checkpoint_every_s`: between two checkpoints of the work, also within a phase; 0: after each round.
        """
        sync = node.campaign.config.sync
        self.node = node
        self.layout = layout
        self.outer = node.campaign.config.outer
        self.codecs = group_codecs(sync.codec)
        scratch = memory_scratch if base_in_memory or arrays_in_memory else node.world.store.scratch
        self._size = base_size(layout, self.outer)
        is_helper = node.role == "helper"
        self._kept_rounds = replayable_rounds(layout, self.codecs, self.outer) if is_helper else KEPT_ROUNDS
        self.store = BaseStore(node.world, self._size, base_in_memory, checkpoint_every_s)
        self.checkpoints_in_phase = checkpoint_every_s > 0 and not sync.overlap
        self.resumed: tuple[str, int] = "", 0
        """Commit of the base of the checkpoint that a restart continued from, and the steps of the phase after it."""
        self.work = OwnWork(node.peer_id, layout, self.codecs, scratch)
        self.validity = Validity(
            node.world, node.endpoint, node.fetcher, node.log, node.rules, layout, self.codecs, lambda: self.store.current,
            node.spawn,
        )
        node.decisions.check_with(self.validity)
        self.results = self.validity.kept
        self.exchanges = Exchanges(node, layout, self.results, self.work, scratch, base_in_memory)
        self.newest = NewestBase(node, self._size, self.store.snapshots)
        self.leaves: Callable[[], bool] = lambda: False
        """Whether this peer was asked to leave."""
        self._observer = observer
        self._prepared: BuiltBase | None = None
        self._refused = ""
        """Id of the certified commit that was refused last."""

    @property
    def has_base(self) -> bool:
        """Whether there is a base yet."""
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
        """Accounts of this peer's pending work."""
        return self.work.ledger

    async def start(self) -> None:
        """Serve exchanges, results and bases from now on."""
        await self.exchanges.serve()
        await self.results.serve(self.node.content)
        await self.store.snapshots.serve(self.node.endpoint, self.node.content)

    async def restore(self, where: str) -> bool:
        """Load base and staged results from this run-dir; False when there is no whole base."""
        if not await self.store.load(where, self.validity.derive):
            return False
        await self.node.world.run_blocking(self.results.load)
        self.work.sent_update_lost = True
        return True

    async def learn_own_commit(self) -> None:
        """Wait until the log reaches the base, in case the log's file was damaged: other peers have the rest.

        Also returns when the base's branch was given up: `advance` takes another base then.
        """
        log, waited = self.node.log, 0
        while self.base.round > log.round and not log.gave_up(self.base.commit):
            await self.node.decisions.learn_from_all(self.node.others())
            if self.base.round > log.round:
                if waited % 30 == 0:
                    logger.warning(
                        "the log of commits ends at round %d, the base is of round %d: waiting for a peer that has the rest",
                        log.round, self.base.round,
                    )
                waited += 1
                await asyncio.sleep(RETRY_S)
                await self.node.refresh_contacts()

    async def download_base(self, on_progress: Callable[[int, int], None]) -> None:
        """Download and verify the newest base; wait until a peer has it."""
        while True:
            offers = await self.newest.offers_of_newest()
            if offers:
                with contextlib.suppress(PeerUnreachable):
                    await self.store.install(await self.newest.download(offers, None, on_progress))
                    await self._save(at_once=True)
                    await self.durable()
                    self.newest.clear()
                    return
            await self.newest.wait_for_donors()

    async def begin_training(self, make_trainer: MakeTrainer, restored: bool) -> None:
        """Make the trainer on the base; `restored`: continue from the checkpoint in this run-dir."""
        run = self.node.world.run_blocking
        if restored:
            await self._replay_until(await run(newest_checkpoint, self.node.world.store))
        base = self.base
        assignment = base.assignment(self.node.peer_id)
        owned = assignment.owned if assignment is not None else ()
        self.trainer = await run(make_trainer, base.values, owned)
        if restored:
            await run(self._load_checkpoint, base)

    async def _replay_until(self, round_number: int) -> None:
        """Apply the stored rounds after the stored base up to this one: a checkpoint belongs to the base after it."""
        log = self.node.log
        while self.base.round < min(round_number, log.round) and log.has(self.base.commit, self.base.round):
            commit = log.at(self.base.round + 1).commit
            if commit.plan not in self.results.by_plan or commit.base_digest != self.base.digest:
                return  # `advance` gets what is missing
            try:
                results = await self._complete_results(commit)
            except Refused:
                return
            if results is None:
                return
            await self._apply(commit, results)
        self.work.sent_update_lost = True

    def _load_checkpoint(self, base: Base) -> None:
        """Continue from the checkpoint of this base, if there is one."""
        trainer = self.trainer
        assert trainer is not None
        found = load_checkpoint(self.node.world.store, trainer, self.ledger, self.layout, base.commit, base.round)
        if found is not None:
            self.store.checkpoint = found.name
        if found is not None and found.is_whole:
            self.resumed = base.commit, found.steps
            self.announce()

    def announce(self) -> None:
        """Take all pending work as the update of the next round."""
        self.work.announce(self.base.values)

    def validation_loss(self) -> float:
        """Return the held-out loss of the base. Called between two steps."""
        return self.work.validation_loss(self.base.values)

    async def open_exchange(self, plan: Plan) -> Exchange:
        """Take part in a plan with the announced update."""
        exchange: Exchange = await self.node.world.run_blocking(self.exchanges.open, plan, self.base)
        self.exchanges.opened()
        return exchange

    async def durable(self) -> None:
        """Wait until what is being saved is on disk, as it must be before an announcement. Raises UserError (disk full)."""
        await self.store.durable()

    async def advance(self) -> list[Applied]:
        """Apply every decided commit after the base; return those applied that no reform gave up meanwhile.

        A leaving peer applies the rounds it took part in, too: otherwise it would return their samples. It does not wait for a
        base that nobody offers.
        """
        applied = []
        log, failures = self.node.log, self.newest.failures
        while self.base.commit != log.last.id and not (self.leaves() and self.newest.failures > failures):
            if self.base.round >= log.round or not log.has(self.base.commit, self.base.round):
                reason = "is older than the log" if self.base.round < log.begins else "was given up by a reform"
                logger.warning("base %d of this peer %s: taking base %d", self.base.round, reason, log.round)
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
            try:
                results = await self._complete_results(decided.commit)
            except Refused as refused:
                await self._stay_before(decided, refused)
                continue
            if results is None:
                await self._jump_to_newest(forked=False)
                continue
            bounded = await self._apply(decided.commit, results)
            applied.append(Applied(decided, results.plan, results, self.base.digest, bounded))
        if self.base.commit == log.last.id:
            self.newest.found()
        return [each for each in applied if log.has(each.decided.commit.id, each.decided.commit.round)]

    async def _stay_before(self, decided: CertifiedCommit, refused: Refused) -> None:
        """Wait for another branch: a majority of the electors signed a commit that cannot be."""
        if decided.commit.id != self._refused:
            self._refused = decided.commit.id
            signers = ", ".join(vote.elector for vote in decided.votes)
            logger.error("round %d is not applied: %s; signed by %s", decided.commit.round, refused, signers)
        await self.newest.wait_for_donors()

    async def prepare(self) -> None:
        """Compute and serve the base of the next round, if it is decided, so that `advance` finds it ready.

        Nothing else changes: the trainer may be training meanwhile.
        """
        log, base = self.node.log, self.base
        if base.round >= log.round or not log.has(base.commit, base.round):
            return
        commit = log.at(base.round + 1).commit
        if commit.plan and commit.base_digest == base.digest:
            try:
                results = await self._complete_results(commit)
            except Refused:
                return  # `advance` says so
            if results is not None:
                self._prepared = built = await self._build_base(commit, results)
                await self.node.world.run_blocking(self.store.serve, built.base)

    async def _apply(self, commit: Commit, results: Results) -> tuple[tuple[str, float], ...]:
        """Apply a decided round to the base; return the groups whose step was scaled down. Every member gets the same bits."""
        built, self._prepared = self._prepared, None
        if built is None or built.base.commit != commit.id:
            built = await self._build_base(commit, results)
        new, run = built.base, self.node.world.run_blocking
        dropped = await run(self._settle, new, results, {part.index for part in results.committed(commit)})
        self.work.sent_update_lost = False
        self.store.replace(new)
        self._report_dropped(dropped, "left out of more than two rounds")
        await self._save(built.draft)
        pinned = self.store.snapshots.oldest_pinned_round
        await run(self.results.forget, new.round, self._kept_rounds, self.store.durable_round, pinned)
        await run(self.exchanges.forget, new.round, results.plan.id)
        return built.bounded

    def _settle(self, new: Base, results: Results, committed: set[int]) -> int:
        """Serve the next base, and account for what it includes of this peer's work; return the tokens that are dropped."""
        self.store.serve(new)
        exchanges = self.exchanges.of(results)
        dropped = self.work.settle(self.base, new, results, committed, exchanges) if self.trainer is not None else 0
        self.work.residuals.settle(exchanges, results, committed)
        return dropped

    async def _complete_results(self, commit: Commit) -> Results | None:
        """Return the commit's results with every committed part; None when no reachable peer has one of them."""
        others, members = set(self.node.others()), set(commit.members)
        peers = sorted((others | members) - {self.node.peer_id})
        self.node.world.rng.shuffle(peers)
        for some in widening(sorted(peers, key=lambda peer: peer not in others or peer not in members)):
            results = await self.results.complete(commit, self.node.fetcher, some)
            if results is not None:
                return results
        return None

    async def _build_base(self, commit: Commit, results: Results) -> BuiltBase:
        ahead = await self.exchanges.finish_base(commit, results, self.base)
        if ahead is not None:
            return ahead
        builder = self.exchanges.make_builder(self.base, results)
        return await builder.finish(commit, results)

    async def _pass_reform(self, commit: Commit) -> None:
        """Apply a reform: the base's values stay, as does pending work; assignments are void."""
        base, run = replace(self.base, commit=commit.id, round=commit.round, plan=None), self.node.world.run_blocking
        await run(self.store.serve, base)
        if self.trainer is not None:
            await run(self.work.take_assignment, base)
        self.store.replace(base)
        await self._save()

    async def repair(self) -> None:
        """Fetch the pieces whose digests differ from the majority's. Pending work stays on top. Raises PeerUnreachable."""
        if not self.node.log.has(self.base.commit, self.base.round):
            raise PeerUnreachable("the branch of this round was given up")
        offers = await self.newest.offers(self.node.log.commit_at(self.base.round))
        if not offers or offers[0].info.digest == self.base.digest:
            raise PeerUnreachable("no peer offers another base for this round")
        self._observer(DigestMismatch(self.base.round, self.base.digest, offers[0].info.digest))
        right = await self.newest.download(offers, self.base.values, resumable=False)
        await self._jump(replace(right, plan=self.base.plan), True)

    async def _take_certified(self, digest: str) -> None:
        """Fetch the pieces that differ from the base that the next commit certifies. Pending work stays on top."""
        offers = [o for o in await self.newest.offers(self.node.log.commit_at(self.base.round)) if o.info.digest == digest]
        self._observer(DigestMismatch(self.base.round, self.base.digest, digest))
        if not offers:
            await self._jump_to_newest(forked=False)
            return
        with contextlib.suppress(PeerUnreachable):
            right = await self.newest.download(offers, self.base.values, resumable=False)
            await self._jump(replace(right, plan=self.base.plan), True)

    async def _roll_back(self, commit: Commit) -> None:
        """Take an earlier base, from this peer's archive or another's. Work since then is dropped."""
        kept = await self._archived(commit)
        if kept is None:
            await self._jump_to_newest(forked=False)
        else:
            await self._jump(replace(kept, commit=commit.id, round=commit.round, plan=None), False)

    async def _archived(self, commit: Commit) -> Base | None:
        """Return the base that this commit goes back to, if it is archived here undamaged."""
        assert commit.control is not None
        world, wanted = self.node.world, commit.control.rollback
        try:
            kept: Base | None = await world.run_blocking(
                load_archived, world.store, wanted, self._size, "archive", world.threads
            )
        except UserError as error:
            logger.warning("%s", error)
            return None
        return kept if kept is not None and kept.digest == commit.base_digest else None

    async def _jump_to_newest(self, forked: bool) -> None:
        """Take the newest base: this peer is too far behind to replay, or on a branch that was given up (`forked`).

        Pending work is kept unless a skipped round may include it, or the base is of another branch.
        """
        offers = await self.newest.offers_of_newest()
        try:
            if not offers:
                raise PeerUnreachable("no peer offers the newest base")
            base = await self.newest.download(offers, self.base.values)
        except PeerUnreachable as error:
            logger.debug("snapshot: %s", error)
            await self.newest.wait_for_donors()
            return
        skipped = {decided.commit.plan: decided.commit for decided in self.node.log.since(self.base.round)}
        may_be_in = self.exchanges.knows_any(set(skipped))
        may_be_in |= self.work.sent_update_lost and any(self.node.peer_id in commit.members for commit in skipped.values())
        await self._jump(base, not forked and not may_be_in)
        self.newest.clear()

    async def _jump(self, new: Base, keep_pending: bool) -> None:
        old, log = self.base, self.node.log
        known = min(new.round, log.round)  # a branch may be given up during a download
        skipped = log.since(old.round, max(0, known - old.round))
        rolled_back = any(is_rollback(each.commit) for each in skipped)
        await self.store.install(new)
        self._prepared = None
        dropped = await self.node.world.run_blocking(self.work.rebase, old, new, keep_pending, rolled_back)
        if self.trainer is not None:
            self._report_dropped(dropped, "the campaign was rolled back" if rolled_back else "the base was downloaded again")
        del old
        await self._save(at_once=True)

    def _report_dropped(self, tokens: int, reason: str) -> None:
        """Report pending work that is dropped."""
        if tokens:
            self._observer(WorkDropped(self.base.round, tokens, reason))

    async def save_in_phase(self, steps: int) -> None:
        """Begin to make durable the work of a phase after this many steps, if that is due. Raises UserError (disk full)."""
        await self.store.save(partial(self._checkpoint, steps=steps))

    async def _save(self, draft: Draft | None = None, at_once: bool = False) -> None:
        """Begin to make durable what is due of the base and of the work on top of it."""
        await self.store.save(None if self.trainer is None else self._checkpoint, draft, at_once)

    def _checkpoint(self, base: Base, before: str | None, steps: int = 0) -> Checkpoint:
        return self.work.checkpoint(self.node.world.store, base, before, steps)
