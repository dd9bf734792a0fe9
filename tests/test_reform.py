"""A swarm that lost most of its electors goes on: the bootstrap peer opens a new term, and who comes back follows it."""

from __future__ import annotations

import asyncio

import pytest

from spes_p2p.messages.methods import PUSH
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign


@pytest.mark.sampled(1)
@pytest.mark.parametrize("killed", ["AB", "ABC"])
@pytest.mark.long
async def test_a_swarm_goes_on_when_most_of_it_dies_at_once(killed: str) -> None:
    swarm = VirtualSwarm(campaign(total_steps=100, sync={"min_peers": 4, "reform_after_s": 30.0}))
    swarm.start_bootstrap()
    for name in "ABCD":
        swarm.start(name)
    await swarm.until(lambda: swarm.round_of("D") >= 3)
    for name in killed:
        swarm.kill(name)
    left = [name for name in "ABCD" if name not in killed]
    await swarm.until(lambda: all(swarm.tasks[name].done() for name in left))
    final = max(swarm.recorders["D"].commits().items())[1]
    assert final.campaign_step == 100
    assert set(final.members) == set(left)
    assert all(owners for owners in final.owners)
    assert all(len(digests) == 1 for digests in swarm.digests().values())


async def test_two_volunteers_gone_and_the_one_who_just_joined_goes_on() -> None:
    swarm = VirtualSwarm(campaign(total_steps=100, sync={"min_peers": 2, "reform_after_s": 30.0}))
    swarm.start_bootstrap()
    swarm.start("A")
    swarm.start("B")
    await swarm.until(lambda: swarm.round_of("A") >= 2 and swarm.round_of("B") >= 2)
    swarm.start("C")
    await swarm.until(lambda: swarm.round_of("C") >= 2)
    swarm.kill("A")
    swarm.kill("B")
    await swarm.until(lambda: swarm.tasks["C"].done())


@pytest.mark.long
async def test_a_swarm_goes_on_when_most_of_it_dies_after_a_round_that_lost_a_reducer() -> None:
    swarm = VirtualSwarm(campaign(total_steps=100, sync={"min_peers": 4, "reform_after_s": 30.0}))
    swarm.start_all("ABCD")

    def die(frame: Frame) -> Frame:
        """A dies as soon as it would get an update."""
        if frame.method == PUSH and frame.receiver == "A" and swarm.nodes["W"].log.round >= 2:
            swarm.network.tap = None
            asyncio.get_running_loop().call_soon(swarm.kill, "A")
        return frame

    swarm.network.tap = die
    await swarm.until(lambda: bool(swarm.nodes["W"].log.last.lost))
    for name in "BC":
        swarm.kill(name)
    await swarm.until(lambda: swarm.tasks["D"].done())
    assert swarm.nodes["D"].log.last.term == 1


@pytest.mark.long
async def test_who_comes_back_after_a_reform_takes_its_branch() -> None:
    swarm = VirtualSwarm(campaign(total_steps=160, sync={"min_peers": 4, "reform_after_s": 30.0}))
    swarm.start_bootstrap()
    for name in "ABCD":
        swarm.start(name)
    await swarm.until(lambda: swarm.round_of("D") >= 3)
    # Three of five electors go on by themselves; the bootstrap and D see no majority and open a new term.
    swarm.network.partition(["W", "D"], ["A", "B", "C"])
    await swarm.until(lambda: swarm.peers["D"].node.log.last.term == 1 and swarm.round_of("A") >= 10)
    forked = swarm.round_of("A")
    assert swarm.peers["A"].node.log.last.term == 0
    swarm.network.heal()
    await swarm.until(lambda: all(swarm.tasks[name].done() for name in "ABCD"))
    assert forked >= 10
    last = {name: swarm.peers[name].replica.base for name in "ABCD"}
    assert len({base.digest for base in last.values()}) == 1
    assert len({base.commit for base in last.values()}) == 1
    assert swarm.peers["A"].node.log.last.term == 1


@pytest.mark.parametrize("silence_s", [5.0, 10.0])
@pytest.mark.parametrize("total_steps", [300, 310, 320])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_a_minority_is_reformed_however_long_its_attempts_take(total_steps: int, silence_s: float) -> None:
    """Two electors of five take turns as coordinators; how many steps there are decides which of them begins."""
    sync = {"min_peers": 4, "reform_after_s": 30.0, "silence_s": silence_s}
    swarm = VirtualSwarm(campaign(total_steps=total_steps, sync=sync))
    swarm.start_bootstrap()
    for name in "ABCD":
        swarm.start(name)
    await swarm.until(lambda: swarm.round_of("D") >= 3)
    swarm.network.partition(["W", "D"], ["A", "B", "C"])
    cut_at = asyncio.get_running_loop().time()
    await swarm.until(lambda: swarm.peers["D"].node.log.last.term == 1)
    assert asyncio.get_running_loop().time() - cut_at < 30 + 14 * silence_s + 30


@pytest.mark.parametrize("majority_comes_back", [False, True])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_an_outage_that_ended_is_another_one_when_it_comes_back(majority_comes_back: bool) -> None:
    """Between two rounds, so that no commit tells them apart."""
    training = {"total_steps": 400, "sync_steps": 200}
    merge = {"merge_interval": None}
    swarm = VirtualSwarm(campaign(training=training, merge=merge, sync={"min_peers": 4, "reform_after_s": 30.0}))
    swarm.start_bootstrap()
    for name in "ABCD":
        swarm.start(name)
    await swarm.until(lambda: swarm.nodes["W"].log.round == 1)
    reformer, clock = swarm.helper.reforms, asyncio.get_running_loop().time
    await asyncio.sleep(5)
    swarm.network.partition(["W"], ["A", "B", "C", "D"])
    first = await reformer.no_majority_since()
    if majority_comes_back:
        swarm.network.heal()
        await asyncio.sleep(20)
        swarm.network.partition(["W"], ["A", "B", "C", "D"])
    else:
        await asyncio.sleep(20)
    again = await reformer.no_majority_since()
    assert swarm.nodes["W"].log.round == 1
    assert clock() - again < (15 if majority_comes_back else 40)
    first, again = first, again
    assert (again > first + 20) == majority_comes_back


@pytest.mark.long
async def test_nothing_is_reformed_while_a_majority_is_there() -> None:
    swarm = VirtualSwarm(campaign(sync={"min_peers": 3, "reform_after_s": 1.0}))
    swarm.start_bootstrap()
    for name in "ABC":
        swarm.start(name)
    await swarm.until(lambda: swarm.round_of("C") >= 2)
    swarm.kill("A")
    await swarm.until(lambda: all(swarm.tasks[name].done() for name in "BC"))
    assert swarm.peers["B"].node.log.last.term == 0
