"""The base of the last head is gone with the peers that had it: the swarm goes on from the last base that somebody has."""

from __future__ import annotations

import asyncio

import pytest

from spes_p2p.observe.events import BaseRestored
from spes_p2p.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.swarm.memory import run_virtual


async def bootstrap_that_knows_more_than_it_has(overlap: bool = False) -> VirtualSwarm:
    """A trained alone while the bootstrap was cut off. It has learnt of those rounds since; A is killed before it has more."""
    sync = {"min_peers": 1, "reform_after_s": 30.0, "overlap": overlap}
    swarm = VirtualSwarm(campaign(total_steps=200, sync=sync))
    swarm.start_bootstrap()
    swarm.start("A")
    await swarm.until(lambda: swarm.round_of("A") >= 3 and swarm.helper.replica.base.round >= 3)
    swarm.network.partition(["W"], ["A"])
    await swarm.until(lambda: swarm.round_of("A") >= swarm.helper.replica.base.round + 7)
    swarm.network.heal()
    await swarm.until(lambda: swarm.nodes["W"].log.round > swarm.helper.replica.base.round + 2)
    swarm.kill("A")
    return swarm


@pytest.mark.parametrize("overlap", [False, True])
def test_who_joins_goes_on_from_the_base_that_the_bootstrap_has(overlap: bool) -> None:
    async def main() -> None:
        swarm = await bootstrap_that_knows_more_than_it_has(overlap)
        had, known = swarm.helper.replica.base.round, swarm.nodes["W"].log.round
        swarm.start("B")
        await swarm.until(lambda: swarm.tasks["B"].done())
        log = swarm.nodes["W"].log
        assert log.head.step == 200
        assert [log.head_at(had).epoch, log.head_at(had + 1).epoch] == [0, 1]
        assert had + 1 < known

    run_virtual(main())


def test_the_swarm_goes_on_from_the_newest_base_that_anybody_has() -> None:
    async def main() -> None:
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
        assert log.head.step == 400
        assert [log.head_at(had).epoch, log.head_at(had + 1).epoch] == [0, 1]

    run_virtual(main())


def test_who_had_the_base_comes_back_before_the_swarm_gives_it_up() -> None:
    async def main() -> None:
        swarm = await bootstrap_that_knows_more_than_it_has()
        swarm.start("B")
        swarm.start_again("A")
        await swarm.until(lambda: all(swarm.tasks[name].done() for name in "AB"))
        assert swarm.nodes["W"].log.head.epoch == 0

    run_virtual(main())


def test_who_had_the_base_comes_back_too_late_and_takes_the_new_branch() -> None:
    async def main() -> None:
        swarm = await bootstrap_that_knows_more_than_it_has()
        swarm.start("B")
        await swarm.until(lambda: swarm.nodes["W"].log.head.epoch == 1)
        swarm.start_again("A")
        await swarm.until(lambda: all(swarm.tasks[name].done() for name in "AB"))
        bases = {swarm.peers[name].replica.base.digest for name in "AB"} | {swarm.helper.replica.base.digest}
        assert len(bases) == 1
        assert swarm.recorders["A"].told(BaseRestored)

    run_virtual(main())


def test_a_base_is_there_for_others_before_the_phase_ends_that_its_round_overlapped() -> None:
    async def main() -> None:
        sync = {"min_peers": 2, "overlap": True}
        swarm = VirtualSwarm(campaign(total_steps=60, sync=sync), seconds_per_step=20.0)
        swarm.start_all("AB")
        replica, log = swarm.peers["A"].replica, swarm.nodes["A"].log
        await swarm.until(lambda: log.round == 3 and replica.base.round == 2)
        await asyncio.sleep(5.0)
        assert replica.base.round == 2
        assert log.head.id in {info.head for info in replica.snapshots.infos}

    run_virtual(main())
