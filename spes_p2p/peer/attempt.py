"""The member's side of a round: try the coordinators in turn; in each attempt announce, exchange, report, learn the commit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from spes_p2p.consensus.control import is_paused, takes_part
from spes_p2p.consensus.electorate import quorum
from spes_p2p.consensus.signed import sign
from spes_p2p.errors import PeerUnreachable, Refused, UserError, refusal_line
from spes_p2p.messages.codec import WireError, pack
from spes_p2p.messages.compact import shortened
from spes_p2p.messages.consensus import CertifiedCommit
from spes_p2p.messages.framing import Kind, Message
from spes_p2p.messages.methods import PING, ROUND
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Ping, Proposal, Report, Revision, Stalled
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.net.unpacking import unpack_beside
from spes_p2p.peer.announcing import Announcer
from spes_p2p.peer.coordinator_service import CoordinatorService
from spes_p2p.peer.exchange import Exchange
from spes_p2p.peer.judging import Judge
from spes_p2p.peer.leaving import LeaveRequest
from spes_p2p.peer.node import Node
from spes_p2p.peer.patience import no_exchange
from spes_p2p.peer.phases import PhaseRunner
from spes_p2p.peer.replica import Replica
from spes_p2p.peer.reporter import EventReporter
from spes_p2p.rounds.commit import own_manifests, staged_report
from spes_p2p.rounds.planned import Plan

logger = logging.getLogger(__name__)

BACKOFF_S, MAX_BACKOFF_S = 1.0, 15.0
LATE_ASK = 2
"""Members that a peer asks for a commit that it missed before it asks the coordinator."""
BUSY_TRIES = 8
"""How often in a round a newcomer asks a coordinator again that has too many newcomers."""


class RoundMember:
    """Takes part in the next round. An attempt that fails changes nothing."""

    def __init__(
        self,
        node: Node,
        replica: Replica,
        announcer: Announcer,
        phases: PhaseRunner,
        coordinators: CoordinatorService,
        judge: Judge,
        reporter: EventReporter,
        leave: LeaveRequest,
    ):
        self._judge = judge
        self._node, self._replica, self._announcer = node, replica, announcer
        self._phases, self._coordinators, self._reporter, self._leave = phases, coordinators, reporter, leave
        self._patience = coordinators.patience
        self._refusing: set[str] = set()
        """Coordinators that refused this peer's version or campaign."""
        self._turned_away = 0
        """How often in this round a coordinator had too many newcomers."""
        self._said: set[str] = set()
        """What the log says of refusals in this round: a peer that comes late meets the same one every second."""

    async def take_part(self, seconds: dict[str, float]) -> None:
        """Bring the round after the base to a decision, or return when this peer is asked to leave.

        The base changes only where it has to be repaired. `seconds` gets the duration of each stage of the last attempt.
        Raises UserError when this peer cannot take part.
        """
        self._patience.begin()
        watching = asyncio.ensure_future(self._patience.watch())
        try:
            await self._decide(seconds)
        finally:
            await end_tasks([watching])
        if not takes_part(self._node.log.last, self._node.peer_id):  # nobody serves the round's results to this peer
            self._node.require_admitted(self._node.log.last.control)

    async def _decide(self, seconds: dict[str, float]) -> None:
        target, attempt, self._turned_away = self._replica.base.round + 1, 0, 0
        self._said.clear()
        while self._node.log.last.id == self._replica.base.commit and not self._leave.is_made:
            seconds.clear()
            order = self._node.coordinators()
            coordinator = order[attempt % len(order)]
            if self._patience.skips(coordinator) or coordinator in self._node.departures.gone(self._replica.base.commit):
                self._set_state("waiting")
                attempt += 1
            else:
                attempt = await self._try(target, attempt, order, seconds)
            if attempt and attempt % len(order) == 0:
                self._patience.next_pass(order)
                await self._rediscover(attempt // len(order))

    async def _try(self, target: int, attempt: int, order: Sequence[str], seconds: dict[str, float]) -> int:
        """Make an attempt; return the number of the next one. Raises UserError when this peer cannot take part."""
        coordinator = order[attempt % len(order)]
        try:
            elsewhere = await self._attempt_in_time(attempt, coordinator, seconds)
            if elsewhere:
                attempt += (order.index(elsewhere) - attempt) % len(order)
        except PeerUnreachable as error:
            attempt += 1
            self._patience.unreachable(coordinator)
            if coordinator in self._node.departures.gone(self._replica.base.commit):  # it said so meanwhile
                return attempt
            if attempt > len(order) or not self._is_new:
                self._reporter.failed(target, attempt - 1, "coordinator_lost", str(error))
            in_this_pass = attempt % len(order)
            untried = order[in_this_pass:] if in_this_pass else ()
            attempt += await self._leave.unless_made(_first_living(self._node.endpoint, untried)) or 0
        except WireError as error:
            self._patience.failed(coordinator)
            self._reporter.failed(target, attempt, "malformed", str(error))
            attempt += 1
        except Refused as error:
            attempt = await self._after_refusal(coordinator, target, attempt, len(order), error)
        return attempt

    @property
    def _is_new(self) -> bool:
        """Whether this peer was not in the last round: then it does not know who has left since."""
        last = self._node.log.last
        return self._node.peer_id not in {*last.members, *last.electorate}

    async def _after_refusal(self, coordinator: str, target: int, attempt: int, coordinators: int, refused: Refused) -> int:
        """Fix what a refusal names; return the next attempt's number. Raises UserError when this peer cannot take part."""
        if refused.code in (Code.VERSION, Code.CAMPAIGN):
            self._refusing.add(coordinator)  # one of them may lie
            if len(self._refusing.intersection(self._node.log.last.electorate)) >= quorum(self._node.log.last.electorate):
                raise UserError(refusal_line(coordinator, refused, self._node.world.protocol))
        if refused.code is Code.NOT_ADMITTED:
            await self._node.refresh_contacts()  # fetches the owner's newest record: only that, or a commit, proves a ban
            await self._node.decisions.learn_from_all(self._node.sources())
            if self._node.why_not_admitted(self._node.controls.newest):
                await self.return_work()
            self._node.require_admitted(self._node.controls.newest)
        if refused.code is Code.BEHIND:
            await self._learn(target, coordinator)
            return attempt if self._node.log.round >= target else attempt + 1
        if refused.code is Code.DIGEST:
            return await self._repair(target, attempt, refused.detail)
        if refused.code is Code.BUSY and self._is_new and self._turned_away < BUSY_TRIES:
            self._turned_away += 1
            await self._leave.wait(max(BACKOFF_S, min(refused.refusal.retry_s or 0.0, MAX_BACKOFF_S)))
            return attempt
        await self._leave.wait(BACKOFF_S)
        if refused.code in (Code.CLOSED, Code.ALIVE, Code.LEAVING):
            line = f"round {target}: {refused.detail} ({coordinator[-6:]})"
            if coordinator != self._node.peer_id and line not in self._said:
                self._said.add(line)
                logger.info("%s", line)
            if refused.code is Code.CLOSED:
                self._patience.proposed(coordinator)
                return attempt
            if refused.code is Code.ALIVE:
                self._patience.deferred(coordinator, refused.refusal.peer or "")
            if refused.code is Code.LEAVING or self._patience.disputes(refused.refusal.peer or ""):
                return attempt + 1
            return (attempt // coordinators + 1) * coordinators
        if refused.code is not Code.COORDINATOR_BEHIND:
            self._patience.failed(coordinator)
        self._reporter.failed(target, attempt, "refused", refused.detail)
        return attempt + 1

    async def _learn(self, target: int, coordinator: str) -> None:
        """Learn the commit of this round from a member, or else from the coordinator, which all that come too late know."""
        is_trusted = self._node.endpoint.shares.is_trusted
        members = sorted((peer for peer in self._node.others() if peer != coordinator), key=lambda peer: not is_trusted(peer))
        for peer in (*members[:LATE_ASK], coordinator):
            if self._node.log.round < target:
                with contextlib.suppress(PeerUnreachable, Refused, WireError):
                    await self._node.decisions.learn_from(peer, is_patient=peer == coordinator)

    async def _repair(self, target: int, attempt: int, reason: str) -> int:
        try:
            async with self._phases.lock:
                await self._replica.jumps.repair()
            self._reporter.restored("download")
            return attempt
        except PeerUnreachable as error:
            self._reporter.failed(target, attempt, "refused", f"{reason} ({error})")
            await self._leave.wait(BACKOFF_S)
            return attempt + 1

    async def _rediscover(self, times_tried: int) -> None:
        """After trying every coordinator: refresh contacts and commits, and ask for a reform."""
        await self._rest(min(BACKOFF_S * 2 ** min(times_tried - 1, 10), MAX_BACKOFF_S))
        await self._node.refresh_contacts()
        await self._node.decisions.learn_from_all(self._node.sources())
        await self._node.departures.come_back()
        if self._node.role == "trainer":
            await self._node.decisions.ask_for_reform()

    async def _rest(self, seconds: float) -> None:
        """Wait, at most until a commit follows the base: one may open a term for a peer that found no coordinator."""
        for _ in range(round(seconds / BACKOFF_S)):
            if self._node.log.last.id != self._replica.base.commit or self._leave.is_made:
                return
            await self._leave.wait(BACKOFF_S)

    def _look_for_electors(self) -> None:
        """Find silent electors in the background, if this peer is one, so that its vote on a commit without them waits less."""
        node, electorate = self._node, set(self._node.log.last.electorate)
        if node.peer_id in electorate:
            node.spawn(node.decisions.validity.look_for(sorted(electorate - {node.peer_id})))

    async def return_work(self) -> None:
        """Tell the others that this peer leaves: they train the samples of its work that no round includes."""
        await self._coordinators.stop()
        await self._node.departures.leave()

    async def _attempt_in_time(self, number: int, coordinator: str, seconds: dict[str, float]) -> str:
        """As `_attempt`, but ends when another coordinator brings the round to a decision, or should get the next attempt.

        Returns the latter, or "". Raises PeerUnreachable, too, when this coordinator has had its time.
        """
        attempt = asyncio.ensure_future(self._attempt(number, coordinator, seconds))
        over = asyncio.ensure_future(self._patience.exhausted(coordinator))
        try:
            await asyncio.wait({attempt, over}, return_when=asyncio.FIRST_COMPLETED)
            if attempt.done():
                attempt.result()
                return ""
            elsewhere = over.result()
            if not elsewhere and self._node.log.last.id == self._replica.base.commit:
                raise PeerUnreachable(f"{coordinator[-6:]} lives and does not bring the round to a decision")
            return elsewhere
        finally:
            await end_tasks([attempt, over])

    async def _attempt(self, number: int, coordinator: str, seconds: dict[str, float]) -> None:
        """Make one attempt; it ends without a decision when this peer is asked to leave before there is a plan.

        Raises PeerUnreachable, Refused, WireError.
        """
        clock = asyncio.get_running_loop().time
        await self._replica.store.durable()
        trains, paused = self._node.role == "trainer", is_paused(self._node.log.last.control)
        self._set_state("paused" if paused else "announcing" if trains else "waiting")
        started = clock()
        async with self._node.endpoint.stream(coordinator, ROUND) as stream:
            announced = pack(self._announcer.announcement(number))
            await _send(stream, shortened(Kind.MESSAGE, announced, self._replica.base.known_of(self._node.peer_id)))
            self._look_for_electors()
            reply = await self._plan_or_commit(stream, announced)
            if reply is None:
                return
            reply = await stream.alive(self._node.relay.received(reply, stream.remote))
            if trains and not paused:
                seconds["announce"] = clock() - started
            if reply.kind == Kind.PROPOSAL:
                plan = await self._plan(await unpack_beside(Proposal, reply.body), stream.remote)
                reply = await self._exchange(stream, plan, seconds, announced + plan.id.encode())
            decided = await unpack_beside(CertifiedCommit, reply.body)
        self._node.decisions.learn(decided)

    def _set_state(self, state: str) -> None:
        self._phases.set_state_unless_training(state)

    async def _plan_or_commit(self, stream: Stream, announced: bytes) -> Message | None:
        """Return the coordinator's answer, and tell it what was announced if it asks; None if this peer leaves before that."""
        answer = asyncio.ensure_future(_answer(stream, announced))
        try:
            if await self._leave.unless_made(asyncio.shield(answer)) is None:
                await self.return_work()
            return await answer if answer.done() else None
        finally:
            answer.cancel()

    async def _exchange(self, stream: Stream, plan: Plan, seconds: dict[str, float], known: bytes) -> Message:
        """Exchange, stage, judge and report, again for each revision of the plan; returns the message with the commit.

        `known`: the dictionary of reports (`messages/compact.py`).
        """
        clock = asyncio.get_running_loop().time
        self._set_state("exchanging")
        started = clock()
        if self._node.campaign.config.sync.overlap:
            self._coordinators.phase_begins_during(plan.round)
        exchange = await self._replica.open_exchange(plan)
        self._patience.proposed(stream.remote, exchange.timeout_s)

        async def complain(reducer: int, revision: int) -> None:
            await stream.send(pack(Stalled(plan.id, revision, reducer)), kind=Kind.STALLED)

        exchanges = [exchange]
        work: asyncio.Future[Any] | None = asyncio.ensure_future(exchange.run(complain))
        self._patience.is_exchanging = lambda: work is not None and any(each.moves for each in exchanges)
        judging: asyncio.Future[None] | None = None
        answer = asyncio.ensure_future(stream.any_message())
        try:
            while True:
                await asyncio.wait({answer, work} if work else {answer}, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    reply = answer.result()
                    if reply.kind == Kind.IN_FULL:
                        await stream.send(self._report(exchange, in_full=True), kind=Kind.REPORT)
                    elif reply.kind == Kind.REVISION:
                        revision = await unpack_beside(Revision, reply.body)
                        more = self._replica.exchanges.revise(plan, revision)
                        exchanges += more
                        work = asyncio.gather(*([work] if work else []), *(each.run(complain) for each in more))
                    else:
                        seconds["commit"] = clock() - started - seconds.get("exchange", 0.0)
                        return await stream.alive(self._node.relay.received(reply, stream.remote))
                    answer = asyncio.ensure_future(stream.any_message())
                elif work is not None and work is not judging:
                    work.result()
                    await self._replica.results.stage(exchange.results)
                    work = judging = asyncio.ensure_future(self._judge.judge(exchange.results))
                elif work is not None:
                    work.result()
                    work = None
                    await _send(stream, shortened(Kind.REPORT, self._report(exchange), known))
                    seconds["exchange"] = clock() - started
                    self._set_state("committing")
        finally:
            self._patience.is_exchanging = no_exchange
            await end_tasks([answer] if work is None else [answer, work])

    def _report(self, exchange: Exchange, in_full: bool = False) -> bytes:
        harmful = self._judge.harmful(exchange.plan.id)
        staged = staged_report(exchange.results, exchange.me, self._node.decisions.incarnation, in_full, harmful)
        return pack(Report(sign(staged, self._node.world.identity), own_manifests(exchange.results, exchange.me)))

    async def _plan(self, proposal: Proposal, coordinator: str) -> Plan:
        """Derive the plan of this attempt. Raises Refused where none follows for this peer."""
        if proposal.parent != self._replica.base.commit or proposal.ballot.coordinator != coordinator:
            raise Refused(Code.NOT_PROVEN, "a proposal for another round, or of another coordinator")
        plan = await self._replica.validity.derive_on_base(proposal)
        if plan.index(self._node.peer_id) is None:
            raise Refused(Code.NOT_PROVEN, "a proposal without this peer")
        return plan


async def _answer(stream: Stream, announced: bytes) -> Message:
    """Return the coordinator's answer to an announcement. Raises PeerUnreachable, Refused."""
    answer = await stream.any_message()
    if answer.kind == Kind.IN_FULL:
        await stream.send(announced)
        answer = await stream.any_message()
    return answer


async def _send(stream: Stream, message: Message) -> None:
    await stream.send(bytes(message.body), kind=message.kind)


async def _first_living(endpoint: RpcEndpoint, peers: Sequence[str]) -> int:
    """Return the index of the first of these peers that answers; their number when none does. Takes one `silence_s` at most."""
    pings = [asyncio.ensure_future(endpoint.is_there(peer, PING, pack(Ping(-1)))) for peer in peers]
    try:
        for index, ping in enumerate(pings):
            if await ping is not None:
                return index
        return len(peers)
    finally:
        await end_tasks(pings)
