"""Swarms in which training is audited: who does not train is convicted, and honest strangers lose nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spes_p2p.consensus import admission
from spes_p2p.consensus.admission import NO_SERVICE, is_past_probation
from spes_p2p.consensus.control import signed
from spes_p2p.consensus.signed import sign
from spes_p2p.messages.audits import Audited
from spes_p2p.messages.codec import unpack
from spes_p2p.messages.consensus import Control, Signed
from spes_p2p.messages.methods import PING
from spes_p2p.messages.rounds import Announcement
from spes_p2p.net.interfaces import World
from spes_p2p.observe.events import PhaseAudited, PhaseTrained, StandingChanged, UpdatesClipped, VerdictsTaken
from spes_p2p.peer.announcing import Announcer
from spes_p2p.peer.auditing import Auditing
from spes_p2p.peer.exchange_context import EncodedUpdate, SentUpdate
from spes_p2p.peer.judging import Judge
from spes_p2p.peer.kept_moments import KeptMoments
from spes_p2p.rounds.audits import (
    Score,
    drawn_work,
    still_convicted,
)
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.parts import Part
from spes_p2p.testing import memory_nat
from spes_p2p.testing.attacks.kinds import ATTACKS, KINDS, Attack, AttackKind
from spes_p2p.testing.attacks.tamper import Liar
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate import virtual
from spes_p2p.testing.simulate.scenario import Scenario, peer_names
from spes_p2p.testing.simulate.swarm import RecordingTrainer, VirtualSwarm, campaign
from spes_p2p.testing.simulate.virtual import run_seed
from spes_p2p.testing.simulated_identity import SimulatedIdentity
from spes_p2p.training.interface import Phase, PhaseReport, Trainer


def audited_swarm(strangers: str, vouched: str = "ABC", **sync: Any) -> VirtualSwarm:
    """W, vouched trainers and strangers, each of whose phases is drawn."""
    swarm = VirtualSwarm(campaign(
        10**6, admission="open", sync={"min_peers": len(vouched + strangers), "audited_share": 1.0, **sync}
    ))
    swarm.invitations = {name: swarm.invitation(name, ("trainer", "elector")) for name in vouched}
    return swarm


def is_proven(swarm: VirtualSwarm, peer: str) -> bool:
    log = swarm.nodes["W"].log
    return is_past_probation(log.services(log.round).get(peer, NO_SERVICE), needs_audit=True)


class Steady(RecordingTrainer):
    """Steps agree: each makes the weights a little smaller, which is what the held-out loss wants."""

    def train(self, phase: Phase, should_stop: Callable[[], bool], on_step: Callable[[int, float], None]) -> PhaseReport:
        """See Trainer."""
        report = super().train(phase, should_stop, on_step)
        for group in self.layout.groups:
            if group.expert is None or group.expert in self.owned:
                self._local[group.start : group.stop] *= np.float32(0.99**report.steps)
        return report


async def audited_by_order(rounds: int) -> VirtualSwarm:
    """A vouched trainer, A, which takes longer than a phase to swap trainers' states, and a stranger past probation. The owner
    has the phases of this many rounds audited; some rounds follow."""
    swarm = audited_swarm("X", vouched="A", audited_share=1e-6)
    training = swarm.campaign.config.training

    def steady(base: np.ndarray, owned: tuple[int, ...]) -> Steady:
        return Steady(swarm.layout, base, owned, training.batch_size * training.sequence_length, 1.0, 0)

    def busy(world: World) -> World:
        async def run_blocking(function: Callable[..., Any], *args: Any) -> Any:
            if getattr(function, "__func__", None) is Auditing._score:
                await asyncio.sleep(12.0)
            return await world.run_blocking(function, *args)

        return replace(world, run_blocking=run_blocking)

    swarm._make_trainer = steady
    swarm.around["A"] = busy
    swarm.start_all("AX")
    decisions, log = swarm.nodes["W"].decisions, swarm.nodes["W"].log
    await swarm.until_round(2)
    order = Control(swarm.campaign.hash, 1, "running", (), -1, b"", audited=("X",))
    decisions.take_control(signed(order, SimulatedIdentity("W")))
    await swarm.until_round(2 + rounds)
    decisions.take_control(signed(replace(order, number=2, audited=()), SimulatedIdentity("W")))
    await swarm.until_round(log.round + 6)
    assert {each.passed for each in audits(swarm, "X")} == {True}
    return swarm


def attacking(swarm: VirtualSwarm, kind: AttackKind) -> Callable[[World], World]:
    return lambda world: ATTACKS[kind].around(Liar(world, swarm.campaign.config, lambda lie: None))


def audits(swarm: VirtualSwarm, peer: str) -> list[Audited]:
    made = [event.audit for recorder in swarm.recorders.values() for event in recorder.of(PhaseAudited)]
    return [audit for audit in made if audit.peer == peer]


def convictions(swarm: VirtualSwarm) -> dict[int, set[str]]:
    found = {each.commit.round: each.commit for each in swarm.nodes["W"].log.since(0)}
    return {number: {commit.members[i] for i in commit.convicted} for number, commit in found.items() if commit.convicted}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["free-ride", "copy"])
async def test_a_free_rider_loses_its_work_by_two_auditors_and_an_honest_stranger_keeps_it(kind: AttackKind) -> None:
    swarm = audited_swarm("XY")
    swarm.around["X"] = attacking(swarm, kind)
    swarm.start_all("ABCXY")
    log = swarm.nodes["W"].log
    await swarm.until(lambda: "X" in still_convicted(log.recent(log.round)))
    await swarm.until_round(log.round + 4)
    assert {each.passed for each in audits(swarm, "Y")} == {True}
    assert {each.passed for each in audits(swarm, "X")} == {False}
    (number,) = convictions(swarm)
    assert convictions(swarm)[number] == {"X"}
    after = log.commit_at(number + 1)
    assert after.workloads[after.members.index("X")].steps == 0
    assert after.members.index("X") not in after.heard
    taken = [each for each in swarm.recorders["Y"].of(VerdictsTaken) if each.convicted]
    assert [each.convicted for each in taken] == [("X",)]
    assert all(not math.isnan(audit.cosine) for each in taken for _, audit in each.audits)
    swarm.assert_same_commits()
    swarm.assert_replicas_agree()


@pytest.mark.parametrize("hidden", ["X", "XA"], ids=["the member", "both"])
async def test_who_cannot_be_dialled_fails_no_audit_for_it(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setattr(memory_nat, "CIRCUIT_BYTES", 32)
    swarm = audited_swarm("X", vouched="AB")
    nats = swarm.network.nats
    nats.relays = (swarm.bootstrap,)
    for name in hidden:
        nats.put_behind(name, "symmetric")
    swarm.start_all("ABX")

    met, clock = dict.fromkeys("AB", -math.inf), asyncio.get_running_loop().time

    def note(frame: Frame) -> Frame:
        if frame.method == PING and frame.sender == "X" and not frame.is_answer:
            met[frame.receiver] = clock()
        return frame

    async def close_unused() -> None:
        """Only what it opens to meet an auditor stays: in a cell it would not push to these."""
        while True:
            await asyncio.sleep(0.01)
            units = swarm.network.units
            for auditor, at_s in met.items():
                if auditor not in units["X"].remotes and clock() > at_s + 30.0:
                    nats.disconnect(units["X"], units[auditor])

    swarm.network.tap = note
    closing = asyncio.create_task(close_unused())
    await swarm.until_round(12)
    made_by = {name for name in "AB" if swarm.recorders[name].of(PhaseAudited)}
    assert made_by == set("AB") - set(hidden)
    assert {each.passed for each in audits(swarm, "X")} == {True}
    closing.cancel()


async def test_a_vouched_trainer_without_a_vote_audits() -> None:
    swarm = audited_swarm("XY", vouched="A")
    swarm.around["X"] = attacking(swarm, "free-ride")
    swarm.start_all("AXY")
    log = swarm.nodes["W"].log
    await swarm.until(lambda: "X" in still_convicted(log.recent(log.round)))
    assert log.last.electorate == ("W",)
    await swarm.until(lambda: bool(audits(swarm, "Y")))
    assert {each.passed for each in audits(swarm, "Y")} == {True}


@pytest.mark.long
async def test_a_stranger_past_probation_that_reverses_the_common_step_is_audited_for_it(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "PROBATION_ROUNDS", 1)
    monkeypatch.setattr("spes_p2p.rounds.audits.WAITING_SHARE", 1.0)
    monkeypatch.setattr("spes_p2p.peer.auditing.auditors_share", lambda config: 0.5)
    swarm = audited_swarm("XY", vouched="AB", audited_share=1e-9)
    lies = [False]

    def lying_later(world: World) -> World:
        lying = attacking(swarm, "flip")(world)

        async def run_blocking(function: Callable[..., Any], *args: Any) -> Any:
            return await (lying if lies[0] else world).run_blocking(function, *args)

        return replace(world, run_blocking=run_blocking)

    swarm.around["X"] = lying_later
    monkeypatch.setattr(Judge, "harmful", lambda self, plan: ("router", "shared") if lies[0] else ())
    swarm.start_all("ABXY")
    log = swarm.nodes["W"].log
    await swarm.until(lambda: all(is_proven(swarm, peer) for peer in "XY"))
    lies[0], number = True, log.round
    await swarm.until(lambda: not all(each.passed for each in audits(swarm, "X")))
    found = [decided.commit for decided in log.since(number)]
    assert len(found) < 10
    assert {each.members[i] for each in found for i in each.suspected} == {"X", "Y"}
    assert {each.passed for each in audits(swarm, "Y")} == {True}
    swarm.assert_same_commits()


async def test_who_sends_nothing_that_can_be_audited_is_on_probation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its update of shared weights to itself, and could harm its experts unseen."""
    monkeypatch.setattr(admission, "PROBATION_ROUNDS", 1)
    has, withholds = SentUpdate.has, [False]

    def has_no_shared(self: SentUpdate, part: Part) -> bool:
        is_withheld = withholds[0] and self.context.endpoint.peer_id == "X" and part.group.kind == "shared"
        return has(self, part) and not is_withheld

    monkeypatch.setattr(SentUpdate, "has", has_no_shared)
    swarm = audited_swarm("XY", vouched="A")
    swarm.start_all("AXY")
    log = swarm.nodes["W"].log
    await swarm.until(lambda: all(is_proven(swarm, peer) for peer in "XY"))
    withholds[0], number = True, log.round
    await swarm.until_round(number + 4)
    assert not is_proven(swarm, "X")
    assert is_proven(swarm, "Y")
    assert {each.commit.members[i] for each in log.since(number) for i in each.commit.withholding} == {"X"}
    assert not any(commit.commit.withholding for commit in log.since(0) if commit.commit.round <= number)
    withholds[0] = False
    await swarm.until(lambda: is_proven(swarm, "X"))
    swarm.assert_same_commits()


async def test_who_says_that_it_trained_no_shared_weights_contributes_to_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it could send updates of its experts only, and is not drawn, since it claims no work that could be audited."""
    monkeypatch.setattr(admission, "PROBATION_ROUNDS", 1)
    announcement, lies = Announcer.announcement, [False]

    def nothing_trained(self: Announcer, attempt: int) -> Signed:
        made = announcement(self, attempt)
        if not lies[0] or self._node.peer_id != "X":
            return made
        return sign(replace(unpack(Announcement, made.record), tokens=0, moments=b""), self._node.world.identity)

    monkeypatch.setattr(Announcer, "announcement", nothing_trained)
    swarm = audited_swarm("XY", vouched="A")
    swarm.start_all("AXY")
    log = swarm.nodes["W"].log
    await swarm.until(lambda: is_proven(swarm, "X"))
    lies[0], number = True, log.round
    await swarm.until_round(number + 4)
    plan = swarm.peers["A"].replica.base.plan
    assert plan is not None
    assert {each.peer: each.tokens > 0 for each in plan.members if each.peer in "XY"} == {"X": False, "Y": True}
    assert {each.peer: any(each.routed) for each in plan.members if each.peer in "XY"} == {"X": False, "Y": True}
    swarm.assert_same_commits()


async def test_strangers_past_probation_keep_their_experts_while_the_vouched_trainer_is_away(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "PROBATION_ROUNDS", 1)
    swarm = audited_swarm("XY", vouched="A")
    swarm.start_all("AXY")
    log = swarm.nodes["W"].log
    await swarm.until(lambda: all(is_proven(swarm, peer) for peer in "XY"))
    await swarm.until_round(log.round + 2)
    swarm.kill("A")
    away = log.round + 2
    await swarm.until_round(away + 3)
    for number in range(away, away + 3):
        assert any(log.commit_at(number).owners)


@pytest.mark.long
async def test_a_stranger_that_reverses_its_router_is_convicted_whoever_reduces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two auditors one reduces no part of the router."""
    read = SentUpdate._read

    def reversed_router(self: SentUpdate, batch: Sequence[Part]) -> list[EncodedUpdate]:
        found = read(self, batch)
        if self.context.endpoint.peer_id != "X":
            return found
        return [backwards(each) if each.part.group.kind == "router" else each for each in found]

    def backwards(each: EncodedUpdate) -> EncodedUpdate:
        body = each.part.codec.encode(-each.part.codec.decode(each.body, each.part.size))
        return replace(each, body=body, update=replace(each.update, digest=content_digest(body)))

    monkeypatch.setattr(SentUpdate, "_read", reversed_router)
    swarm = audited_swarm("XY", vouched="AB")
    swarm.start_all("ABXY")
    await swarm.until(lambda: bool(convictions(swarm)))
    assert set().union(*convictions(swarm).values()) == {"X"}
    assert not any(each.passed for each in audits(swarm, "X"))
    assert all(each.passed for each in audits(swarm, "Y"))


async def test_a_stranger_with_more_room_than_its_auditor_is_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan gives it no more experts than that one can train again."""
    monkeypatch.setattr(admission, "PROBATION_ROUNDS", 1)
    swarm = audited_swarm("X", vouched="A")
    swarm.start_bootstrap()
    swarm.start("A", experts=1)
    swarm.start("X", experts=4)
    await swarm.until(lambda: len(audits(swarm, "X")) > 4)
    assert {each.passed for each in audits(swarm, "X")} == {True}
    swarm.assert_same_commits()


@pytest.mark.long
async def test_one_lying_auditor_of_two_convicts_nobody() -> None:
    swarm = audited_swarm("XY", vouched="AB")
    swarm.start_all("ABXY")
    swarm.peers["A"].auditing._score = lambda *args: Score(10, 0.0, 0.0)  # type: ignore[method-assign]
    await swarm.until_round(14)
    made = swarm.recorders["A"].of(PhaseAudited)
    assert len(made) > 1
    assert not any(each.audit.passed for each in made)
    assert not convictions(swarm)


@pytest.mark.long
async def test_who_does_not_show_its_moments_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = audited_swarm("XY")
    swarm.start_all("ABCXY")
    hiding, serve = swarm.peers["X"].phases.moments, KeptMoments._piece

    async def nothing(self: KeptMoments, root: str, index: int) -> Any:
        return None if self is hiding else await serve(self, root, index)

    monkeypatch.setattr(KeptMoments, "_piece", nothing)
    await swarm.until(lambda: bool(convictions(swarm)))
    assert set().union(*convictions(swarm).values()) == {"X"}
    assert {each.steps for each in audits(swarm, "X")} == {0}
    assert {each.passed for each in audits(swarm, "Y")} <= {True}


async def test_in_long_rounds_too_who_does_not_show_its_moments_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = audited_swarm("X", vouched="A", silence_s=2.0)
    swarm.evaluation_s, swarm._seconds_per_step = 0.0, 20.0
    swarm.start_all("AX")

    async def nothing(self: KeptMoments, root: str, index: int) -> None:
        return None

    monkeypatch.setattr(KeptMoments, "_piece", nothing)
    await swarm.until(lambda: bool(audits(swarm, "X")))
    assert {each.steps for each in audits(swarm, "X")} == {0}


async def test_a_trainer_past_probation_that_leaves_whenever_it_is_drawn_is_on_probation_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "PROBATION_ROUNDS", 1)
    swarm = audited_swarm("XY", vouched="A")
    swarm.start_all("AXY")
    log = swarm.nodes["W"].log
    await swarm.until_round(0)

    def standing_of(peer: str) -> str:
        plan = swarm.peers["A"].replica.base.plan
        return next((each.standing for each in plan.members if each.peer == peer), "") if plan is not None else ""

    await swarm.until(lambda: standing_of("X") == "proven")
    await swarm.until(lambda: "X" in drawn_work(log.recent(log.round), log.services(log.round), swarm.campaign.config))
    drawn_in = log.round
    swarm.kill("X")
    await swarm.until_round(drawn_in + 2)
    swarm.start_again("X")
    assert "X" in log.commit_at(drawn_in + 1).drawn
    back = drawn_in + 2
    await swarm.until(lambda: bool(standing_of("X")) and log.round > back)
    assert standing_of("X") == "newcomer"
    await swarm.until(lambda: standing_of("X") == "proven")
    verdicts = [each for commit in log.since(drawn_in) for each in commit.commit.verdicts if each.peer == "X"]
    assert any(each.passed and each.round > drawn_in for each in verdicts), "only an audit ends that"
    told = [each.standing for each in swarm.recorders["X"].of(StandingChanged)]
    assert told == ["proven"] * 2, "X itself is told when its probation has ended"
    swarm.assert_same_commits()


@pytest.mark.long
async def test_an_audit_of_a_phase_of_four_times_the_steps_holds_up_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PROBATION_ROUNDS", 1)
    swarm = audited_swarm("X", vouched="A")
    swarm._seconds_per_step = 10.0
    swarm.start_bootstrap()
    swarm.start("A")
    swarm.start("X", speed=4.0)
    clock, log = asyncio.get_running_loop().time, swarm.nodes["W"].log
    await swarm.until(lambda: bool(audits(swarm, "X")))
    began_s, number = clock(), log.round
    await swarm.until(lambda: any(each.steps == 40 for each in audits(swarm, "X")))
    rounds = log.round - number
    assert {each.passed for each in audits(swarm, "X")} == {True}
    assert (clock() - began_s) / rounds < 105.0, "ten steps of ten seconds"
    phases = [each.steps for each in swarm.recorders["A"].of(PhaseTrained) if each.round > number]
    assert min(phases) >= 3, "as many as the rounds in which an audit can be reported allow"


async def test_a_coordinator_that_waits_no_longer_ends_an_audit_which_goes_on_later() -> None:
    swarm = audited_swarm("X", vouched="A")
    swarm._seconds_per_step = 10.0
    swarm.start_all("AX")
    auditing, log = swarm.peers["A"].auditing, swarm.nodes["A"].log
    await swarm.until(lambda: auditing._under_way is not None)
    number, clock = log.round, asyncio.get_running_loop().time
    await asyncio.sleep(15.0)
    swarm.peers["A"].phases.stop_after(number)
    told_s = clock()
    await swarm.until(lambda: auditing._under_way is not None and auditing._under_way.done > 0)
    assert clock() - told_s <= 10.0
    await swarm.until(lambda: bool(audits(swarm, "X")))
    assert [(each.passed, each.steps) for each in audits(swarm, "X")] == [(True, 10)]


async def test_an_audit_takes_half_of_a_phase_and_cuts_nobodys_short_though_its_auditor_is_late() -> None:
    swarm = await audited_by_order(8)
    steps = {name: [each.steps for each in swarm.recorders[name].of(PhaseTrained)] for name in "AX"}
    assert set(steps["X"]) == {10}
    assert set(steps["A"]) == {5, 10}
    assert steps["A"].count(5) == 2 * len(audits(swarm, "X")) > 4


async def test_an_honest_stranger_beside_the_short_phases_of_its_auditor_is_not_clipped(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "PROBATION_ROUNDS", 1)
    swarm = await audited_by_order(8)
    plan = swarm.peers["A"].replica.base.plan
    assert plan is not None
    assert [each.standing for each in plan.members if each.peer == "X"] == ["proven"]
    assert swarm.recorders["A"].of(UpdatesClipped) == []


@pytest.mark.long
async def test_audits_take_a_fifth_of_an_auditors_steps_however_many_newcomers_there_are(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spes_p2p.rounds.audits.NEWCOMERS_SHARE", 50.0)
    monkeypatch.setattr(admission, "PROBATION_ROUNDS", 50)
    swarm = audited_swarm("XY", vouched="A", audited_share=0.02)
    swarm.start_bootstrap()
    swarm.start("A")
    for name in "XY":
        swarm.start(name, speed=4.0)
    await swarm.until_round(21)
    made = audits(swarm, "X") + audits(swarm, "Y")
    assert {(each.passed, each.steps) for each in made} == {(True, 10)}, "newcomers have no longer phases"
    assert 3 <= len(made) <= 4


@pytest.mark.long
async def test_strangers_that_show_their_moments_slowly_keep_nobody_from_being_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = KeptMoments._piece

    async def slowly(self: KeptMoments, root: str, index: int) -> Any:
        if index > 0 and self._node.peer_id in "STUV":
            await asyncio.sleep(10**5)
        return await serve(self, root, index)

    monkeypatch.setattr(KeptMoments, "_piece", slowly)
    swarm = audited_swarm("STUVY", vouched="A")
    swarm.start_all("ASTUVY")
    await swarm.until_round(16)
    made = audits(swarm, "Y")
    assert len(made) >= 4
    assert all(each.passed for each in made)


async def test_who_shows_its_moments_for_longer_than_a_round_fails_no_other_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    serve, uploads = KeptMoments._piece, list[int]()

    async def slowly(self: KeptMoments, root: str, index: int) -> Any:
        if index > 0:
            uploads.append(self._node.content.uploads("moments"))
            await asyncio.sleep(19.0)
        return await serve(self, root, index)

    monkeypatch.setattr(KeptMoments, "_piece", slowly)
    swarm = audited_swarm("X")
    swarm.evaluation_s, swarm._seconds_per_step = 0.0, 1.0
    swarm.start_all("ABCX")
    await swarm.until_round(20)
    assert max(uploads) > 1
    assert all(each.passed for each in audits(swarm, "X"))


async def test_moments_that_nobody_may_ask_for_any_more_leave_no_file_when_they_are_being_written(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = audited_swarm("X", vouched="A")
    swarm.start_all("AX")
    moments, store = swarm.peers["X"].phases.moments, swarm.stores["X"]
    await swarm.until(lambda: bool(moments._of_round))
    number = max(moments._of_round)
    monkeypatch.setattr(moments, "_may_be_asked", lambda number: False)

    def forget(point: str, name: str) -> None:
        if point == "write:rename":
            moments.forget()

    store.fault = forget
    moments.save(number)
    assert store.names(f"moments-{number}") == []


class Inventing:
    """A world whose peer trains honestly on invented pending work, which takes back three times the last round's move."""

    def __init__(self) -> None:
        self.before: np.ndarray | None = None

    def around(self, liar: Liar) -> World:
        honest = liar.world.run_blocking

        async def run_blocking(function: Callable[..., Any], *args: Any) -> Any:
            if getattr(function, "__name__", "") == "keep":
                liar.tell("pending work")
                await honest(self._invent, args[1], args[2])
            return await honest(function, *args)

        return replace(liar.world, run_blocking=run_blocking)

    def _invent(self, trainer: Trainer, base: np.ndarray) -> None:
        for group in trainer.layout.groups:
            if self.before is not None and group.expert is None:
                place = slice(group.start, group.stop)
                trainer.add(group, np.float32(-3.0) * (base[place] - self.before[place]))
        self.before = np.array(base)


@pytest.mark.long
def test_a_stranger_that_hides_a_reversed_update_as_pending_work_is_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "SYNC_STEPS", 16)
    monkeypatch.setitem(ATTACKS, "free-ride", Attack(lambda liar: Inventing().around(liar)))
    made = Scenario(peer_names(4), 30, attackers=1, attacks=KINDS, attack="free-ride", admission="open")
    found = run_seed(made, 0)
    assert found.violations == ()
    assert found.attacked is not None
    assert (found.attacked.attackers_convicted, found.attacked.honest_failed) == (1, 0)


async def test_a_stranger_that_invents_pending_work_in_its_experts_is_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared weights go wherever the experts lead them that they are trained beside."""
    keep = KeptMoments.keep

    def keep_invented(self: KeptMoments, round_number: int, trainer: Trainer, base: np.ndarray) -> None:
        if self._node.peer_id == "X":
            for expert in trainer.owned:
                group = trainer.layout.expert(expert)
                trainer.add(group, np.float32(29.0) * base[group.start : group.stop])
        keep(self, round_number, trainer, base)

    monkeypatch.setattr(KeptMoments, "keep", keep_invented)
    swarm = audited_swarm("XY")
    swarm.start_all("ABCXY")
    log = swarm.nodes["W"].log
    await swarm.until(lambda: "X" in still_convicted(log.recent(log.round)), 200)
    assert {each.passed for each in audits(swarm, "Y")} == {True}


@pytest.mark.parametrize("leaves", [True, False], ids=["paused", "killed"])
async def test_an_honest_stranger_that_stops_and_goes_on_within_each_phase_passes(leaves: bool) -> None:
    """It shows what it kept before the phase, also of the one before, which is drawn already."""
    swarm = audited_swarm("X", vouched="AB")
    swarm._seconds_per_step, swarm._checkpoint_every_s = 10.0, 8.0
    swarm.start_all("AB")
    swarm.start("X", speed=2.0)
    continued = 0
    for number in range(6):
        await swarm.until_round(number)
        await asyncio.sleep(25.0)
        if leaves:
            swarm.peers["X"].leave()
            await swarm.tasks["X"]
            swarm.start_again("X")
        else:
            swarm.restart("X")
        await swarm.until(lambda: swarm.peers["X"].replica.has_base)
        await asyncio.sleep(5.0)
        continued += swarm.phases["X"][max(swarm.phases["X"])].done > 0
    await swarm.until_round(8)
    made = audits(swarm, "X")
    assert continued == 6
    assert len(made) > 1
    assert {each.passed for each in made} == {True}
    assert not convictions(swarm)
    swarm.assert_same_commits()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["free-ride", "copy"])
def test_with_a_real_model_and_peers_of_different_speed_only_the_attacker_fails(kind: AttackKind) -> None:
    made = Scenario(peer_names(6), 12, attackers=1, attacks=KINDS, attack=kind, admission="open")
    found = run_seed(made, 0)
    assert found.violations == ()
    assert found.attacked is not None
    assert (found.attacked.attackers_convicted, found.attacked.honest_failed) == (1, 0)
