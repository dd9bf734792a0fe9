"""One attempt at one round, at its coordinator: gather, prepare, plan, collect what is staged, decide.

Each member holds one talk with the coordinator for the whole attempt: it sends its announcement, gets the plan, sends what it
staged, gets the decided head. A talk that breaks tells both ends at once. An attempt that fails changes nothing anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spes_p2p.data.slices import Interval
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.swarm.control import is_paused, rolls_back
from spes_p2p.swarm.deadline import lateness, patience
from spes_p2p.swarm.electors import Accept, HeadLog, Prepare, Promise, is_outbid, quorum, remaining, weigh
from spes_p2p.swarm.interfaces import Identity
from spes_p2p.swarm.records import Announcement, Ballot, Control, Decided, Farewell, Head, Plan, Pong, Revision, Staged, Vote
from spes_p2p.swarm.relay import Relay
from spes_p2p.swarm.rpc import Switchboard, Talk
from spes_p2p.swarm.tasks import end_tasks
from spes_p2p.swarm.wire import WireError, pack, unpack
from spes_p2p.sync.merge import Donors
from spes_p2p.sync.plan import (
    Rules,
    alpha_due,
    check_announcement,
    check_staged,
    disagreeing,
    lost_reducers,
    make_head,
    make_plan,
)
from spes_p2p.sync.results import Results

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROUND, PREPARE, ACCEPT, DECIDE, PING = "round", "prepare", "accept", "decide", "ping"
MAX_BALLOTS = 5
IN_FULL = b"full"
"""Asks a member for the roots of all manifests that it has."""
PING_EVERY_S = 1.0


def coordinator_order(head: Head) -> tuple[str, ...]:
    """Who coordinates the next round, in order of rank: its trainer electors by hash(campaign, round, id), then the helpers."""

    def rank(peer: str) -> tuple[bool, bytes]:
        name = f"{head.campaign}/{head.epoch}/{head.round + 1}/{peer}"
        return peer in head.helpers, hashlib.sha256(name.encode()).digest()

    return tuple(sorted(head.electorate, key=rank))


@dataclass(frozen=True)
class Ping:
    """Are you there? `stop_after`: end the phase after this round's current step and announce; -1: take your time."""

    stop_after: int


@dataclass(frozen=True)
class Decide:
    """Heads with their certificates, in order."""

    decided: tuple[Decided, ...]


class AttemptFailed(Exception):
    """This attempt will not come to a decision; nothing was applied."""


class Coordination:
    """One attempt of the round after `head`."""

    def __init__(
        self,
        board: Switchboard,
        log: HeadLog,
        rules: Rules,
        results_of: Callable[[Plan], Results],
        donors: Callable[[], Awaitable[Donors]],
        duties: Mapping[str, int],
        lateness: Sequence[float],
        returned: Callable[[], Mapping[str, tuple[Interval, ...]]],
        decided: Callable[[Decided], None],
        phase_began: float,
        identity: Identity,
        farewells: Callable[[], tuple[Farewell, ...]],
        relay: Relay,
        control: Callable[[], Control | None],
        too_late: set[str],
    ):
        """`duties`: steps of this phase by peer. `lateness`: of members in earlier rounds (`deadline.py`).

        `returned`: who has left by now, with what they gave back; `farewells`: of electors among them. `phase_began`: loop
        time. `control`: the newest control record that is known here. `too_late`: who came too late for an earlier round; who
        is too late for this one is added, who is in time taken out.
        """
        self.head = log.head
        self._board = board
        self._log = log
        self._rules = rules
        self._results_of = results_of
        self._donors = donors
        self._duties = duties
        self._lateness = lateness
        self._returned = returned
        self._on_decided = decided
        self._phase_began = phase_began
        self._identity = identity
        self._farewells = farewells
        self._relay = relay
        self._control = control
        self._too_late = too_late
        loop = asyncio.get_running_loop()
        self._announced: dict[str, Announcement] = {}
        self._done_at: dict[str, float] = {}
        self._quorum_at: float | None = None
        self._alive: dict[str, Talk] = {}
        self._dead: set[str] = set()
        self._results: Results | None = None
        """The plan's, empty, with its revisions."""
        self._asked: set[int] = set()
        """Members that were asked for their reports in full."""
        self._told: dict[Talk, int] = {}
        """The revision that each member with a plan knows."""
        self._staged: dict[int, Staged] = {}
        """Reports about the last revision."""
        self._plan: asyncio.Future[Plan | Decided] = loop.create_future()
        self._decided: asyncio.Future[Decided] = loop.create_future()
        self._changed = asyncio.Event()
        self._ballot_number = 0
        self.failed = False

    async def run(self) -> None:
        """Bring the round to a decision, or fail the attempt for everybody in it."""
        try:
            await self._sit_out_pause()
            await self._gather()
            decided = await self._decide()
            self._on_decided(decided)
            self._decided.set_result(decided)
            await self._tell_electors(decided)
        except (AttemptFailed, Refused, WireError, UserError) as error:
            self._fail(str(error))
        except Exception:
            logger.exception("coordinating round %d failed", self.head.round + 1)
            self._fail("an error at the coordinator")

    @property
    def is_planned(self) -> bool:
        """Is the round's plan made? Then others may be exchanging by it."""
        return self._plan.done()

    def give_up(self) -> None:
        """I go: tell everybody in this attempt at once."""
        self._fail("the coordinator leaves")

    def _fail(self, reason: str) -> None:
        self.failed = True
        for future in (self._plan, self._decided):
            if not future.done():
                future.set_exception(Refused(f"attempt failed: {reason}"))
                future.exception()

    async def serve(self, talk: Talk, announcement: Announcement) -> None:
        """One member's talk, from its announcement to the decided head."""
        check_announcement(announcement, self.head, self._rules)
        peer = talk.remote
        if self._plan.done():
            self._too_late.add(peer)
            raise Refused("closed: the plan of this attempt is made")
        self._too_late.discard(peer)
        self._announced[peer] = announcement
        done_at = asyncio.get_running_loop().time() - announcement.waited_s
        self._done_at.setdefault(peer, max(done_at, self._phase_began))
        self._alive[peer] = talk
        self._dead.discard(peer)
        self._changed.set()
        try:
            plan = await talk.alive(asyncio.shield(self._plan))
            if isinstance(plan, Plan):
                await self._serve_plan(talk, plan, announcement)
            decided = await talk.alive(asyncio.shield(self._decided))
            await talk.send(self._passed_on(b"head" + pack(decided), peer, decided.head.members))
        finally:
            if self._alive.get(peer) is talk:
                del self._alive[peer]
            self._changed.set()

    async def _serve_plan(self, talk: Talk, plan: Plan, announcement: Announcement) -> None:
        """Send the plan and its revisions and take the member's reports, until there is a decision."""
        index = plan.index(talk.remote)
        if announcement.base_digest != plan.base_digest:
            raise Refused("digest: your base differs from what most members have")
        if index is None:
            raise Refused("closed: the plan of this attempt was being made")
        await talk.send(self._passed_on(b"plan" + pack(plan), talk.remote, [member.peer for member in plan.members]))
        self._told[talk] = 0
        await self._tell_revisions()
        report: asyncio.Future[bytes] | None = None
        try:
            while not self._decided.done():
                report = report or asyncio.ensure_future(talk.message())
                either: set[asyncio.Future[Any]] = {report, self._decided}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if report.done():
                    self._take_report(index, unpack(Staged, report.result()))
                    report = None
        finally:
            self._told.pop(talk, None)
            if report is not None:
                await end_tasks([report])

    def _passed_on(self, record: bytes, peer: str, members: Sequence[str]) -> bytes:
        return self._relay.addressed(record, members.index(peer), members) if peer in members else record

    def _take_report(self, index: int, staged: Staged) -> None:
        """A report from before a revision is of no use any more: another one follows."""
        assert self._results is not None
        check_staged(staged, index, self._results)
        if staged.revision == self._results.revision:
            self._staged[index] = staged
            self._changed.set()

    async def _tell_revisions(self) -> None:
        """To every member that has the plan and not yet the last revision."""
        assert self._results is not None
        revision = pack(Revision(self._results.plan.id, self._results.lost))
        behind = [talk for talk, known in self._told.items() if known < self._results.revision]
        for talk in behind:
            self._told[talk] = self._results.revision
        await asyncio.gather(*(talk.send(b"lost" + revision) for talk in behind), return_exceptions=True)

    # Gathering ---------------------------------------------------------------------------------------------------------

    async def _sit_out_pause(self) -> None:
        """After a head that pauses the campaign no round is planned, until its owner says more."""
        while is_paused(self.head.control) and self._next_control() == self.head.control:
            self._require_open()
            await asyncio.sleep(PING_EVERY_S)

    def _next_control(self) -> Control | None:
        """What the next head carries: the newest record, but a rollback only when somebody here keeps the base for it."""
        control = self._control()
        if control is None or not rolls_back(control, self.head):
            return control
        kept = any(control.rollback in self._announced[peer].archived for peer in self._alive)
        return control if kept and self._log.rolled_back(self.head, control) is not None else self.head.control

    def _require_open(self) -> None:
        """Raises AttemptFailed when another coordinator has brought this round to its decision."""
        if self._log.head.id != self.head.id:
            raise AttemptFailed("this round is decided already")

    async def _gather(self) -> None:
        """Wait until every trainer that lives and has a duty has announced; late ones are told to stop, then left behind.

        Who came too late for a round is waited for, within the bound of silence, or the short phases of a few would keep it out
        for ever. A phase without duties, the first of a campaign or of an epoch, is a time to join.
        """
        sync, all_there_at = self._rules.config.sync, None
        while True:
            self._require_open()
            self._changed.clear()
            now = asyncio.get_running_loop().time()
            trainers = {peer for peer in self._alive if self._announced[peer].trains}
            expected = self._expected()
            missing = expected.keys() - self._announced.keys()
            coming = self._too_late - self._announced.keys() - self._dead - self._returned().keys()
            quorum_at = self._quorum_of(trainers, expected)
            self._quorum_at = quorum_at if self._quorum_at is None else self._quorum_at
            waited_s = now - self._quorum_at if self._quorum_at is not None and trainers else 0.0
            if trainers and expected and not missing:
                all_there_at = now if all_there_at is None else all_there_at
                if not coming or now - all_there_at >= sync.silence_s:
                    self._too_late -= coming
                    return
            if not expected and waited_s >= sync.join_grace_s and quorum_at is not None:
                return
            late = bool(expected) and waited_s > self._patience()
            if late and waited_s > self._patience() + sync.silence_s:
                return
            if missing or coming:
                await asyncio.gather(*(self._ping(peer, late and peer in missing) for peer in sorted(missing | coming)))
                self._too_late -= self._dead
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), PING_EVERY_S)

    def _expected(self) -> dict[str, int]:
        """Steps that those who have a duty, live and have not left do in this phase."""
        gone = self._dead | set(self._returned())
        return {peer: steps for peer, steps in self._duties.items() if peer not in gone}

    def _quorum_of(self, trainers: set[str], expected: Mapping[str, int]) -> float | None:
        """When those with half of the phase's work were done with it; without duties: when enough trainers to begin were there.

        Loop time; None while they are not.
        """
        enough = self._rules.config.sync.min_peers if self.head.round < 0 else 1
        needed, there = (sum(expected.values()) / 2 if expected else enough), 0
        for peer in sorted(trainers, key=lambda peer: self._done_at[peer]):
            there += expected.get(peer, 0) if expected else 1
            if there >= needed:
                return self._done_at[peer]
        return None

    def _patience(self) -> float:
        """Seconds after the quorum until stragglers are told to stop."""
        return 0.0 if self._quorum_at is None else patience(self._lateness, self._quorum_at - self._phase_began)

    def _arrivals(self, members: Iterable[str]) -> tuple[float, ...]:
        """How late each member with a duty was. After a failed attempt nobody can tell."""
        if self._quorum_at is None or any(self._announced[peer].attempt for peer in members):
            return ()
        quorum_s = self._quorum_at - self._phase_began
        timed = [peer for peer in members if peer in self._duties]
        return tuple(lateness(self._done_at[peer] - self._phase_began, quorum_s) for peer in timed)

    async def _ping(self, peer: str, stop: bool) -> None:
        """Is it there? Raises AttemptFailed when it is ahead: then this round is over, and nobody will come."""
        answer = await self._board.is_there(peer, PING, pack(Ping(self.head.round if stop else -1)))
        try:
            pong = unpack(Pong, answer) if answer is not None else None
        except WireError:
            pong = None
        if pong is None:
            logger.info("%s is not there for round %d", peer[-6:], self.head.round + 1)
            self._dead.add(peer)
        elif pong.round > self.head.round:
            raise AttemptFailed(f"{peer[-6:]} knows of later rounds")

    # Deciding ----------------------------------------------------------------------------------------------------------

    async def _decide(self) -> Decided:
        ballot, accepted = await self._prepare()
        control = self._next_control()
        proposal = accepted or self._log.rolled_back(self.head, control)
        if proposal is None:
            plan = await self._make_plan(ballot, control)
            self._results = self._results_of(plan)
            self._plan.set_result(plan)
            await self._collect(self._results)
            proposal = make_head(self.head, plan, self._results, self._staged, self.head.helpers)
        decided = await self._propose(ballot, proposal)
        if not self._plan.done():
            self._plan.set_result(decided)
        return decided

    async def _prepare(self) -> tuple[Ballot, Head | None]:
        """Promises from a majority, and the head that they bind me to, if any."""
        electorate = self._electorate()
        for _ in range(MAX_BALLOTS):
            self._ballot_number += 1
            ballot = Ballot(self._ballot_number, self._board.peer_id)
            request = Prepare(self.head.round + 1, self.head.id, ballot)

            def enough(promises: list[Promise], ballot: Ballot = ballot) -> bool:
                return weigh(promises, electorate).won or (len(promises) >= quorum(electorate) and is_outbid(ballot, promises))

            promises = await _until(enough, (self._ask_promise(elector, request) for elector in electorate))
            weighed = weigh(promises, electorate)
            if weighed.won:
                return ballot, weighed.bound
            if any(promise.round > self.head.round for promise in promises):
                raise AttemptFailed("this round is decided already")
            if not weighed.highest or all(promise.granted for promise in promises):
                break  # electors are missing; a higher ballot would not bring them
            self._ballot_number = weighed.highest
        raise AttemptFailed(f"no quorum: {len(promises)} of {len(electorate)} electors answered")

    async def _ask_promise(self, elector: str, request: Prepare) -> Promise | None:
        try:
            promise = unpack(Promise, await self._ask(elector, PREPARE, pack(request)))
            if promise.round < self.head.round:
                await self._ask(elector, DECIDE, pack(Decide(self._log.since(promise.round))))
                promise = unpack(Promise, await self._ask(elector, PREPARE, pack(request)))
            return promise
        except (PeerUnreachable, Refused, WireError) as error:
            logger.debug("elector %s: %s", elector[-6:], error)
            return None

    async def _make_plan(self, ballot: Ballot, control: Control | None) -> Plan:
        there = {peer: self._announced[peer] for peer in self._alive if peer not in self._returned()}
        if not any(announcement.trains for announcement in there.values()):
            raise AttemptFailed("everybody left")
        digest = Counter(announcement.base_digest for announcement in there.values()).most_common(1)[0][0]
        agreeing = {peer: announcement for peer, announcement in there.items() if announcement.base_digest == digest}
        tokens = sum(announcement.tokens for announcement in agreeing.values())
        donors = await self._choose_donors() if alpha_due(self.head, tokens, self._rules) > 0 else None
        returned = tuple(interval for peer, back in self._returned().items() if peer not in there for interval in back)
        arrivals = self._arrivals(agreeing)
        return make_plan(self.head, ballot, agreeing, returned, digest, donors, self._rules, arrivals, control)

    async def _choose_donors(self) -> Donors | None:
        """Merge donors; none when I hold no base to compare experts in: this one merge is left out then."""
        try:
            return await self._donors()
        except Refused as error:
            logger.warning("round %d goes without its merge: %s", self.head.round + 1, error)
            return None

    async def _collect(self, results: Results) -> None:
        """Wait for every member that lives to report what it staged; the parts of lost reducers go to backups meanwhile."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + 2 * self._rules.config.sync.exchange_timeout_s
        names = [member.peer for member in results.plan.members]
        half_at: float | None = None
        while (now := loop.time()) < deadline:
            self._changed.clear()
            waiting = [peer for i, peer in enumerate(names) if i not in self._staged and peer in self._alive]
            lost = lost_reducers(results, self._staged, {i for i, peer in enumerate(names) if peer in self._alive}, not waiting)
            if lost:
                self._revise(results, lost)
                half_at = None
                await self._tell_revisions()
            elif not waiting:
                unclear = [i for i in disagreeing(results, self._staged) if names[i] in self._alive and i not in self._asked]
                if not unclear:
                    return
                await self._ask_in_full([names[i] for i in unclear])
            elif half_at is None and 2 * len(self._staged) >= len(names):
                half_at = now
            elif half_at is not None and now - half_at > self._patience_with_exchange(half_at - started):
                self._give_up(waiting)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(PING_EVERY_S, deadline - now))

    async def _ask_in_full(self, peers: Sequence[str]) -> None:
        """These members got other manifests than I: ask which, so that what they hold of the others still counts."""
        assert self._results is not None
        for peer in peers:
            index = self._results.plan.index(peer)
            if index is not None:
                self._asked.add(index)
                self._staged.pop(index)
        talks = [self._alive[peer] for peer in peers]
        await asyncio.gather(*(talk.send(IN_FULL) for talk in talks), return_exceptions=True)

    def _revise(self, results: Results, lost: tuple[int, ...]) -> None:
        logger.info("round %d: %d reducers are lost, their parts go to others", self.head.round + 1, len(lost))
        results.revise(lost)
        gone = {i for i, member in enumerate(results.plan.members) if member.peer not in self._alive}
        self._staged = {i: staged for i, staged in self._staged.items() if i in gone and i not in lost}

    def _patience_with_exchange(self, half_s: float) -> float:
        """Seconds that the slower half of the members gets after the first: as long again, and the longest silence."""
        return self._rules.config.sync.silence_s + half_s

    def _give_up(self, waiting: Iterable[str]) -> None:
        """These members take too long. Their talks end; whoever lives catches up with the head."""
        for peer in waiting:
            logger.info("round %d goes on without %s, which takes too long to exchange", self.head.round + 1, peer[-6:])
            talk = self._alive.pop(peer, None)
            if talk is not None:
                talk.break_off("closed: the others exchanged long ago")
        self._changed.set()

    async def _propose(self, ballot: Ballot, head: Head) -> Decided:
        request = pack(Accept(ballot, head))
        electorate, farewells = self._electorate(), self._farewells()
        votes = await _until(
            lambda votes: len(votes) >= quorum(electorate), (self._ask_vote(elector, request) for elector in electorate)
        )
        if len(votes) < quorum(electorate):
            raise AttemptFailed(f"no quorum: {len(votes)} of {len(electorate)} electors voted")
        return Decided(head, ballot, tuple(votes), farewells)

    def _electorate(self) -> tuple[str, ...]:
        """Whose majority decides: the electors that have not left."""
        return remaining(self.head, self._farewells(), self._identity)

    async def _ask_vote(self, elector: str, request: bytes) -> Vote | None:
        try:
            vote = unpack(Vote, await self._ask(elector, ACCEPT, request))
            return vote if vote.elector == elector else None
        except (PeerUnreachable, Refused, WireError) as error:
            logger.debug("elector %s: %s", elector[-6:], error)
            return None

    async def _tell_electors(self, decided: Decided) -> None:
        outside = sorted(set(self.head.electorate) - set(decided.head.members))
        await asyncio.gather(
            *(self._ask(elector, DECIDE, pack(Decide((decided,)))) for elector in outside), return_exceptions=True
        )

    async def _ask(self, peer: str, method: str, request: bytes) -> bytes:
        return await self._board.ask(peer, method, request, self._board.silence_s)


async def _until(enough: Callable[[list[T]], bool], asks: Iterable[Coroutine[Any, Any, T | None]]) -> list[T]:
    """The answers that have come when they are enough, or when there will be no more: nobody waits for a silent elector."""
    tasks = [asyncio.ensure_future(ask) for ask in asks]
    answers: list[T] = []
    try:
        while (open_tasks := [task for task in tasks if not task.done()]) and not enough(answers):
            await asyncio.wait(open_tasks, return_when=asyncio.FIRST_COMPLETED)
            answers = [answer for task in tasks if task.done() and (answer := task.result()) is not None]
        return answers
    finally:
        await end_tasks(tasks)
