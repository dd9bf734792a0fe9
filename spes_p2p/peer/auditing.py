"""A vouched trainer's audits: it trains phases of other members again, and compares. The rules are in `rounds/audits.py`.

A commit draws audits. Base and pushed updates are at hand then: this peer held the one and reduced some of the other. The
members' moments are fetched while this peer's next phase runs. Before the phase after that it swaps those of one member for
its own, trains some of the audited phase again, and swaps back; it goes on before the next one. Its own phase is shorter by
the steps that this took, but at most by half, unless the audit would come too late: strangers weigh at most as much as vouched
trainers, and beside an update of few steps those of whole phases look too large.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from spes_p2p.consensus.admission import NO_SERVICE
from spes_p2p.consensus.signed import read_signed
from spes_p2p.content.pieces import BadPiece, Body, Content, Piece
from spes_p2p.data.slices import end_of, union
from spes_p2p.errors import Diverged, PeerUnreachable, Refused, UserError
from spes_p2p.messages.audits import Audited
from spes_p2p.messages.codec import WireError
from spes_p2p.messages.consensus import Workload
from spes_p2p.messages.fields import MAX_AUDITS
from spes_p2p.messages.rounds import Announcement
from spes_p2p.model.layout import Group, Placed
from spes_p2p.observe.events import Observer, PhaseAudited
from spes_p2p.peer.announcing import Capacity
from spes_p2p.peer.checking import Checking
from spes_p2p.peer.kept_moments import PIECE_BYTES
from spes_p2p.peer.node import Node
from spes_p2p.peer.phases import PhaseRunner
from spes_p2p.peer.replica import Applied, Replica
from spes_p2p.rounds.accounting import MAX_PENDING_ROUNDS
from spes_p2p.rounds.audits import (
    AUDITED_IN_CELLS,
    AUDITED_PARTS,
    KEPT_MOMENTS_ROUNDS,
    REPORT_ROUNDS,
    Replayed,
    Score,
    are_audited,
    auditor_of,
    auditors_share,
    compared,
    drawn_work,
    has_passed,
    in_order,
    is_urgent,
    worse_of,
)
from spes_p2p.rounds.base import Base
from spes_p2p.rounds.claims import outstanding
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.results import Results
from spes_p2p.storage.interfaces import Draft
from spes_p2p.storage.tensor_file import read_tensors, tensor_chunks
from spes_p2p.training.batches import split_samples
from spes_p2p.training.interface import Phase
from spes_p2p.training.moments import are_plausible, load_moments, moments_chunks, most_bytes, read_moments
from spes_p2p.training.pending import PENDING

logger = logging.getLogger(__name__)

ASK_AGAIN_S = (1.0, 4.0, 16.0)
"""A member that has not learned the commit yet, or serves no moments now, is asked again after so long, at last every 16 s
until the next commit says whether it took part meanwhile."""
MOST_PHASES = REPORT_ROUNDS - 2
"""An audit takes the time of at most this many of its auditor's phases: the first and the last of the rounds have none."""
MAX_FETCHED = 3
"""Moments that are fetched at a time: those of a stranger that serves them slowly hold up no other audit."""


@dataclass(frozen=True, eq=False)
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


@dataclass
class Audit:
    """A case whose moments are here, and how far its phase is trained again."""

    case: Case
    moments: Draft
    """What the member had before the phase."""
    state: Draft
    """The same after the steps that are trained again."""
    left_out: Mapping[int, int]
    """By start of a pushed part: earlier phases that may be pending in it."""
    done: int = 0


class _Unwanted(Exception):
    """Another audit has begun."""


class Auditing:
    """One audit at a time, and the moments for the next one."""

    def __init__(
        self, node: Node, replica: Replica, phases: PhaseRunner, checking: Checking, capacity: Capacity, observer: Observer
    ):
        self._checking, self._capacity, self._observer = checking, capacity, observer
        self._node, self._replica, self._phases, self._exchanges = node, replica, phases, replica.exchanges
        self._waiting: tuple[Case, ...] = ()
        """Drawn by one commit, in order, while none of them is audited: their moments are being fetched."""
        self._arrived: dict[Case, Audit] = {}
        """Those whose moments are here already."""
        self._under_way: Audit | None = None
        self._share, self._owed_steps = auditors_share(node.campaign.config), 0.0
        """Share of this peer's steps that audits may take; steps that they took beyond it."""
        self._made: list[Audited] = []
        self._included: dict[int, dict[int, frozenset[str]]] = {}
        """By round and start of a part of common weights: the members whose updates the base took."""

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
        """Take up what the commit after this base draws for this peer, in place of what did not arrive in time."""
        self._note_included(applied)
        cases = self._drawn_cases(before, applied)
        if not cases:
            return
        self._waiting = cases
        for case in cases:
            self._node.spawn(self._prepare(case))

    @property
    def _steps_a_phase(self) -> int:
        """The most steps of audits before this peer's next phase: one of its own is left."""
        steps = self._phases.assigned_steps
        return max(1, steps - 1) if steps else 0

    @property
    def _half_a_phase(self) -> int:
        """The steps of audits, and the time that these take, before this peer's next phase, where more rounds are left."""
        return math.ceil(self._phases.assigned_steps / 2)

    def _note_included(self, applied: Applied) -> None:
        commit, results = applied.decided.commit, applied.results
        parts = (part for part in results.parts if part.group.expert is None and part.index not in commit.dropped)
        members = applied.plan.members
        self._included[commit.round] = {
            part.start: frozenset(members[i].peer for i in results.contributors(part)) for part in parts
        }
        for number in [number for number in self._included if number <= commit.round - REPORT_ROUNDS - MAX_PENDING_ROUNDS]:
            del self._included[number]

    def _left_out(self, case: Case, part: Part) -> int:
        """Return how many phases of the member's may be pending in a part: those since a round that took it.

        Who was away brings back what it trained before.
        """
        found, number, log = 0, case.base.round, self._node.log
        while found < MAX_PENDING_ROUNDS and number > max(0, log.begins):
            included = self._included.get(number)
            if included is not None and case.peer in included.get(part.start, ()):
                break
            if case.peer not in log.commit_at(number - 1).members:
                was_here = any(case.peer in commit.members for commit in log.recent(number - 1))
                return found + (was_here or log.services(number - 1).get(case.peer, NO_SERVICE).rounds > 0)
            found, number = found + 1, number - 1
        return found

    def _drawn_cases(self, before: Base, applied: Applied) -> tuple[Case, ...]:
        node, commit, log = self._node, applied.decided.commit, self._node.log
        config, me = node.campaign.config, node.peer_id
        is_next = commit.parent == before.commit and commit.id == log.last.id and before.plan is not None
        if self._arrived or not are_audited(config) or self._replica.trainer is None or not is_next:
            return ()
        recent = log.recent(commit.round)
        drawn = drawn_work(recent, log.services(commit.round), config)
        mine = [peer for peer in in_order(commit, drawn) if auditor_of(commit, peer) == me]
        urgent = {peer for peer in mine if is_urgent(recent, peer, me)}
        found = (self._case_of(peer, drawn[peer], before, applied) for peer in mine if not self._owed_steps or peer in urgent)
        cases = islice((case for case in found if case is not None), MAX_FETCHED)
        return tuple(sorted(cases, key=lambda case: case.peer not in urgent))

    def _case_of(self, peer: str, work: Workload, before: Base, applied: Applied) -> Case | None:
        """Return the case of a member; None where this peer has no room for its experts, or not the time."""
        assignment = before.assignment(peer)
        signed = next(each for each in applied.plan.proposal.announcements if each.peer == peer)
        announced = read_signed(Announcement, signed, self._node.world.identity)
        if assignment is None or len(assignment.owned) > self._capacity.experts:
            return None
        training, log = self._node.campaign.config.training, self._node.log
        step_tokens = training.batch_size * training.sequence_length
        returned = sum(map(len, end_of(work.slices, union(announced.untrained)))) // training.batch_size
        earlier = outstanding(log.recent(before.round), peer, overlap=False).steps - work.steps
        # What it does not return counts as trained, and so do the tokens that it claims.
        steps = max(1, work.steps - returned, min(work.steps, announced.tokens // step_tokens - earlier))
        if steps > MOST_PHASES * self._steps_a_phase:
            return None
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
        assert member is not None
        for part in applied.results.parts:
            is_mine = part.reducer == me and part.group.expert is None and part.hub_of(member) not in part.summing
            inputs = self._exchanges.inputs_of(plan.id, part.index) if is_mine else None
            if inputs is not None and member in inputs:
                found.append((part, inputs[member].body))
        return tuple(found)

    async def _prepare(self, case: Case) -> None:
        """Get what the audit needs; without the member's update of shared weights there is none."""
        pushed = (*case.pushed, *await self._fetch_updates(case))
        if not any(part.group.kind == "shared" for part, _ in pushed):
            await self._judge_hidden(case)
        elif case.moments:
            with contextlib.suppress(_Unwanted):
                await self._fetch(case, pushed)
        else:
            self._conclude(case, Score(0))

    async def _judge_hidden(self, case: Case) -> None:
        """Fail a member that hides what it gave to itself alone, as its cell's hub, and takes part in the next round."""
        log, results, member = self._node.log, case.results, case.results.plan.index(case.peer)
        given = [part for part in results.parts if part.group.kind == "shared" and member in results.contributors(part)]
        while log.round <= case.round:
            await asyncio.sleep(ASK_AGAIN_S[-1])
        assert member is not None
        took_part = log.begins <= case.round + 1 and case.peer in log.commit_at(case.round + 1).members
        if given and took_part and all(part.hub_of(member) == member for part in given):
            self._conclude(case, Score(0))
        else:
            self._drop(case)

    async def _fetch_updates(self, case: Case) -> tuple[tuple[Part, Body], ...]:
        """Fetch some of the member's updates from the peers that summed them: of shared weights and router, at random.

        The member knew who sums what when it sent them.
        """
        results, found = case.results, []
        member, me = results.plan.index(case.peer), results.plan.index(self._node.peer_id)
        assert member is not None
        parts = [
            part for part in results.parts
            if part.group.expert is None and member in results.contributors(part)
            and (part.reducer != me or part.hub_of(member) in part.summing)
        ]
        self._node.world.rng.shuffle(parts)
        for kind in ("shared", "router"):
            of_kind = [part for part in parts if part.group.kind == kind]
            count = AUDITED_IN_CELLS if any(part.hub_of(member) in part.summing for part in of_kind) else AUDITED_PARTS
            for part in of_kind[:count]:
                with contextlib.suppress(PeerUnreachable, Refused, WireError):
                    found.append((part, await self._checking.update_of(results, part, member)))
        return tuple(found)

    async def _fetch(self, case: Case, pushed: tuple[tuple[Part, Body], ...]) -> None:
        """Fetch the moments to which the member committed, from it alone. Raises _Unwanted when it shows them too late."""
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
            if case not in self._waiting:
                raise _Unwanted
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
            if found and case not in self._waiting:
                raise _Unwanted
            if not missing or is_last:
                break
            await asyncio.sleep(ASK_AGAIN_S[min(asked, len(ASK_AGAIN_S) - 1)])
            asked += 1
        if not missing:
            left_out = {part.start: self._left_out(case, part) for part, _ in pushed}
            self._arrived[case] = Audit(replace(case, pushed=pushed), draft, draft, left_out)
        elif (
            node.log.begins <= case.round + 1 <= node.log.round and case.peer in node.log.commit_at(case.round + 1).members
            and self._can_connect(case)
        ):
            self._conclude(case, Score(0))
        else:
            self._drop(case)  # it was away, which the next commit says (`admission.owes_an_audit`)

    def _can_connect(self, case: Case) -> bool:
        """Return whether this peer or the member can be dialled: the other one opens the connection."""
        plan = case.results.plan
        return self._capacity.is_dialable() or any(each.peer == case.peer and each.bandwidth > 0 for each in plan.members)

    async def audit(self) -> None:
        """Train the audited phase on, if its moments are here. Called between two phases of this peer."""
        log, steps = self._node.log, self._phases.assigned_steps
        audit = self._under_way = self._under_way or self._next_audit()
        self._waiting = tuple(
            case for case in self._waiting if case in self._arrived or log.round < case.round + KEPT_MOMENTS_ROUNDS
        )
        trained, spent = (0, 0) if audit is None else await self._train_again(audit)
        self._phases.give_up_steps(min(spent, max(trained, self._half_a_phase)))
        self._owed_steps = max(0.0, self._owed_steps + spent - self._share * steps)

    async def _train_again(self, audit: Audit) -> tuple[int, int]:
        """Train an equal share of the phase in each round; return its steps, and its own that it had time for meanwhile."""
        case, before, clock = audit.case, audit.done, asyncio.get_running_loop().time
        left, training = case.phase.steps - before, self._node.campaign.config.training
        rounds = math.ceil(left / self._steps_a_phase) if self._steps_a_phase else 1
        rounds_left = case.round + REPORT_ROUNDS - 1 - self._node.log.round
        if rounds > rounds_left:
            self._drop(case)  # too late: others no longer know the round then
            return 0, 0
        if not self._steps_a_phase:
            return 0, 0  # the campaign is paused
        rounds = max(rounds, min(rounds_left, math.ceil(left / self._half_a_phase)))
        try:
            async with self._phases.lock:
                began_at, share, must_stop = clock(), math.ceil(left / rounds), self._phases.must_stop
                score: Score | None = await self._node.world.run_blocking(self._score, audit, share, must_stop)
        except (UserError, ValueError, RuntimeError, ArithmeticError, MemoryError) as error:  # the state may be anything
            logger.warning("round %d: no audit of %s: %s", case.round, case.peer, error)
            self._drop(case)
            return 0, 0
        if score is not None:
            self._conclude(case, score)
        tokens = (clock() - began_at) * self._phases.tokens_per_s
        trained = audit.done - before
        return trained, max(trained, round(tokens / (training.batch_size * training.sequence_length)))

    def _next_audit(self) -> Audit | None:
        audit = next((self._arrived[case] for case in self._waiting if case in self._arrived), None)
        if audit is not None:
            self._waiting, self._arrived = (), {}
        return audit

    def _drop(self, case: Case) -> None:
        self._waiting = tuple(each for each in self._waiting if each is not case)
        if self._under_way is not None and self._under_way.case is case:
            self._under_way = None

    def _conclude(self, case: Case, score: Score) -> None:
        self._drop(case)
        passed = has_passed(score)
        made = Audited(case.round, case.peer, passed, score.steps, *worse_of(score))
        self._made.append(made)
        self._observer(PhaseAudited(made))
        if not passed:
            logger.warning("round %d: the update of %s is not what training gives", case.round, case.peer)

    def _score(self, audit: Audit, most_steps: int, is_stopped: Callable[[], bool]) -> Score | None:
        """Train the phase on with the member's state, and compare at its end. In a worker thread, between two phases.

        None before the end. Raises UserError when this peer cannot train the phase.
        """
        trainer, ledger, base = self._replica.trainer, self._replica.ledger, self._replica.base.values
        case, store, training = audit.case, self._node.world.store, self._node.campaign.config.training
        assert trainer is not None
        try:
            state = read_moments(audit.state.view())
        except ValueError as error:
            logger.warning("round %d: %s commits to no moments: %s", case.round, case.peer, error)
            return Score(0)
        steps = min(case.phase.steps, audit.done + most_steps)
        _, left = split_samples(case.phase.slices, audit.done * training.batch_size)
        slices, _ = split_samples(left, (steps - audit.done) * training.batch_size)
        phase = replace(case.phase.shortened(steps), slices=slices, done=audit.done)
        own = _written(store.draft("own-moments"), tensor_chunks(trainer.optimizer_state(), {}))
        owned, pending = trainer.owned, ledger.stash_pending(trainer, base)
        try:
            trainer.assign(case.owned, case.base.values)
            load_moments(trainer, case.base.values, state)
            del state
            try:
                audit.done += trainer.train(phase, is_stopped, lambda done, speed: None).steps
            except Diverged:  # as with moments that no training has
                audit.done = steps
                return Score(case.phase.steps, 0.0, 0.0)
            if audit.done < case.phase.steps:
                chunks = moments_chunks(trainer, case.base.values, case.round, is_begun=True)
                audit.state = _written(store.draft("audited-moments"), chunks)
                return None
            moments = read_moments(audit.moments.view())
            tensors, decay = self._replica.layout.by_name, training.beta2**case.phase.steps
            common = {name: values for name, values in moments.items() if _is_common(tensors.get(name.partition("/")[2]))}
            if not are_plausible(common, trainer.optimizer_state(in_full=True), decay):
                return Score(case.phase.steps, 0.0, 0.0)
            return self._compared(audit, moments)
        finally:
            trainer.assign(owned, base)
            trainer.load_base(base)
            trainer.load_optimizer_state(read_tensors(own.view())[0])
            ledger.restore_pending(trainer, pending)

    def _compared(self, audit: Audit, moments: Mapping[str, np.ndarray]) -> Score:
        """Compare the member's update with what the trainer has now. `moments`: what both had before the phase."""
        case, trainer = audit.case, self._replica.trainer
        assert trainer is not None

        def pending_and_made(group: Group, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
            place = slice(start - group.start, stop - group.start)
            made = trainer.read(group, place.start, place.stop) - case.base.values[start:stop]
            pending = moments.get(PENDING + group.name)
            if pending is None or pending.shape != (group.size,):
                pending = np.zeros(group.size, np.float32)
            made -= pending[place]
            return pending[place], made

        parts = []
        for part, body in case.pushed:
            pending, made = pending_and_made(part.group, part.start, part.stop)
            sent = part.codec.decode(body, part.size)
            parts.append(Replayed(sent, made, pending, audit.left_out[part.start], part.group.kind))
        owned = (self._replica.layout.expert(expert) for expert in case.owned)
        pairs = (pending_and_made(group, group.start, group.stop) for group in owned)
        experts = [(float(np.linalg.norm(pending)), float(np.linalg.norm(made))) for pending, made in pairs]
        return compared(case.phase.steps, parts, self._longer(case), experts)

    def _longer(self, case: Case) -> float:
        """Return how many times as many steps the longest phase had that the member was lately given, this one included."""
        recent, steps = self._node.log.recent(case.base.round), case.phase.steps
        given = (work.steps for commit in recent for peer, work in zip(commit.members, commit.workloads, strict=False)
                 if peer == case.peer)
        return max([1.0, *(each / steps for each in given)])


def _written(draft: Draft, chunks: Iterable[bytes | memoryview]) -> Draft:
    size = 0
    for chunk in chunks:
        draft.write(size, chunk)
        size += memoryview(chunk).nbytes
    return draft


def _is_common(placed: Placed | None) -> bool:
    return placed is not None and placed.spec.expert is None
