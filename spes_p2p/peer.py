"""The life of a peer: get the base, then train a phase, take part in a round, and again until the campaign is done.

A helper lives the same life without the training: it reduces, follows the base and serves it, also when all others are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from spes_p2p.config import PROTOCOL_VERSION
from spes_p2p.data.slices import Interval
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.model.layout import Layout
from spes_p2p.observe.events import (
    Observer,
    PhaseTrained,
    TrainingProgress,
    WorkDropped,
)
from spes_p2p.swarm.control import is_paused, is_stopped
from spes_p2p.swarm.coordinator import IN_FULL, ROUND
from spes_p2p.swarm.electors import is_rollback
from spes_p2p.swarm.last_loss import LAST_LOSS, LastLoss, hearing, tell_last_loss
from spes_p2p.swarm.node import Hooks, Node
from spes_p2p.swarm.records import Announcement, Decided, Plan, Revision
from spes_p2p.swarm.rpc import Talk
from spes_p2p.swarm.tasks import end_tasks
from spes_p2p.swarm.wire import WireError, pack, unpack
from spes_p2p.sync.archive import NO_ARCHIVE, Archive, archived_rounds
from spes_p2p.sync.merge import Donors, nearest_experts
from spes_p2p.sync.plan import staged_report
from spes_p2p.sync.replica import Replica
from spes_p2p.sync.results import Results
from spes_p2p.sync.selftest import check_arithmetic
from spes_p2p.telling import Teller, trainers_of
from spes_p2p.training.balance import load_violation, share_of
from spes_p2p.training.checkpoint import load_checkpoint
from spes_p2p.training.interface import Phase, PhaseReport, Trainer, averaged_peers

logger = logging.getLogger(__name__)

T = TypeVar("T")

MakeTrainer = Callable[[np.ndarray, tuple[int, ...]], Trainer]
"""Builds the trainer on a base (flat float32) with these owned experts."""

LINGER_S = 20.0
"""After the last round a peer stays so long for those that still need its results."""
BACKOFF_S, MAX_BACKOFF_S = 1.0, 15.0


@dataclass(frozen=True)
class Capacity:
    """What this peer can and will do."""

    experts: int
    """Most experts it trains."""
    bandwidth: float = 1.0
    """Share of its measured upload bandwidth that counts in plans; 0: it cannot be dialled, and reduces nothing."""
    is_dialable: Callable[[], bool] = lambda: True
    """Can others open connections to it now?"""

    def announced(self, bytes_per_s: float) -> float:
        """The bandwidth that plans count with, of a measured one; 0 for a peer that cannot be dialled: it reduces nothing."""
        return self.bandwidth * bytes_per_s if self.is_dialable() else 0.0


NOTHING_TO_TRAIN = Capacity(experts=0)
"""Of a helper."""


class Peer:
    """One peer. `run` returns after `leave` was asked for, a trainer's also when the campaign is complete."""

    def __init__(
        self,
        node: Node,
        layout: Layout,
        make_trainer: MakeTrainer | None,
        capacity: Capacity,
        observer: Observer,
        status: Callable[[], bytes],
        where: str,
        archive: Archive = NO_ARCHIVE,
        base_in_memory: bool = False,
    ):
        """`make_trainer`: None for a helper. `where` names the run-dir in messages; `status` is what a status call gets."""
        self.node = node
        self.layout = layout
        self.replica = Replica(node, layout, observer, base_in_memory)
        self._teller = Teller(node, self.replica, observer)
        self._make_trainer = make_trainer
        self._capacity = capacity
        self._observer = observer
        self._status = status
        self._where = where
        self._archive = archive
        self._leaving = asyncio.Event()
        self.replica.leaves = self._leaving.is_set
        self._stop_after_round: int | None = None
        self._untrained: tuple[Interval, ...] = ()
        """Announced as such with this round."""
        self._left_over: tuple[Interval, ...] = ()
        """The same for the next round."""
        self._begun = ""
        """The head whose duty was begun last."""
        self._samples: tuple[Interval, ...] = ()
        """Of that duty, until its work is announced."""
        self._announced_samples: tuple[Interval, ...] = ()
        self._stepping = asyncio.Lock()
        """Held during a phase: weights and base change between phases only."""
        self._in_flight: asyncio.Future[None] | None = None
        """The round that goes on during a phase."""
        self._speed = 0.0
        self._phase_done_at = 0.0
        self._validation_loss: float | None = None

    @property
    def trainer(self) -> Trainer:
        """A trainer's, as soon as there is a base."""
        assert self.replica.trainer is not None
        return self.replica.trainer

    @property
    def is_helper(self) -> bool:
        """Does it not train?"""
        return self._make_trainer is None

    @property
    def _overlaps(self) -> bool:
        """Does it train on while a round goes on?"""
        return self.node.campaign.config.sync.overlap and not self.is_helper

    @property
    def finished(self) -> bool:
        """Is the campaign's last round in the base: the one that reached the last step, or in which its owner stopped it?"""
        head = self.node.log.head
        over = head.step >= self.node.training_after(head).total_steps or is_stopped(head.control)
        return over and self.replica.base.head == head.id

    def leave(self) -> None:
        """Stop at the next step and go, after telling the others."""
        self._leaving.set()

    async def run(self) -> None:
        """The whole life. Raises UserError when this peer cannot take part."""
        check_arithmetic()
        await self._start()
        try:
            await self._get_base()
            while not self.finished and not self._leaving.is_set():
                if self._overlaps:
                    await self._train_during_round()
                else:
                    await self._train_phase()
                    await self._sync()
            if self.is_helper:
                self._teller.enter("waiting")
                await self._leaving.wait()
            await self.replica.durable()
            await self._go()
        finally:
            await self.node.close()

    # Joining -----------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        hooks = Hooks(
            results_of=lambda plan: Results.empty(plan, self.layout, self.replica.codecs, self.replica.part_bytes),
            donors=self._donors,
            duties=self._duties,
            stop_phase=self._stop_phase,
            phase=lambda: self._teller.phase,
            status=self._status,
            base_lost_since=self.replica.base_lost_since,
            newest_base=self.replica.newest_at_hand,
        )
        await self.replica.start()
        await self.node.board.serve(LAST_LOSS, hearing(self._hear_last_loss))
        await self.node.start(hooks)

    async def _get_base(self) -> None:
        restored = self.replica.restore(self._where)
        if not restored:
            self._teller.enter("downloading")
            await self._or_leave(self.replica.join(self._teller.downloading))
        else:
            await self._or_leave(self.replica.learn_own_head())
        if self._leaving.is_set():
            return
        if self._make_trainer is not None:
            await self._begin_training(self._make_trainer, restored)
        base = self.replica.base
        if self.node.log.has(base.head, base.round):  # else that branch was given up, and another base comes
            self._teller.restored("disk" if restored else "download")
        await self.node.learn_from_all()
        if restored:
            await self.node.tell_back()
        await self._advance({})

    async def _begin_training(self, make_trainer: MakeTrainer, restored: bool) -> None:
        base = self.replica.base
        duty = base.duty(self.node.peer_id)
        owned = duty.owned if duty is not None else ()
        self.replica.trainer = await self.node.world.run_blocking(make_trainer, base.values, owned)
        if restored:
            store, ledger = self.node.world.store, self.replica.ledger
            found = load_checkpoint(store, self.trainer, ledger, self.layout, base.head, base.round)
            if found is not None:
                self.replica.checkpoint = found
                self.replica.announce()

    # Training ----------------------------------------------------------------------------------------------------------

    async def _train_phase(self) -> None:
        """Do the duty of this phase, if the last plan gave one."""
        base = self.replica.base
        duty = base.duty(self.node.peer_id)
        if self.is_helper or base.plan is None or duty is None or duty.steps == 0:
            return
        if not self.node.log.has(base.head, base.round):
            return  # that branch was given up
        self._teller.enter("training")
        self._begun, self._samples = base.head, duty.slices
        training = self.node.training_after(self.node.log.head_at(base.round))
        peers = averaged_peers([each.steps for each in base.plan.duties])
        phase = Phase(base.round + 1, base.plan.phase_step, training.sync_steps, duty.steps, duty.slices, training, peers)
        async with self._stepping:
            report: PhaseReport = await self.node.world.run_blocking(
                self.trainer.train, phase, self._should_stop, self._progress_teller(phase)
            )
        if self._leaving.is_set():
            return
        self._left_over = report.untrained
        self._speed = report.tokens / report.seconds if report.seconds > 0 else 0.0
        self.replica.ledger.trained(report)
        self._observer.tell(
            PhaseTrained(
                phase.round, report.steps, report.tokens, report.loss, report.aux_loss, report.seconds, report.skipped_steps,
                report.flops_per_second, report.mfu, tuple(load_violation(report.assignments)),
                share_of(report.assignments, self.trainer.owned) if report.assignments else math.nan,
            )
        )

    def _should_stop(self) -> bool:
        due, failed = self._stop_after_round, self._in_flight
        late = due is not None and due >= self.replica.base.round + self._overlaps
        return self._leaving.is_set() or late or (failed is not None and failed.done() and failed.exception() is not None)

    def _stop_phase(self, after_round: int) -> None:
        """The coordinator waits no longer: announce what is done."""
        self._stop_after_round = after_round

    def _phase_steps(self) -> int:
        """Of the duty that my base gives me."""
        duty = self.replica.base.duty(self.node.peer_id)
        return duty.steps if duty is not None else 0

    def _enter(self, phase: str) -> None:
        """Tell what this peer does; a round that goes on while it trains is not what it does."""
        if not self._stepping.locked():
            self._teller.enter(phase)

    def _progress_teller(self, phase: Phase) -> Callable[[int, float], None]:
        loop = asyncio.get_running_loop()

        def tell(steps_done: int, tokens_per_second: float) -> None:
            event = TrainingProgress(phase.round, steps_done, phase.steps, tokens_per_second)
            loop.call_soon_threadsafe(self._observer.tell, event)

        return tell

    # Rounds ------------------------------------------------------------------------------------------------------------

    async def _sync(self) -> None:
        """Bring the next round to a decision and apply it, until there is another base."""
        before, seconds = self.replica.base.head, dict[str, float]()
        await self._take_stock()
        while self.replica.base.head == before and not self._leaving.is_set():
            await self._decide(seconds)
            await self._advance(seconds)

    async def _train_during_round(self) -> None:
        """Train the phase while the round with the work until now is held, then apply that round: one phase late."""
        seconds: dict[str, float] = {}
        await self._take_stock()
        self._in_flight = asyncio.ensure_future(self._decide_and_prepare(seconds))
        try:
            await self._train_phase()
            await self._in_flight
        finally:
            await end_tasks([self._in_flight])
            self._in_flight = None
        await self._advance(seconds)

    async def _decide_and_prepare(self, seconds: dict[str, float]) -> None:
        await self._decide(seconds)
        await self.replica.prepare()

    async def _take_stock(self) -> None:
        """All that is pending now goes with the next round."""
        self._phase_done_at = asyncio.get_running_loop().time()
        await self.node.world.run_blocking(self.replica.announce)
        self._untrained, self._left_over = self._left_over, ()
        self._announced_samples, self._samples = self._samples, ()

    async def _decide(self, seconds: dict[str, float]) -> None:
        """Try until the round after my base is decided. Attempts that fail change nothing; nor does this, but for repairs."""
        target, attempt = self.replica.base.round + 1, 0
        while self.node.log.head.id == self.replica.base.head and not self._leaving.is_set():
            seconds.clear()
            order = self.node.coordinators()
            coordinator = order[attempt % len(order)]
            try:
                await self._attempt(coordinator, attempt, seconds)
            except PeerUnreachable as error:
                self._teller.failed(target, attempt, "coordinator_lost", str(error))
                attempt += 1
                left = order[attempt % len(order) :] if attempt % len(order) else ()
                attempt += await self._or_leave(self.node.first_living(left)) or 0
            except WireError as error:
                self._teller.failed(target, attempt, "malformed", str(error))
                attempt += 1
            except Refused as error:
                attempt = await self._after_refusal(coordinator, target, attempt, len(order), str(error))
            if attempt and attempt % len(order) == 0:
                await self._look_around(attempt // len(order))

    async def _attempt(self, coordinator: str, attempt: int, seconds: dict[str, float]) -> None:
        """One attempt: announce, exchange, stage, and learn the decided head. Raises PeerUnreachable, Refused, WireError."""
        clock = asyncio.get_running_loop().time
        await self.replica.durable()
        paused = is_paused(self.node.log.head.control)
        self._enter("paused" if paused else "waiting" if self.is_helper else "announcing")
        started = clock()
        async with self.node.board.talk(coordinator, ROUND) as talk:
            await talk.send(pack(self._announcement(attempt)))
            reply = await self._plan_or_head(talk)
            if reply is None:
                return
            reply = await talk.alive(self.node.relay.received(reply))
            if not self.is_helper:
                seconds["announce"] = clock() - started
            if reply[:4] == b"plan":
                reply = await self._exchange(talk, unpack(Plan, reply[4:]), seconds)
            decided = unpack(Decided, reply[4:])
        self.node.learn(decided)

    async def _plan_or_head(self, talk: Talk) -> bytes | None:
        """The coordinator's answer; None when I leave before there is a plan. One that was just made is served to its end."""
        answer = asyncio.ensure_future(talk.message())
        try:
            if await self._or_leave(asyncio.shield(answer)) is None:
                await self._tell_leave()
            return await answer if answer.done() else None
        finally:
            answer.cancel()

    def _announcement(self, attempt: int) -> Announcement:
        base, ledger = self.replica.base, self.replica.ledger
        return Announcement(
            campaign=self.node.campaign_hash,
            protocol=PROTOCOL_VERSION,
            round=base.round + 1,
            attempt=attempt,
            waited_s=asyncio.get_running_loop().time() - self._phase_done_at,
            trains=not self.is_helper,
            head=base.head,
            base_digest=base.digest,
            tokens=ledger.announced.tokens,
            routed=ledger.announced.routed,
            capacity=self._capacity.experts,
            tokens_per_second=self._speed,
            bandwidth=self._capacity.announced(self.node.board.upload.bytes_per_s()),
            loss=ledger.announced.loss,
            validation_loss=self._validation_loss,
            untrained=self._untrained,
            in_flight=self._overlaps and bool(self._phase_steps()),
            archived=tuple(archived_rounds(self.node.world.store)),
        )

    async def _exchange(self, talk: Talk, plan: Plan, seconds: dict[str, float]) -> bytes:
        """Exchange, stage and report, again for each revision of the plan; returns the message with the head."""
        clock = asyncio.get_running_loop().time
        self._enter("exchanging")
        started = clock()
        self._check_plan(plan, talk.remote)
        if self.node.campaign.config.sync.overlap:
            self.node.phase_goes_on_during(plan.round)
        exchange = await self.node.world.run_blocking(self.replica.open_exchange, plan)
        work: asyncio.Future[Any] | None = asyncio.ensure_future(exchange.run())
        answer = asyncio.ensure_future(talk.message())
        try:
            while True:
                await asyncio.wait({answer, work} if work else {answer}, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    reply = answer.result()
                    if reply == IN_FULL:
                        await talk.send(pack(staged_report(exchange.results, exchange.me, self.node.disk, in_full=True)))
                    elif reply[:4] == b"lost":
                        more = self.replica.revise_exchange(plan, unpack(Revision, reply[4:]))
                        work = asyncio.gather(*([work] if work else []), *(each.run() for each in more))
                    else:
                        seconds["commit"] = clock() - started - seconds.get("exchange", 0.0)
                        return await talk.alive(self.node.relay.received(reply))
                    answer = asyncio.ensure_future(talk.message())
                elif work is not None:
                    work.result()
                    work = None
                    await self.replica.stage(exchange.results)
                    await talk.send(pack(staged_report(exchange.results, exchange.me, self.node.disk)))
                    seconds["exchange"] = clock() - started
                    self._enter("committing")
        finally:
            await end_tasks([answer] if work is None else [answer, work])

    def _check_plan(self, plan: Plan, coordinator: str) -> None:
        base = self.replica.base
        if (plan.campaign, plan.round, plan.parent) != (self.node.campaign_hash, base.round + 1, base.head):
            raise WireError("a plan of another round")
        if plan.ballot.coordinator != coordinator or plan.index(self.node.peer_id) is None:
            raise WireError("a plan of another coordinator, or without me")
        if plan.base_digest != base.digest:
            raise Refused("digest: the plan starts from other bits than mine")

    async def _after_refusal(self, coordinator: str, target: int, attempt: int, ranks: int, reason: str) -> int:
        """Mend what a refusal names; returns the attempt to go on with."""
        kind, _, detail = reason.partition(": ")
        if kind in ("version", "campaign"):
            raise UserError(f"refused by {coordinator}: {detail}")
        if kind == "behind":
            await self._catch_up(coordinator)
            return attempt if self.node.log.round >= target else attempt + 1
        if kind == "digest":
            return await self._repair(target, attempt, reason)
        await self._or_leave(asyncio.sleep(BACKOFF_S))
        if kind in ("closed", "alive"):
            logger.info("round %d: %s", target, detail)
            return attempt if kind == "closed" else (attempt // ranks + 1) * ranks
        self._teller.failed(target, attempt, "refused", reason)
        return attempt + 1

    async def _repair(self, target: int, attempt: int, reason: str) -> int:
        try:
            async with self._stepping:
                await self.replica.repair()
            self._teller.restored("download")
            return attempt
        except PeerUnreachable as error:
            self._teller.failed(target, attempt, "refused", f"{reason} ({error})")
            await self._or_leave(asyncio.sleep(BACKOFF_S))
            return attempt + 1

    async def _look_around(self, times_tried: int) -> None:
        """Every coordinator was tried: see who is there and what was decided meanwhile; ask for a reform where it is needed."""
        await self._or_leave(asyncio.sleep(min(BACKOFF_S * 2 ** min(times_tried - 1, 10), MAX_BACKOFF_S)))
        await self.node.meet()
        await self.node.learn_from_all()
        await self.node.tell_back()
        if not self.is_helper:
            await self.node.ask_for_reform()

    async def _catch_up(self, peer: str) -> None:
        with contextlib.suppress(PeerUnreachable, Refused, WireError):
            await self.node.learn_heads(peer)

    async def _advance(self, seconds: dict[str, float]) -> None:
        """Apply what was decided, and tell."""
        if self.replica.base.head == self.node.log.head.id:
            return
        self._teller.enter("applying")
        started = asyncio.get_running_loop().time()
        applied = await self.replica.advance()
        if not applied and self.replica.base.head != self.node.log.head.id:
            return  # I leave, and could not get the newest base
        seconds["apply"] = asyncio.get_running_loop().time() - started
        self._untrained, self._announced_samples, self._validation_loss, self._stop_after_round = (), (), None, None
        for each in applied:
            self.node.lateness.extend(each.plan.lateness)
            self._teller.committed(each, seconds)
        if not applied or applied[-1].decided.head.id != self.replica.base.head:
            self._teller.restored(self._source_of_base())
        await self.node.world.run_blocking(self._archive.file, self.node.world.store, self.replica.base, self._wanted_round())
        await self._maybe_evaluate()
        await self.node.meet()

    def _source_of_base(self) -> str:
        """Why the base of the last head is here, though no round was applied."""
        head = self.node.log.head
        return "rollback" if is_rollback(head) else "download" if head.plan else "reform"

    def _wanted_round(self) -> int:
        """The round that the newest control record goes back to, or went; -1: none."""
        control = self.node.controls.newest
        return -1 if control is None else control.rollback

    async def _maybe_evaluate(self) -> None:
        """One member evaluates the base every so many rounds, in turn; it tells the others with its next announcement."""
        base = self.replica.base
        if self._evaluator() != self.node.peer_id or (base.round % self._evaluates_every and not self.finished):
            return
        self._teller.enter("evaluating")
        loss = await self.node.world.run_blocking(self.replica.validation_loss)
        if np.isfinite(loss):
            self._validation_loss = float(loss)
            self._teller.evaluated(base.round, self._validation_loss)

    @property
    def _evaluates_every(self) -> int:
        """Rounds; 0: never."""
        return self.node.campaign.config.evaluation.every_rounds

    def _evaluator(self) -> str | None:
        """Whose turn it is to evaluate this base."""
        base = self.replica.base
        trainers = trainers_of(base.plan) if base.plan is not None else ()
        every = self._evaluates_every
        return trainers[(base.round // every) % len(trainers)] if every and trainers else None

    def _hear_last_loss(self, sender: str, last: LastLoss) -> bool:
        if not self._has_finished() or last.round != self.replica.base.round:
            return False
        if sender == self._evaluator():
            self._teller.heard_last_loss(last.round, last.loss)
        return True

    # Leaving -----------------------------------------------------------------------------------------------------------

    async def _go(self) -> None:
        self._teller.enter("leaving")
        if not self._has_finished():
            await self._tell_leave()
        elif not self.is_helper:
            self._tell_of_left_over_work()
            await self._linger()

    def _tell_of_left_over_work(self) -> None:
        """The campaign is over, and no round will include what is still pending: a stop does not wait for it."""
        tokens = self.replica.ledger.most_behind
        if tokens:
            self._observer.tell(WorkDropped(self.replica.base.round, tokens, "the campaign ended before a round included it"))

    async def _tell_leave(self) -> None:
        """Say that I go; the samples of all work that is in no round come back, since nothing of it will be included."""
        base = self.replica.base if hasattr(self.replica, "base") else None
        duty = base.duty(self.node.peer_id) if base is not None and base.head != self._begun else None
        await self.node.leave((*self._announced_samples, *self._samples, *(duty.slices if duty is not None else ())))

    def _has_finished(self) -> bool:
        """Nothing of mine is expected by others any more."""
        return hasattr(self.replica, "base") and self.finished

    async def _linger(self) -> None:
        """Stay until every other trainer has the last base too, and all know what it is worth, within limits."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LINGER_S
        last = None if self._validation_loss is None else LastLoss(self.replica.base.round, self._validation_loss)
        untold = set(self.node.others()) if last is not None else set()
        while loop.time() < deadline and not self._leaving.is_set():
            if last is not None:
                untold = await tell_last_loss(self.node.board, untold & set(self.node.others()), last)
            await self.node.meet()
            behind = [p for p in self.node.others("trainer") if self.node.contacts[p].round < self.node.log.round]
            if not behind and not untold:
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), BACKOFF_S)

    async def _or_leave(self, awaited: Awaitable[T]) -> T | None:
        """Wait for something unless this peer is asked to leave; None then."""
        task = asyncio.ensure_future(awaited)
        leaving = asyncio.ensure_future(self._leaving.wait())
        either: set[asyncio.Future[Any]] = {task, leaving}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            task.cancel()
            leaving.cancel()

    def _duties(self) -> dict[str, int] | None:
        base = self.replica.base if hasattr(self.replica, "base") else None
        if base is None or base.head != self.node.log.head.id or base.plan is None:
            return None
        members, overlap = base.plan.members, self.node.campaign.config.sync.overlap
        return {members[d.member].peer: max(d.steps, overlap and members[d.member].trains) for d in base.plan.duties}

    async def _donors(self) -> Donors:
        merge = self.node.campaign.config.merge
        if self.replica.base.round != self.node.log.round:
            raise Refused("the coordinator is still catching up")
        donors: Donors = await self.node.world.run_blocking(
            nearest_experts, self.replica.base.values, self.layout, merge.merge_top_k
        )
        return donors

