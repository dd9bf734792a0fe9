"""The member's side of one attempt at a round: announce, exchange, stage, report, and learn the decided commit."""

from __future__ import annotations

import asyncio
from typing import Any

from spes_p2p.consensus.control import is_paused
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import CertifiedCommit
from spes_p2p.messages.framing import Kind, Message
from spes_p2p.messages.methods import ROUND
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Plan, Revision
from spes_p2p.net.rpc import Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.peer.announcing import Announcer
from spes_p2p.peer.leaving import LeaveRequest, hand_back
from spes_p2p.peer.node import Node
from spes_p2p.peer.phases import PhaseRunner
from spes_p2p.peer.replica import Replica
from spes_p2p.peer.samples import AssignedSamples
from spes_p2p.rounds.plan import staged_report


class RoundMember:
    """Takes part in attempts at the next round. An attempt that fails changes nothing."""

    def __init__(
        self,
        node: Node,
        replica: Replica,
        announcer: Announcer,
        samples: AssignedSamples,
        phases: PhaseRunner,
        leave: LeaveRequest,
    ):
        self._node, self._replica, self._announcer = node, replica, announcer
        self._samples, self._phases, self._leave = samples, phases, leave

    async def attempt(self, number: int, coordinator: str, seconds: dict[str, float]) -> None:
        """One attempt; it ends without a decision when this peer is asked to leave before there is a plan.

        `seconds` gets the duration of each part. Raises PeerUnreachable, Refused, WireError.
        """
        clock = asyncio.get_running_loop().time
        await self._replica.durable()
        trains, paused = self._node.role == "trainer", is_paused(self._node.log.last.control)
        self._set_state("paused" if paused else "announcing" if trains else "waiting")
        started = clock()
        async with self._node.board.stream(coordinator, ROUND) as stream:
            await stream.send(pack(self._announcer.announcement(number)))
            reply = await self._plan_or_commit(stream)
            if reply is None:
                return
            reply = await stream.alive(self._node.relay.received(reply))
            if trains:
                seconds["announce"] = clock() - started
            if reply.kind == Kind.PLAN:
                reply = await self._exchange(stream, unpack(Plan, reply.body), seconds)
            decided = unpack(CertifiedCommit, reply.body)
        self._node.learn(decided)

    def _set_state(self, state: str) -> None:
        self._phases.set_state_unless_training(state)

    async def _plan_or_commit(self, stream: Stream) -> Message | None:
        """The coordinator's answer; None when this peer leaves before there is a plan. A plan just made is still served."""
        answer = asyncio.ensure_future(stream.any_message())
        try:
            if await self._leave.unless_made(asyncio.shield(answer)) is None:
                await hand_back(self._node, self._replica, self._samples)
            return await answer if answer.done() else None
        finally:
            answer.cancel()

    async def _exchange(self, stream: Stream, plan: Plan, seconds: dict[str, float]) -> Message:
        """Exchange, stage and report, again for each revision of the plan; returns the message with the commit."""
        clock = asyncio.get_running_loop().time
        self._set_state("exchanging")
        started = clock()
        self._check_plan(plan, stream.remote)
        if self._node.campaign.config.sync.overlap:
            self._node.phase_goes_on_during(plan.round)
        exchange = await self._node.world.run_blocking(self._replica.open_exchange, plan)
        work: asyncio.Future[Any] | None = asyncio.ensure_future(exchange.run())
        answer = asyncio.ensure_future(stream.any_message())
        try:
            while True:
                await asyncio.wait({answer, work} if work else {answer}, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    reply = answer.result()
                    if reply.kind == Kind.IN_FULL:
                        report = staged_report(exchange.results, exchange.me, self._node.incarnation, in_full=True)
                        await stream.send(pack(report), kind=Kind.REPORT)
                    elif reply.kind == Kind.REVISION:
                        more = self._replica.revise_exchange(plan, unpack(Revision, reply.body))
                        work = asyncio.gather(*([work] if work else []), *(each.run() for each in more))
                    else:
                        seconds["commit"] = clock() - started - seconds.get("exchange", 0.0)
                        return await stream.alive(self._node.relay.received(reply))
                    answer = asyncio.ensure_future(stream.any_message())
                elif work is not None:
                    work.result()
                    work = None
                    await self._replica.stage(exchange.results)
                    report = staged_report(exchange.results, exchange.me, self._node.incarnation)
                    await stream.send(pack(report), kind=Kind.REPORT)
                    seconds["exchange"] = clock() - started
                    self._set_state("committing")
        finally:
            await end_tasks([answer] if work is None else [answer, work])

    def _check_plan(self, plan: Plan, coordinator: str) -> None:
        base = self._replica.base
        if (plan.campaign, plan.round, plan.parent) != (self._node.campaign_hash, base.round + 1, base.commit):
            raise WireError("a plan of another round")
        if plan.ballot.coordinator != coordinator or plan.index(self._node.peer_id) is None:
            raise WireError("a plan of another coordinator, or without me")
        if plan.base_digest != base.digest:
            raise Refused(Code.DIGEST, "the plan starts from other bits than mine")
