"""What a round's members hold durably: their reports to the coordinator, and the parts of lost reducers moved to backups."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Collection, Iterable, Sequence, Set

from spes_p2p.consensus.electorate import taking_turns
from spes_p2p.consensus.signed import read_signed
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import WireError, pack
from spes_p2p.messages.consensus import Signed
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Report, Revision, Staged, Stalled
from spes_p2p.net.rpc import Stream
from spes_p2p.net.unpacking import beside
from spes_p2p.peer.courtesy import KNOWN_PATIENCE, LEAST_SHARE, Wait
from spes_p2p.peer.gathering import LOOK_S, PING_EVERY_S, Gathering, RoundContext
from spes_p2p.peer.transfers import COMPLAINT_SILENCES
from spes_p2p.rounds.commit import HOLDERS, check_staged, disagreeing, lost_reducers, unserved_reducers
from spes_p2p.rounds.parts import waits_for
from spes_p2p.rounds.planned import trusted
from spes_p2p.rounds.results import Results
from spes_p2p.rounds.traffic import exchange_limit_s, exchange_s

logger = logging.getLogger(__name__)


class StagedReports:
    """The reports of one attempt's members about the last revision of its part table."""

    def __init__(self, context: RoundContext, members: Gathering, results: Results):
        """`results`: the plan's, empty; it takes up the revisions."""
        self._round, self._sync = context.parent.round + 1, context.node.rules.config.sync
        self._members, self._identity = members, context.node.world.identity
        self._run_blocking = context.node.world.run_blocking
        self.results = results
        self.staged: dict[int, Staged] = {}
        self._signed: dict[int, Signed] = {}
        self._asked: set[int] = set()
        """Members that were asked for their reports in full."""
        self._complaints: dict[int, dict[int, float]] = {}
        """By reducer: who complains about it in this revision, and the loop time since when."""
        self._stalled = context.stalled
        self._context = context
        self._wait: Wait | None = None
        """For strangers only."""
        self._revision_of: dict[Stream, int] = {}
        """The revision that each member with a plan knows."""
        self._names = [member.peer for member in results.plan.members]
        self._known = trusted(results.plan.members)
        self._known_s = math.inf
        """KNOWN_PATIENCE times what the lines of these need for the exchange."""
        self._began = self._looked_at = -math.inf
        self._half_at: float | None = None
        """Loop time at which half of the members had reported, or got their time anew; None before that."""

    async def begin(self, stream: Stream) -> None:
        """Send this member, which has the plan, every revision from now on."""
        self._revision_of[stream] = 0
        await self._send_revisions()

    def end(self, stream: Stream) -> None:
        """Note that this member's stream has ended."""
        self._revision_of.pop(stream, None)

    async def take(self, index: int, report: Report) -> None:
        """Take a member's report. One that precedes a revision is dropped: another follows. Raises Refused, WireError."""
        if report.staged.peer != self._names[index]:
            raise Refused(Code.NOT_ALLOWED, "the report of another peer")
        staged = await beside(len(report.staged.record), read_signed, Staged, report.staged, self._identity)
        check_staged(staged, self.results)
        if staged.revision != self.results.revision:
            return
        if tuple(manifest.root for manifest in report.manifests) != staged.manifests:
            raise WireError("a report with other manifests than it names")
        for manifest in report.manifests:
            if manifest.reducer != index or not manifest.digests:  # one without parts is like no other member's list
                raise WireError("a manifest of another reducer, or of a member that reduces nothing")
            self.results.add_manifest(manifest)
        self.staged[index], self._signed[index] = staged, report.staged
        for since in self._complaints.values():
            since.pop(index, None)
        self._members.changed.set()

    def signed(self) -> tuple[Signed, ...]:
        """Return the reports as evidence, by member."""
        return tuple(self._signed[index] for index in sorted(self.staged))

    def complain(self, index: int, stalled: Stalled) -> None:
        """Take a member's complaint about a reducer. Raises WireError for one that is no member."""
        if stalled.reducer >= len(self._names):
            raise WireError("a complaint about another peer")
        if (stalled.plan, stalled.revision) == (self.results.plan.id, self.results.revision):
            since = self._complaints.setdefault(stalled.reducer, {})
            if index not in since:
                since[index] = asyncio.get_running_loop().time()
                self._members.changed.set()

    async def wait(self) -> None:
        """Wait for the report of every living member; move the parts of lost reducers to backups meanwhile.

        Strangers that are later than all others are waited for as far as the coordinator's `Courtesy` goes.
        """
        try:
            await self._collect()
        finally:
            self._end_wait(is_in_vain=False)

    def _end_wait(self, is_in_vain: bool) -> None:
        if self._wait is not None:
            self._wait.end(is_in_vain)
            self._wait = None

    def _left_for(self, waiting: Collection[int], decisive: Collection[int], half_s: float) -> float | None:
        """Return for how long to wait for the last ones; None: not for strangers only, or too few others hold the parts.

        `half_s`: see `_patience`.
        """
        if not waiting or not set(decisive).isdisjoint(waiting) or len(self.staged.keys() & set(decisive)) < HOLDERS:
            return None
        if self._wait is None:
            round_s, sharers = asyncio.get_running_loop().time() - self._context.phase_began, taking_turns(self._context.parent)
            self._wait = self._context.strangers.begin(self._patience(half_s), LEAST_SHARE * round_s, sharers)
        return self._wait.left_s()

    async def _collect(self) -> None:
        loop, changed, members = asyncio.get_running_loop(), self._members.changed, self.results.plan.members
        began = self._began = self._looked_at = loop.time()
        limit_s: float = await self._run_blocking(exchange_limit_s, self.results.parts, members)
        self._known_s = KNOWN_PATIENCE * await self._run_blocking(exchange_s, self.results.parts, members, self._known)
        deadline = began + 2 * limit_s
        while (now := loop.time()) < deadline:
            changed.clear()
            stalled = self._stalled_reducers(now)
            for reducer in stalled:
                self._drop(reducer)
            living, decisive = self._living(), self._decisive()
            waiting = living - self.staged.keys()
            due = self._due()
            late, due_s = self._late(waiting, due, now), due - now if due > now else PING_EVERY_S
            left_s = self._left_for(waiting, decisive, now - began)
            lost = {*lost_reducers(self.results, self.staged, living, not waiting), *stalled}
            if lost:
                self._revise(tuple(sorted(lost)))
                self._end_wait(is_in_vain=False)
                self._half_at = left_s = None
                await self._send_revisions()
            elif not waiting:
                unclear = self._unclear(decisive)
                if not unclear:
                    unserved = await self._run_blocking(unserved_reducers, self.results, dict(self.staged), living)
                    if not unserved:
                        return
                    for reducer in unserved & self._living():
                        self._drop(reducer)
                    continue
                await self._ask_in_full(unclear)
                self._half_at = now  # they get the same time once more
            elif late:
                self._give_up(late)
                left_s = None
            elif self._half_at is None and (
                self._has_half(decisive) or (now - began > self._known_s and self._has_half(self._known))
            ):
                self._half_at = now
                continue  # to wait until the others are late, not longer
            elif self._is_half_too_late(now) or left_s == 0:
                self._end_wait(is_in_vain=True)
                self._give_up(waiting)
                left_s = None
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), min(PING_EVERY_S, left_s or PING_EVERY_S, due_s, deadline - now))
            await asyncio.sleep(LOOK_S * len(members))

    def _living(self) -> set[int]:
        """Return the members whose streams are open."""
        return {i for i, peer in enumerate(self._names) if peer in self._members.alive}

    def _decisive(self) -> Collection[int]:
        """Return the members without whose reports no round goes on: all but strangers that reduce nothing."""
        decisive = self._known | {part.reducer for part in self.results.parts}
        return range(len(self._names)) if len(decisive) < HOLDERS else decisive

    def _are_held(self) -> bool:
        """Return whether enough of the members that are no strangers hold the parts."""
        needed = min(HOLDERS, len(self._known))
        return len(self._known) == len(self._names) or len(self.staged.keys() & self._known) >= needed

    def _due(self) -> float:
        """Return the loop time from which members that are no strangers are late; infinite while half are missing."""
        if self._half_at is None or not self._are_held():
            return math.inf
        return max(2 * self._half_at - self._began, self._began + self._known_s)

    def _late(self, waiting: Set[int], due: float, now: float) -> list[int]:
        """Return the late ones that have held up this peer too often."""
        lateness, known = self._context.node.lateness, self._known & waiting
        lateness.add((self._names[i] for i in known), now - max(due, self._looked_at))
        self._looked_at = now
        late = lateness.late() if known and now >= due else ()
        return [i for i in known if self._names[i] in late]

    def _is_half_too_late(self, now: float) -> bool:
        """Return whether the slower half of the members has had its time."""
        if self._half_at is None or not self._are_held():
            return False
        return now - self._half_at > self._patience(self._half_at - self._began)

    def _unclear(self, decisive: Collection[int]) -> list[int]:
        """Return the members to ask for their reports in full."""
        asked, alive = self._asked, self._members.alive
        return [
            i for i in disagreeing(self.results, self.staged)
            if self._names[i] in alive and i not in asked and i in decisive
        ]

    def _has_half(self, members: Collection[int]) -> bool:
        return 2 * len(self.staged.keys() & set(members)) >= len(members)

    def _stalled_reducers(self, now: float) -> list[int]:
        """Return the reducers about which half of the members complain, and all that contribute to their parts, or for long.

        A reducer that waits for a slow contributor is not complained about by that one. Strangers do not count, since anybody
        can be as many as they like; so where strangers contribute, a reducer may wait for them, and complaints count only once
        they are old. In a round with cells, its neighbours count in place of the members. Of several reducers, those come first
        that wait for nobody themselves. Who has reported complains no more.
        """
        known, names, alive = self._known, self._names, self._members.alive
        stalled = []
        for reducer, since in self._complaints.items():
            its = [part for part in self.results.parts if part.reducer == reducer]
            children = {i for part in its for i in range(len(names)) if waits_for(part, i)}
            living = {i for i in known & (children or known) if names[i] in alive and i != reducer}
            inputs = {i for part in its for i in part.inputs}
            are_agreed = inputs <= known and inputs & living <= since.keys()
            patience_s = 0.0 if are_agreed else COMPLAINT_SILENCES * self._sync.silence_s
            by = [i for i in since.keys() & living if now - since[i] >= patience_s]
            if names[reducer] in alive and by and 2 * len(by) >= len(living):
                stalled.append(reducer)
        waiting = {i for reducer, since in self._complaints.items() if names[reducer] in alive for i in since}
        return [reducer for reducer in stalled if reducer not in waiting] or stalled

    def _drop(self, reducer: int) -> None:
        """Take a stalled reducer for lost, for the rest of this round too: its parts go to others, and the commit names it."""
        peer = self._names[reducer]
        logger.warning("round %d: %s lives and does not go on; others take its parts", self._round, peer[-6:])
        self._stalled.add(peer)
        self.staged.pop(reducer, None)
        self._complaints.pop(reducer, None)
        stream = self._members.alive.pop(peer)
        stream.break_off(Refused(Code.CLOSED, "members wait for you in vain"))

    async def _send_revisions(self) -> None:
        record = pack(Revision(self.results.plan.id, self.results.lost))
        behind = [stream for stream, revision in self._revision_of.items() if revision < self.results.revision]
        for stream in behind:
            self._revision_of[stream] = self.results.revision
        await asyncio.gather(*(stream.send(record, kind=Kind.REVISION) for stream in behind), return_exceptions=True)

    async def _ask_in_full(self, members: Sequence[int]) -> None:
        """Ask members whose manifests differ from the coordinator's which they hold, so that the rest of their parts counts."""
        for index in members:
            self._asked.add(index)
            self.staged.pop(index)
        streams = [self._members.alive[self._names[index]] for index in members]
        await asyncio.gather(*(stream.send(kind=Kind.IN_FULL) for stream in streams), return_exceptions=True)

    def _revise(self, lost: tuple[int, ...]) -> None:
        logger.info("round %d: %d reducers are lost, their parts go to others", self._round, len(lost))
        self.results.revise(lost)
        self._complaints.clear()
        self._asked.clear()
        again = self._living() | set(lost)
        self.staged = {i: staged for i, staged in self.staged.items() if i not in again}

    def _patience(self, half_s: float) -> float:
        """Seconds that the slower half of the members gets: as long as the first half took, and `silence_s`."""
        return self._sync.silence_s + half_s

    def _give_up(self, members: Iterable[int]) -> None:
        """End the streams of members that take too long; they catch up from the commit."""
        for peer in (self._names[i] for i in sorted(members)):
            logger.info("round %d goes on without %s, which takes too long to exchange", self._round, peer[-6:])
            stream = self._members.alive.pop(peer, None)
            if stream is not None:
                stream.break_off(Refused(Code.CLOSED, "the exchange took you too long"))
        self._members.changed.set()
