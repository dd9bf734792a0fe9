"""This peer's replica of the base: it follows the log of decided commits.

`Replica.advance` applies every decided round in order (`_apply`), or takes another base as a whole (`jumps.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

from spes_p2p.consensus.control import is_rollback
from spes_p2p.content.fetcher import widening
from spes_p2p.errors import Refused
from spes_p2p.messages.consensus import CertifiedCommit, Commit
from spes_p2p.messages.content import ContentKind
from spes_p2p.model.layout import Layout
from spes_p2p.net.shares import ANSWERS_SHARE, JOINERS_SHARE
from spes_p2p.observe.events import Observer, WorkDropped
from spes_p2p.peer.base_store import BaseStore
from spes_p2p.peer.exchange import Exchange
from spes_p2p.peer.exchanges import Exchanges
from spes_p2p.peer.jumps import Jumps
from spes_p2p.peer.kept_results import KINDS
from spes_p2p.peer.newest_base import NewestBase
from spes_p2p.peer.node import Node
from spes_p2p.peer.own_work import OwnWork
from spes_p2p.peer.validity import Validity
from spes_p2p.rounds.accounting import Ledger
from spes_p2p.rounds.base import Base, BuiltBase
from spes_p2p.rounds.codecs import group_codecs
from spes_p2p.rounds.outer import base_size
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.results import KEPT_ROUNDS, MAX_KEPT_ROUNDS, Results, replayable_rounds
from spes_p2p.rounds.schedule import is_last
from spes_p2p.storage.interfaces import Draft
from spes_p2p.storage.scratch import memory_scratch
from spes_p2p.training.checkpoint import Checkpoint
from spes_p2p.training.interface import Trainer

logger = logging.getLogger(__name__)


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
        self, node: Node, layout: Layout, observer: Observer, base_in_memory: bool, checkpoint_every_s: float,
        arrays_in_memory: bool,
    ):
        """`base_in_memory`: hold the base and a round's arrays in memory, `arrays_in_memory`: only these; otherwise both are
        memory-mapped.

        `checkpoint_every_s`: between two checkpoints of the work, also within a phase; 0: after each round.
        """
        sync, outer = node.campaign.config.sync, node.campaign.config.outer
        self.node = node
        self.layout = layout
        self.codecs = group_codecs(sync.codec)
        scratch = memory_scratch if base_in_memory or arrays_in_memory else node.world.store.scratch
        size = base_size(layout, outer)
        is_helper = node.role == "helper"
        self._replayable = replayable_rounds(layout, self.codecs, outer)
        self._kept_rounds = self._replayable if is_helper else KEPT_ROUNDS
        self.store = BaseStore(node.world, size, base_in_memory, checkpoint_every_s)
        self.checkpoints_in_phase = checkpoint_every_s > 0
        self.progress: tuple[str, int] = "", 0
        """Commit of a base, and the steps of the phase after it that are done; after a restart, those in the checkpoint."""
        self.saved: tuple[str, int] = "", 0
        """The same of the last checkpoint."""
        self.overlaps = sync.overlap
        self.work = OwnWork(node.peer_id, layout, self.codecs, scratch, node.world.threads)
        self.validity = Validity(
            node.world, node.endpoint, node.fetcher, node.log, node.rules, layout, self.codecs, lambda: self.store.current,
            node.spawn,
        )
        node.decisions.check_with(self.validity)
        self.results = self.validity.kept
        node.relay.proposal = self.results.proposal
        self.exchanges = Exchanges(node, layout, self.results, self.work, scratch, base_in_memory)
        self.newest = NewestBase(node, size, self.store.snapshots)
        self.jumps = Jumps(
            node, self.store, self.newest, self.work, self.exchanges, partial(self.save, at_once=True), observer
        )
        self.leaves: Callable[[], bool] = lambda: False
        """Whether this peer was asked to leave."""
        self._observer = observer
        self._prepared: BuiltBase | None = None
        """The base after the commit that it names, which says on which base that is built."""
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

    @property
    def ledger(self) -> Ledger:
        """Accounts of this peer's pending work."""
        return self.work.ledger

    async def start(self) -> None:
        """Serve exchanges, results and bases from now on."""
        await self.exchanges.serve()
        content, is_open = self.node.content, self.node.campaign.config.admission == "open"
        content.is_exchanging = lambda: bool(self.exchanges.by_plan)
        of_bases = ANSWERS_SHARE if is_open else JOINERS_SHARE
        paced: dict[ContentKind, float] = {kind: of_bases for kind in get_args(ContentKind) if kind != "record"}
        content.paced = paced | dict.fromkeys(KINDS, ANSWERS_SHARE)
        await self.results.serve(content)
        if not is_open:  # there, who is sent elsewhere may come to a stranger
            content.admit["plan"] = self._admit_to_proposal
        self.store.snapshots.on_invitation = self.node.see_invitation
        await self.store.snapshots.serve(self.node.endpoint, content)

    def _admit_to_proposal(self, peer: str, plan: str) -> None:
        """Refuse a peer once where others got enough; no elector, which asks this peer alone before it votes."""
        if peer not in self.node.log.last.electorate:
            self.results.send_elsewhere(peer)

    async def replay_until(self, round_number: int) -> None:
        """Apply the stored rounds after the stored base up to this one: a checkpoint belongs to the base after it."""
        log = self.node.log
        while self.base.round < min(round_number, log.round) and log.has(self.base.commit, self.base.round):
            commit = log.at(self.base.round + 1).commit
            if commit.plan not in self.results.by_plan or commit.base_digest != self.base.digest:
                return  # `advance` gets what is missing
            try:
                results = await self.complete_results(commit)
            except Refused:
                return
            if results is None:
                return
            await self._apply(commit, results)
            self.work.sent_update_lost = True

    def announce(self) -> None:
        """Take all pending work as the update of the next round."""
        log, base = self.node.log, self.base
        is_known = log.has(base.commit, base.round)
        self.work.announce(base.values, is_known and is_last(log.commit_at(base.round), self.node.campaign.config))

    def validation_loss(self) -> float:
        """Return the held-out loss of the base. Called between two steps."""
        return self.work.validation_loss(self.base.values)

    async def open_exchange(self, plan: Plan) -> Exchange:
        """Take part in a plan with the announced update."""
        round_s = asyncio.get_running_loop().time() - self.node.decisions.learned_at
        exchange: Exchange = await self.node.world.run_blocking(self.exchanges.open, plan, self.base, round_s)
        self.exchanges.opened()
        return exchange

    async def advance(self) -> list[Applied]:
        """Apply every decided commit after the base; return those applied that no reform gave up meanwhile.

        A leaving peer applies the rounds it took part in, too: otherwise it would return their samples. It does not wait for a
        base that nobody offers.
        """
        applied = []
        log, failures = self.node.log, self.newest.failures
        while self.base.commit != log.last.id and not (self.leaves() and self.newest.failures > failures):
            if self.base.round >= log.round or not log.has(self.base.commit, self.base.round):
                is_ahead = self.base.round > log.round and not log.gave_up(self.base.commit)
                reason = "is of a round that no peer knows" if is_ahead else "was given up by a reform"
                reason = "is older than the log" if self.base.round < log.begins else reason
                logger.warning("base %d of this peer %s: taking base %d", self.base.round, reason, log.round)
                await self.jumps.take_newest(forked=True)
                continue
            decided = log.at(self.base.round + 1)
            if is_rollback(decided.commit):
                await self.jumps.roll_back(decided.commit)
                continue
            if not decided.commit.plan:
                await self._pass_reform(decided.commit)
                continue
            if decided.commit.base_digest != self.base.digest:
                await self.jumps.take_certified(decided.commit.base_digest)
                continue
            try:
                results = await self.complete_results(decided.commit)
            except Refused as refused:
                await self._stay_before(decided, refused)
                continue
            if results is None:
                await self.jumps.take_newest(forked=False)
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
                results = await self.complete_results(commit)
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
        is_member = results.plan.index(self.node.peer_id) is not None
        self._leave_base(has_saved_work=not is_member or (self.overlaps and self.saved[1] > 0))
        self.store.replace(new)
        if dropped:
            self._observer(WorkDropped(new.round, dropped, "left out of more than two rounds"))
        if built.draft is None:
            await self.results.stage_fetched(results)
        await self.save(built.draft)
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

    async def complete_results(self, commit: Commit) -> Results | None:
        """Return the commit's results with every committed part; None when no reachable peer has one of them.

        Of older rounds than all keep, only helpers and the donors of a downloaded base are asked.
        """
        missed = self.node.log.round - commit.round + 1
        if commit.plan not in self.results.by_plan and missed > self._kept_elsewhere():
            return None
        others, members = set(self.node.contacts), set(commit.members)
        keep = members if missed <= KEPT_ROUNDS else {*commit.helpers, *self.newest.donors}
        peers = sorted((others | members if missed <= KEPT_ROUNDS else keep) - {self.node.peer_id})
        self.node.world.rng.shuffle(peers)
        is_trusted = self.node.endpoint.shares.is_trusted
        for some in widening(sorted(peers, key=lambda peer: (peer not in keep & others, not is_trusted(peer)))):
            results = await self.results.complete(commit, self.node.fetcher, some)
            if results is not None:
                return results
        return None

    def _kept_elsewhere(self) -> int:
        """Return the number of last rounds whose results others keep: more while they still serve a downloaded base."""
        is_downloaded = self.base.round < self.newest.downloaded_round + MAX_KEPT_ROUNDS
        return max(self._replayable, MAX_KEPT_ROUNDS if is_downloaded else 0)

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
        self._leave_base(has_saved_work=True)
        self.store.replace(base)
        await self.save()

    def _leave_base(self, has_saved_work: bool) -> None:
        """Call for a checkpoint if that of this base has work that is still pending: the next base would leave it useless.

        `has_saved_work`: whether the next base leaves out work that it has, if it has any.
        """
        if has_saved_work and self.saved[0] == self.base.commit and self.trainer is not None and self.ledger.max_pending_tokens:
            self.store.call_for_checkpoint()

    async def save_moments(self) -> None:
        """Make the moments durable: a peer that leaves may come back. Raises UserError (disk full)."""
        if self.trainer is not None:
            await self.store.save_checkpoint(partial(self.work.moments, self.node.world.store))

    async def save(self, draft: Draft | None = None, at_once: bool = False) -> None:
        """Begin to make durable what is due of the base and of the work on top of it; `at_once`: both."""
        await self.store.save(None if self.trainer is None else self._checkpoint, draft, at_once)

    def _checkpoint(self, base: Base, before: str | None) -> Checkpoint:
        steps = self.progress[1] if self.progress[0] == base.commit else 0
        self.saved = base.commit, steps
        return self.work.checkpoint(self.node.world.store, base, before, steps, is_announced=self.overlaps and steps > 0)
