"""The exchanges of the current round at this member, and the next base that is computed while their results arrive."""

from __future__ import annotations

import asyncio

from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, unpack
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.methods import PULL, PUSH
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import PullRequest, PushHeader, Revision
from spes_p2p.model.layout import Layout
from spes_p2p.net.rpc import Stream
from spes_p2p.peer.courtesy import REDUCERS_SHARE, Courtesy
from spes_p2p.peer.exchange import Exchange
from spes_p2p.peer.exchange_context import ExchangeContext
from spes_p2p.peer.kept_inputs import Input, KeptInputs
from spes_p2p.peer.kept_results import KeptResults
from spes_p2p.peer.node import Node
from spes_p2p.peer.own_work import OwnWork
from spes_p2p.rounds.apply import NextBase
from spes_p2p.rounds.base import Base, BuiltBase
from spes_p2p.rounds.next_base import NextBaseBuilder
from spes_p2p.rounds.planned import Plan, trusted
from spes_p2p.rounds.results import Results
from spes_p2p.rounds.traffic import exchange_limit_s, exchange_s
from spes_p2p.storage.scratch import Scratch


class Exchanges:
    """All attempts at the next round, by plan and revision, until that round is in the base."""

    def __init__(self, node: Node, layout: Layout, results: KeptResults, work: OwnWork, scratch: Scratch, in_memory: bool):
        """`in_memory`: compute the next base in memory."""
        self.by_plan: dict[tuple[str, int], Exchange] = {}
        """By plan id and revision."""
        self._inputs: dict[str, tuple[int, list[KeptInputs]]] = {}
        """By plan id: the round, and what this member's means were made from, by revision."""
        self._node, self._layout, self._results, self._work, self._scratch = node, layout, results, work, scratch
        self._in_memory, self._strangers = in_memory, Courtesy(REDUCERS_SHARE)
        self._builder: NextBaseBuilder | None = None
        """The next base by the last plan."""
        self._news = asyncio.Event()

    async def serve(self) -> None:
        """Answer the other members from now on."""
        await self._node.endpoint.serve(PUSH, self._on_push)
        await self._node.endpoint.serve(PULL, self._on_pull)

    def open(self, plan: Plan, base: Base, round_s: float) -> Exchange:
        """Take part in a plan with the announced update. `round_s`: seconds since the last commit."""
        self._node.meet_members(plan)
        results, ledger, sync = self._results.begin(plan), self._work.ledger, self._node.campaign.config.sync
        exchange = self.by_plan[plan.id, 0] = Exchange(ExchangeContext(
            self._node.endpoint, self._node.world.identity, results, ledger.update, self._work.residuals.by_key,
            exchange_limit_s(results.parts, plan.members), ledger.tokens_behind, self._node.world.run_blocking, self._scratch,
            sync.bound_influence, self._strangers,
            exchange_s(results.parts, plan.members, trusted(plan.members)), round_s, self._node.lateness,
        ))
        self._inputs[plan.id] = plan.round, [exchange.inputs]
        if self._builder is not None:
            self._builder.drop()
        self._builder = self.make_builder(base, results)
        return exchange

    def opened(self) -> None:
        """Wake those that wait for a plan. On the event loop, after `open`, which is called in a worker thread."""
        self._news.set()

    def make_builder(self, base: Base, results: Results) -> NextBaseBuilder:
        """Return a builder of the next base by the plan of these results, which may still arrive."""
        config, world = self._node.campaign.config, self._node.world
        return NextBaseBuilder(
            world.store, base.values, self._layout, config.outer, results, world.run_blocking, config.sync.bound_influence,
            world.threads, self._in_memory,
        )

    def candidate(self, plan: Plan) -> NextBase | None:
        """Return the base that the last plan's results would make; None for another plan."""
        ahead = self._builder
        return ahead.candidate() if ahead is not None and ahead.plan.id == plan.id else None

    def revise(self, plan: Plan, revision: Revision) -> list[Exchange]:
        """Open exchanges over the parts of lost reducers. Raises WireError when the revision does not follow the plan."""
        first, known = self.by_plan[plan.id, 0], self._results.by_plan[plan.id].lost
        if revision.plan != plan.id or revision.lost[: len(known)] != known:
            raise WireError("a revision of another plan")
        more = []
        for newly_lost in revision.lost[len(known) :]:
            for earlier in self.of(first.results):
                earlier.give_up(newly_lost)
            first.results.revise(newly_lost)
            exchange = first.with_revision(first.results.revision)
            self.by_plan[plan.id, exchange.revision] = exchange
            self._inputs[plan.id][1].append(exchange.inputs)
            more.append(exchange)
        self._news.set()
        return more

    def of(self, results: Results) -> list[Exchange]:
        """Return this member's exchanges of a plan, by revision."""
        plan = results.plan.id
        return [self.by_plan[plan, r] for r in range(results.revision + 1) if (plan, r) in self.by_plan]

    def knows_any(self, plans: set[str]) -> bool:
        """Return whether this member took part in one of these plans."""
        return any(plan in plans for plan, _ in self.by_plan)

    async def finish_base(self, commit: Commit, results: Results, base: Base) -> BuiltBase | None:
        """Return the base after this commit if it was computed ahead, else None."""
        ahead, self._builder = self._builder, None
        if ahead is None:
            return None
        if ahead.plan.id == results.plan.id and ahead.base is base.values:
            return await ahead.finish(commit, results)
        ahead.drop()
        return None

    def inputs_of(self, plan: str, part: int, of_cell: bool = False) -> dict[int, Input] | None:
        """Return what this member's mean of a part, or its cell's, was made from, by member; None where it made none."""
        _, kept = self._inputs.get(plan, (0, []))
        found = [each.of_cell if of_cell else each.of_part for each in reversed(kept)]
        return next((each[part] for each in found if part in each), None)

    def count_of_inputs(self, plan: str) -> int:
        """Return the number of means that this member made in a plan."""
        return sum(len(each.of_part) + len(each.of_cell) for each in self._inputs.get(plan, (0, []))[1])

    def forget(self, base_round: int, decided: str) -> None:
        """Drop the exchanges of rounds that are in the base, but for the inputs of the last one. `decided`: its plan.

        In a worker thread: what they hold is large.
        """
        for key in [key for key, exchange in self.by_plan.items() if exchange.plan.round <= base_round]:
            del self.by_plan[key]
        self._inputs = {
            plan: kept for plan, kept in self._inputs.items() if plan == decided or kept[0] > base_round
        }

    async def _on_push(self, stream: Stream) -> None:
        header = unpack(PushHeader, await stream.message())
        await (await self._known(header.plan, header.revision)).on_push(stream)

    async def _on_pull(self, stream: Stream) -> None:
        request = unpack(PullRequest, await stream.message())
        await (await self._known(request.plan, request.revision)).on_pull(stream, request)

    async def _known(self, plan: str, revision: int) -> Exchange:
        """Return an exchange; wait for one that this member opens later than others. Raises Refused."""
        deadline = asyncio.get_running_loop().time() + self._node.endpoint.silence_s
        while (plan, revision) not in self.by_plan:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), deadline - asyncio.get_running_loop().time())
            except asyncio.TimeoutError:
                raise Refused(Code.NOT_HERE, "that plan is not known here") from None
        return self.by_plan[plan, revision]
