"""What a round's members hold durably: their reports to the coordinator, and the parts of lost reducers moved to backups."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence

from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Revision, Staged
from spes_p2p.net.rpc import Stream
from spes_p2p.peer.gathering import PING_EVERY_S, Gathering
from spes_p2p.peer.round_context import RoundContext
from spes_p2p.rounds.plan import check_staged, disagreeing, lost_reducers
from spes_p2p.rounds.results import Results

logger = logging.getLogger(__name__)


class StagedReports:
    """The reports of one attempt's members about the last revision of its part table."""

    def __init__(self, context: RoundContext, members: Gathering, results: Results):
        """`results`: the plan's, empty; it takes up the revisions."""
        self._round, self._sync = context.commit.round + 1, context.rules.config.sync
        self._members = members
        self.results = results
        self.staged: dict[int, Staged] = {}
        self._asked: set[int] = set()
        """Members that were asked for their reports in full."""
        self._told: dict[Stream, int] = {}
        """The revision that each member with a plan knows."""

    async def begin(self, stream: Stream) -> None:
        """A member has the plan: tell it every revision from now on."""
        self._told[stream] = 0
        await self._tell_revisions()

    def end(self, stream: Stream) -> None:
        """This member's stream has ended."""
        self._told.pop(stream, None)

    def take(self, index: int, staged: Staged) -> None:
        """A member reports. A report from before a revision is useless: another one follows. Raises Refused."""
        check_staged(staged, index, self.results)
        if staged.revision == self.results.revision:
            self.staged[index] = staged
            self._members.changed.set()

    async def wait(self) -> None:
        """Wait for the report of every living member; the parts of lost reducers go to backups meanwhile."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + 2 * self._sync.exchange_timeout_s
        names = [member.peer for member in self.results.plan.members]
        half_at: float | None = None
        alive, changed = self._members.alive, self._members.changed
        while (now := loop.time()) < deadline:
            changed.clear()
            waiting = [peer for i, peer in enumerate(names) if i not in self.staged and peer in alive]
            lost = lost_reducers(self.results, self.staged, {i for i, peer in enumerate(names) if peer in alive}, not waiting)
            if lost:
                self._revise(lost)
                half_at = None
                await self._tell_revisions()
            elif not waiting:
                unclear = [i for i in disagreeing(self.results, self.staged) if names[i] in alive and i not in self._asked]
                if not unclear:
                    return
                await self._ask_in_full([names[i] for i in unclear])
            elif half_at is None and 2 * len(self.staged) >= len(names):
                half_at = now
            elif half_at is not None and now - half_at > self._patience(half_at - started):
                self._give_up(waiting)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), min(PING_EVERY_S, deadline - now))

    async def _tell_revisions(self) -> None:
        """To every member that has the plan and not yet the last revision."""
        revision = pack(Revision(self.results.plan.id, self.results.lost))
        behind = [stream for stream, known in self._told.items() if known < self.results.revision]
        for stream in behind:
            self._told[stream] = self.results.revision
        await asyncio.gather(*(stream.send(revision, kind=Kind.REVISION) for stream in behind), return_exceptions=True)

    async def _ask_in_full(self, peers: Sequence[str]) -> None:
        """These members got other manifests than the coordinator: ask which, so that the rest of what they hold counts."""
        for peer in peers:
            index = self.results.plan.index(peer)
            if index is not None:
                self._asked.add(index)
                self.staged.pop(index)
        streams = [self._members.alive[peer] for peer in peers]
        await asyncio.gather(*(stream.send(kind=Kind.IN_FULL) for stream in streams), return_exceptions=True)

    def _revise(self, lost: tuple[int, ...]) -> None:
        logger.info("round %d: %d reducers are lost, their parts go to others", self._round, len(lost))
        self.results.revise(lost)
        gone = {i for i, member in enumerate(self.results.plan.members) if member.peer not in self._members.alive}
        self.staged = {i: staged for i, staged in self.staged.items() if i in gone and i not in lost}

    def _patience(self, half_s: float) -> float:
        """Seconds that the slower half of the members gets after the first: as long again, and the longest silence."""
        return self._sync.silence_s + half_s

    def _give_up(self, waiting: Iterable[str]) -> None:
        """These members take too long. Their streams end; those that live catch up with the commit."""
        for peer in waiting:
            logger.info("round %d goes on without %s, which takes too long to exchange", self._round, peer[-6:])
            stream = self._members.alive.pop(peer, None)
            if stream is not None:
                stream.break_off(Refused(Code.CLOSED, "the others exchanged long ago"))
        self._members.changed.set()
