"""The exchanges of the current round at this member, and the next base that is made while their results arrive."""

from __future__ import annotations

import asyncio

from spes_p2p.config.campaign import OuterConfig
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, unpack
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.methods import PULL, PUSH
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Plan, PullRequest, PushHeader, Revision
from spes_p2p.model.layout import Layout
from spes_p2p.net.rpc import Stream
from spes_p2p.peer.exchange import Exchange
from spes_p2p.peer.kept_results import KeptResults
from spes_p2p.peer.node import Node
from spes_p2p.peer.own_work import OwnWork
from spes_p2p.rounds.base import Base, StagedBase
from spes_p2p.rounds.next_base import Staging
from spes_p2p.rounds.results import Results
from spes_p2p.storage.scratch import Scratch


class Exchanges:
    """All attempts at the next round, by plan and revision, until that round is in the base."""

    def __init__(self, node: Node, layout: Layout, results: KeptResults, work: OwnWork, scratch: Scratch):
        self.by_plan: dict[tuple[str, int], Exchange] = {}
        """By plan id and revision."""
        self._node, self._layout, self._results, self._work, self._scratch = node, layout, results, work, scratch
        self._staging: Staging | None = None
        """Of the plan whose results arrive."""
        self._news = asyncio.Event()

    @property
    def _outer(self) -> OuterConfig:
        return self._node.campaign.config.outer

    async def serve(self) -> None:
        """Answer the other members from now on."""
        await self._node.board.serve(PUSH, self._on_push)
        await self._node.board.serve(PULL, self._on_pull)

    def open(self, plan: Plan, base: Base) -> Exchange:
        """Take part in a plan with what was announced; a helper has nothing of its own.

        What an earlier attempt of this round sent stays as it is: it may turn out to be the decided one.
        """
        results, ledger, world = self._results.begin(plan), self._work.ledger, self._node.world
        update = ledger.copy_of_update() if self.by_plan else ledger.update
        timeout_s = self._node.campaign.config.sync.exchange_timeout_s
        exchange = self.by_plan[plan.id, 0] = Exchange(
            self._node.board, results, update, self._work.carried.by_start, timeout_s, ledger.behind, 0, self._scratch,
        )
        if self._staging is not None:
            self._staging.drop()
        self._staging = Staging(world.store, base.values, self._layout, self._outer, results, world.run_blocking)
        self._news.set()
        return exchange

    def revise(self, plan: Plan, revision: Revision) -> list[Exchange]:
        """Reducers are lost: exchanges over their parts, which moved to backups. Raises WireError when that cannot be."""
        first, known = self.by_plan[plan.id, 0], self._results.by_plan[plan.id].lost
        if revision.plan != plan.id or revision.lost[: len(known)] != known:
            raise WireError("a revision of another plan")
        more = []
        for newly_lost in revision.lost[len(known) :]:
            first.results.revise(newly_lost)
            exchange = first.beside(first.results.revision)
            self.by_plan[plan.id, exchange.revision] = exchange
            more.append(exchange)
        self._news.set()
        return more

    def of(self, results: Results) -> list[Exchange]:
        """This member's exchanges of a plan, by revision."""
        plan = results.plan.id
        return [self.by_plan[plan, r] for r in range(results.revision + 1) if (plan, r) in self.by_plan]

    def knows_any(self, plans: set[str]) -> bool:
        """Did this member take part in one of these plans?"""
        return any(plan in plans for plan, _ in self.by_plan)

    async def finish_staging(self, commit: Commit, results: Results, base: Base) -> StagedBase | None:
        """The base after this commit, where most of it was made ahead; None when it was not."""
        ahead, self._staging = self._staging, None
        if ahead is None:
            return None
        if ahead.plan.id == results.plan.id and ahead.base is base.values:
            return await ahead.finish(commit, results)
        ahead.drop()
        return None

    def forget(self, base_round: int) -> None:
        """Let the attempts go at rounds that are in the base."""
        for key in [key for key, exchange in self.by_plan.items() if exchange.plan.round <= base_round]:
            del self.by_plan[key]

    async def _on_push(self, stream: Stream) -> None:
        header = unpack(PushHeader, await stream.message())
        await (await self._known(header.plan, header.revision)).on_push(stream)

    async def _on_pull(self, stream: Stream) -> None:
        request = unpack(PullRequest, await stream.message())
        await (await self._known(request.plan, request.revision)).on_pull(stream, request)

    async def _known(self, plan: str, revision: int) -> Exchange:
        """One that this member opens a moment later than the others is waited for. Raises Refused."""
        deadline = asyncio.get_running_loop().time() + self._node.board.silence_s
        while (plan, revision) not in self.by_plan:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), deadline - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                raise Refused(Code.NOT_HERE, "that plan is not known here") from None
        return self.by_plan[plan, revision]
