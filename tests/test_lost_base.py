"""The base of the last commit is gone with the peers that had it: the swarm goes on from the last base that somebody has."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from lost_base import bootstrap_that_knows_more_than_it_has

from spes_p2p.consensus.control import signed
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Control, ReformRequest
from spes_p2p.messages.methods import REFORM
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.observe.events import BaseRestored
from spes_p2p.rounds.archive import Archive, archived_rounds
from spes_p2p.testing.in_memory_world import in_memory_world
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.testing.simulated_identity import SimulatedIdentity


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_who_joins_goes_on_from_the_base_that_the_bootstrap_has(overlap: bool) -> None:
    swarm = await bootstrap_that_knows_more_than_it_has(overlap)
    had, known = swarm.helper.replica.base.round, swarm.nodes["W"].log.round
    swarm.start("B")
    await swarm.until(lambda: swarm.tasks["B"].done())
    log = swarm.nodes["W"].log
    assert log.last.step == 200
    assert [log.commit_at(had).term, log.commit_at(had + 1).term] == [0, 1]
    assert had + 1 < known


@pytest.mark.long
async def test_the_swarm_goes_on_from_the_newest_base_that_anybody_has() -> None:
    swarm = VirtualSwarm(campaign(total_steps=400, sync={"min_peers": 2, "reform_after_s": 30.0}))
    swarm.start_all("AC")
    await swarm.until(lambda: swarm.round_of("A") >= 3 and swarm.helper.replica.base.round >= 3)
    swarm.network.partition(["W"], ["A", "C"])
    await swarm.until(lambda: swarm.round_of("C") >= swarm.helper.replica.base.round + 8)  # more than anybody replays
    swarm.peers["C"].leave()
    await swarm.until(lambda: swarm.tasks["C"].done())
    had = swarm.peers["C"].replica.base.round
    await swarm.until(lambda: swarm.round_of("A") >= had + 7)
    swarm.network.heal()
    await swarm.until(lambda: swarm.nodes["W"].log.round > had + 1)
    assert swarm.helper.replica.base.round < had
    swarm.kill("A")
    swarm.restart("C")
    await swarm.until(lambda: swarm.tasks["C"].done())
    log = swarm.nodes["W"].log
    assert log.last.step == 400
    assert [log.commit_at(had).term, log.commit_at(had + 1).term] == [0, 1]


@pytest.mark.long
async def test_a_bootstrap_alone_with_a_damaged_base_goes_on_from_its_newest_whole_archived_one() -> None:
    sync = {"min_peers": 1, "reform_after_s": 30.0}
    swarm = VirtualSwarm(campaign(total_steps=200, sync=sync), archive=Archive(2, 2))
    swarm.start_all("A")
    await swarm.until(lambda: swarm.round_of("A") >= 9 and swarm.helper.replica.base.round >= 9)
    swarm.kill("A")
    newest, older = reversed(archived_rounds(swarm.stores["W"]))
    for name in ("base", f"archived-{newest}"):
        swarm.stores["W"].write(name, [b"damaged"])
    swarm.restart("W")
    await swarm.until(lambda: swarm.helper.replica.store.current is not None)
    assert swarm.helper.replica.base.round >= older
    swarm.start("B")
    await swarm.until(lambda: swarm.tasks["B"].done())
    assert swarm.nodes["W"].log.last.step == 200


@pytest.mark.long
async def test_who_had_the_base_comes_back_before_the_swarm_gives_it_up() -> None:
    swarm = await bootstrap_that_knows_more_than_it_has()
    swarm.start("B")
    swarm.start_again("A")
    await swarm.until(lambda: all(swarm.tasks[name].done() for name in "AB"))
    assert swarm.nodes["W"].log.last.term == 0


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 4])
async def test_who_had_the_base_and_is_back_at_the_moment_of_asking_loses_nothing(ahead: int) -> None:
    """It was cut off, and is not in the registry yet that the bootstrap sees; with the lost base, or some rounds further."""
    swarm = await bootstrap_that_knows_more_than_it_has()
    node, known = swarm.nodes["W"], swarm.nodes["W"].log.round
    swarm.network.partition(["W"], ["A"])
    swarm.start_again("A")
    swarm.slow("A", 1.0 if ahead else 1e6)
    await swarm.until(lambda: swarm.round_of("A") >= known + ahead)
    swarm.slow("A", 1e6)  # or it comes to the end of the campaign, and goes
    await asyncio.sleep(70)
    assert node.log.round == known
    swarm.network.heal()
    asker = RpcEndpoint(in_memory_world(swarm.network, "asker").transport, 5.0)
    with pytest.raises(Refused, match=r"goes on|a majority of the electors is there"):
        await asker.ask("W", REFORM, pack(ReformRequest(node.log.last.id)), 10.0)
    await swarm.until(lambda: swarm.helper.replica.base.round >= known + ahead)
    assert node.log.last.term == 0


@pytest.mark.long
async def test_who_had_the_base_comes_back_too_late_and_takes_the_new_branch() -> None:
    swarm = await bootstrap_that_knows_more_than_it_has()
    swarm.start("B")
    await swarm.until(lambda: swarm.nodes["W"].log.last.term == 1)
    swarm.start_again("A")
    await swarm.until(lambda: all(swarm.tasks[name].done() for name in "AB"))
    bases = {swarm.peers[name].replica.base.digest for name in "AB"} | {swarm.helper.replica.base.digest}
    assert len(bases) == 1
    assert swarm.recorders["A"].of(BaseRestored)


async def test_an_order_that_was_applied_in_rounds_that_are_given_up_holds_again() -> None:
    """The bootstrap knew of it from the commits alone, and the one who had brought it there is dead."""
    swarm = VirtualSwarm(campaign(total_steps=200, sync={"min_peers": 1, "reform_after_s": 30.0}))
    swarm.start_all("A")
    await swarm.until(lambda: swarm.round_of("A") >= 3 and swarm.helper.replica.base.round >= 3)
    swarm.network.partition(["W"], ["A"])
    order = signed(Control(swarm.campaign.hash, 1, "stopped", (), -1, b""), SimulatedIdentity("W"))
    await swarm.until(lambda: swarm.round_of("A") >= swarm.helper.replica.base.round + 6)
    assert swarm.nodes["A"].decisions.take_control(order)
    while swarm.nodes["A"].log.last.control != order:  # it soon leaves
        await asyncio.sleep(0.01)
    swarm.network.heal()
    await swarm.until(lambda: swarm.nodes["W"].log.last.control == order)
    assert swarm.helper.replica.base.round < swarm.nodes["W"].log.round
    swarm.kill("A")
    swarm.start("B")
    await swarm.until(lambda: swarm.nodes["W"].log.last.term == 1)
    assert swarm.nodes["W"].log.last.control is None
    swarm.restart("W")
    await swarm.until(lambda: swarm.tasks["B"].done())
    assert swarm.nodes["W"].log.last.control == order
    assert swarm.nodes["W"].log.last.step < 200


@pytest.mark.long
async def test_who_is_restarted_before_it_has_a_base_of_the_new_branch_goes_on_there() -> None:
    """Its base is of a round that its log does not reach any more, and nobody else is there to reach that round."""
    swarm = await bootstrap_that_knows_more_than_it_has()
    swarm.start("B")
    await swarm.until(lambda: swarm.nodes["W"].log.last.term == 1)
    swarm.kill("B")
    swarm.start_again("A")
    await swarm.until(lambda: swarm.nodes["A"].log.last.term == 1)
    assert swarm.nodes["A"].log.round < swarm.round_of("A")
    swarm.restart("A")
    await swarm.until(lambda: swarm.tasks["A"].done())
    swarm.tasks["A"].result()
    assert swarm.nodes["W"].log.last.step == 200


async def test_a_download_that_ends_when_its_branch_was_given_up_does_no_harm() -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(2)
    replica = swarm.helper.replica
    given_up = replace(replica.base, commit="another", round=9)
    await replica.jumps.to(given_up, False)
    with pytest.raises(PeerUnreachable, match="given up"):
        await replica.jumps.repair()
    await swarm.until_finished()
    await swarm.until(lambda: replica.base.digest in swarm.final_digests())


async def test_a_base_is_there_for_others_before_the_phase_ends_that_its_round_overlapped() -> None:
    sync = {"min_peers": 2, "overlap": True}
    swarm = VirtualSwarm(campaign(total_steps=60, sync=sync), seconds_per_step=20.0)
    swarm.start_all("AB")
    replica, log = swarm.peers["A"].replica, swarm.nodes["A"].log
    await swarm.until(lambda: log.round == 3 and replica.base.round == 2)
    await asyncio.sleep(5.0)
    assert replica.base.round == 2
    assert log.last.id in {info.commit for info in replica.store.snapshots.infos}


async def lose_a_base(swarm: VirtualSwarm, last: str, name: str) -> None:
    """The last peer that trains is killed with the base that only it has; another one joins, and the swarm reforms."""
    swarm.network.partition(["W"], [last])
    had, term = swarm.helper.replica.base.round, swarm.nodes["W"].log.last.term
    await swarm.until(lambda: swarm.round_of(last) >= had + 7)
    swarm.network.heal()
    await swarm.until(lambda: swarm.nodes["W"].log.round > swarm.helper.replica.base.round + 2)
    swarm.kill(last)
    swarm.restart("W")
    swarm.start(name)
    await swarm.until(lambda: swarm.nodes["W"].log.last.term == term + 1)
    reformed = swarm.nodes["W"].log.round
    swarm.restart("W")
    await swarm.until(lambda: swarm.round_of(name) >= reformed + 2)
    await swarm.until(lambda: swarm.helper.replica.base.round >= reformed + 2)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
async def test_three_bases_are_lost_in_a_row_while_the_bootstrap_restarts_and_then_everybody_comes_back(overlap: bool) -> None:
    sync = {"min_peers": 1, "reform_after_s": 30.0, "overlap": overlap}
    swarm = VirtualSwarm(campaign(total_steps=600, sync=sync))
    swarm.start_all("A")
    await swarm.until(lambda: swarm.round_of("A") >= 3 and swarm.helper.replica.base.round >= 3)
    for last, name in ("AB", "BC", "CD"):
        await lose_a_base(swarm, last, name)
    for name in "ABC":
        swarm.start_again(name)
    await swarm.until(lambda: all(swarm.tasks[name].done() for name in "ABCD"))
    swarm.assert_same_commits()
    assert len(swarm.final_digests()) == 1
    assert swarm.nodes["W"].log.last.step == 600
