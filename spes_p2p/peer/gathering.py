"""The members of a round: its coordinator waits for announcements, and for stragglers as far as the swarm's pace allows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from spes_p2p.consensus.admission import standing_of
from spes_p2p.consensus.electorate import taking_turns
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.consensus import Commit, Signed
from spes_p2p.messages.methods import PING
from spes_p2p.messages.rounds import Announcement, Ping, Pong
from spes_p2p.net.rpc import Stream
from spes_p2p.peer.node import Node
from spes_p2p.rounds.stragglers import patience_s, straggler_delay

logger = logging.getLogger(__name__)

PING_EVERY_S = 1.0
WAITING_SHARE = 0.25
"""Ping missing members often once this share of the expected ones wait for them, or a quorum."""
COURTESY_SHARE = 0.05
"""Wait for late arrivals for at most this share of the time."""
MAX_LATE = 64
"""Wait for at most this many late arrivals."""


class AttemptFailed(Exception):
    """This attempt will not come to a decision; nothing was applied."""


class LateArrivals:
    """Peers that came too late for a round and were in none since. Kept by the coordinator from round to round.

    The next round waits for them, so that the short phases of a few members keep no one out. Since a peer can arrive late in
    every round, the waiting comes out of a budget that fills with time.
    """

    def __init__(self, silence_s: float):
        """`silence_s`: the most that is waited at once."""
        self.peers: set[str] = set()
        self._silence_s = self._budget_s = silence_s
        self._filled_at = -math.inf
        """Loop time."""

    def add(self, peer: str) -> None:
        """Wait for this peer in the next round."""
        if len(self.peers) < MAX_LATE:
            self.peers.add(peer)

    def patience_s(self, coordinators: int) -> float:
        """Return how long a round may wait now. `coordinators`: those that take turns, each with a budget of its own."""
        now = asyncio.get_running_loop().time()
        filled_s = COURTESY_SHARE / coordinators * (now - self._filled_at)
        self._budget_s, self._filled_at = min(self._silence_s, self._budget_s + filled_s), now
        return self._budget_s

    def spend(self, waited_s: float) -> None:
        """Note that a round waited."""
        self._budget_s -= waited_s


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
    stalled: set[str]
    """Members that stalled as reducers in an attempt at this round: later attempts go on without them."""

    def gone(self) -> Mapping[str, Signed]:
        """Return the statements of the peers that have left this round."""
        return self.node.departures.gone(self.parent.id)

    def require_open(self) -> None:
        """Raise AttemptFailed when another coordinator has brought this round to its decision."""
        if self.node.log.last.id != self.parent.id:
            raise AttemptFailed("this round is decided already")


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
        self._told_to_stop: set[str] = set()
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
        """Note that a member's stream has ended."""
        if self.alive.get(stream.remote) is stream:
            del self.alive[stream.remote]
        self.changed.set()

    def keeps_base_of(self, round_number: int) -> bool:
        """Return whether a member that is present and that the owner vouches for says that it keeps the base of this round."""
        rule, helpers = self._context.node.rules.config.admission, self._context.parent.helpers
        present = {peer: self.announced[peer] for peer in self.alive}
        return any(
            round_number in each.archived and standing_of(rule, peer, each.invitation, helpers) == "vouched"
            for peer, each in present.items()
        )

    async def wait(self) -> None:
        """Wait until every living trainer with an assignment has announced; tell stragglers to stop, then go on without them.

        A peer that came too late for the last round is waited for: a helper for `silence_s`, others within the budget of
        `LateArrivals`. A phase without assignments, the first of a campaign or a term, goes on for `join_grace_s` after its
        quorum. Raises AttemptFailed when the round is decided elsewhere.
        """
        context, all_there_at, budget_s, limit_s = self._context, None, 0.0, 0.0
        sync, helpers, waited_for = context.node.rules.config.sync, set(context.parent.helpers), set[str]()
        while True:
            context.require_open()
            self.changed.clear()
            now = asyncio.get_running_loop().time()
            trainers = {peer for peer in self.alive if self.announced[peer].trains}
            expected = self._expected()
            missing = expected.keys() - self.announced.keys()
            coming = context.too_late.peers - self.announced.keys() - self._dead_peers() - context.gone().keys()
            quorum_at = self._quorum_of(trainers, expected)
            if quorum_at is not None:
                self._quorum_at = quorum_at if self._quorum_at is None else min(self._quorum_at, quorum_at)
            waited_s = now - self._quorum_at if self._quorum_at is not None and trainers else 0.0
            if trainers and expected and not missing:
                if all_there_at is None:
                    all_there_at, budget_s = now, context.too_late.patience_s(taking_turns(context.parent))
                waited_for |= coming
                limit_s = sync.silence_s if coming & helpers else budget_s
                if not coming or now - all_there_at >= limit_s:
                    context.too_late.peers.difference_update(coming)
                    if waited_for - helpers:
                        context.too_late.spend(now - all_there_at)
                    return
            if not expected and waited_s >= sync.join_grace_s and quorum_at is not None:
                return
            late = bool(expected) and waited_s > self._patience()
            if late and waited_s > self._patience() + sync.silence_s:
                return
            if missing or coming:
                are_waiting = self._quorum_at is not None or len(trainers) >= WAITING_SHARE * len(expected)
                due = self._due_for_ping(missing | coming, missing if late else set(), are_waiting, now)
                await asyncio.gather(*(self._ping(peer, late and peer in missing) for peer in due))
                context.too_late.peers.difference_update(self._dead_peers())
            waits_s = PING_EVERY_S if all_there_at is None else min(PING_EVERY_S, max(0.0, all_there_at + limit_s - now))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), waits_s)

    def arrivals(self, members: Iterable[str]) -> tuple[float, ...]:
        """Return the straggler delay of each member that sets the pace; unknown, thus empty, after a failed attempt."""
        if self._quorum_at is None or any(self.announced[peer].attempt for peer in members):
            return ()
        began = self._context.phase_began
        quorum_s = self._quorum_at - began
        timed = [peer for peer in members if peer in self._context.pace]
        return tuple(straggler_delay(self._done_at[peer] - began, quorum_s) for peer in timed)

    def _expected(self) -> dict[str, int]:
        """Return the steps of the living peers with an assignment that have not left."""
        gone = self._dead_peers() | set(self._context.gone())
        return {peer: steps for peer, steps in self._context.assigned_steps.items() if peer not in gone}

    def _dead_peers(self) -> set[str]:
        returns = self._context.node.departures.returns
        return {peer for peer, count in self._dead.items() if returns[peer] == count}

    def _quorum_of(self, trainers: set[str], expected: Mapping[str, int]) -> float | None:
        """Loop time at which half of `pace`'s work was done or, without assignments, enough trainers were there to begin.

        None before that. Phases are planned to take all trainers as long, so half of them are a quorum after twice their time:
        a member with most of the work that never announces it holds up nobody for longer.
        """
        enough = self._context.node.rules.config.sync.min_peers if self._context.parent.round < 0 else 1
        expected = {peer: steps for peer, steps in expected.items() if peer in self._context.pace} or expected
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

    def _due_for_ping(self, peers: set[str], to_stop: set[str], are_waiting: bool, now: float) -> list[str]:
        """Return which of these peers to ping now. Those `to_stop` are told at once.

        While other members wait for them, peers are pinged every PING_EVERY_S. Before that a dead peer delays nobody, so they
        are pinged every `silence_s`.
        """
        silence_s = self._context.node.endpoint.silence_s
        gap_s = PING_EVERY_S if are_waiting else silence_s
        due = []
        for peer in sorted(peers):
            at = self._pinged.get(peer, self._context.phase_began)
            if now - at >= gap_s or peer in to_stop - self._told_to_stop:
                self._pinged[peer] = now
                due.append(peer)
        self._told_to_stop |= to_stop
        return due

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
            logger.info("%s does not answer before round %d", peer[-6:], commit.round + 1)
            self._dead[peer] = returns
        elif pong.round > commit.round:
            self._context.node.check_claim(peer, pong.round)
            self._dead[peer] = returns
