"""One member's side of a round's exchange: push updates to reducers, reduce, pull all results.

A contributor pushes its encoded update of each part to the part's reducer, with the number of tokens it was trained on, and
signs every few updates; a reducer uses what is signed. It closes a part when every contributor has sent, is lost or is too
late: it clips updates that stand out, averages by these weights, encodes the mean once, and serves it. Its manifest lists the
digests, the contributors, who was clipped, and a digest of the inputs, which it keeps for members that check the mean. A
part's only contributor reduces it itself where its bandwidth allows; otherwise its codes are passed on unchanged and not sent
back to it. Every member pulls every other part. Sender, part and size are checked against the plan before anything is decoded,
and values that are not finite are refused.

A round of many members has cells (`rounds/cells.py`): hubs stand between members and reducers. A hub is a reducer for its cell,
pushes the mean to the part's reducer as a contributor does, and hands on the result. If it is lost, its cell's work on these
parts stays pending, and its members pull the results from other hubs.

When a reducer is lost, a further exchange covers the parts that moved to backups (a revision of the part table).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from spes_p2p.errors import Refused
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import PullRequest
from spes_p2p.net.rpc import Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.peer.exchange_context import ExchangeContext, SentUpdate
from spes_p2p.peer.reducer import Reducer
from spes_p2p.peer.serving import Serving
from spes_p2p.peer.transfers import PULL_STREAMS, TellStalled, Transfers


async def _tell_nobody(reducer: int, revision: int) -> None:
    """Where there is no coordinator to complain to."""


class Exchange:
    """The exchange of one part table of a plan at one member. `run` ends when everything that will come has come."""

    def __init__(self, context: ExchangeContext, revision: int = 0):
        """`revision`: of the results' part table. Raises ValueError when this peer is no member of the plan."""
        self.results, self.plan, self.me, self.revision = context.results, context.plan, context.me, revision
        self._context = context
        self.timeout_s = context.timeout_s
        self._update = SentUpdate(context)
        self._serving = Serving(context, revision)
        self._reducer = Reducer(context, self._update, self._serving, revision)
        self._transfers = Transfers(context, self._update, self._serving, revision)
        self.sent = self._update.parts
        """This peer's contributions, by part index."""
        self.inputs, self.new_residuals = self._reducer.inputs, self._reducer.new_residuals

    def with_revision(self, revision: int) -> Exchange:
        """Return an exchange of the same updates over the parts that this revision of the part table moved."""
        return Exchange(self._context, revision)

    def give_up(self, lost: Collection[int]) -> None:
        """Wait no longer for members whose parts have moved to backups."""
        self._transfers.give_up(lost)
        self._reducer.give_up(lost)

    async def run(self, tell_stalled: TellStalled = _tell_nobody) -> None:
        """Push, reduce and pull. A member that is lost costs its parts, nothing else.

        Once this has ended or was cancelled, requests for parts that are not reduced, and pushes, are refused.
        """
        tasks = [*self._transfers.begin(tell_stalled), asyncio.create_task(self._reducer.run())]
        watching = asyncio.create_task(self._transfers.watch(tell_stalled))
        try:
            await asyncio.wait(tasks, timeout=self._context.timeout_s)
        finally:
            self._update.is_over = True
            self._reducer.end()
            self._serving.end()
            self._transfers.end()
            await end_tasks([*tasks, watching])
        self.results.discard_unverified(self.revision)

    @property
    def moves(self) -> bool:
        """Whether something moves between this peer and the reducers, or did a while ago."""
        return not self._transfers.stalled()

    async def on_push(self, stream: Stream) -> None:
        """Take a contributor's parts."""
        sender = self.plan.index(stream.remote)
        if sender is None or sender == self.me:
            raise Refused(Code.NOT_ALLOWED, "not a contributor of this plan")
        await self._reducer.take_updates(stream, sender)

    async def on_pull(self, stream: Stream, request: PullRequest) -> None:
        """Serve results, after this peer's updates to the member that asks."""
        puller = self.plan.index(stream.remote)
        if puller is None:
            raise Refused(Code.NOT_ALLOWED, "not a member of this plan")
        if not 0 <= request.lane < request.lanes <= PULL_STREAMS:
            raise Refused(Code.MALFORMED, f"no lane {request.lane} of {request.lanes}")
        await stream.alive(self._transfers.wait_until_sent_to(puller))
        await self._serving.serve(stream, puller, request)
