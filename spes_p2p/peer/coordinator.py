"""One attempt at one round, at its coordinator: gather, prepare, plan, collect what is staged, decide.

Each member holds one stream with the coordinator for the whole attempt: it sends its announcement, gets the plan, sends what it
staged, gets the decided commit. A stream that breaks tells both ends at once. An attempt that fails changes nothing anywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from spes_p2p.consensus.control import is_paused, rolls_back
from spes_p2p.consensus.proposer import Proposer
from spes_p2p.errors import Refused, UserError
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Ballot, CertifiedCommit, Control, Decide
from spes_p2p.messages.framing import Kind, Message
from spes_p2p.messages.methods import DECIDE
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Announcement, Plan, Staged
from spes_p2p.net.rpc import Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.peer.balloting import drive
from spes_p2p.peer.collecting import StagedReports
from spes_p2p.peer.gathering import PING_EVERY_S, Gathering
from spes_p2p.peer.round_context import AttemptFailed, RoundContext
from spes_p2p.rounds.merge import Donors
from spes_p2p.rounds.plan import alpha_due, check_announcement, make_commit, make_plan

logger = logging.getLogger(__name__)


class Coordination:
    """One attempt at the round after `commit`."""

    def __init__(self, context: RoundContext):
        self.commit = context.commit
        self.failed = False
        self._context = context
        self._members = Gathering(context)
        self._reports: StagedReports | None = None
        """None until the round is planned."""
        loop = asyncio.get_running_loop()
        self._plan: asyncio.Future[Plan | CertifiedCommit] = loop.create_future()
        self._decided: asyncio.Future[CertifiedCommit] = loop.create_future()

    async def run(self) -> None:
        """Bring the round to a decision, or fail the attempt for everybody in it."""
        try:
            await self._sit_out_pause()
            await self._members.wait()
            decided = await self._decide()
            self._context.learn(decided)
            self._decided.set_result(decided)
            await self._tell_electors(decided)
        except (AttemptFailed, Refused, WireError, UserError) as error:
            self._fail(str(error))
        except Exception:
            logger.exception("coordinating round %d failed", self.commit.round + 1)
            self._fail("an error at the coordinator")

    @property
    def is_planned(self) -> bool:
        """Is the round's plan made? Then others may be exchanging by it."""
        return self._plan.done()

    def give_up(self) -> None:
        """Fail the attempt, because this peer leaves."""
        self._fail("the coordinator leaves")

    def _fail(self, reason: str) -> None:
        self.failed = True
        for future in (self._plan, self._decided):
            if not future.done():
                future.set_exception(Refused(Code.FAILED, f"attempt failed: {reason}"))
                future.exception()

    # Members -----------------------------------------------------------------------------------------------------------

    async def serve(self, stream: Stream, announcement: Announcement) -> None:
        """One member's stream, from its announcement to the decided commit."""
        check_announcement(announcement, self.commit, self._context.rules)
        if self._plan.done():
            self._context.too_late.add(stream.remote)
            raise Refused(Code.CLOSED, "the plan of this attempt is made")
        self._members.join(stream, announcement)
        try:
            plan = await stream.alive(asyncio.shield(self._plan))
            if isinstance(plan, Plan):
                await self._serve_plan(stream, plan, announcement)
            decided = await stream.alive(asyncio.shield(self._decided))
            await self._pass_on(stream, Kind.DECIDED, pack(decided), decided.commit.members)
        finally:
            self._members.part(stream)

    async def _serve_plan(self, stream: Stream, plan: Plan, announcement: Announcement) -> None:
        """Send the plan and its revisions and take the member's reports, until there is a decision."""
        index, reports = plan.index(stream.remote), self._reports
        assert reports is not None
        if announcement.base_digest != plan.base_digest:
            raise Refused(Code.DIGEST, "your base differs from what most members have")
        if index is None:
            raise Refused(Code.CLOSED, "the plan of this attempt was being made")
        await self._pass_on(stream, Kind.PLAN, pack(plan), [member.peer for member in plan.members])
        report: asyncio.Future[bytes] | None = None
        try:
            await reports.begin(stream)
            while not self._decided.done():
                report = report or asyncio.ensure_future(stream.message(Kind.REPORT))
                either: set[asyncio.Future[Any]] = {report, self._decided}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if report.done():
                    reports.take(index, unpack(Staged, report.result()))
                    report = None
        finally:
            reports.end(stream)
            if report is not None:
                await end_tasks([report])

    async def _pass_on(self, stream: Stream, kind: Kind, record: bytes, members: Sequence[str]) -> None:
        index = members.index(stream.remote) if stream.remote in members else 0
        message = self._context.relay.addressed(Message(record, kind), index, members)
        await stream.send(bytes(message.body), kind=message.kind)

    # Deciding ----------------------------------------------------------------------------------------------------------

    async def _sit_out_pause(self) -> None:
        """After a commit that pauses the campaign no round is planned, until its owner says more."""
        while is_paused(self.commit.control) and self._next_control() == self.commit.control:
            self._context.require_open()
            await asyncio.sleep(PING_EVERY_S)

    def _next_control(self) -> Control | None:
        """What the next commit carries: the newest record, but a rollback only while a member keeps the base for it."""
        control = self._context.newest_control()
        if control is None or not rolls_back(control, self.commit):
            return control
        kept = self._members.keeps_base_of(control.rollback)
        return control if kept and self._context.log.rolled_back(self.commit, control) is not None else self.commit.control

    async def _decide(self) -> CertifiedCommit:
        """Collect promises; plan and exchange, unless the promises or an order name the commit; collect votes."""
        context = self._context
        proposer = Proposer(context.log, context.identity)
        await drive(context.board, proposer, proposer.prepare(context.farewells()))
        control = self._next_control()
        proposal = proposer.bound or context.log.rolled_back(self.commit, control)
        if proposal is None:
            plan = await self._make_plan(proposer.ballot, control)
            self._reports = StagedReports(context, self._members, context.results_of(plan))
            self._plan.set_result(plan)
            await self._reports.wait()
            proposal = make_commit(self.commit, plan, self._reports.results, self._reports.staged, self.commit.helpers)
        await drive(context.board, proposer, proposer.propose(proposal, context.farewells()))
        decided = proposer.decided
        assert decided is not None
        if not self._plan.done():
            self._plan.set_result(decided)
        return decided

    async def _make_plan(self, ballot: Ballot, control: Control | None) -> Plan:
        context, announced, left = self._context, self._members.announced, self._context.returned()
        there = {peer: announced[peer] for peer in self._members.alive if peer not in left}
        if not any(announcement.trains for announcement in there.values()):
            raise AttemptFailed("everybody left")
        digest = Counter(announcement.base_digest for announcement in there.values()).most_common(1)[0][0]
        agreeing = {peer: announcement for peer, announcement in there.items() if announcement.base_digest == digest}
        tokens = sum(announcement.tokens for announcement in agreeing.values())
        donors = await self._choose_donors() if alpha_due(self.commit, tokens, context.rules) > 0 else None
        returned = tuple(interval for peer, back in context.returned().items() if peer not in there for interval in back)
        arrivals = self._members.arrivals(agreeing)
        return make_plan(self.commit, ballot, agreeing, returned, digest, donors, context.rules, arrivals, control)

    async def _choose_donors(self) -> Donors | None:
        """Merge donors; none when this peer holds no base to compare experts in: this one merge is left out then."""
        try:
            return await self._context.donors()
        except Refused as error:
            logger.warning("round %d goes without its merge: %s", self.commit.round + 1, error)
            return None

    async def _tell_electors(self, decided: CertifiedCommit) -> None:
        board, request = self._context.board, pack(Decide((decided,)))
        outside = sorted(set(self.commit.electorate) - set(decided.commit.members))
        told = (board.ask(elector, DECIDE, request, board.silence_s) for elector in outside)
        await asyncio.gather(*told, return_exceptions=True)
