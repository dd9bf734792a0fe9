"""The life of a peer: get the base, then train a phase and take part in a round, until the campaign is complete.

A helper does the same without the training: it reduces, follows the base and serves it, also when all others are gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from spes_p2p.consensus.control import is_rollback
from spes_p2p.errors import UserError, version_advice
from spes_p2p.messages.methods import STATUS
from spes_p2p.model.layout import Layout
from spes_p2p.net.rpc import Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.observe.events import Observer, WorkDropped
from spes_p2p.peer.announcing import Announcer, Capacity
from spes_p2p.peer.attempt import RoundMember
from spes_p2p.peer.auditing import Auditing
from spes_p2p.peer.checking import Checking
from spes_p2p.peer.coordinator_service import CoordinatorService
from spes_p2p.peer.evaluation import Evaluation, has_last_base
from spes_p2p.peer.first_base import MakeTrainer, begin_training, download_base, learn_missed_commits, restore
from spes_p2p.peer.guard import Guard
from spes_p2p.peer.judging import Judge
from spes_p2p.peer.leaving import LeaveRequest, serve_last_results, serve_until_asked_to_leave
from spes_p2p.peer.node import Node
from spes_p2p.peer.phases import PhaseRunner
from spes_p2p.peer.reforming import ReformService
from spes_p2p.peer.replica import Replica
from spes_p2p.peer.reporter import EventReporter
from spes_p2p.peer.samples import UntrainedSamples
from spes_p2p.rounds.archive import NO_ARCHIVE, Archive
from spes_p2p.rounds.held_out import reported_loss
from spes_p2p.rounds.selftest import check_arithmetic

logger = logging.getLogger(__name__)


class Peer:
    """One peer. `run` returns after `leave`; a trainer's also when the campaign is complete."""

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
        arrays_in_memory: bool = False,
        checkpoint_every_s: float = 0.0,
        leave: LeaveRequest | None = None,
        key: str = "KEY",
    ):
        """`make_trainer`: None for a helper. `where` and `key` name the run-dir and the file of this peer's key in messages;
        `status` is what a status call gets. `leave`: what `leave` makes, where others wait for it too.
        """
        self.node = node
        self.replica = Replica(node, layout, observer, base_in_memory, checkpoint_every_s, arrays_in_memory)
        self._make_trainer = make_trainer
        self._observer = observer
        self._status = status
        self._where = where
        self._archive = archive
        self._leave = leave or LeaveRequest()
        self.replica.leaves = lambda: self._leave.is_made
        self._samples = UntrainedSamples()
        self._reporter = EventReporter(node, self.replica, observer)
        self._evaluation = Evaluation(node, self.replica, self._reporter)
        self._guard = Guard(node, key)
        self.phases = PhaseRunner(node, self.replica, self._samples, self._reporter, observer, self._leave)
        self.checking = Checking(node, self.replica.exchanges, self.replica.validity.proofs, observer)
        self.auditing = Auditing(node, self.replica, self.phases, self.checking, capacity, observer)
        self.announcer = Announcer(
            node, self.replica, capacity, self._samples, self.phases, self.checking.unanswered, lambda: self.auditing.unreported
        )
        self.coordinators = CoordinatorService(node, self.replica, self.phases)
        self.reforms = ReformService(node, self.replica.newest)
        self._member = RoundMember(
            node, self.replica, self.announcer, self.phases, self.coordinators,
            Judge(node, self.replica, self.phases, observer), self._reporter, self._leave,
        )

    @property
    def finished(self) -> bool:
        """Whether the base includes the campaign's last round."""
        return has_last_base(self.node, self.replica)

    def leave(self) -> None:
        """Stop at the next step, tell the other peers, and end."""
        self._leave.make()

    async def run(self) -> None:
        """Live until the end of the campaign, or until asked to leave. Raises UserError when this peer cannot take part."""
        check_arithmetic()
        await self._start()
        try:
            excluded = ""
            try:
                await self._get_base()
                excluded = await self._take_part_and_serve()
            except UserError:  # a wait for text ends so
                if not self._leave.is_made:
                    raise
            await self.replica.store.save_base()
            self._reporter.set_state("leaving")
            # Both when the campaign is complete, too: its owner may add steps.
            await self._member.return_work()
            await self.replica.save_moments()
            if excluded:
                raise UserError(excluded)
        finally:
            self.coordinators.close()
            await self.node.close()

    async def _take_part_and_serve(self) -> str:
        """Take part until this peer leaves, and again when the owner adds steps to a finished campaign; return as `_take_part`.

        Of a finished campaign a helper serves the base until asked to leave, a trainer until everybody has it.
        """
        if self.finished:
            await self.node.decisions.take_control_from_all(self.node.sources())
        while True:
            excluded = await self._take_part()
            if not self.finished:
                return excluded
            await self.replica.store.save_base()
            if self._make_trainer is None:
                self._reporter.set_state("waiting")
                await serve_until_asked_to_leave(self.node, self._evaluation, self._leave, lambda: self.finished)
            else:
                self._reporter.set_state("leaving")
                self._report_dropped_work()
                await serve_last_results(self.node, self._evaluation, self._leave, lambda: self.finished)
            if self.finished:
                return excluded

    async def _take_part(self) -> str:
        """Take part in rounds until the end, or until asked to leave; return why this peer is excluded, "" when it is not."""
        overlaps = self._make_trainer is not None and self.node.campaign.config.sync.overlap
        excluded = ""
        while not self.finished and not self._leave.is_made and not (excluded := self._why_excluded()):
            if overlaps:
                await self._train_during_round()
            else:
                await self.auditing.audit()
                await self.phases.train()
                await self._sync()
        return excluded

    async def _start(self) -> None:
        await self.replica.start()
        await self.coordinators.serve()
        await self.reforms.serve()
        await self.checking.serve()
        await self.phases.moments.serve()
        await self.node.endpoint.serve(STATUS, self._on_status)
        await self.node.start()

    async def _on_status(self, stream: Stream) -> None:
        await stream.send(self._status())

    def _why_excluded(self) -> str:
        """Say why this peer is not admitted to the next round; "" when it is. Warns when its protocol will be too old."""
        if problem := self.node.why_not_admitted(self.node.log.last.control):
            return problem
        control, protocol, next_round = self.node.log.last.control, self.node.world.protocol, self.node.log.round + 1
        requires = None if control is None else control.requires
        if requires is None or protocol >= requires.protocol:
            return ""
        problem = (
            f"the campaign requires protocol {requires.protocol} from round {requires.from_round} on, this program speaks "
            f"{protocol}; {version_advice(protocol, requires.protocol)}"
        )
        if next_round >= requires.from_round:
            return problem
        logger.warning("rounds left: %d; %s", requires.from_round - next_round, problem)
        return ""

    async def _get_base(self) -> None:
        restored = await restore(self.replica, self._where)
        if not restored:
            self._reporter.set_state("downloading")
            await self._leave.unless_made(download_base(self.replica, self._reporter.downloading))
        else:
            await self._leave.unless_made(learn_missed_commits(self.replica))
        if self._leave.is_made:
            return
        if self._make_trainer is not None:
            await begin_training(self.replica, self._make_trainer, restored)
            await self.phases.moments.load()
        base = self.replica.base
        if self.node.log.has(base.commit, base.round):  # otherwise its branch was given up: another base follows
            self._reporter.restored("disk" if restored else "download")
        if self.replica.newest.asked_s() > self.node.endpoint.silence_s:
            await self.replica.newest.learn_commits()
        if restored:
            await self.node.departures.come_back()
        await self._advance({})
        self.phases.give_up_rest(base)

    async def _sync(self) -> None:
        """Bring the next round to a decision and apply it; again until there is another base."""
        before, seconds = self.replica.base.commit, dict[str, float]()
        await self.announcer.freeze_update()
        while self.replica.base.commit == before and not self._leave.is_made:
            await self._member.take_part(seconds)
            await self._advance(seconds)

    async def _train_during_round(self) -> None:
        """Train a phase while the round with the work before it is under way, then apply that round, one phase late."""
        seconds: dict[str, float] = {}
        await self.announcer.freeze_update()
        round_under_way = asyncio.ensure_future(self._decide_and_prepare(seconds))
        try:
            await self.phases.train(round_under_way)
            await round_under_way
        finally:
            await end_tasks([round_under_way])
        await self._advance(seconds)

    async def _decide_and_prepare(self, seconds: dict[str, float]) -> None:
        await self._member.take_part(seconds)
        await self.replica.prepare()

    async def _advance(self, seconds: dict[str, float]) -> None:
        """Apply and report decided rounds; then archive and evaluate the base."""
        if self.replica.base.commit == self.node.log.last.id:
            return
        self._reporter.set_state("applying")
        started = asyncio.get_running_loop().time()
        base = self.replica.base
        before = base.plan
        applied = await self.replica.advance()
        if not applied and self.replica.base.commit != self.node.log.last.id:
            return  # asked to leave without the newest base
        took_part = bool(seconds)
        seconds["apply"] = asyncio.get_running_loop().time() - started
        if self._is_settled_since(base.round):
            self._samples.decided()
        self.phases.round_applied()
        self.phases.moments.forget()
        self.phases.moments.meet_auditor()
        if not took_part or self.replica.base.round > base.round + 1:
            self._reporter.caught_up(base.round, seconds["apply"])
        for each in applied:
            self.node.straggler_delay.extend(each.plan.proposal.straggler_delay)
            self._reporter.committed(each, seconds, reported_loss(before, each.plan, self.node.campaign.config))
            if each.decided.commit.id == self.node.log.last.id:
                self.coordinators.applied(each.plan)
                self.checking.begin(each.decided.commit, each.results)
                self.auditing.begin(base, each)
            self._guard.saw(before, each.plan)
            before = each.plan
        if not applied or applied[-1].decided.commit.id != self.replica.base.commit:
            self._reporter.restored(self._source_of_base())
        if self.node.log.is_long:
            self.node.spawn(self.node.decisions.shorten_log(self.node.others()))
        world = self.node.world
        await world.run_blocking(self._archive.file, world.store, self.replica.base, self._wanted_round(), world.threads)
        await self._evaluation.evaluate_if_due()
        await self.node.refresh_contacts(only_if_due=True)

    def _is_settled_since(self, round_number: int) -> bool:
        """Return whether a later round has what this peer announced, or its assignments are void."""
        later = (commit for commit in self.node.log.recent(self.node.log.round) if commit.round > round_number)
        return any(not commit.plan or self.node.peer_id in commit.members for commit in later)

    def _source_of_base(self) -> str:
        """Return where the last commit's base comes from when no round was applied."""
        commit = self.node.log.last
        return "rollback" if is_rollback(commit) else "download" if commit.plan else "reform"

    def _wanted_round(self) -> int:
        """Return the round that the newest control record goes back to; -1 for none."""
        control = self.node.controls.newest
        return -1 if control is None else control.rollback

    def _report_dropped_work(self) -> None:
        """Report pending work that no round will include: the campaign's end does not wait for it."""
        tokens = self.replica.ledger.max_pending_tokens
        if tokens:
            self._observer(WorkDropped(self.replica.base.round, tokens, "the campaign ended before a round included it"))
