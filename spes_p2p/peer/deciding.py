"""Bringing the next round to a decision: which coordinator to try, and what to do after a failed attempt."""

from __future__ import annotations

import contextlib
import logging

from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.messages.codec import WireError
from spes_p2p.messages.refusals import Code
from spes_p2p.peer.attempt import RoundMember
from spes_p2p.peer.leaving import LeaveRequest
from spes_p2p.peer.node import Node
from spes_p2p.peer.phases import PhaseRunner
from spes_p2p.peer.replica import Replica
from spes_p2p.peer.reporter import EventReporter

logger = logging.getLogger(__name__)

BACKOFF_S, MAX_BACKOFF_S = 1.0, 15.0


class RoundDecision:
    """Tries the coordinators of the next round in order of rank, over and over, until one decides it."""

    def __init__(
        self,
        node: Node,
        replica: Replica,
        member: RoundMember,
        phases: PhaseRunner,
        reporter: EventReporter,
        leave: LeaveRequest,
    ):
        self._node, self._replica, self._member = node, replica, member
        self._phases, self._reporter, self._leave = phases, reporter, leave

    async def reach(self, seconds: dict[str, float]) -> None:
        """Return when the round after the base is decided, or this peer was asked to leave.

        The base changes only where it had to be repaired. `seconds` gets the duration of each part of the last attempt.
        """
        target, attempt = self._replica.base.round + 1, 0
        while self._node.log.last.id == self._replica.base.commit and not self._leave.is_made:
            seconds.clear()
            order = self._node.coordinators()
            coordinator = order[attempt % len(order)]
            try:
                await self._member.attempt(attempt, coordinator, seconds)
            except PeerUnreachable as error:
                self._reporter.failed(target, attempt, "coordinator_lost", str(error))
                attempt += 1
                left = order[attempt % len(order) :] if attempt % len(order) else ()
                attempt += await self._leave.unless_made(self._node.first_living(left)) or 0
            except WireError as error:
                self._reporter.failed(target, attempt, "malformed", str(error))
                attempt += 1
            except Refused as error:
                attempt = await self._after_refusal(coordinator, target, attempt, len(order), error)
            if attempt and attempt % len(order) == 0:
                await self._rediscover(attempt // len(order))

    async def _after_refusal(self, coordinator: str, target: int, attempt: int, ranks: int, refused: Refused) -> int:
        """Fix what a refusal names; returns the attempt to go on with. Raises UserError when this peer cannot take part."""
        if refused.code in (Code.VERSION, Code.CAMPAIGN):
            raise UserError(f"refused by {coordinator}: {refused.detail}")
        if refused.code is Code.BEHIND:
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                await self._node.learn_commits(coordinator)
            return attempt if self._node.log.round >= target else attempt + 1
        if refused.code is Code.DIGEST:
            return await self._repair(target, attempt, refused.detail)
        await self._leave.wait(BACKOFF_S)
        if refused.code in (Code.CLOSED, Code.ALIVE):
            logger.info("round %d: %s", target, refused.detail)
            return attempt if refused.code is Code.CLOSED else (attempt // ranks + 1) * ranks
        self._reporter.failed(target, attempt, "refused", refused.detail)
        return attempt + 1

    async def _repair(self, target: int, attempt: int, reason: str) -> int:
        try:
            async with self._phases.lock:
                await self._replica.repair()
            self._reporter.restored("download")
            return attempt
        except PeerUnreachable as error:
            self._reporter.failed(target, attempt, "refused", f"{reason} ({error})")
            await self._leave.wait(BACKOFF_S)
            return attempt + 1

    async def _rediscover(self, times_tried: int) -> None:
        """Every coordinator was tried: see who is there and what was decided meanwhile; ask for a reform where it is needed."""
        await self._leave.wait(min(BACKOFF_S * 2 ** min(times_tried - 1, 10), MAX_BACKOFF_S))
        await self._node.meet()
        await self._node.learn_from_all()
        await self._node.tell_back()
        if self._node.role == "trainer":
            await self._node.ask_for_reform()
