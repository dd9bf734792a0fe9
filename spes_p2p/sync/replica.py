"""This peer's copy of the base: how it gets one, how it follows the decided heads, and how its own work is accounted for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.model.layout import Layout
from spes_p2p.observe.events import DigestMismatch, Observer, WorkDropped
from spes_p2p.swarm.electors import is_rollback
from spes_p2p.swarm.interfaces import Draft
from spes_p2p.swarm.node import Node
from spes_p2p.swarm.records import Decided, Head, Manifest, Plan, Revision
from spes_p2p.swarm.rpc import Talk
from spes_p2p.swarm.tasks import end_tasks
from spes_p2p.swarm.wire import WireError, pack, unpack
from spes_p2p.sync.accounting import Ledger
from spes_p2p.sync.apply import next_base
from spes_p2p.sync.archive import load_archived
from spes_p2p.sync.base import Base, StagedBase, in_memory, load_base, pieces_of, stage_base
from spes_p2p.sync.carried import Carried
from spes_p2p.sync.codecs import group_codecs
from spes_p2p.sync.exchange import PULL, PUSH, Exchange, PullRequest, PushHeader, fetch_parts, serve_parts
from spes_p2p.sync.outer import base_size
from spes_p2p.sync.parts import Part, part_ranges
from spes_p2p.sync.results import (
    BODIES_OF,
    RESULTS_OF,
    Results,
    bodies_name,
    load_results,
    results_name,
    round_of,
    save_results,
)
from spes_p2p.sync.scratch import memory_scratch
from spes_p2p.sync.snapshot import PIECES, SNAPSHOT, KeptPieces, Offer, Snapshots, collect_offers, download, newest_bases
from spes_p2p.sync.spool import Spool
from spes_p2p.sync.staging import Staging
from spes_p2p.training.checkpoint import Checkpoint, take_checkpoint, write_checkpoint
from spes_p2p.training.interface import Trainer

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")

RESULTS = "results"
KEPT_ROUNDS, MAX_KEPT_ROUNDS = 4, 16
"""Encoded results are kept for so many rounds, for who replays them."""
RETRY_S = 1.0
ASK_EVERY = 10
"""After so many fruitless looks for the newest base the helpers are asked to go on without it."""


@dataclass(frozen=True)
class ResultsRequest:
    """A plan and its manifests, by plan id."""

    plan: str


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
        """`base_in_memory`: hold the base in memory, and what a round keeps beside it; otherwise both are memory-mapped.

        Others are served from the file.
        """
        sync = node.campaign.config.sync
        self.node = node
        self.layout = layout
        self.codecs = group_codecs(sync.codec)
        self.part_bytes = sync.part_bytes
        self.outer = node.campaign.config.outer
        self._scratch = memory_scratch if base_in_memory else node.world.store.scratch
        self.ledger = Ledger(layout, part_ranges(layout, self.codecs, self.part_bytes), self._scratch)
        self.snapshots = Snapshots(sync.silence_s)
        self._base_in_memory = base_in_memory
        self._downloaded_pieces = KeptPieces(node.world.store)
        self.trainer: Trainer | None = None
        self.leaves: Callable[[], bool] = lambda: False
        """Was this peer asked to leave?"""
        self.base: Base
        self._observer = observer
        self._exchanges: dict[tuple[str, int], Exchange] = {}
        """By plan id and revision."""
        self._kept: dict[str, Results] = {}
        self._codes_lost = False
        """Was this peer restarted, so that a push of its last life may be in a round that it knows nothing of?"""
        self._prepared: StagedBase | None = None
        self._staging: Staging | None = None
        """Of the plan whose results arrive."""
        self.checkpoint: str | None = None
        """Name of the one that belongs to the base on disk."""
        self._saving: asyncio.Future[None] | None = None
        self.carried = Carried(self._scratch)
        self._news = asyncio.Event()
        self._lost_after, self._lost_since, self._fruitless = "", 0.0, 0
        """The head whose base I need and nobody offers, since when, and how often I could not get the newest base."""

    async def start(self) -> None:
        """Serve what I have."""
        board = self.node.board
        for method, handler in {
            PUSH: self._on_push, PULL: self._on_pull, RESULTS: self._on_results,
            SNAPSHOT: self.snapshots.on_snapshot, PIECES: self.snapshots.on_pieces,
        }.items():
            await board.serve(method, handler)

    # Getting a base ----------------------------------------------------------------------------------------------------

    def restore(self, where: str) -> bool:
        """Take up the base and the staged results of this run-dir; False when there is none. Raises UserError when damaged."""
        base = load_base(self.node.world.store, base_size(self.layout, self.outer), where)
        if base is None:
            return False
        for name in self.node.world.store.names(RESULTS_OF):
            with contextlib.suppress(ValueError):
                results = load_results(self.node.world.store, name, self.layout, self.codecs, self.part_bytes)
                if results is not None:
                    self._kept[results.plan.id] = results
        self._install(base)
        if self._base_in_memory:
            self.base = in_memory(base)
        self._codes_lost = True
        return True

    async def learn_own_head(self) -> None:
        """Wait until the log reaches my base: it falls short of it when its file was harmed, and others know the rest.

        Or my base is of a branch that was given up: then `advance` takes another.
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
            offers = await self._offers_of_newest()
            if offers:
                with contextlib.suppress(PeerUnreachable):
                    values = await self._download(offers, None, on_progress, self._downloaded_pieces)
                    self._install(self._downloaded(offers[0], values))
                    await self._save()
                    await self.durable()
                    self._downloaded_pieces.clear()
                    return
            await self._look_again()

    async def _look_again(self) -> None:
        """The newest base could not be had: see who is there in a while."""
        self._fruitless += 1
        if self.base_lost_since() is not None and self._fruitless % ASK_EVERY == 0:
            logger.info("nobody who is there has the base of round %d; waiting for a peer that has it", self.node.log.round)
            if self.node.role != "helper":
                await self.node.ask_for_reform()
        await asyncio.sleep(RETRY_S)
        await self.node.meet()

    def base_lost_since(self) -> float | None:
        """Loop time since when nobody who is there has the base of the last head, nor I; None when I know of none missing."""
        return self._lost_since if self._lost_after == self.node.log.head.id else None

    async def newest_at_hand(self, peers: Sequence[str]) -> int | None:
        """The last round of my log whose base I have, or one of these peers offers; None when there is none."""
        known = [*await newest_bases(self.node.board, peers), *self.snapshots.infos]
        return max((info.round for info in known if self.node.log.has(info.head, info.round)), default=None)

    async def repair(self) -> None:
        """My bits differ from most members': download the pieces that differ; pending work stays on top."""
        if not self.node.log.has(self.base.head, self.base.round):
            raise PeerUnreachable("the branch of this round was given up")
        offers = await self._offers(self.node.log.head_at(self.base.round))
        if not offers or offers[0].info.digest == self.base.digest:
            raise PeerUnreachable("nobody offers another base for this round")
        self._observer.tell(DigestMismatch(self.base.round, self.base.digest, offers[0].info.digest))
        values = await self._download(offers, self.base.values)
        await self._jump(Base(self.base.head, self.base.round, _frozen(values), offers[0].info.digest, self.base.plan), True)

    async def _offers_of_newest(self) -> list[Offer]:
        """Offers of the newest head that living peers have, after learning its certificate."""
        await self.node.learn_from_all()
        head = self.node.log.head
        offers = [offer for offer in await self._offers(head) if offer.info.round == head.round]
        if head.round < 0 or is_rollback(head):
            offers = [offer for offer in offers if offer.info.digest == head.base_digest]
        if offers:
            self._lost_after = ""
        elif self._lost_after != head.id:
            self._lost_after, self._lost_since = head.id, asyncio.get_running_loop().time()
        return offers

    async def _take_certified(self, digest: str) -> None:
        """The next round was decided on other bits than mine: download what differs. Pending work stays on top."""
        offers = [o for o in await self._offers(self.node.log.head_at(self.base.round)) if o.info.digest == digest]
        self._observer.tell(DigestMismatch(self.base.round, self.base.digest, digest))
        if not offers:
            await self._jump_to_newest(forked=False)
            return
        with contextlib.suppress(PeerUnreachable):
            values = await self._download(offers, self.base.values)
            await self._jump(Base(self.base.head, self.base.round, _frozen(values), digest, self.base.plan), True)

    async def _offers(self, head: Head) -> list[Offer]:
        """Of a head's base. What its members say counts; whether that was right the next head's certificate tells."""
        size = base_size(self.layout, self.outer)
        return await collect_offers(self.node.board, self.node.others(), head.id, size, {*head.members, *head.helpers})

    async def _download(
        self,
        offers: Sequence[Offer],
        have: np.ndarray | None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        kept: KeptPieces | None = None,
    ) -> np.ndarray:
        """In a file until it is written as a base, also where that is held in memory."""
        return await download(self.node.board, offers, have, on_progress, kept, self.node.world.store.scratch)

    def _downloaded(self, offer: Offer, values: np.ndarray) -> Base:
        return Base(offer.info.head, offer.info.round, _frozen(values), offer.info.digest, None)

    def validation_loss(self) -> float:
        """Held-out loss of the base; work that is pending is set aside meanwhile. Called between two steps."""
        trainer, base = self.trainer, self.base.values
        assert trainer is not None
        if not self.ledger.most_behind:
            return trainer.validation_loss()
        set_aside = self.ledger.set_aside(trainer, base)
        trainer.load_base(base)
        loss = trainer.validation_loss()
        self.ledger.put_back(trainer, set_aside)
        return loss

    # Following the heads -----------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """Take what is pending now as the update of the next round; a helper has none."""
        if self.trainer is not None:
            self.ledger.announce(self.trainer, self.base.values)

    def open_exchange(self, plan: Plan) -> Exchange:
        """Take part in a plan with what was announced; a helper has nothing of its own.

        What an earlier attempt of this round sent stays as it is: it may turn out to be the decided one.
        """
        results = self._begin(plan, ())
        update = self.ledger.update
        if self._exchanges:
            update = self.ledger.copy_of_update()
        timeout_s = self.node.campaign.config.sync.exchange_timeout_s
        board, behind = self.node.board, self.ledger.behind
        carried = self.carried.by_start
        exchange = Exchange(board, results, update, carried, timeout_s, behind, 0, self.outer.mean, self._scratch)
        self._exchanges[plan.id, 0] = exchange
        self._kept[plan.id] = results
        if self._staging is not None:
            self._staging.drop()
        store, run = self.node.world.store, self.node.world.run_blocking
        self._staging = Staging(store, self.base.values, self.layout, self.outer, results, run)
        self._news.set()
        return exchange

    def _begin(self, plan: Plan, lost: tuple[tuple[int, ...], ...]) -> Results:
        """Results of a plan that are kept on disk as they arrive."""
        results = Results.empty(plan, self.layout, self.codecs, self.part_bytes, lost)
        if results.parts:
            results.spool = Spool(self.node.world.store.draft(bodies_name(results_name(plan))), results.parts)
        return results

    def revise_exchange(self, plan: Plan, revision: Revision) -> list[Exchange]:
        """Reducers are lost: exchanges over their parts, which moved to backups. Raises WireError when that cannot be."""
        first, known = self._exchanges[plan.id, 0], self._kept[plan.id].lost
        if revision.plan != plan.id or revision.lost[: len(known)] != known:
            raise WireError("a revision of another plan")
        more = []
        for newly_lost in revision.lost[len(known) :]:
            first.results.revise(newly_lost)
            exchange = first.beside(first.results.revision)
            self._exchanges[plan.id, exchange.revision] = exchange
            more.append(exchange)
        self._news.set()
        return more

    async def stage(self, results: Results) -> None:
        """Make results durable before they are reported as staged."""
        await self.node.world.run_blocking(save_results, self.node.world.store, results)

    async def advance(self) -> list[Applied]:
        """Apply every decided head that is not yet in the base; returns those applied, but for what a reform gave up meanwhile.

        Who leaves applies what it took part in first, or that would be trained again. It does not wait for a base, though.
        """
        applied = []
        log, fruitless = self.node.log, self._fruitless
        while self.base.head != log.head.id and not (self.leaves() and self._fruitless > fruitless):
            if self.base.round >= log.round or log.head_at(self.base.round).id != self.base.head:
                logger.warning("a reform of the swarm gave up my round %d: taking base %d", self.base.round, log.round)
                await self._jump_to_newest(forked=True)
                continue
            decided = log.at(self.base.round + 1)
            if is_rollback(decided.head):
                await self._roll_back(decided.head)
                continue
            if not decided.head.plan:
                await self._pass_reform(decided)
                continue
            if decided.head.base_digest != self.base.digest:
                await self._take_certified(decided.head.base_digest)
                continue
            results = await self._complete_results(decided)
            if results is None:
                await self._jump_to_newest(forked=False)
                continue
            await self._apply(decided, results)
            applied.append(Applied(decided, results.plan, results, self.base.digest))
        if self.base.head == log.head.id:
            self._lost_after = ""
        return [each for each in applied if log.has(each.decided.head.id, each.decided.head.round)]

    async def prepare(self) -> None:
        """Make the base that follows mine, when it is decided and I hold its parts, so that `advance` finds it ready.

        From now on it is served. Nothing else changes: the trainer may be training meanwhile.
        """
        log, base = self.node.log, self.base
        if base.round >= log.round or log.head_at(base.round).id != base.head:
            return
        decided = log.at(base.round + 1)
        if decided.head.plan and decided.head.base_digest == base.digest:
            results = await self._complete_results(decided)
            if results is not None:
                self._prepared = staged = await self._stage_base(decided.head, results)
                self.snapshots.publish(decided.head.id, decided.head.round, staged.base.values, staged.digests)

    async def _stage_base(self, head: Head, results: Results) -> StagedBase:
        plan, store = results.plan, self.node.world.store
        ahead, self._staging = self._staging, None
        if ahead is not None and ahead.plan.id == plan.id and ahead.base is self.base.values:
            return await ahead.finish(head, results)
        if ahead is not None:
            ahead.drop()
        parts = results.committed(head)
        pieces = next_base(self.base.values, self.layout, parts, results.encoded, plan.merge, self.outer)
        staged: StagedBase = await self.node.world.run_blocking(stage_base, store, head.id, head.round, plan, pieces)
        return staged

    async def _apply(self, decided: Decided, results: Results) -> None:
        head, plan, run = decided.head, results.plan, self.node.world.run_blocking
        staged, self._prepared = self._prepared, None
        if staged is None or staged.base.head != head.id:
            staged = await self._stage_base(head, results)
        base, parts = staged.base, results.committed(head)
        self.snapshots.publish(head.id, head.round, base.values, staged.digests)
        exchanges = [self._exchanges[plan.id, r] for r in range(results.revision + 1) if (plan.id, r) in self._exchanges]
        if self.trainer is not None:
            await run(self._settle, base, results, {part.index for part in parts}, exchanges)
        self._codes_lost = False
        self.carried.settle(exchanges, results, {part.index for part in parts})
        self.base = base
        await self._save(staged.draft)
        self._forget_old()

    def _settle(self, base: Base, results: Results, committed: set[int], exchanges: Sequence[Exchange]) -> None:
        assert self.trainer is not None
        me = results.plan.index(self.node.peer_id)

        def included(index: int) -> bool:
            return index in committed and me in results.contributors(results.parts[index])

        sent = {index: each for exchange in exchanges for index, each in exchange.sent.items()}
        if not exchanges:
            sent = self._sent_before_restart(results, included)
        accepted = [each for index, each in sent.items() if included(index)]
        dropped = self.ledger.settle(self.trainer, self.base.values, base.values, accepted)
        if dropped:
            self._observer.tell(WorkDropped(base.round, dropped, "left out of more than two rounds"))
        self._take_duty(base)

    def _sent_before_restart(self, results: Results, included: Callable[[int], bool]) -> dict[int, tuple[Part, np.ndarray]]:
        """My push is in the result, but its codes were lost in a crash: what is pending there counts as sent, or goes twice."""
        assert self.trainer is not None
        sent, pushed = {}, dict[str, np.ndarray | None]()
        for part in results.parts:
            if included(part.index):
                name, start = part.group.name, part.start - part.group.start
                if name not in pushed:
                    pushed[name] = self.ledger.may_be_sent(self.trainer, self.base.values, part.group)
                values = pushed[name]
                if values is not None:
                    sent[part.index] = (part, values[start : start + part.size])
        return sent

    def _take_duty(self, base: Base) -> None:
        assert self.trainer is not None
        duty = base.duty(self.node.peer_id)
        owned = duty.owned if duty is not None else ()
        if owned != self.trainer.owned:
            self.ledger.change_owned(self.trainer, owned, base.values)

    async def _complete_results(self, decided: Decided) -> Results | None:
        """The head's results with every committed part, fetched where they are missing; None when nobody has them any more."""
        if (results := await self._completed(None, decided)) is not None:
            return results
        peers = {*decided.head.members, *self.node.others()} - {self.node.peer_id}
        asked = [asyncio.ensure_future(self._has_results(peer, decided.head.plan)) for peer in sorted(peers)]
        holders: list[str] = []
        try:
            for answer in asyncio.as_completed(asked):
                if (holder := await answer) is not None:
                    holders.append(holder)
                    if (results := await self._completed(holder, decided)) is not None:
                        return results
        finally:
            await end_tasks(asked)
        for holder in holders:
            if (results := await self._completed(holder, decided)) is not None:
                return results
        return None

    async def _has_results(self, peer: str, plan: str) -> str | None:
        """The peer, if it keeps results of this plan."""
        with contextlib.suppress(PeerUnreachable, Refused, WireError):
            async with self.node.board.talk(peer, RESULTS) as talk:
                await talk.send(pack(ResultsRequest(plan)))
                await talk.prompt_message()
                return peer
        return None

    async def _completed(self, peer: str | None, decided: Decided) -> Results | None:
        """The results, when they are complete with what this peer has, or without any peer."""
        with contextlib.suppress(PeerUnreachable, Refused, WireError):
            results = self._results_under(decided)
            if peer is not None:
                results = await self._fetch(peer, decided, results)
            if results is not None and _complete(results, decided):
                return results
        return None

    def _results_under(self, decided: Decided) -> Results | None:
        """What I keep of the decided plan, with the revisions that the head names."""
        results = self._kept.get(decided.head.plan)
        if results is not None:
            results = self._kept[decided.head.plan] = results.under(decided.head.lost)
        return results

    async def _fetch(self, peer: str, decided: Decided, results: Results | None) -> Results:
        """From one peer: the plan and manifests where they are missing, then the missing parts that it has."""
        board, head = self.node.board, decided.head
        if results is None or not _manifests_complete(results, decided):
            async with board.talk(peer, RESULTS) as talk:
                await talk.send(pack(ResultsRequest(head.plan)))
                plan = unpack(Plan, bytes(await talk.prompt_message()))
                if plan.id != head.plan:
                    raise WireError("another plan than was asked for")
                if results is None:
                    results = self._begin(plan, head.lost)
                    self._kept[plan.id] = results
                while message := await talk.prompt_message():
                    manifest = unpack(Manifest, bytes(message))
                    if manifest.root in head.roots:
                        results.add_manifest(manifest)
        results.discard_unverified()
        missing = [part.index for part in results.committed(head) if part.index not in results.encoded]
        if missing:
            await fetch_parts(board, peer, results, missing)
        return results

    async def _pass_reform(self, decided: Decided) -> None:
        """A reform moves no weights: the same values under its head, duties are void, pending work stays."""
        base = replace(self.base, head=decided.head.id, round=decided.head.round, plan=None)
        await self.node.world.run_blocking(self.snapshots.publish, base.head, base.round, base.values)
        if self.trainer is not None:
            await self.node.world.run_blocking(self._take_duty, base)
        self.base = base
        await self._save()

    async def _roll_back(self, head: Head) -> None:
        """Take an earlier base: who keeps it from its own disk, the others from those. What was trained since is given up."""
        kept = await self._archived(head)
        if kept is None:
            await self._jump_to_newest(forked=False)
        else:
            await self._jump(Base(head.id, head.round, kept.values, kept.digest, None), False)

    async def _archived(self, head: Head) -> Base | None:
        """The base that this head goes back to, where it is kept here and whole."""
        assert head.control is not None
        store, size = self.node.world.store, base_size(self.layout, self.outer)
        try:
            kept: Base | None = await self.node.world.run_blocking(load_archived, store, head.control.rollback, size, "archive")
        except UserError as error:
            logger.warning("%s", error)
            return None
        return kept if kept is not None and kept.digest == head.base_digest else None

    async def _jump_to_newest(self, forked: bool) -> None:
        """Take a snapshot: too far behind to replay, or on a branch that was given up (`forked`).

        What was announced stays pending unless it may be in the rounds I skip, or my base is of another branch.
        """
        offers = await self._offers_of_newest()
        try:
            if not offers:
                raise PeerUnreachable("nobody offers the newest base")
            kept = self._downloaded_pieces
            values = await self._download(offers, self.base.values, kept=kept)
        except PeerUnreachable as error:
            logger.debug("snapshot: %s", error)
            await self._look_again()
            return
        skipped = {decided.head.plan: decided.head for decided in self.node.log.since(self.base.round)}
        may_be_in = any(plan_id in skipped for plan_id, _ in self._exchanges)
        may_be_in |= self._codes_lost and any(self.node.peer_id in head.members for head in skipped.values())
        await self._jump(self._downloaded(offers[0], values), not forked and not may_be_in)
        kept.clear()

    async def _jump(self, base: Base, keep_pending: bool) -> None:
        old, known = self.base, min(base.round, self.node.log.round)  # a branch may be given up during a download
        rolled_back = any(map(is_rollback, map(self.node.log.head_at, range(old.round + 1, known + 1))))
        if rolled_back:
            self.carried.clear()
        self._install(base)
        self._prepared, self._codes_lost = None, False
        if self.trainer is not None:
            run, ledger = self.node.world.run_blocking, self.ledger
            if rolled_back:
                dropped, reason = await run(ledger.give_up, self.trainer, base.values), "the campaign was rolled back"
            else:
                dropped = await run(ledger.rebase, self.trainer, old.values, base.values, keep_pending)
                reason = "the base was downloaded again"
            if dropped:
                self._observer.tell(WorkDropped(base.round, dropped, reason))
            await run(self._take_duty, base)
        del old
        await self._save()

    def _install(self, base: Base) -> None:
        self.snapshots.publish(base.head, base.round, base.values)
        self.base = base

    async def _save(self, draft: Draft | None = None) -> None:
        """Begin to make base and checkpoint durable. Checkpoint first: the one of the base on disk stays until the new base
        is there too.

        `draft`: of the base, when it is written already; otherwise it is written now, and lies there from now on.
        """
        await self.durable()
        run, store, base = self.node.world.run_blocking, self.node.world.store, self.base
        if draft is None:
            staged: StagedBase = await run(stage_base, store, base.head, base.round, base.plan, pieces_of(base.values))
            self.base, draft = staged.base, staged.draft
            self.snapshots.publish(base.head, base.round, staged.base.values, staged.digests)
        if self._base_in_memory:
            self.base = await run(in_memory, self.base)
        checkpoint = None
        if self.trainer is not None:
            checkpoint = await run(
                take_checkpoint, store, self.trainer, self.ledger, self.layout, base.values, base.head, base.round,
                self.checkpoint,
            )
        self._saving = asyncio.ensure_future(self._write(checkpoint, draft))
        self._saving.add_done_callback(lambda done: done.cancelled() or done.exception())  # `durable` raises it

    async def _write(self, checkpoint: Checkpoint | None, draft: Draft) -> None:
        run = self.node.world.run_blocking
        if checkpoint is not None:
            await run(write_checkpoint, checkpoint)
        await run(draft.commit)
        self.checkpoint = None if checkpoint is None else checkpoint.name

    async def durable(self) -> None:
        """Wait until the base and its checkpoint are on the disk: nothing is announced before. Raises UserError (disk full)."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    def _forget_old(self) -> None:
        """Results are kept for some rounds, and longer while somebody downloads an older base, to replay what follows it."""
        pinned = self.snapshots.oldest_pinned_round
        oldest = self.base.round - KEPT_ROUNDS
        if pinned is not None:
            oldest = max(min(oldest, pinned), self.base.round - MAX_KEPT_ROUNDS)
        for plan_id in [plan_id for plan_id, results in self._kept.items() if results.plan.round <= oldest]:
            del self._kept[plan_id]
        for key in [key for key, exchange in self._exchanges.items() if exchange.plan.round <= self.base.round]:
            del self._exchanges[key]
        store = self.node.world.store
        for name in (*store.names(RESULTS_OF), *store.names(BODIES_OF)):
            if round_of(name) <= oldest:
                store.delete(name)

    # Serving -----------------------------------------------------------------------------------------------------------

    async def _on_push(self, talk: Talk) -> None:
        header = unpack(PushHeader, await talk.message())
        await (await self._known(self._exchanges, (header.plan, header.revision))).on_push(talk)

    async def _on_pull(self, talk: Talk) -> None:
        request = unpack(PullRequest, await talk.message())
        if request.parts:
            await serve_parts(talk, await self._known(self._kept, request.plan), request.parts)
        else:
            await (await self._known(self._exchanges, (request.plan, request.revision))).on_pull(talk, request)

    async def _on_results(self, talk: Talk) -> None:
        results = self._kept.get(unpack(ResultsRequest, await talk.message()).plan)
        if results is None:
            raise Refused("no results of that plan here")
        await talk.send(pack(results.plan))
        for manifest in tuple(results.manifests.values()):
            await talk.send(pack(manifest))
        await talk.send(b"")

    async def _known(self, table: Mapping[K, T], key: K) -> T:
        """The entry of a plan or revision; one that reaches me a moment later than its other members is waited for."""
        deadline = asyncio.get_running_loop().time() + self.node.board.silence_s
        while key not in table:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), deadline - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                raise Refused("that plan is not known here") from None
        return table[key]


def _manifests_complete(results: Results, decided: Decided) -> bool:
    """Are the manifests those that the head names? Others are of no use."""
    return all(
        not root or mine == root for mine, root in zip(results.roots(), decided.head.roots, strict=True)
    )


def _complete(results: Results, decided: Decided) -> bool:
    return _manifests_complete(results, decided) and all(results.verified(part) for part in results.committed(decided.head))


def _frozen(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values
