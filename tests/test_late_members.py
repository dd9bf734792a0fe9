"""Members that the owner vouches for and that are late hold up rounds by a share of the time; slow lines are no lateness."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from open_campaign import ELECTOR

from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import PUSH, ROUND
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.net.interfaces import World
from spes_p2p.net.throughput import Throughput
from spes_p2p.peer.courtesy import SLOW_SHARE, Lateness
from spes_p2p.rounds import parts, traffic
from spes_p2p.testing.attacks.tamper import Liar, Tamper, tampered
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, samples, simulate

SILENCE_S = 5.0
VOUCHED = "ABCX"


async def test_who_is_late_by_silence_s_is_late_until_half_of_that_is_made_up_for() -> None:
    lateness = Lateness(SILENCE_S)
    lateness.add("A", 0.5 * SILENCE_S)
    lateness.add("AB", 0.6 * SILENCE_S)
    lateness.add("B", -SILENCE_S)
    assert lateness.late() == {"A"}
    await asyncio.sleep(0.5 * SILENCE_S / SLOW_SHARE)
    assert lateness.late() == {"A"}
    await asyncio.sleep(0.2 * SILENCE_S / SLOW_SHARE)
    assert not lateness.late()


class Held(Tamper):
    """Holds each update for some time, while its streams live."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    async def send(self, frame: Frame) -> Frame:
        if frame.method == PUSH and not frame.is_answer and frame.kind in (Kind.PART, Kind.PUSHED):
            await asyncio.sleep(self._seconds)
        return frame


class Unreporting(Tamper):
    """Keeps its reports to itself."""

    async def send(self, frame: Frame) -> Frame | None:
        return None if (frame.method, frame.kind) == (ROUND, Kind.REPORT) else frame


async def seconds_of_rounds(attacker: Tamper | None, rounds: int) -> float:
    sync = {"min_peers": len(VOUCHED), "audited_share": 0.0}
    swarm = VirtualSwarm(campaign(10**6, admission="open", sync=sync), seconds_per_step=10.0)
    for name in VOUCHED:
        swarm.invitations[name] = swarm.invitation(name, ELECTOR)
    if attacker is not None:
        swarm.around["X"] = lambda world: tampered(Liar(world, swarm.campaign.config), attacker)
    swarm.start_all(VOUCHED)
    await swarm.until(lambda: swarm.round_of("A") >= 2, 5000.0)
    began = asyncio.get_running_loop().time()
    await swarm.until(lambda: swarm.round_of("A") >= 2 + rounds, 5000.0)
    return asyncio.get_running_loop().time() - began


@pytest.mark.long
@pytest.mark.parametrize("attacker", [Held(4.0), Held(60.0), Unreporting()], ids=["held 4 s", "held 60 s", "unreporting"])
def test_a_vouched_member_that_is_late_in_every_round_holds_up_all_rounds_together_little(attacker: Tamper) -> None:
    clean_s, late_s = (simulate(lambda each=each: seconds_of_rounds(each, 20)) for each in (None, attacker))  # type: ignore[misc]
    assert late_s < 1.06 * clean_s


SLOW_BYTES_PER_S = 2000.0


class ThinLine(Tamper):
    """Each part takes its time, and everything else none."""

    def __init__(self, part_s: float):
        self._part_s = part_s

    async def send(self, frame: Frame) -> Frame:
        if frame.kind == Kind.PART:
            await asyncio.sleep(self._part_s)
        return frame


@pytest.mark.long
async def test_a_vouched_member_on_a_slow_line_that_it_announces_is_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "SLOWEST_BYTES_PER_S", SLOW_BYTES_PER_S / 4)
    monkeypatch.setattr(parts, "SMALL_BYTES", 1024)
    layout = Layout([
        TensorSpec("embed", (20_000,), "shared"),
        *(TensorSpec(f"experts.{e}.gate_up_proj", (1000,), "expert", 0, e) for e in range(4)),
    ])
    swarm = VirtualSwarm(campaign(10**6, sync={"min_peers": len(VOUCHED)}), layout=layout)
    swarm.around["X"] = lambda world: tampered(Liar(world, swarm.campaign.config), ThinLine(1.0))
    swarm.start_all(VOUCHED)
    swarm.nodes["X"].endpoint.upload = Throughput(SLOW_BYTES_PER_S)
    await swarm.until(lambda: swarm.round_of("A") >= 12, 5000.0)
    for decided in swarm.nodes["A"].log.since(1):
        commit = decided.commit
        assert commit.members.index("X") in commit.heard
    assert not swarm.nodes["A"].lateness.late()


def on_a_slow_processor(world: World) -> World:
    """Make each piece of work outside training take a second longer."""

    async def run_blocking(function: Callable[..., Any], *args: Any) -> Any:
        result = await world.run_blocking(function, *args)
        if getattr(function, "__name__", "") != "train":
            await asyncio.sleep(1.0)
        return result

    return dataclasses.replace(world, run_blocking=run_blocking)


@pytest.mark.long
async def test_in_short_rounds_a_late_member_that_a_helper_left_out_takes_part_again_and_again() -> None:
    """Nobody can be dialled, so the helper reduces and coordinates in each round."""
    swarm = VirtualSwarm(campaign(10**6, sync={"min_peers": 3, "silence_s": SILENCE_S}), seconds_per_step=2.0)
    swarm.around["C"] = on_a_slow_processor
    swarm.start_bootstrap()
    for name in "ABC":
        swarm.start(name, bandwidth=0.0)
    await swarm.until(lambda: swarm.round_of("A") >= 60, 5000.0)
    rounds = swarm.recorders["A"].commits().values()
    is_in = [any(peer == "C" and tokens for peer, tokens, _ in each.contributions) for each in rounds]
    assert sum(each for each, _ in groupby(is_in)) > 2


@pytest.mark.parametrize("slowness", [10, 20])
async def test_others_train_what_a_phase_left_over_whose_work_came_too_late_for_a_round(slowness: int) -> None:
    swarm = VirtualSwarm(campaign(10**6, sync={"min_peers": 2}))
    swarm.start_all()
    await swarm.until_round(4)
    await asyncio.sleep(1.0)
    swarm.slow("C", slowness)
    await asyncio.sleep(20.0 + slowness)
    swarm.slow("C", 1.0)
    await swarm.until_round(16)
    commits = [each.commit for each in swarm.nodes["A"].log.since(-1)]
    assert "C" not in commits[5].members
    trained = Counter(sample for by in swarm.samples.values() for each in by.values() for sample in samples(each))
    assigned = {sample for commit in commits[:10] for each in commit.workloads for sample in samples(list(each.slices))}
    assert {trained[sample] for sample in assigned} == {1}
