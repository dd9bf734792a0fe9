"""The coordinator's door: which announcements this peer takes, and the one attempt that is open here."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spes_p2p.consensus.admission import EXPIRED, standing_of
from spes_p2p.consensus.control import takes_part
from spes_p2p.consensus.electorate import coordinator_order
from spes_p2p.consensus.signed import read_signed
from spes_p2p.errors import Refused
from spes_p2p.messages.admission import Invitation
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.compact import restored
from spes_p2p.messages.consensus import Commit, Signed
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import PING, ROUND
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Announcement, Ping, Pong
from spes_p2p.net.rpc import Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.net.unpacking import beside
from spes_p2p.peer.coordinator import Coordination
from spes_p2p.peer.courtesy import LAST_SHARE, Courtesy
from spes_p2p.peer.gathering import PING_EVERY_S, LateArrivals, RoundContext
from spes_p2p.peer.node import Node
from spes_p2p.peer.patience import Patience
from spes_p2p.peer.phases import PhaseRunner
from spes_p2p.peer.replica import Replica
from spes_p2p.rounds.plan import MAX_SPEED_RATIO
from spes_p2p.rounds.planned import Plan, pacemakers
from spes_p2p.rounds.proposal import check_announced

logger = logging.getLogger(__name__)

BASE_EVERY_S = 0.1
"""A coordinator that waits for its base looks this often."""
LEAST_KNOWN, KNOWN_ROUNDS = 3, 8
"""The median of the last ones says how long a round takes: some are short since a trainer comes back, others wait for votes."""


class CoordinatorService:
    """Opens an attempt at the next round when it is this peer's turn, and lets members into it."""

    def __init__(self, node: Node, replica: Replica, phases: PhaseRunner):
        self.too_late, self._strangers = LateArrivals(), Courtesy(LAST_SHARE)
        self.patience = Patience(node, self._work)
        self._node, self._replica, self._phases = node, replica, phases
        self._attempt: Coordination | None = None
        self._running: asyncio.Task[None]
        """Runs the attempt."""
        self._opened = asyncio.Event()
        """Set when an attempt opens, then replaced."""
        self._timed = -1, 0.0
        """The last round that was applied, and the loop time at which its commit became known."""
        self._known_s: deque[float] = deque(maxlen=KNOWN_ROUNDS)
        """Seconds of the last rounds with work of trainers that are no strangers."""
        self._phase_during = -1, 0.0
        """With overlap: the round in flight during the phase, and the loop time at which the phase began."""
        self._failed_round = -1
        self._leaves = False
        self._stalled: tuple[int, set[str]] = -1, set()
        """A round, and the reducers that stalled in attempts at it."""
        self._asked_to_stop_by: set[str] = set()
        """Coordinators whose request to end the phase is being looked into."""
        self._expired = set[Invitation]()
        """The owner's invitations of which this peer's log file says that they have expired."""

    async def serve(self) -> None:
        """Answer requests from now on."""
        await self._node.endpoint.serve(PING, self._on_ping)
        await self._node.endpoint.serve(ROUND, self._on_round)

    def phase_begins_during(self, round_number: int) -> None:
        """Time the stragglers of the next round from now: a phase begins with this round in flight."""
        self._phase_during = round_number, asyncio.get_running_loop().time()

    def applied(self, plan: Plan) -> None:
        """Time a round with work of trainers that are no strangers."""
        (last, began), now = self._timed, self._node.decisions.learned_at
        self._timed = plan.round, now
        if last == plan.round - 1 and any(each.tokens and each.trains and not each.is_stranger for each in plan.members):
            self._known_s.append(now - began)

    def close(self) -> None:
        """Fail the open attempt."""
        if self._attempt is not None:
            self._attempt.give_up()

    async def stop(self) -> None:
        """Open no further attempts, and fail the one that has no plan yet."""
        self._leaves = True
        if self._attempt is not None and not self._attempt.is_planned:
            self._attempt.give_up()
            await end_tasks([self._running])

    async def _on_ping(self, stream: Stream) -> None:
        ping, log = unpack(Ping, await stream.message()), self._node.log
        if ping.stop_after == log.round and stream.remote in set(log.last.electorate) - self._asked_to_stop_by:
            self._asked_to_stop_by.add(stream.remote)
            self._node.spawn(self._stop_if_due(stream.remote, log.last))
        failed = log.round + 1 if self._leaves and not self._is_open() else self._failed_round
        exchanging = log.round + 1 if self.patience.is_exchanging() else -1
        patience, decisions = self.patience, self._node.decisions
        known_s = max(0.0, asyncio.get_running_loop().time() - decisions.learned_at)
        await stream.send(pack(Pong(
            log.round, failed, decisions.may_vote, patience.announced, exchanging, patience.waits_for, known_s,
        )))

    async def _stop_if_due(self, coordinator: str, commit: Commit) -> None:
        """End the phase after a commit if its coordinator may ask for it: those before it are gone, and half of it is done.

        Otherwise any elector could end every phase after one step.
        """
        order = coordinator_order(commit)
        try:
            is_its_turn = not await self._present(order[: order.index(coordinator)])
            if is_its_turn and await self.patience.is_quorum_ready() and self._node.log.last.id == commit.id:
                self._phases.stop_after(commit.round)
            await asyncio.sleep(PING_EVERY_S / 2)
        finally:
            self._asked_to_stop_by.discard(coordinator)

    async def _on_round(self, stream: Stream) -> None:
        signed, log = await self._announced(stream), self._node.log
        if signed.peer != stream.remote:
            raise Refused(Code.NOT_ALLOWED, "the announcement of another peer")
        is_known, identity = self._node.endpoint.shares.is_known(signed.peer), self._node.world.identity
        announcement = await beside(len(signed.record), read_signed, Announcement, signed, identity, is_known=is_known)
        self._check_same_campaign(announcement)
        self._check_admission(stream.remote, announcement)
        if announcement.round <= log.round:
            self.too_late.add(stream.remote, log.last, self._node.is_invited(announcement.invitation))
            raise Refused(Code.BEHIND, f"round {announcement.round} is decided", round=log.round)
        if announcement.round > log.round + 1:
            self._node.check_claim(stream.remote, announcement.round - 1)
            raise Refused(Code.COORDINATOR_BEHIND, "the coordinator is behind; try again", round=log.round)
        order = self._node.coordinators()
        turn = announcement.attempt % len(order)
        if order[turn] != self._node.peer_id:
            raise Refused(Code.NOT_COORDINATOR, "not the coordinator of this attempt")
        if self._leaves and not self._is_open():
            raise Refused(Code.LEAVING, "the coordinator leaves")
        self._node.departures.see(stream.remote)
        if stream.remote in self._stalled_in(log.round + 1):
            raise Refused(Code.CLOSED, "this round goes on without you: members waited for you in vain")
        await self._require_failed(order[:turn])
        if turn == 0 and not await self._has_base(order):
            self._failed_round = announcement.round
            raise Refused(Code.LEAVING, "the coordinator does not have the last base yet")
        if announcement.commit != log.last.id:
            raise Refused(Code.BEHIND, f"round {announcement.round} is decided", round=log.round)
        check_announced(stream.remote, announcement, log.last, self._node.peer_id, self._node.rules)
        announcement = self._kept_of(stream.remote, announcement)
        await self._current_attempt().serve(stream, announcement, signed)

    async def _announced(self, stream: Stream) -> Signed:
        """Return the announcement that begins a stream; ask for it in full if it is a Brief that this peer cannot restore."""
        known = self._replica.base.known_of(stream.remote) if self._replica.has_base else b""
        message = restored(await stream.any_message(), known)
        if message is None:
            stream.expect_request()
            await stream.send(kind=Kind.IN_FULL)
            message = await stream.any_message()
        if message.kind != Kind.MESSAGE:
            raise WireError(f"a frame of kind {message.kind} where an announcement belongs")
        return unpack(Signed, message.body)

    def _kept_of(self, peer: str, announcement: Announcement) -> Announcement:
        """Return an announcement without its long lists, each of which takes a megabyte; a plan is made from the signed one."""
        rule, helpers = self._node.rules.config.admission, self._node.log.last.helpers
        is_vouched = standing_of(rule, peer, announcement.invitation, helpers) == "vouched"
        return replace(announcement, untrained=(), archived=announcement.archived if is_vouched else ())

    def _check_same_campaign(self, announcement: Announcement) -> None:
        self._node.check_protocol(announcement.protocol, announcement.round)
        ours = self._node.campaign_hash
        if announcement.campaign != ours:
            detail = f"you train {announcement.campaign[:12]}, this swarm {ours[:12]}"
            raise Refused(Code.CAMPAIGN, detail, campaign=ours)

    def _check_admission(self, peer: str, announcement: Announcement) -> None:
        """Raise Refused unless the peer may take part now. If the clock here is ahead, nobody else's log says so."""
        invitation = announcement.invitation
        try:
            self._node.check_admission(peer, announcement.trains, invitation, self._node.log.last.control)
        except Refused as refused:
            if invitation is not None and invitation not in self._expired and refused.detail.startswith(EXPIRED):
                self._expired.add(invitation)
                logger.warning("refused %s: %s; if this machine's clock is ahead, set it", peer[-6:], refused.detail)
            raise

    async def _require_failed(self, coordinators: Sequence[str]) -> None:
        """Take over only from coordinators that are gone, have failed, or had their time (`patience.py`).

        Otherwise one bad link could abort a round for all.

        Returns at once when an attempt is open here, also one that another member's announcement opens meanwhile.
        Raises Refused.
        """
        if self._is_open():
            return
        asked = asyncio.ensure_future(self._present(coordinators))
        opened = asyncio.ensure_future(self._opened.wait())
        try:
            either: set[asyncio.Future[Any]] = {asked, opened}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._is_open():
                return
            present = await asked
        finally:
            await end_tasks([asked, opened])
        if present:
            raise Refused(Code.ALIVE, f"{present[0][-6:]} is there to coordinate this round", peer=present[0])

    async def _present(self, coordinators: Sequence[str]) -> list[str]:
        """Return those of these coordinators that are there to coordinate the next round: neither failed nor given up."""
        answers = await asyncio.gather(*(self._node.endpoint.is_there(peer, PING, pack(Ping(-1))) for peer in coordinators))
        answered = [peer for peer, answer in zip(coordinators, answers, strict=True)
                    if answer is not None and not _has_failed(answer, self._node.log.round + 1)]
        return [peer for peer in answered if not self.patience.yields(peer)]

    async def _has_base(self, order: Sequence[str]) -> bool:
        """Wait, if this peer is a helper before trainers, for the last base: without it nobody's work can be expected."""
        node, helpers = self._node, self._node.log.last.helpers
        if order[0] not in helpers or all(peer in helpers for peer in order):
            return True
        deadline = asyncio.get_running_loop().time() + node.endpoint.silence_s
        while not (ready := self._is_open() or self._holds_last_base()) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(BASE_EVERY_S)
        return ready

    def _holds_last_base(self) -> bool:
        return self._replica.has_base and self._replica.base.commit == self._node.log.last.id

    def _stalled_in(self, round_number: int) -> set[str]:
        if self._stalled[0] != round_number:
            self._stalled = round_number, set()
        return self._stalled[1]

    def _is_open(self) -> bool:
        """Return whether an attempt at the next round is open here."""
        attempt = self._attempt
        return attempt is not None and attempt.parent.id == self._node.log.last.id and not attempt.failed

    def _current_attempt(self) -> Coordination:
        """Return the attempt that is open here; open one when the last has failed or its round is over."""
        if self._attempt is not None and self._is_open():
            return self._attempt
        node, (during, began) = self._node, self._phase_during
        phase_began = began if during == node.log.round else node.decisions.learned_at
        stalled = self._stalled_in(node.log.round + 1)
        least_s = statistics.median_low(self._known_s) / MAX_SPEED_RATIO if len(self._known_s) >= LEAST_KNOWN else 0.0
        context = RoundContext(
            node, node.log.last, phase_began, *self._work(), self.too_late, self._strangers, stalled, least_s
        )
        self._attempt = attempt = Coordination(context, self._replica)
        self._opened.set()
        self._opened = asyncio.Event()
        self._running = node.spawn(self._run(attempt))
        return attempt

    async def _run(self, attempt: Coordination) -> None:
        await attempt.run()
        if attempt.failed:
            self._failed_round = attempt.parent.round + 1
            await self._node.decisions.learn_from_all(self._node.sources())

    def _work(self) -> tuple[Mapping[str, int], Collection[str]]:
        """Return the steps of this phase by peer, and the peers that make a quorum."""
        steps = self._assigned_steps()
        return steps, self._pace(steps)

    def _assigned_steps(self) -> Mapping[str, int]:
        """Steps by peer in this phase. Without the last plan, the same is expected of every trainer."""
        last, plan = self._node.log.last, self._last_plan()
        if plan is None:
            trainers = set(last.members) - set(last.helpers)
            return {peer: 1 for peer in trainers if takes_part(last, peer)}
        members, overlap = plan.members, self._node.campaign.config.sync.overlap
        steps = {members[a.member].peer: max(a.steps, overlap and members[a.member].trains) for a in plan.assignments}
        return {peer: each for peer, each in steps.items() if each}

    def _pace(self, steps: Mapping[str, int]) -> Collection[str]:
        """Return those of the peers with steps that decide how long the others may take."""
        plan, last = self._last_plan(), self._node.log.last
        known = {last.members[i] for i in last.vouched} if plan is None else pacemakers(plan.members)
        return known & steps.keys() or steps.keys()

    def _last_plan(self) -> Plan | None:
        """Return the plan of the last commit, if this peer has that commit's base."""
        return self._replica.base.plan if self._holds_last_base() else None


def _has_failed(pong: bytes, round_number: int) -> bool:
    """Return whether a ping's answer says that its sender could not coordinate the round; a malformed answer counts as yes."""
    try:
        return unpack(Pong, pong).failed_to_coordinate == round_number
    except WireError:
        return True
