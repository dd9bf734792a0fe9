"""A coordinator that lives and does not go on is given up; one that waits for trainers that still train is not."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_late_members import ThinLine

from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import ACCEPT, PING, PULL, ROUND
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Pong
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.net.interfaces import Channel, Handler, World
from spes_p2p.net.tasks import end_tasks
from spes_p2p.net.throughput import Throughput
from spes_p2p.observe.events import RoundFailed
from spes_p2p.peer.node import Node
from spes_p2p.peer.patience import ALLOWANCE, ASK_AGAIN, GIVEN_UP_ROUNDS, KEPT_ANSWERS, MAX_ASKED, Patience
from spes_p2p.rounds import parts, traffic
from spes_p2p.testing.attacks.deciding import SilentCoordinator
from spes_p2p.testing.attacks.kinds import ATTACKS, AttackKind
from spes_p2p.testing.attacks.tamper import Liar, Tamper, changed, tampered
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign

SILENCE_S = 5.0
HONEST = "ABC"


def swarm_of(**sync: Any) -> VirtualSwarm:
    return VirtualSwarm(campaign(total_steps=10**6, sync={"min_peers": 4, **sync}))


def coordinator_of(swarm: VirtualSwarm, round_number: int) -> str:
    return {each.commit.round: each.ballot.coordinator for each in swarm.nodes["A"].log.since(-1)}[round_number]


async def longest_round_s(swarm: VirtualSwarm, rounds: int) -> float:
    """Run that many rounds of the honest peers; return the most seconds that one of them took."""
    clock, longest = asyncio.get_running_loop().time, 0.0
    while min(map(swarm.round_of, HONEST)) < rounds:
        before, began = max(map(swarm.round_of, HONEST)), clock()
        while max(map(swarm.round_of, HONEST)) == before:
            await asyncio.sleep(0.5)
            assert clock() - began < 2000, swarm.rounds()
        longest = max(longest, clock() - began)
    return longest


@pytest.mark.long
@pytest.mark.parametrize(("kind", "limit_s"), [("unproposing", 80.0), ("undeciding", 200.0)])
async def test_a_coordinator_that_lives_and_never_goes_on_holds_up_a_round_once(kind: AttackKind, limit_s: float) -> None:
    """It is first in turn in several of these rounds. Before that there was no bound."""
    swarm = swarm_of()
    swarm.around["X"] = lambda world: ATTACKS[kind].around(Liar(world, swarm.campaign.config))
    swarm.start_all(HONEST + "X")
    assert await longest_round_s(swarm, GIVEN_UP_ROUNDS) < limit_s
    failed = [event for event in swarm.recorders["A"].of(RoundFailed) if "lives and does not bring" in event.detail]
    assert {event.reason for event in failed} == {"coordinator_lost"}
    assert len(failed) == 1
    turns = [coordinator_of(swarm, number) for number in range(2, GIVEN_UP_ROUNDS)]
    assert "X" not in turns


@pytest.mark.long
async def test_a_coordinator_that_waits_for_half_of_the_trainers_is_not_overtaken() -> None:
    """They train thirty times as long as planned, far beyond what a silent coordinator gets."""
    swarm = swarm_of(min_peers=3)
    swarm.start_all(HONEST)
    await swarm.until_round(2)
    for name in "BC":
        swarm.slow(name, 30.0)
    began = asyncio.get_running_loop().time()
    await swarm.until_round(3)
    assert asyncio.get_running_loop().time() - began > 20 * SILENCE_S
    await swarm.until_round(6)
    assert not any(recorder.of(RoundFailed) for recorder in swarm.recorders.values())
    swarm.assert_replicas_agree()


class Holder(SilentCoordinator):
    """From some time on, holds one member's stream, and tells the others that its attempt failed."""

    def __init__(self, held: str):
        super().__init__(proposes=False)
        self._held = held
        self.has_begun = False

    def handler(self, method: str, honest: Handler) -> Handler:
        hold = super().handler(method, honest)

        async def serve(channel: Channel) -> None:
            if not self.has_begun or method != ROUND:
                await honest(channel)
            elif channel.remote == self._held:
                await hold(channel)
            else:
                await channel.receive()
                await channel.send(pack(Refused(Code.FAILED, "no majority").refusal), kind=Kind.REFUSAL)
                await channel.finish()

        return serve

    async def send(self, frame: Frame) -> Frame | None:
        return await super().send(frame) if self.has_begun else frame


async def test_a_member_that_is_kept_waiting_learns_of_a_round_that_the_others_decided() -> None:
    swarm, attacker, behind_s = swarm_of(), Holder("C"), 0.0
    swarm.around["X"] = lambda world: tampered(Liar(world, swarm.campaign.config), attacker)
    swarm.start_all(HONEST + "X")
    await swarm.until_round(4)
    attacker.has_begun = True
    while not behind_s and swarm.round_of("A") < 24:
        await asyncio.sleep(0.5)
        while swarm.round_of("C") < swarm.round_of("A") and swarm.peers["C"].coordinators.patience.waits_for == "X":
            await asyncio.sleep(0.5)
            behind_s += 0.5
    assert 0 < behind_s < 2 * SILENCE_S


class Capricious(SilentCoordinator):
    """From some time on, treats each member in its own way: holds it, refuses it with some code, or serves it."""

    def __init__(self, rng: random.Random):
        super().__init__(proposes=True)
        self._rng, self._ways = rng, dict[str, Code | Handler]()
        self.has_begun = False

    def handler(self, method: str, honest: Handler) -> Handler:
        hold = super().handler(method, honest)

        async def serve(channel: Channel) -> None:
            way = self._rng.choice((hold, hold, honest, self._rng.choice([*Code]), self._rng.choice([*Code])))
            way = self._ways.setdefault(channel.remote, way) if self.has_begun and method == ROUND else honest
            if not isinstance(way, Code):
                await way(channel)
            else:
                await channel.receive()
                refusal = Refused(way, "so it is", peer=self._rng.choice(HONEST), round=10**6).refusal
                await channel.send(pack(refusal), kind=Kind.REFUSAL)
                await channel.finish()

        return serve

    async def send(self, frame: Frame) -> Frame | None:
        return await super().send(frame) if self.has_begun else frame


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
async def test_rounds_go_on_however_a_coordinator_treats_each_member(seed: int) -> None:
    swarm, attacker = swarm_of(), Capricious(random.Random(seed))
    swarm.around["X"] = lambda world: tampered(Liar(world, swarm.campaign.config), attacker)
    swarm.start_all(HONEST + "X")
    await swarm.until_round(3)
    attacker.has_begun = True
    assert await longest_round_s(swarm, 15) < 30 * SILENCE_S


async def test_members_that_wait_for_coordinators_apart_come_together() -> None:
    """Each has given up all others, so none of their attempts has a quorum."""
    swarm = swarm_of()
    swarm.start_all("ABCD")
    await swarm.until_round(2)
    assert sorted(swarm.nodes["A"].coordinators()) == sorted(swarm.nodes)
    for peer in (*swarm.peers.values(), swarm.helper):
        for other in swarm.nodes:
            peer.coordinators.patience.give_up(other)
    assert await longest_round_s(swarm, 6) < 12 * SILENCE_S
    swarm.assert_replicas_agree()


class Failing(Tamper):
    """From round 3 on, holds all members for some time if it is first in turn, and then says that its attempt failed."""

    def __init__(self, swarm: VirtualSwarm, hold_s: float):
        self._swarm, self._hold_s = swarm, hold_s
        self._ends: dict[int, float] = {}
        """By round: the loop time."""

    def handler(self, method: str, honest: Handler) -> Handler:
        async def serve(channel: Channel) -> None:
            node, clock = self._swarm.nodes["X"], asyncio.get_running_loop().time
            if node.log.round < 3 or node.peer_id != node.coordinators()[0]:
                await honest(channel)
                return
            end = self._ends.setdefault(node.log.round, clock() + self._hold_s)
            while clock() < end:
                await channel.send(kind=Kind.HEARTBEAT)
                await asyncio.sleep(0.5)
            await channel.send(pack(Refused(Code.FAILED, "no quorum").refusal), kind=Kind.REFUSAL)
            await channel.finish()

        return serve if method == ROUND else honest

    async def send(self, frame: Frame) -> Frame | None:
        if frame.method != PING or not frame.is_answer:
            return frame
        is_over = asyncio.get_running_loop().time() >= self._ends.get(self._swarm.nodes["X"].log.round, math.inf)
        return changed(frame, Pong, lambda pong: replace(pong, failed_to_coordinate=pong.round + 1 if is_over else -1))


@pytest.mark.long
async def test_a_coordinator_that_fails_just_before_its_time_is_over_is_given_up_at_the_second_time() -> None:
    swarm, clock, hold_s, held = swarm_of(), asyncio.get_running_loop().time, 8 * SILENCE_S, 0
    swarm.around["X"] = lambda world: tampered(Liar(world, swarm.campaign.config), Failing(swarm, hold_s))
    swarm.start_all(HONEST + "X")
    await swarm.until_round(3)
    for number in range(4, 4 + GIVEN_UP_ROUNDS):
        began = clock()
        await swarm.until_round(number)
        held += clock() - began > hold_s
    assert held == 2
    assert all(swarm.peers[name].coordinators.patience.skips(swarm.nodes["X"].peer_id) for name in HONEST)


class Voteless(Tamper):
    """Reaches no other elector for its votes while it is among the first two in turn."""

    def __init__(self, swarm: VirtualSwarm, name: str):
        self._swarm, self._name = swarm, name

    async def send(self, frame: Frame) -> Frame | None:
        node, helper = self._swarm.nodes[self._name], self._swarm.nodes["W"].peer_id
        first = node.coordinators()[:2]
        is_cut = frame.method == ACCEPT and not frame.is_answer and node.peer_id in first and helper not in first
        return None if is_cut and node.log.round >= 3 else frame


def voteless(swarm: VirtualSwarm, name: str, world: World) -> World:
    return tampered(Liar(world, swarm.campaign.config), Voteless(swarm, name))


@pytest.mark.long
async def test_a_coordinator_whose_electors_are_away_is_not_given_up() -> None:
    swarm = swarm_of()
    for name in HONEST + "D":
        swarm.around[name] = partial(voteless, swarm, name)
    swarm.start_all(HONEST + "D")
    await swarm.until_round(12)
    failed = Counter(event.round for event in swarm.recorders["A"].of(RoundFailed))
    assert len(failed) > 4
    assert max(failed.values()) > 1
    for name in HONEST:
        patience = swarm.peers[name].coordinators.patience
        assert not any(patience.skips(node.peer_id) for node in swarm.nodes.values())


SLOW_BYTES_PER_S = 2000.0
WIDE = Layout([
    TensorSpec("embed", (60_000,), "shared"),
    *(TensorSpec(f"experts.{e}.gate_up_proj", (1000,), "expert", 0, e) for e in range(4)),
])


async def slow_swarm(monkeypatch: pytest.MonkeyPatch, attacker: Tamper | None = None) -> VirtualSwarm:
    """Return a swarm on thin lines, X in it if it attacks. An exchange takes some ten times `silence_s`."""
    monkeypatch.setattr(traffic, "SLOWEST_BYTES_PER_S", SLOW_BYTES_PER_S / 4)
    monkeypatch.setattr(parts, "SMALL_BYTES", 1024)
    names = HONEST + ("X" if attacker is not None else "")
    swarm = VirtualSwarm(campaign(total_steps=10**6, sync={"min_peers": len(names)}), layout=WIDE)
    for name in HONEST:
        swarm.around[name] = lambda world: tampered(Liar(world, swarm.campaign.config), ThinLine(1.5))
    if attacker is not None:
        swarm.around["X"] = lambda world: tampered(Liar(world, swarm.campaign.config), attacker)
    swarm.start_all(names)
    for name in names:
        swarm.nodes[name].endpoint.upload = Throughput(SLOW_BYTES_PER_S)
    return swarm


@pytest.mark.long
async def test_slow_exchanges_are_not_cut_while_something_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = await slow_swarm(monkeypatch)
    await swarm.until_round(1)
    began = asyncio.get_running_loop().time()
    await swarm.until_round(3)
    assert asyncio.get_running_loop().time() - began > 2 * 10 * SILENCE_S
    assert not any(recorder.of(RoundFailed) for recorder in swarm.recorders.values())
    swarm.assert_replicas_agree()


class Unserving(SilentCoordinator):
    """Has nothing decided, and serves no results of its own parts either."""

    async def send(self, frame: Frame) -> Frame | None:
        return None if frame.method == PULL and frame.is_answer else await super().send(frame)


class Excuses(Tamper):
    """Refuses every member, and answers pings as a coordinator that goes on."""

    def __init__(self, refused: Refused):
        self._refused = refused

    def handler(self, method: str, honest: Handler) -> Handler:
        async def refuse(channel: Channel) -> None:
            await channel.receive()
            await channel.send(pack(self._refused.refusal), kind=Kind.REFUSAL)
            await channel.finish()

        return refuse if method == ROUND else honest

    async def send(self, frame: Frame) -> Frame | None:
        if frame.method == PING and frame.is_answer:
            return changed(frame, Pong, lambda pong: replace(pong, failed_to_coordinate=-1))
        return frame


EXCUSES = [
    Refused(Code.ALIVE, "another one is there", peer="A"), Refused(Code.BEHIND, "decided", round=10),
    Refused(Code.VERSION, "too old", protocol=99),
    Refused(Code.CLOSED, "the plan is made"), Refused(Code.FAILED, "no majority"), Refused(Code.BUSY, "later"),
    Refused(Code.COORDINATOR_BEHIND, "wait"), Refused(Code.DIGEST, "other bits"),
    Refused(Code.CAMPAIGN, "another one", campaign="ab" * 32),
    Refused(Code.LEAVING, "the coordinator leaves"), Refused(Code.NOT_COORDINATOR, "not my turn"),
    Refused(Code.NOT_ADMITTED, "not you"),
]


@pytest.mark.parametrize(
    "refused", [EXCUSES[0], *(pytest.param(each, marks=pytest.mark.long) for each in EXCUSES[1:])],
    ids=lambda refused: refused.code.value,
)
@pytest.mark.long
async def test_a_coordinator_with_excuses_does_not_stop_rounds(refused: Refused, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spes_p2p.peer.attempt")
    swarm = swarm_of()
    swarm.around["X"] = lambda world: tampered(Liar(world, swarm.campaign.config), Excuses(refused))
    swarm.start_all(HONEST + "X")
    assert await longest_round_s(swarm, 8) < 250
    said = Counter(line for line in caplog.messages if f"{refused.detail} (" in line)
    assert max(said.values(), default=0) <= 2 * len(HONEST), "no peer says every second why it waits"


@pytest.mark.long
@pytest.mark.parametrize(
    "attacker", [SilentCoordinator(proposes=True), Unserving(proposes=True)], ids=["undeciding", "unserving"]
)
async def test_a_coordinator_that_proposes_and_stalls_is_given_up_when_nothing_moves(
    monkeypatch: pytest.MonkeyPatch, attacker: Tamper
) -> None:
    """The time limit of these exchanges, which thin lines set, is 900 s."""
    swarm = await slow_swarm(monkeypatch, attacker)
    longest_s = await longest_round_s(swarm, 4)
    assert longest_s < 600


def patience_of(steps: Sequence[int], learned_at: float) -> Patience:
    """Of the first of the trainers with these steps, after round 0; its clock shows 0 at first."""
    names = [f"peer-{number}" for number in range(len(steps))]
    node = SimpleNamespace(
        peer_id=names[0], log=SimpleNamespace(round=0, last=SimpleNamespace(id="")),
        decisions=SimpleNamespace(learned_at=learned_at), world=SimpleNamespace(rng=random.Random(0)),
        rules=SimpleNamespace(config=swarm_of().campaign.config),
    )
    return Patience(cast(Node, node), lambda: (dict(zip(names, steps, strict=True)), names))


async def test_by_chance_half_of_those_asked_are_ready_and_the_phase_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the trainers are ready. Of 16 that are asked, drawn anew 200 times, more than half are, a few times."""
    rng, patience = random.Random(0), patience_of([4] * 240, 0.0)
    pongs = {f"peer-{number}": Pong(0, -1, True, announced=int(number % 3 == 0)) for number in range(240)}
    looks = [{name: pongs[name] for name in rng.sample(sorted(pongs), MAX_ASKED)} for _ in range(200)]
    assert any(patience._ready(answers) is not None for answers in looks)
    for answers in looks:
        patience._look(answers)
    assert patience._limit_s is None
    asked = iter(looks)

    async def ask_some() -> dict[str, Pong]:
        return next(asked)

    monkeypatch.setattr(patience, "_ask_some", ask_some)
    assert not any([await patience.is_quorum_ready() for _ in looks]), "a coordinator may ask for the end of a phase"
    for answers in looks:
        patience._look({name: replace(pong, announced=1) for name, pong in answers.items()})
    assert patience._limit_s is not None


async def test_who_waited_for_a_whole_phase_of_many_trainers_soon_sees_that_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks ever less often, and looks at answers of earlier times, too."""
    clock, phase_s, patience = asyncio.get_running_loop().time, 1000.0, patience_of([4] * 64, 0.0)
    asked_at: list[float] = []

    async def ask_some() -> dict[str, Pong]:
        asked_at.append(clock())
        ready = int(clock() >= phase_s)
        asked = patience._node.world.rng.sample(range(1, 64), MAX_ASKED)
        return {f"peer-{number}": Pong(0, -1, True, announced=ready) for number in asked}

    monkeypatch.setattr(patience, "_ask_some", ask_some)
    monkeypatch.setattr(patience, "_is_paused", lambda: False)
    monkeypatch.setattr(patience._node, "coordinators", tuple, raising=False)
    watching = asyncio.ensure_future(patience.watch())
    while patience._limit_s is None:
        await asyncio.sleep(SILENCE_S / 4)
    await end_tasks([watching])
    assert sum(at < phase_s for at in asked_at) < 50
    assert patience._ready_at <= phase_s * (1 + ASK_AGAIN) + KEPT_ANSWERS * SILENCE_S


@pytest.mark.parametrize(("steps", "said_s"), [
    ((4, 4, 4, 4), (100.0, 100.0, 100.0)), ((4, 4, 4, 4), (100.0, 95.0, 1e9)), ((4, 4, 4, 4), (100.0, 1e9, 1e9)),
    ((8, 8, 2, 2, 2), (100.0, 1e9, 1e9, 1e9)), ((1, 1, 1, 8, 8), (100.0, 100.0, 1e9, 1e9)),
])
async def test_who_learns_a_commit_late_waits_as_long_as_the_others(steps: tuple[int, ...], said_s: tuple[float, ...]) -> None:
    """It learned it 90 s after them. Liars change nothing unless they have half of all, by steps and by number."""
    await asyncio.sleep(100.0)
    patience = patience_of(steps, learned_at=90.0)
    patience.announced = 1
    patience._look({f"peer-{i}": Pong(0, -1, True, announced=1, known_s=each) for i, each in enumerate(said_s, 1)})
    assert patience._limit_s == pytest.approx(50.0 + ALLOWANCE * SILENCE_S, rel=0.1)
