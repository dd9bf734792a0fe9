"""A peer that is asked to leave goes soon, and takes no sample twice or away."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest
from lost_base import bootstrap_that_knows_more_than_it_has

from spes_p2p.messages.content import SnapshotInfo
from spes_p2p.messages.methods import SNAPSHOT
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.observe.events import RoundFailed
from spes_p2p.peer import leaving
from spes_p2p.peer.leaving import SERVE_RESULTS_S
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, samples


def assert_each_sample_is_in_one_round(swarm: VirtualSwarm, leaver: str, overlap: bool) -> None:
    """Of A, B and C: the leaver's where a round includes its work, and all of the others'."""
    stayed = "ABC".replace(leaver, "")
    log = swarm.nodes[stayed[0]].log
    in_round = {number + overlap: trained for number, trained in swarm.samples[leaver].items()}
    included = [i for r, trained in in_round.items() if r <= log.round and leaver in log.commit_at(r).members for i in trained]
    others = [i for name in stayed for trained in swarm.samples[name].values() for i in trained]
    counts = Counter(samples(included + others))
    assert set(counts.values()) == {1}
    epoch = [position for epoch, position in counts if epoch == 0]
    assert sorted(epoch) == list(range(len(epoch)))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("moment", ["exchanging", "committing"])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_who_leaves_during_a_round_gives_back_nothing_that_the_round_includes(
    moment: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = VirtualSwarm(campaign(total_steps=150, sync={"overlap": overlap}))
    swarm.start_all()
    await swarm.until_round(3)
    leaver = swarm.peers.pop("B")
    set_state = leaver.phases.set_state_unless_training

    def leave_at(state: str) -> None:
        set_state(state)
        if state == moment:
            leaver.leave()

    monkeypatch.setattr(leaver.phases, "set_state_unless_training", leave_at)
    await swarm.until(swarm.tasks["B"].done)
    swarm.network.kill("B")
    await swarm.until_finished()
    assert_each_sample_is_in_one_round(swarm, "B", overlap)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("leaver", "ABC")
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_who_leaves_and_takes_long_to_end_coordinates_no_round_meanwhile(
    leaver: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the three coordinates the next round. A process that goes still answers for seconds."""
    swarm = VirtualSwarm(campaign(total_steps=150, sync={"overlap": overlap}))
    swarm.start_all()
    await swarm.until_round(3)
    node, close = swarm.nodes[leaver], swarm.nodes[leaver].close

    async def close_late() -> None:
        await asyncio.sleep(40)
        await close()

    monkeypatch.setattr(node, "close", close_late)
    swarm.peers.pop(leaver).leave()
    told = asyncio.get_running_loop().time()
    await swarm.until_round(5)
    assert asyncio.get_running_loop().time() - told < 24
    await swarm.until_finished()
    assert_each_sample_is_in_one_round(swarm, leaver, overlap)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("leaver", "ABC")
@pytest.mark.parametrize("delay_s", [0.1, 2.0, 6.4, 7.3, 9.1])
@pytest.mark.sampled(3)
@pytest.mark.long
async def test_who_leaves_costs_no_attempt(delay_s: float, leaver: str, overlap: bool) -> None:
    """One of the three coordinates the next round, one member is no elector, and the helper learns commits late."""
    swarm = VirtualSwarm(campaign(total_steps=1500, sync={"overlap": overlap}))
    swarm.start_all()
    for peer in "ABC":
        swarm.network.set_latency("W", peer, 0.3)
    await swarm.until_round(3)
    await asyncio.sleep(delay_s)
    swarm.peers.pop(leaver).leave()
    await swarm.until(swarm.tasks[leaver].done)
    swarm.network.kill(leaver)
    stayed = "ABC".replace(leaver, "")
    goal = max(map(swarm.round_of, stayed)) + 4
    await swarm.until(lambda: min(map(swarm.round_of, stayed)) >= goal)
    assert [swarm.recorders[peer].of(RoundFailed) for peer in (*stayed, "W")] == [[], [], []]


async def test_after_the_last_trainer_left_the_bootstrap_waits_in_silence_and_the_next_one_trains_at_once() -> None:
    swarm = VirtualSwarm(campaign(total_steps=200, sync={"min_peers": 1, "reform_after_s": 600.0}))
    swarm.start_all("A")
    await swarm.until_round(3)
    swarm.peers.pop("A").leave()
    await swarm.until(swarm.tasks["A"].done)
    swarm.network.kill("A")
    await asyncio.sleep(120)
    assert swarm.recorders["W"].of(RoundFailed) == []
    started, left_at = asyncio.get_running_loop().time(), swarm.nodes["W"].log.round
    swarm.start("B")
    await swarm.until(lambda: swarm.round_of("B") > left_at + 2)
    assert asyncio.get_running_loop().time() - started < 60
    assert swarm.recorders["B"].of(RoundFailed) == [], "nobody failed: all had left"


async def test_after_the_last_round_trainers_stay_until_the_bootstrap_has_the_base_of_which_it_knows() -> None:
    swarm = VirtualSwarm(campaign(), network=MemoryNetwork(latency_s=0.5))
    swarm.start_all()
    await swarm.until(lambda: swarm.nodes["A"].log.round == 4)
    swarm.network.stop("W")
    await swarm.until(lambda: all(peer.finished for peer in swarm.peers.values()))
    swarm.network.resume("W")
    await swarm.until_finished()
    assert swarm.round_of("A") == swarm.helper.replica.base.round


@pytest.mark.parametrize("overlap", [False, True])
async def test_who_leaves_comes_back_and_leaves_again_gives_back_its_samples_once(overlap: bool) -> None:
    swarm = VirtualSwarm(campaign(total_steps=400, sync={"overlap": overlap, "min_peers": 2}))
    swarm.start_all()
    await swarm.until_round(4)
    await asyncio.sleep(1.0)
    for away_s in (12.0, 0.0):
        swarm.peers["B"].leave()
        await swarm.until(swarm.tasks["B"].done)
        swarm.kill("B")
        await asyncio.sleep(away_s)
        if away_s:
            assert "B" not in swarm.nodes["A"].log.last.members
            swarm.start_again("B")
            await swarm.until(lambda: "B" in swarm.nodes["A"].log.last.members)
    await swarm.until_round(swarm.round_of("A") + 6)
    others = Counter(sample for name in "AC" for each in swarm.samples[name].values() for sample in samples(each))
    assert set(others.values()) == {1}


@pytest.mark.parametrize("leaves", [False, True])
async def test_after_the_last_round_nobody_waits_for_long_for_one_that_never_answers(leaves: bool) -> None:
    swarm = VirtualSwarm(campaign(total_steps=20, sync={"silence_s": 60.0}))
    swarm.start_all()
    await swarm.until_round(0)
    await swarm.nodes["W"].endpoint.serve(SNAPSHOT, lambda stream: asyncio.sleep(1000.0))
    await swarm.until(lambda: swarm.peers["A"].finished)
    if leaves:
        await asyncio.sleep(3.0)
        swarm.peers["A"].leave()
    await asyncio.wait_for(swarm.tasks["A"], 5.0 if leaves else SERVE_RESULTS_S + 5.0)


async def test_after_the_last_round_trainers_ask_the_helper_and_the_same_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = defaultdict[str, set[str]](set)

    async def newest(endpoint: RpcEndpoint, peers: Iterable[str]) -> list[SnapshotInfo]:
        asked[endpoint.peer_id].update(peers)
        return [SnapshotInfo("", 0, 0, "")]  # of an older round, so that they ask again

    monkeypatch.setattr(leaving, "newest_bases", newest)
    monkeypatch.setattr(leaving, "MAX_ASKED", 3)
    swarm = VirtualSwarm(campaign(total_steps=20))
    swarm.start_all("ABCDEF")
    await swarm.until_finished()
    assert {trainer: "".join(sorted(others)) for trainer, others in asked.items()} == {
        "A": "BCW", "B": "CDW", "C": "DEW", "D": "EFW", "E": "AFW", "F": "ABW",
    }


async def test_who_waits_for_a_base_that_nobody_has_can_leave() -> None:
    swarm = await bootstrap_that_knows_more_than_it_has()
    await asyncio.sleep(20)
    assert swarm.helper.replica.newest.lost_since() is not None
    swarm.helper.leave()
    await swarm.until(swarm.tasks["W"].done, timeout_s=20)
