"""How long a member waits for a coordinator that lives, before it goes on to the next in turn.

Who coordinates depends on it, and never what is decided: ballots see to that (docs/safety.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from spes_p2p.consensus.control import is_paused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.methods import PING
from spes_p2p.messages.rounds import Ping, Pong
from spes_p2p.peer.node import Node
from spes_p2p.rounds.parts import SHORTEST_LIMIT_S
from spes_p2p.rounds.stragglers import MAX_PATIENCE

logger = logging.getLogger(__name__)

ALLOWANCE = 8
"""Multiples of `silence_s` that an honest coordinator needs beside what it waits for. Before a proposal: peers that do not
answer, stragglers told to stop, late arrivals, promises and absent electors take one each, the plan with its merge three. After
the exchange: votes take three."""
FIRST_LOOK = 2
"""Multiples of `silence_s` before a member asks whether the others wait as well. Most rounds are planned by then."""
MAX_ASKED = 16
"""Ask at most this many at a time, drawn at random: all members ask, and each of them would ask each."""
HALVES_SHARE = 2.0
"""A coordinator waits for twice the time of the faster half of the trainers, and half of that again for stragglers."""
MOVING_SHARE = 0.25
"""An exchange goes on while this share of the trainers exchanges. A coordinator waits only until half of the members have
reported, and then for as long again; a few liars must not reach it."""
GIVEN_UP_ROUNDS = 16
"""Skip a coordinator that was given up for this many rounds: else it would hold up each round in which its turn is first."""
MAX_FACTOR = 2**10

Work = Callable[[], tuple[Mapping[str, int], Collection[str]]]
"""Returns the steps of this phase by peer, and the peers that make a quorum."""


@dataclass
class _Planned:
    """A coordinator that has proposed."""

    at: float
    """Loop time."""
    due: float
    """Loop time at which its decision is due, however the exchange goes."""
    quiet_due: float | None = None
    """Loop time at which it is due since the exchange came to an end; None while it goes on."""


class Patience:
    """The coordinators of the next round, as this peer sees them: which of them have had the time that an honest one needs.

    A coordinator may wait for trainers that still train. So its time begins once a quorum of these say that their phase is
    over, each for itself. With its first proposal it gets the time of the longest exchange, once, and less when the trainers
    say that they exchange nothing any more. Nothing that a coordinator says lengthens either. When all have had their time,
    all get twice as much.
    """

    def __init__(self, node: Node, work: Work):
        self.announced = -1
        """The last round to which this peer has brought its work, which it tells others."""
        self.is_exchanging: Callable[[], bool] = no_exchange
        """Whether this peer exchanges updates for the next round, and something moves."""
        self._node, self._work = node, work
        self._exchange_s = 2 * SHORTEST_LIMIT_S
        """The longest that the last exchange could take."""
        self._given_up: dict[str, int] = {}
        """By coordinator: the round in which it was given up."""
        self._factor = 1
        self._begin("")

    def begin(self) -> None:
        """Begin with the round after the last commit; nothing changes if it has begun before."""
        if self._parent != self._node.log.last.id:
            self._factor = 1
            self._begin(self._node.log.last.id)
        self.announced = self._node.log.round + 1

    def _begin(self, parent: str) -> None:
        self._parent = parent
        self._limit_s: float | None = None
        """None until a quorum is ready."""
        self._ready_at = 0.0
        """Loop time."""
        self._since: dict[str, float] = {}
        """By coordinator: the loop time of this peer's first attempt with it."""
        self._planned: dict[str, _Planned] = {}
        """The coordinators that have proposed."""
        self._failed: set[str] = set()
        self._unreachable: set[str] = set()

    async def watch(self) -> None:
        """Find out when a quorum of the phase's trainers is ready for the round, and when an exchange has come to an end."""
        await asyncio.sleep(FIRST_LOOK * self._silence_s)
        while True:
            if self._limit_s is None:
                await self._look()
            for coordinator, planned in tuple(self._planned.items()):
                await self._look_for_progress(coordinator, planned)
            await asyncio.sleep(self._silence_s)

    async def exhausted(self, coordinator: str) -> None:
        """Return when this coordinator has had its time."""
        self._since.setdefault(coordinator, _now())
        self._unreachable.discard(coordinator)
        while not self.skips(coordinator):
            await asyncio.sleep(self._silence_s / 4)

    def proposed(self, coordinator: str, exchange_limit_s: float | None = None) -> None:
        """Note that a coordinator has a plan. `exchange_limit_s`: of its exchange; None: this peer is not in the plan."""
        if exchange_limit_s is not None:
            self._exchange_s = 2 * exchange_limit_s  # what the coordinator waits at most, revisions included
        due = _now() + self._factor * (self._exchange_s + ALLOWANCE * self._silence_s)
        if coordinator != self._node.peer_id:
            self._planned.setdefault(coordinator, _Planned(_now(), due))

    def failed(self, coordinator: str) -> None:
        """Note that an attempt failed by what its coordinator said: others may take over.

        It may try again, unless it has let this peer wait for longer than an honest one needs beside the exchange.
        """
        self._failed.add(coordinator)
        since, order = self._since.get(coordinator), self._node.coordinators()
        if since is not None and len(order) > 1 and coordinator != self._node.peer_id:
            began = max(since, self._ready_at)
            if self._limit_s is not None and _now() - began > self._factor * self._limit_s:
                self._given_up[coordinator] = self._node.log.round + 1
        self._since.pop(coordinator, None)
        self._planned.pop(coordinator, None)

    def unreachable(self, coordinator: str) -> None:
        """Note that a coordinator did not answer this peer."""
        self._unreachable.add(coordinator)

    def skips(self, coordinator: str) -> bool:
        """Return whether to go on without this coordinator: it had its time, in this round or in a recent one."""
        if self._is_over(coordinator):
            self._given_up[coordinator] = self._node.log.round + 1
        return self._given_up.get(coordinator, -GIVEN_UP_ROUNDS - 1) > self._node.log.round + 1 - GIVEN_UP_ROUNDS

    def yields(self, coordinator: str) -> bool:
        """Return whether this peer takes over from a coordinator that answers."""
        return coordinator in self._failed or self.skips(coordinator)

    def disputes(self, coordinator: str) -> bool:
        """Return whether this coordinator is none for this peer, though another one says that it is there to coordinate.

        One that was given up in an earlier round is tried again.
        """
        if coordinator in self._unreachable or coordinator in self._failed or self._is_over(coordinator):
            return True
        self._given_up.pop(coordinator, None)
        return False

    def next_pass(self, order: Sequence[str]) -> None:
        """Give all coordinators more time when none of them is left to wait for."""
        if all(self.skips(each) or each in self._unreachable or each == self._node.peer_id for each in order):
            self._given_up.clear()
            self._since.clear()
            self._planned.clear()
            self._factor = min(2 * self._factor, MAX_FACTOR)

    @property
    def _silence_s(self) -> float:
        return self._node.rules.config.sync.silence_s

    def _is_over(self, coordinator: str) -> bool:
        if coordinator == self._node.peer_id or len(self._node.coordinators()) == 1 or coordinator not in self._since:
            return False
        if (planned := self._planned.get(coordinator)) is not None:
            return _now() >= min(planned.due, planned.due if planned.quiet_due is None else planned.quiet_due)
        if self._limit_s is None:
            return False
        return _now() >= max(self._ready_at, self._since[coordinator]) + self._factor * self._limit_s

    async def is_quorum_ready(self) -> bool:
        """Return whether half of the phase's trainers, by steps or by number, say that it is over for them."""
        return await self._ready() is not None

    async def _look(self) -> None:
        """Ask the trainers of the phase whether it is over for them."""
        node, commit = self._node, self._node.log.last
        if is_paused(commit.control) and node.controls.newest == commit.control:
            return
        share = await self._ready()
        if share is None:
            return
        sync, self._ready_at = node.rules.config.sync, _now()
        waited_s = self._ready_at - node.decisions.learned_at
        self._limit_s = share * waited_s + ALLOWANCE * sync.silence_s + (0.0 if self._work()[0] else sync.join_grace_s)

    async def _ready(self) -> float | None:
        """Return the share of the time so far that a coordinator may wait for stragglers; None until a quorum is ready."""
        round_number, (steps, pace) = self._node.log.round, self._work()
        others = await self._ask_some(sorted({*pace} - {self._node.peer_id}))
        answers = {self._node.peer_id: self.announced, **{peer: pong.announced for peer, pong in others.items()}}
        expected = {peer: steps[peer] for peer in answers if peer in pace}
        ready = [peer for peer in expected if answers[peer] > round_number]
        if 2 * sum(expected[peer] for peer in ready) >= sum(expected.values()):
            return MAX_PATIENCE
        return HALVES_SHARE if 2 * len(ready) >= len(expected) else None

    async def _look_for_progress(self, coordinator: str, planned: _Planned) -> None:
        """Ask the trainers of the phase whether they exchange what this coordinator planned.

        It may need as long again once most are done, and twice that for reports in full, which it asks for in between.
        """
        quiet = not self.is_exchanging()
        if quiet:
            steps, pace = self._work()
            others = sorted((set(pace) or steps.keys()) - {self._node.peer_id, coordinator})
            answers = await self._ask_some(others)
            moving = sum(pong.exchanging > self._node.log.round for pong in answers.values())
            quiet = moving < MOVING_SHARE * (len(answers) + 1) and bool(answers or not others)  # full lines answer late
        if not quiet:
            planned.quiet_due = None
        elif planned.quiet_due is None:
            elapsed_s = _now() - planned.at
            planned.quiet_due = _now() + self._factor * (2 * (elapsed_s + self._silence_s) + ALLOWANCE * self._silence_s)

    async def _ask_some(self, peers: Sequence[str]) -> dict[str, Pong]:
        """Return the answers of some of these peers, by peer."""
        asked = self._node.world.rng.sample(peers, min(MAX_ASKED, len(peers)))
        answers = await asyncio.gather(*map(self._ask, asked))
        return {peer: pong for peer, pong in zip(asked, answers, strict=True) if pong is not None}

    async def _ask(self, peer: str) -> Pong | None:
        answer = await self._node.endpoint.is_there(peer, PING, pack(Ping(-1)))
        try:
            return unpack(Pong, answer) if answer is not None else None
        except WireError:
            return None


def no_exchange() -> bool:
    """Say that nothing is exchanged."""
    return False


def _now() -> float:
    return asyncio.get_running_loop().time()
