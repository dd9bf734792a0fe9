"""Training phases: the local steps that the plan of the last round assigned to this peer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from spes_p2p.observe.events import Observer, PhaseTrained, TrainingProgress
from spes_p2p.peer.kept_moments import KeptMoments
from spes_p2p.peer.leaving import LeaveRequest
from spes_p2p.peer.node import Node
from spes_p2p.peer.replica import Replica
from spes_p2p.peer.reporter import EventReporter
from spes_p2p.peer.samples import UntrainedSamples
from spes_p2p.rounds.base import Base
from spes_p2p.rounds.planned import Assignment
from spes_p2p.training.balance import load_violation, share_of
from spes_p2p.training.batches import split_samples
from spes_p2p.training.interface import Phase, PhaseReport, averaged_peers, joined

T = TypeVar("T")


class PhaseRunner:
    """Trains phase after phase in a worker thread."""

    def __init__(
        self,
        node: Node,
        replica: Replica,
        samples: UntrainedSamples,
        reporter: EventReporter,
        observer: Observer,
        leave: LeaveRequest,
    ):
        self.node, self.replica = node, replica
        self.lock = asyncio.Lock()
        """Held during a phase, because weights and base may change only between phases."""
        self.tokens_per_s = 0.0
        """Speed in the last phase."""
        self._samples, self._reporter, self._observer, self._leave = samples, reporter, observer, leave
        self.moments = KeptMoments(node)
        """What auditors of this peer ask for."""
        self._given_up_steps = 0
        """Steps of the next phase whose time went into an audit."""
        self._stop_after_round: int | None = None
        self._waiting = 0
        """Number of callers of `between_steps` that wait for the phase to pause."""

    @property
    def assigned_steps(self) -> int:
        """Steps that the base's plan assigns to this peer."""
        assignment = self.replica.base.assignment(self.node.peer_id)
        return assignment.steps if assignment is not None else 0

    def stop_after(self, round_number: int) -> None:
        """End the phase that follows this round after its current step: the coordinator waits no longer."""
        self._stop_after_round = round_number

    def set_state_unless_training(self, state: str) -> None:
        """Report the peer's state, unless a phase is running: then it stays "training"."""
        if not self.lock.locked():
            self._reporter.set_state(state)

    def round_applied(self) -> None:
        """Forget a request to stop: its phase is over."""
        self._stop_after_round = None

    def give_up_steps(self, steps: int) -> None:
        """Train so many fewer steps in the next phase, but one: their time is spent already.

        Time beyond that makes no later phase shorter: the others have waited for it, and begin that one with this peer.
        """
        self._given_up_steps = steps

    def phase_of(self, base: Base, assignment: Assignment) -> Phase:
        """Return the whole phase after a base of this log that its plan assigned to a member."""
        assert base.plan is not None
        training = self.node.training_after(self.node.log.commit_at(base.round))
        peers = averaged_peers([each.steps for each in base.plan.assignments])
        return Phase(
            base.round + 1, base.plan.phase_step, training.sync_steps, assignment.steps, assignment.slices, training, peers
        )

    async def between_steps(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do work with the trainer's weights, between two steps of the phase if one runs."""
        self._waiting += 1
        try:
            async with self.lock:
                return await work()
        finally:
            self._waiting -= 1

    async def train(self, round_under_way: asyncio.Future[None] | None = None) -> None:
        """Train the assigned phase, if there is one; it ends early when the round under way fails."""
        base = self.replica.base
        assignment = base.assignment(self.node.peer_id)
        if self.replica.trainer is None or base.plan is None or assignment is None or assignment.steps == 0:
            return
        if not self.node.log.has(base.commit, base.round):
            return  # the base is of a branch that was given up
        self._reporter.set_state("training")
        phase = self.phase_of(base, assignment)
        steps = max(1, phase.steps - self._given_up_steps)
        done = self.replica.progress[1] if self.replica.progress[0] == base.commit else 0
        _, slices = split_samples(assignment.slices, done * self.node.campaign.config.training.batch_size)
        if done >= steps:  # a restart continues after the last step
            self._samples.trained(slices)
            return
        phase = replace(phase.shortened(steps), slices=slices, done=done)
        async with self.lock:
            if self.moments.are_wanted and not done:
                await self.node.world.run_blocking(self.moments.keep, phase.round, self.replica.trainer, base.values)
            report = await self._train(phase, round_under_way)
        if self._leave.is_made:
            return
        self._samples.trained(report.untrained)
        self.tokens_per_s = report.tokens / report.seconds if report.seconds > 0 else 0.0
        self._observer(_phase_trained(phase, report, self.replica.trainer.owned))

    async def _train(self, phase: Phase, round_under_way: asyncio.Future[None] | None) -> PhaseReport:
        """Train the phase, with checkpoints in between; its work becomes pending, unless this peer is asked to leave."""
        trainer, replica, run = self.replica.trainer, self.replica, self.node.world.run_blocking
        assert trainer is not None

        def is_over() -> bool:
            return self.must_stop(round_under_way)

        def is_interrupted() -> bool:
            return is_over() or self._waiting > 0 or (replica.checkpoints_in_phase and replica.store.is_due)

        reports: list[PhaseReport] = []
        while True:
            report: PhaseReport = await run(trainer.train, phase, is_interrupted, self._progress_of(phase))
            reports.append(report)
            if self._leave.is_made:
                return joined(reports)
            replica.ledger.add_phase(report)
            phase = replace(phase, slices=report.untrained, done=phase.done + report.steps)
            replica.progress = replica.base.commit, phase.done
            if is_over() or phase.done >= phase.steps or not (self._waiting or replica.store.is_due):
                return joined(reports)
            if self._waiting:
                self.lock.release()
                await self.lock.acquire()  # the lock is fair: whoever waits goes first
            else:
                if self.moments.are_wanted:
                    await run(self.moments.save, phase.round)
                await replica.save()

    def give_up_rest(self, before: Base) -> None:
        """Return the samples that are left of the phase after this base if another base has followed since a restart.

        Without overlap, the round in between may include the whole phase.
        """
        commit, done = self.replica.progress
        assignment = before.assignment(self.node.peer_id)
        if self.replica.overlaps and commit == before.commit != self.replica.base.commit and assignment is not None:
            _, left = split_samples(assignment.slices, done * self.node.campaign.config.training.batch_size)
            self._samples.trained(left)

    def must_stop(self, round_under_way: asyncio.Future[None] | None = None) -> bool:
        """Return whether the phase ends with its current step. Called from the trainer's thread, too."""
        last_base = self.replica.base.round + (round_under_way is not None)
        is_late = self._stop_after_round is not None and self._stop_after_round >= last_base
        return self._leave.is_made or is_late or _has_failed(round_under_way)

    def _progress_of(self, phase: Phase) -> Callable[[int, float], None]:
        """Return what the trainer calls from its thread after each step."""
        loop = asyncio.get_running_loop()

        def tell(steps_done: int, tokens_per_second: float) -> None:
            event = TrainingProgress(phase.round, phase.done + steps_done, phase.steps, tokens_per_second)
            loop.call_soon_threadsafe(self._observer, event)

        return tell


def _has_failed(work: asyncio.Future[None] | None) -> bool:
    return work is not None and work.done() and work.exception() is not None


def _phase_trained(phase: Phase, report: PhaseReport, owned: tuple[int, ...]) -> PhaseTrained:
    return PhaseTrained(
        phase.round, report.steps, report.tokens, report.loss, report.aux_loss, report.seconds, report.skipped_steps,
        report.flops_per_second, report.mfu, tuple(load_violation(report.assignments)),
        share_of(report.assignments, owned) if report.assignments else math.nan,
    )
