"""A vouched trainer's audits: it trains phases of other members again, and compares. The rules are in `rounds/audits.py`.

A commit draws an audit. Base and pushed updates are at hand then: this peer held the one and reduced some of the other. The
member's moments are fetched while this peer's next phase runs. Before the phase after that it swaps them for its own, trains
the audited phase again, and swaps back. Its own phase is shorter by as many steps, so nobody waits for an auditor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from spes_p2p.consensus.signed import read_signed
from spes_p2p.content.pieces import BadPiece, Body, Content, Piece
from spes_p2p.data.slices import end_of, union
from spes_p2p.errors import Diverged, PeerUnreachable, Refused, UserError
from spes_p2p.messages.audits import Audited
from spes_p2p.messages.codec import WireError
from spes_p2p.messages.consensus import Workload
from spes_p2p.messages.fields import MAX_AUDITS
from spes_p2p.messages.rounds import Announcement
from spes_p2p.model.layout import Placed
from spes_p2p.observe.events import Observer, PhaseAudited
from spes_p2p.peer.checking import Checking
from spes_p2p.peer.kept_moments import PIECE_BYTES
from spes_p2p.peer.leaving import LeaveRequest
from spes_p2p.peer.node import Node
from spes_p2p.peer.phases import PhaseRunner
from spes_p2p.peer.replica import Applied, Replica
from spes_p2p.rounds.audits import (
    AUDITED_PARTS,
    REPORT_ROUNDS,
    Score,
    are_audited,
    auditor_of,
    drawn_work,
    has_passed,
    in_order,
)
from spes_p2p.rounds.base import Base
from spes_p2p.rounds.claims import outstanding
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.results import Results
from spes_p2p.storage.interfaces import Draft
from spes_p2p.storage.tensor_file import read_tensors, tensor_chunks
from spes_p2p.training.batches import split_samples
from spes_p2p.training.interface import Phase
from spes_p2p.training.moments import are_plausible, load_moments, most_bytes, read_moments

logger = logging.getLogger(__name__)

ASK_AGAIN_S = (1.0, 4.0, 16.0)
"""A member that has not learned the commit yet, or serves no moments now, is asked again after so long, at last every 16 s
until the next commit says whether it took part meanwhile."""


@dataclass(frozen=True)
class Case:
    """One phase to audit, with all that its auditor has of it but the moments."""

    peer: str
    round: int
    base: Base
    """The one that the phase began with."""
    owned: tuple[int, ...]
    phase: Phase
    """The steps that the member says it trained."""
    moments: bytes
    """Digest to which the member committed; empty: none."""
    results: Results
    """Of that round."""
    pushed: tuple[tuple[Part, Body], ...]
    """The updates of the member that this peer has."""


class Auditing:
    """One audit at a time."""

    def __init__(
        self, node: Node, replica: Replica, phases: PhaseRunner, checking: Checking, experts: int, observer: Observer,
        leave: LeaveRequest,
    ):
        """`experts`: the most that this peer has room to train."""
        self._checking, self._experts = checking, experts
        self._node, self._replica, self._phases, self._exchanges = node, replica, phases, replica.exchanges
        self._observer, self._leave = observer, leave
        self._case: Case | None = None
        self._fetched: Draft | None = None
        """The moments of the case, once they are here."""
        self._made: list[Audited] = []

    @property
    def unreported(self) -> tuple[Audited, ...]:
        """The audits that no commit has yet, for the announcement."""
        log, me = self._node.log, self._node.peer_id
        verdicts = (each for commit in log.recent(log.round) for each in commit.verdicts)
        known = {(each.peer, each.round) for each in verdicts if each.auditor == me}
        recent = (each for each in self._made if each.round > log.round - REPORT_ROUNDS)
        self._made = [each for each in recent if (each.peer, each.round) not in known][-MAX_AUDITS:]
        return tuple(self._made)

    def begin(self, before: Base, applied: Applied) -> None:
        """Take up what the commit after this base draws for this peer."""
        case = self._drawn_case(before, applied)
        if case is None:
            return
        self._case, self._fetched = case, None
        self._node.spawn(self._prepare(case))

    def _drawn_case(self, before: Base, applied: Applied) -> Case | None:
        node, commit, log = self._node, applied.decided.commit, self._node.log
        config, me = node.campaign.config, node.peer_id
        is_next = commit.parent == before.commit and commit.id == log.last.id and before.plan is not None
        if self._case is not None or not are_audited(config) or self._replica.trainer is None or not is_next:
            return None
        recent = log.recent(commit.round)
        drawn = drawn_work(recent, log.services(commit.round), config)
        mine = [peer for peer in drawn if auditor_of(commit, peer) == me]
        cases = (self._case_of(peer, drawn[peer], before, applied) for peer in in_order(commit, mine, recent))
        return next((case for case in cases if case is not None), None)

    def _case_of(self, peer: str, work: Workload, before: Base, applied: Applied) -> Case | None:
        """Return the case of a member; None where this peer has no room for its experts."""
        assignment = before.assignment(peer)
        signed = next(each for each in applied.plan.proposal.announcements if each.peer == peer)
        announced = read_signed(Announcement, signed, self._node.world.identity)
        if assignment is None or len(assignment.owned) > self._experts:
            return None
        training, log = self._node.campaign.config.training, self._node.log
        step_tokens = training.batch_size * training.sequence_length
        returned = sum(map(len, end_of(work.slices, union(announced.untrained)))) // training.batch_size
        earlier = outstanding(log.recent(before.round), peer, overlap=False).steps - work.steps
        # What it does not return counts as trained, and so do the tokens that it claims.
        steps = max(1, work.steps - returned, min(work.steps, announced.tokens // step_tokens - earlier))
        slices, _ = split_samples(work.slices, steps * training.batch_size)
        phase = self._phases.phase_of(before, assignment)
        return Case(
            peer, applied.decided.commit.round, before, assignment.owned, replace(phase.shortened(steps), slices=slices),
            announced.moments, applied.results, self._pushed_by(peer, applied),
        )

    def _pushed_by(self, peer: str, applied: Applied) -> tuple[tuple[Part, Body], ...]:
        """Return a member's updates in a round that this peer reduced: of shared weights and router.

        Long phases of the same expert differ too much between two devices.
        """
        plan, found = applied.plan, []
        me, member = plan.index(self._node.peer_id), plan.index(peer)
        for part in applied.results.parts:
            is_mine = part.reducer == me and part.group.expert is None
            inputs = self._exchanges.inputs_of(plan.id, part.index) if is_mine else None
            if inputs is not None and member in inputs:
                found.append((part, inputs[member].body))
        return tuple(found)

    async def _prepare(self, case: Case) -> None:
        """Get what the audit needs; without the member's update there is none."""
        if not case.pushed:
            case = replace(case, pushed=await self._fetch_updates(case))
            self._case = case if case.pushed else None
        if case.pushed and case.moments:
            await self._fetch(case)
        elif case.pushed:
            self._conclude(case, Score(0))

    async def _fetch_updates(self, case: Case) -> tuple[tuple[Part, Body], ...]:
        """Fetch some of the member's updates from the peers that reduced them."""
        results, found = case.results, []
        member, me = results.plan.index(case.peer), results.plan.index(self._node.peer_id)
        parts = [
            part for part in results.parts
            if part.group.expert is None and part.reducer != me and member in results.contributors(part)
        ]
        self._node.world.rng.shuffle(parts)
        for part in sorted(parts, key=lambda part: part.group.kind != "shared")[:AUDITED_PARTS]:
            assert member is not None
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                found.append((part, await self._checking.update_of(results, part, member)))
        return tuple(found)

    async def _fetch(self, case: Case) -> None:
        """Fetch the moments to which the member committed, from it alone."""
        node, root = self._node, case.moments.hex()
        groups = self._replica.layout.groups
        most = most_bytes(sum(group.size for group in groups if group.expert is None or group.expert in case.owned))
        draft, donors = node.world.store.draft("audited-moments"), [node.fetcher.peers([case.peer])]
        found: list[bytes] = []

        def piece(index: int) -> Piece:
            if index == 0:
                return Piece(case.moments, 32 * -(-most // PIECE_BYTES))
            return Piece(found[0][32 * index - 32 : 32 * index], PIECE_BYTES)

        async def keep(index: int, body: Body) -> None:
            if self._case is not case:
                raise BadPiece("it came too late for an audit")
            if index == 0:
                found.append(bytes(body))
            elif len(body) != PIECE_BYTES and index < len(found[0]) // 32:
                raise BadPiece("a short piece of moments")
            else:
                await node.world.run_blocking(draft.write, (index - 1) * PIECE_BYTES, bytes(body))

        content, asked = Content("moments", root, piece), 0
        while True:
            is_last = asked >= len(ASK_AGAIN_S) and node.log.round > case.round
            missing = await node.fetcher.fetch(content, [0], donors, keep) if not found else []
            if found:
                arrived: list[int] = await node.fetcher.fetch(content, range(1, 1 + len(found[0]) // 32), donors, keep)
                missing = arrived
            if self._case is not case or not missing or is_last:
                break
            await asyncio.sleep(ASK_AGAIN_S[min(asked, len(ASK_AGAIN_S) - 1)])
            asked += 1
        if self._case is case and not missing:
            self._fetched = draft
        elif self._case is case and node.log.begins <= case.round + 1 <= node.log.round and (
            case.peer in node.log.commit_at(case.round + 1).members
        ):
            self._conclude(case, Score(0))
        elif self._case is case:
            self._case = None  # it was away, which the next commit says (`admission.owes_an_audit`)

    async def audit(self) -> None:
        """Train the audited phase again, if its moments are here. Called between two phases of this peer."""
        case, draft = self._case, self._fetched
        if case is not None and self._node.log.round >= case.round + REPORT_ROUNDS - 1:
            self._case = self._fetched = None  # too late: others no longer know the round
            return
        if case is None or draft is None:
            return
        async with self._phases.lock:
            score: Score | None = await self._node.world.run_blocking(self._score, case, draft, lambda: self._leave.is_made)
        if score is None:
            self._case = self._fetched = None
            return
        self._phases.give_up_steps(score.steps)
        self._conclude(case, score)

    def _conclude(self, case: Case, score: Score) -> None:
        self._case = self._fetched = None
        passed = has_passed(score)
        made = Audited(case.round, case.peer, passed, score.steps, score.cosine, score.norm_ratio)
        self._made.append(made)
        self._observer(PhaseAudited(made))
        if not passed:
            logger.warning("round %d: the update of %s is not what training gives", case.round, case.peer)

    def _score(self, case: Case, draft: Draft, is_stopped: Callable[[], bool]) -> Score | None:
        """Train the phase again with the member's moments, and compare. In a worker thread, between two phases.

        None when it was stopped, or this peer cannot train the phase.
        """
        trainer, ledger, base = self._replica.trainer, self._replica.ledger, self._replica.base.values
        assert trainer is not None
        try:
            moments = read_moments(draft.view())
        except ValueError as error:
            logger.warning("round %d: %s commits to no moments: %s", case.round, case.peer, error)
            return Score(0)
        own, size = self._node.world.store.draft("own-moments"), 0
        for chunk in tensor_chunks(trainer.optimizer_state(), {}):
            own.write(size, chunk)
            size += memoryview(chunk).nbytes
        owned, pending = trainer.owned, ledger.stash_pending(trainer, base)
        try:
            trainer.assign(case.owned, case.base.values)
            before = load_moments(trainer, case.base.values, moments)
            try:
                report = trainer.train(case.phase, is_stopped, lambda done, speed: None)
            except Diverged:  # as with moments that no training has
                return Score(case.phase.steps, 0.0, 0.0)
            except UserError as error:
                logger.warning("round %d: no audit of %s: %s", case.round, case.peer, error)
                return None
            if report.steps < case.phase.steps:
                return None
            tensors, decay = self._replica.layout.by_name, self._node.campaign.config.training.beta2**report.steps
            common = {name: values for name, values in moments.items() if _is_common(tensors.get(name.partition("/")[2]))}
            if not are_plausible(common, trainer.optimizer_state(in_full=True), decay):
                return Score(case.phase.steps, 0.0, 0.0)
            return self._compared(case, before)
        finally:
            trainer.assign(owned, base)
            trainer.load_base(base)
            trainer.load_optimizer_state(read_tensors(own.view())[0])
            ledger.restore_pending(trainer, pending)

    def _compared(self, case: Case, pending: Mapping[str, np.ndarray]) -> Score:
        """Compare the member's update with what the trainer has now. Both had `pending` before the phase, by group name."""
        trainer = self._replica.trainer
        assert trainer is not None
        both = sent_square = made_square = 0.0
        for part, body in case.pushed:
            place = slice(part.start - part.group.start, part.stop - part.group.start)
            made = trainer.read(part.group, place.start, place.stop) - case.base.values[part.start : part.stop]
            sent = part.codec.decode(body, part.size)
            if part.group.name in pending:
                sent, made = sent - pending[part.group.name][place], made - pending[part.group.name][place]
            both += float(np.vdot(sent, made))
            sent_square += float(np.vdot(sent, sent))
            made_square += float(np.vdot(made, made))
        if not sent_square or not made_square:
            return Score(case.phase.steps, 0.0, 0.0)
        norms = math.sqrt(sent_square), math.sqrt(made_square)
        return Score(case.phase.steps, both / (norms[0] * norms[1]), norms[0] / norms[1])


def _is_common(placed: Placed | None) -> bool:
    return placed is not None and placed.spec.expert is None
