"""The members of a round: its coordinator waits for announcements, and for stragglers as far as the swarm's pace allows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from spes_p2p.consensus.admission import standing_of
from spes_p2p.consensus.electorate import taking_turns
from spes_p2p.messages.admission import Standing
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Commit, Signed
from spes_p2p.messages.methods import PING
from spes_p2p.messages.rounds import Announcement, Ping, Pong
from spes_p2p.net.rpc import Stream
from spes_p2p.net.tasks import end_tasks
from spes_p2p.peer.courtesy import LAST_SHARE, LATE_SHARE, LEAST_S, LEAST_SHARE, Courtesy, Wait
from spes_p2p.peer.node import Node
from spes_p2p.rounds.plan import needs_vouched
from spes_p2p.rounds.stragglers import patience_s, straggler_delay

logger = logging.getLogger(__name__)

PING_EVERY_S = 1.0
LOOK_S = 1e-5
"""Per member: time in which what changes is looked at together, since looking at all members takes nearly as long."""
MAX_PINGS_PER_S = 16
"""Of many members that still train, on average at most so many are pinged while nobody waits for them."""
WAITING_SHARE = 0.25
"""Ping missing members often once this share of the expected ones wait for them, or a quorum."""
MAX_LATE = 64
"""Wait for at most this many late arrivals that may be anybody."""


class AttemptFailed(Exception):
    """This attempt will not come to a decision; nothing was applied."""


class LateArrivals:
    """Peers that came too late for a round and were in none since. Kept by the coordinator from round to round.

    The next round waits for them, so that the short phases of a few members keep no one out.
    """

    def __init__(self) -> None:
        self.peers: set[str] = set()
        self.invited: set[str] = set()
        """Those that came too late some time and that the owner vouches for, in an open campaign: no account pays for them."""
        self.courtesy = Courtesy(LATE_SHARE)
        """The time for them."""

    def add(self, peer: str, commit: Commit, is_invited: bool = False) -> None:
        """Wait for this peer in the round after a commit; of those that may be anybody, for MAX_LATE."""
        if is_invited:
            self.invited.add(peer)
        if len(self.peers) < MAX_LATE or peer in {*commit.electorate, *commit.helpers, *self.invited}:
            self.peers.add(peer)


@dataclass(frozen=True)
class RoundContext:
    """One round, and the peer that coordinates it."""

    node: Node
    parent: Commit
    """The last commit: the round is the one after it."""
    phase_began: float
    """Loop time."""
    assigned_steps: Mapping[str, int]
    """Steps of this phase by peer."""
    pace: Collection[str]
    """Those of these peers that make a quorum (`planned.pacemakers`)."""
    too_late: LateArrivals
    strangers: Courtesy
    """This coordinator's time for strangers that announce or report later than all others."""
    stalled: set[str]
    """Members that stalled as reducers in an attempt at this round: later attempts go on without them."""
    least_s: float = 0.0
    """While no other trainer is there, strangers' phases take this long at least: they may say at once that theirs is done."""

    def gone(self) -> Mapping[str, Signed]:
        """Return the statements of the peers that have left this round."""
        return self.node.departures.gone(self.parent.id)

    def require_open(self) -> None:
        """Raise AttemptFailed when another coordinator has brought this round to its decision."""
        if self.node.log.last.id != self.parent.id:
            raise AttemptFailed("this round is decided already")


class _Waits:
    """What one attempt waits after all that set the pace are there: for strangers, and for peers that come late."""

    def __init__(self, context: RoundContext):
        self._context, self._silence_s = context, context.node.rules.config.sync.silence_s
        self._last: Wait | None = None
        self._late: Wait | None = None
        self._last_came_at: float | None = None
        self._late_came_at: float | None = None
        """Loop times at which nobody was missing, or coming, any more."""
        self._is_charged = False
        """Whether others came late than those for whom no account pays."""

    def left_s(self, missing: Collection[str], coming: Collection[str]) -> float:
        """Return for how long to wait for the last of the strangers that are missing, and of the peers that come late."""
        context, now = self._context, asyncio.get_running_loop().time()
        sure = {*context.parent.helpers, *context.too_late.invited}
        self._last_came_at = None if missing else self._last_came_at or now
        self._late_came_at = None if coming else self._late_came_at or now
        self._is_charged |= bool(set(coming) - sure)
        if self._last is None or self._late is None:
            phase_s = now - context.phase_began
            most_s, sharers = max(self._silence_s, LAST_SHARE * phase_s), taking_turns(context.parent)
            self._last = context.strangers.begin(most_s, max(LEAST_S, LEAST_SHARE * phase_s), sharers)
            self._late = context.too_late.courtesy.begin(self._silence_s, sharers=sharers)
        late_s = self._late.left_s(self._silence_s if set(coming) & sure else None) if coming else 0.0
        return max(late_s, self._last.left_s() if missing else 0.0)

    @property
    def are_last_seconds(self) -> bool:
        """Whether to tell strangers to stop: nothing else makes them announce in time."""
        return self._last is not None and self._last.left_s() <= self._silence_s

    def end(self) -> None:
        """Take what was waited off the accounts."""
        if self._last is not None:
            self._last.end(self._last_came_at is None, self._last_came_at)
        if self._late is not None and self._is_charged:
            self._late.end(self._late_came_at is None, self._late_came_at)


class Gathering:
    """The members of one attempt: what they announced, and which of them still hold their stream to the coordinator."""

    def __init__(self, context: RoundContext):
        self._context = context
        self.announced: dict[str, Announcement] = {}
        self.signed: dict[str, Signed] = {}
        """The same, as evidence for the plan."""
        self.alive: dict[str, Stream] = {}
        self.changed = asyncio.Event()
        """Set when a member joins, leaves or reports; the waiting coordinator clears it."""
        self._done_at: dict[str, float] = {}
        """Loop time at which each member's phase was done."""
        self._quorum_at: float | None = None
        self._pinged: dict[str, float] = {}
        """By peer: the loop time of its last ping."""
        self._pings: dict[tuple[str, bool], asyncio.Task[None]] = {}
        """By peer, and whether it is told to stop."""
        self._told_to_stop: set[str] = set()
        self._has_told = False
        """Whether the log says that round 0 waits for a vouched trainer."""
        self._dead: dict[str, int] = {}
        """Peers that did not answer, with the number of times that they had said to be back: another time revives them."""

    def join(self, stream: Stream, announcement: Announcement, signed: Signed) -> None:
        """Take a member's announcement."""
        peer = stream.remote
        self._context.too_late.peers.discard(peer)
        self.announced[peer], self.signed[peer] = announcement, signed
        done_at = asyncio.get_running_loop().time() - announcement.waited_s
        self._done_at.setdefault(peer, max(done_at, self._context.phase_began))
        self.alive[peer] = stream
        self._dead.pop(peer, None)
        self.changed.set()

    def leave(self, stream: Stream) -> None:
        """Note that a member's stream has ended. What it announced is forgotten where nobody waits for its work."""
        peer = stream.remote
        if self.alive.get(peer) is stream:
            del self.alive[peer]
            if peer not in self._context.assigned_steps:
                del self.announced[peer], self.signed[peer], self._done_at[peer]
        self.changed.set()

    def keeps_base_of(self, round_number: int) -> bool:
        """Return whether a member that is present and that the owner vouches for says that it keeps the base of this round."""
        return any(
            round_number in self.announced[peer].archived and self._standing_of(peer) == "vouched" for peer in self.alive
        )

    async def wait(self) -> None:
        """Wait until every living trainer with an assignment has announced; tell stragglers to stop, then go on without them.

        A peer that came too late for the last round is waited for: a helper, or in an open campaign whom the owner invited to
        vote, for `silence_s`, others as far as `LateArrivals` goes; so are, by another account, strangers that are missing when
        all others are there. A phase without assignments, the first of a campaign or a term, goes on for `join_grace_s` after
        its quorum. Raises AttemptFailed when the round is decided elsewhere.
        """
        waits = _Waits(self._context)
        try:
            await self._wait(waits)
        finally:
            waits.end()
            await end_tasks(self._pings.values())

    async def _wait(self, waits: _Waits) -> None:
        context, sync = self._context, self._context.node.rules.config.sync
        while True:
            context.require_open()
            self.changed.clear()
            now = asyncio.get_running_loop().time()
            trainers = {peer for peer in self.alive if self.announced[peer].trains}
            early_s = context.phase_began + context.least_s - now
            if early_s > 0 and {self._standing_of(peer) for peer in trainers} == {"newcomer"}:
                await self._change(early_s)
                continue
            expected = self._expected()
            missing, pacing = expected.keys() - self.announced.keys(), self._pacing(expected).keys()
            context.too_late.peers.difference_update(self._dead_peers())
            coming = context.too_late.peers - self.announced.keys() - context.gone().keys()
            quorum_at = self._quorum_of(trainers, expected)
            self._quorum_at = min((at for at in (self._quorum_at, quorum_at) if at is not None), default=None)
            waited_s = now - self._quorum_at if self._quorum_at is not None and trainers else 0.0
            is_out_of_patience = bool(expected) and waited_s > self._patience()
            if is_out_of_patience and missing and waited_s > self._patience() + sync.silence_s:
                return
            left_s, to_stop = PING_EVERY_S, missing if is_out_of_patience else set[str]()
            if trainers and expected and not missing & pacing:
                left_s = waits.left_s(missing, coming)
                if not left_s:
                    context.too_late.peers.difference_update(coming)
                    return
                to_stop = missing if waits.are_last_seconds else to_stop
            elif self._quorum_at is not None and context.strangers.left_s(taking_turns(context.parent)) < sync.silence_s:
                to_stop = to_stop or missing - pacing
            if not expected and quorum_at is not None and waited_s >= sync.join_grace_s:
                return
            are_waiting = self._quorum_at is not None or len(trainers) >= WAITING_SHARE * len(expected)
            self._ping_all(missing | coming, to_stop, are_waiting, now)
            await self._change(left_s)

    async def _change(self, timeout_s: float) -> None:
        """Wait for something to look at, not longer than this."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.changed.wait(), min(PING_EVERY_S, timeout_s))
        await asyncio.sleep(LOOK_S * len(self.announced))

    def _standing_of(self, peer: str) -> Standing:
        """Return what a peer that announced may do; all strangers are newcomers here."""
        rule, helpers = self._context.node.rules.config.admission, self._context.parent.helpers
        return standing_of(rule, peer, self.announced[peer].invitation, helpers)

    def arrivals(self, members: Iterable[str]) -> tuple[float, ...]:
        """Return the straggler delay of each member that sets the pace; unknown, thus empty, after a failed attempt."""
        timed = [peer for peer in members if peer in self._context.pace]
        if self._quorum_at is None or any(self.announced[peer].attempt for peer in timed):
            return ()
        began = self._context.phase_began
        quorum_s = self._quorum_at - began
        return tuple(straggler_delay(self._done_at[peer] - began, quorum_s) for peer in timed)

    def _expected(self) -> dict[str, int]:
        """Return the steps of the living peers with an assignment that have not left."""
        gone = self._dead_peers() | set(self._context.gone())
        return {peer: steps for peer, steps in self._context.assigned_steps.items() if peer not in gone}

    def _dead_peers(self) -> set[str]:
        returns = self._context.node.departures.returns
        return {peer for peer, count in self._dead.items() if returns[peer] == count}

    def _pacing(self, expected: Mapping[str, int]) -> Mapping[str, int]:
        """Return those of the expected peers that set the pace; all where none of them does."""
        return {peer: steps for peer, steps in expected.items() if peer in self._context.pace} or expected

    def _quorum_of(self, trainers: set[str], expected: Mapping[str, int]) -> float | None:
        """Loop time at which half of `pace`'s work was done or, without assignments, enough trainers were there to begin.

        None before that, and before the first round of an open campaign while no vouched trainer is there. Phases are planned
        to take all trainers as long, so half of them are a quorum after twice their time: a member with most of the work that
        never announces it holds up nobody for longer.
        """
        config, is_first = self._context.node.rules.config, self._context.parent.round < 0
        if is_first and needs_vouched(config) and all(self._standing_of(peer) == "newcomer" for peer in trainers):
            if len(trainers) >= config.sync.min_peers and not self._has_told:
                logger.warning("round 0 waits for a trainer that you vouch for: invite one with --roles trainer,elector")
                self._has_told = True
            return None
        enough = config.sync.min_peers if is_first else 1
        expected = self._pacing(expected)
        needed, there = (sum(expected.values()) / 2 if expected else enough), 0
        done_at = sorted(self._done_at[peer] for peer in trainers if peer in expected)
        halved = done_at[(len(expected) - 1) // 2] if 2 * len(done_at) >= max(1, len(expected)) else None
        for peer in sorted(trainers, key=lambda peer: self._done_at[peer]):
            there += expected.get(peer, 0) if expected else 1
            if there >= needed:
                return self._done_at[peer]
        if expected and halved is not None:
            return 2 * halved - self._context.phase_began
        return None

    def _patience(self) -> float:
        """Return the seconds after the quorum until stragglers are told to stop."""
        if self._quorum_at is None:
            return 0.0
        return patience_s(self._context.node.straggler_delay, self._quorum_at - self._context.phase_began)

    def _ping_all(self, peers: set[str], to_stop: set[str], are_waiting: bool, now: float) -> None:
        """Ping those of these peers that are due. Those `to_stop` are told at once.

        While other members wait for them, peers are pinged every PING_EVERY_S. Before that a dead peer delays nobody, so they
        are pinged every `silence_s`, or less often where they are many.
        """
        rarely_s = max(self._context.node.endpoint.silence_s, len(peers) / MAX_PINGS_PER_S)
        gap_s = PING_EVERY_S if are_waiting else rarely_s
        for peer in sorted(peers):
            at = self._pinged.get(peer, self._context.phase_began)
            if now - at < gap_s and peer not in to_stop - self._told_to_stop:
                continue
            self._pinged[peer], asked = now, (peer, peer in to_stop)
            if asked not in self._pings or self._pings[asked].done():
                self._pings[asked] = asyncio.create_task(self._ping(*asked))
        self._told_to_stop |= to_stop
        self._forget_strangers()

    def _forget_strangers(self) -> None:
        """Forget those that were pinged first of the peers that came too late and are gone: a phase may last for hours."""
        kept = self._context.assigned_steps.keys() | self._context.too_late.peers
        kept |= {peer for (peer, _), ping in self._pings.items() if not ping.done()}
        for peer in [peer for peer in self._pinged if peer not in kept][:-MAX_LATE]:
            del self._pinged[peer]
            self._dead.pop(peer, None)
            self._pings.pop((peer, False), None)

    async def _ping(self, peer: str, stop: bool) -> None:
        """Find out whether a peer is there. One that claims later rounds is not waited for: it proves them, or it lies."""
        commit = self._context.parent
        returns = self._context.node.departures.returns[peer]
        answer = await self._context.node.endpoint.is_there(peer, PING, pack(Ping(commit.round if stop else -1)))
        try:
            pong = unpack(Pong, answer) if answer is not None else None
        except WireError:
            pong = None
        if pong is None:
            logger.info("%s does not answer: round %d goes on without it", peer[-6:], commit.round + 1)
        elif pong.round > commit.round:
            self._context.node.check_claim(peer, pong.round)
        else:
            return
        self._dead[peer] = returns
        self.changed.set()
