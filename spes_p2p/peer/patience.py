"""How long a member waits for a coordinator that lives, before it goes on to the next in turn.

Who coordinates depends on it, and never what is decided: ballots see to that (docs/safety.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from spes_p2p.consensus.control import is_paused
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.methods import PING
from spes_p2p.messages.rounds import Ping, Pong
from spes_p2p.peer.node import Node
from spes_p2p.rounds.stragglers import MAX_PATIENCE
from spes_p2p.rounds.traffic import SHORTEST_LIMIT_S

ALLOWANCE = 8
"""Multiples of `silence_s` that an honest coordinator needs beside what it waits for. Before a proposal: peers that do not
answer, stragglers told to stop, late arrivals, promises and absent electors take one each, the plan with its merge three. After
the exchange: votes take three."""
FIRST_LOOK = 2
"""Multiples of `silence_s` before a member asks whether the others wait as well. Most rounds are planned by then."""
MAX_ASKED = 16
"""Ask at most this many at a time, drawn at random: all members ask, and each of them would ask each."""
ASK_AGAIN, SOME_READY = 0.125, 0.25
"""Until more than the second share of those asked is ready, a look comes after the first share of the time waited so far, if
that is more than `silence_s`: a peer without work may wait for a whole phase, and hundreds may together."""
KEPT_ANSWERS = 4
"""Look at the last answers of this many times: of 16 drawn again and again, more than half are ready by chance at some time."""
HALVES_SHARE = 2.0
"""A coordinator waits for twice the time of the faster half of the trainers, and half of that again for stragglers."""
MOVING_SHARE = 0.25
"""An exchange goes on while this share of the trainers exchanges. A coordinator waits only until half of the members have
reported, and then for as long again; a few liars must not reach it."""
OWN_FACTOR = 2
"""A coordinator gives its own attempt up after this multiple of the time that it has without a plan: others have left by then.
With one, the attempt ends by itself."""
GIVEN_UP_ROUNDS = 16
"""Skip a coordinator that was given up for this many rounds: else it would hold up each round in which its turn is first."""
HELD_SILENCES = 2
"""Remember an attempt that ends in vain, with a quorum ready, after it kept this peer for this many times `silence_s`."""
HELD_ROUNDS = 2 * GIVEN_UP_ROUNDS
"""Give up a coordinator at its second such attempt within this many rounds; one that comes back and fails again, at once."""
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

    Members that remember other coordinators as given up wait for different ones, and no attempt has a quorum. So each goes
    where most of the phase's trainers wait, and a coordinator leaves its own attempt at last, too.
    """

    def __init__(self, node: Node, work: Work):
        self.announced = -1
        """The last round to which this peer has brought its work, which it tells others."""
        self.is_exchanging: Callable[[], bool] = no_exchange
        """Whether this peer exchanges updates for the next round, and something moves."""
        self._node, self._work = node, work
        self._exchange_s = 2 * SHORTEST_LIMIT_S
        """The longest that the last exchange could take."""
        self.waits_for = ""
        """The coordinator that this peer waits for, which it tells others."""
        self._elsewhere = ""
        """The one for which more others wait."""
        self._given_up: dict[str, int] = {}
        """By coordinator: the round in which it was given up."""
        self._followed: dict[str, int] = {}
        """By coordinator: the last round in which this peer went to it since others were there."""
        self._held_in: dict[str, int] = {}
        """By coordinator: the last round in which its attempt failed after it had kept this peer for long."""
        self._factor = 1
        self._begin("")

    def begin(self) -> None:
        """Begin with the round after the last commit; nothing changes if it has begun before."""
        if self._parent != self._node.log.last.id:
            self._factor = 1
            self._remember_failures()
            self._begin(self._node.log.last.id)
        self.announced = self._node.log.round + 1

    def _begin(self, parent: str) -> None:
        self._parent = parent
        self._parent_round = self._node.log.round
        self._limit_s: float | None = None
        """None until a quorum is ready."""
        self._answers = deque[Mapping[str, Pong]](maxlen=KEPT_ANSWERS)
        self._ready_at = 0.0
        """Loop time."""
        self._since: dict[str, float] = {}
        """By coordinator: the loop time of this peer's first attempt with it."""
        self._planned: dict[str, _Planned] = {}
        """The coordinators that have proposed."""
        self._failed: set[str] = set()
        self._unreachable: set[str] = set()
        self._came: tuple[str, float] = "", 0.0
        """The coordinator of the last attempt, and the loop time since which attempts were made with it alone."""
        self._held: set[str] = set()
        """Coordinators whose attempts ended without a decision after they had kept this peer for long."""

    def _remember_failures(self) -> None:
        """Remember who kept this peer in vain in the round that is decided now; give up those that did it not long before.

        Not those that decided the round after all, nor where others were lost or failed, too: then electors were missing.
        """
        number = self._node.log.round
        decided_by = {each.ballot.coordinator for each in self._node.log.since(self._parent_round)}
        for coordinator in self._held - decided_by:
            if not (self._failed | self._unreachable) - {coordinator}:
                if self._held_in.get(coordinator, -math.inf) > number - HELD_ROUNDS:
                    self.give_up(coordinator)
                self._held_in[coordinator] = number

    async def watch(self) -> None:
        """Find out when a quorum of the phase's trainers is ready for the round, and when an exchange has come to an end."""
        began = looked_at = _now()
        answers: dict[str, Pong] = {}
        await asyncio.sleep(FIRST_LOOK * self._silence_s)
        while True:
            ready = sum(pong.announced > self._node.log.round for pong in answers.values())
            is_early = self._limit_s is None and not self._planned and ready <= SOME_READY * len(answers)
            if is_early and _now() < looked_at + ASK_AGAIN * (looked_at - began):
                await asyncio.sleep(self._silence_s)
                continue
            looked_at = _now()
            if self.is_exchanging():
                for planned in self._planned.values():
                    planned.quiet_due = None
            elif not self._is_paused():
                answers = await self._ask_some()
                if self._limit_s is None:
                    self._look(answers)
                for coordinator, planned in self._planned.items():
                    self._look_for_progress(coordinator, planned, answers)
                self._look_for_others(answers)
                await self._learn(answers)
            await asyncio.sleep(self._silence_s)

    async def exhausted(self, coordinator: str) -> str:
        """Return when this coordinator has had its time, or when another one has brought the round to a decision.

        Returns the one for which more wait than for this one; "" if there is none.
        """
        self._since.setdefault(coordinator, _now())
        if self._came[0] != coordinator:
            self._came = coordinator, _now()
        self._unreachable.discard(coordinator)
        self.waits_for, self._elsewhere = coordinator, ""
        try:
            while not self.skips(coordinator) and self._node.log.last.id == self._parent:
                if self._elsewhere:
                    self._given_up.pop(self._elsewhere, None)
                    self._followed[self._elsewhere] = self._node.log.round + 1
                    return self._elsewhere
                await asyncio.sleep(self._silence_s / 4)
        finally:
            self.waits_for = ""
            is_in_vain = self._node.log.last.id == self._parent and not self._elsewhere and coordinator != self._node.peer_id
            kept_s = _now() - max(self._came[1], self._ready_at)
            is_long = self._limit_s is not None and kept_s > HELD_SILENCES * self._silence_s
            if is_in_vain and is_long:
                self._held.add(coordinator)
        return ""

    def proposed(self, coordinator: str, exchange_limit_s: float | None = None) -> None:
        """Note that a coordinator has a plan. `exchange_limit_s`: of its exchange; None: this peer is not in the plan."""
        if exchange_limit_s is not None:
            self._exchange_s = 2 * exchange_limit_s  # what the coordinator waits at most, revisions included
        due = _now() + self._factor * (self._exchange_s + ALLOWANCE * self._silence_s)
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
                self.give_up(coordinator)
        self._since.pop(coordinator, None)
        self._planned.pop(coordinator, None)

    def unreachable(self, coordinator: str) -> None:
        """Note that a coordinator did not answer this peer."""
        self._unreachable.add(coordinator)

    def skips(self, coordinator: str) -> bool:
        """Return whether to go on without this coordinator: it had its time, in this round or in a recent one."""
        if is_over := self._is_over(coordinator):
            self.give_up(coordinator)
        return is_over or self._given_up.get(coordinator, -GIVEN_UP_ROUNDS - 1) > self._node.log.round + 1 - GIVEN_UP_ROUNDS

    def yields(self, coordinator: str) -> bool:
        """Return whether this peer takes over from a coordinator that answers."""
        return coordinator in self._failed or self.skips(coordinator)

    def deferred(self, coordinator: str, to: str) -> None:
        """Note that a coordinator refused since one before it in turn is there: its own time has not begun."""
        order = self._node.coordinators()
        if coordinator in order and to in order[: order.index(coordinator)]:  # otherwise the round was decided meanwhile
            self._since.pop(coordinator, None)

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

    def give_up(self, coordinator: str) -> None:
        """Skip this coordinator, another than this peer, for GIVEN_UP_ROUNDS rounds."""
        if coordinator != self._node.peer_id:
            self._given_up[coordinator] = self._node.log.round + 1

    @property
    def _silence_s(self) -> float:
        return self._node.rules.config.sync.silence_s

    def _is_paused(self) -> bool:
        control = self._node.log.last.control
        return is_paused(control) and self._node.controls.newest == control

    def _is_over(self, coordinator: str) -> bool:
        if len(self._node.coordinators()) == 1 or coordinator not in self._since:
            return False
        is_own = coordinator == self._node.peer_id
        if (planned := self._planned.get(coordinator)) is not None:
            return not is_own and _now() >= min(planned.due, planned.due if planned.quiet_due is None else planned.quiet_due)
        if self._limit_s is None:
            return False
        factor = self._factor * (OWN_FACTOR if is_own else 1)
        return _now() >= max(self._ready_at, self._since[coordinator]) + factor * self._limit_s

    async def is_quorum_ready(self) -> bool:
        """Return whether half of the phase's trainers, by steps or by number, say that it is over for them."""
        return self._ready(self._with_earlier(await self._ask_some())) is not None

    def _look(self, answers: Mapping[str, Pong]) -> None:
        """Note when the phase is over for a quorum of its trainers.

        It began when the last commit became known to half of those that answer: this peer may have learned it late. Half by
        steps and by number: who has half of both can also keep a quorum from being ready.
        """
        known = self._with_earlier(answers)
        share = self._ready(known)
        if share is None:
            return
        sync, self._ready_at = self._node.rules.config.sync, _now()
        mine_s, here = self._ready_at - self._node.decisions.learned_at, self._node.log.round
        said_s = {self._node.peer_id: mine_s, **{peer: pong.known_s for peer, pong in known.items() if pong.round == here}}
        waited_s = max(mine_s, min(_median_low(said_s, weights) for weights in (dict.fromkeys(said_s, 1), self._work()[0])))
        self._limit_s = share * waited_s + ALLOWANCE * sync.silence_s + (0.0 if self._work()[0] else sync.join_grace_s)

    def _with_earlier(self, answers: Mapping[str, Pong]) -> dict[str, Pong]:
        """Return these answers and those of the last looks in this round."""
        self._answers.append(answers)
        here = self._node.log.round
        earlier = {peer: pong for each in self._answers for peer, pong in each.items() if pong.round == here}
        return earlier | dict(answers)

    def _ready(self, answers: Mapping[str, Pong]) -> float | None:
        """Return the share of the time so far that a coordinator may wait for stragglers; None until a quorum is ready."""
        round_number, (steps, pace) = self._node.log.round, self._work()
        announced = {self._node.peer_id: self.announced, **{peer: pong.announced for peer, pong in answers.items()}}
        expected = {peer: steps[peer] for peer in announced if peer in pace}
        ready = [peer for peer in expected if announced[peer] > round_number]
        if 2 * sum(expected[peer] for peer in ready) >= sum(expected.values()):
            return MAX_PATIENCE
        return HALVES_SHARE if 2 * len(ready) >= len(expected) else None

    def _look_for_progress(self, coordinator: str, planned: _Planned, answers: Mapping[str, Pong]) -> None:
        """Note when the trainers of the phase exchange nothing any more of what this coordinator planned.

        It may need as long again once most are done, and twice that for reports in full, which it asks for in between.
        """
        others = set(self._work()[1]) - {self._node.peer_id, coordinator}
        moving = [answers[peer].exchanging > self._node.log.round for peer in others & answers.keys()]
        is_quiet = sum(moving) < MOVING_SHARE * (len(moving) + 1) and bool(moving or not others)  # full lines answer late
        if not is_quiet:
            planned.quiet_due = None
        elif planned.quiet_due is None:
            elapsed_s = _now() - planned.at
            planned.quiet_due = _now() + self._factor * (2 * (elapsed_s + self._silence_s) + ALLOWANCE * self._silence_s)

    def _look_for_others(self, answers: Mapping[str, Pong]) -> None:
        """Find a coordinator for which more of the phase's trainers wait than for this peer's: apart, none has a quorum.

        Each is followed once in a round, and once more only if it did not keep this peer waiting: those who count may lie.
        """
        mine, order, next_round = self.waits_for, self._node.coordinators(), self._node.log.round + 1
        if self._limit_s is None or mine not in order or mine in self._planned:
            return
        waiting = Counter(pong.waits_for for pong in answers.values() if pong.announced == next_round)
        waiting[mine] += self._node.peer_id in self._work()[1]

        def rank(coordinator: str) -> tuple[int, int]:
            return waiting[coordinator], -order.index(coordinator)

        left = {*self._unreachable, *self._failed, *(each for each in order if self._is_over(each))}
        for each, followed in self._followed.items():
            if followed == next_round or (self.skips(each) and followed > next_round - GIVEN_UP_ROUNDS):
                left.add(each)
        best = max((each for each in order if each == mine or each not in left), key=rank)
        self._elsewhere = best if rank(best) > rank(mine) else ""

    async def _learn(self, answers: Mapping[str, Pong]) -> None:
        """Learn the round's decision from a peer that has it: a coordinator may keep members waiting that others left."""
        ahead = sorted(peer for peer, pong in answers.items() if pong.round > self._node.log.round)
        if ahead and not self.is_exchanging():
            with contextlib.suppress(PeerUnreachable, Refused, WireError):
                await self._node.decisions.learn_from(self._node.world.rng.choice(ahead), is_patient=False)

    async def _ask_some(self) -> dict[str, Pong]:
        """Return the answers of some trainers of the phase that set its pace, by peer."""
        peers = sorted({*self._work()[1]} - {self._node.peer_id})
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


def _median_low(values: Mapping[str, float], weights: Mapping[str, int]) -> float:
    """Return the least value that at least half of these peers, by weight, do not exceed; without a weight a peer has none."""
    passed, total = 0, sum(weights.get(peer, 0) for peer in values)
    for peer in sorted(values, key=values.__getitem__):
        passed += weights.get(peer, 0)
        if 2 * passed >= total:
            break
    return values[peer]


def _now() -> float:
    return asyncio.get_running_loop().time()
