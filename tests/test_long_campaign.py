"""A long campaign: clocks that jump and laptops that sleep do no harm."""

from __future__ import annotations

import dataclasses
from functools import partial

import psutil
import pytest

from spes_p2p.net.interfaces import World
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate

HOUR_S, YEAR_S = 3600.0, 365 * 86400.0
JUMPS_S = (HOUR_S, -HOUR_S, YEAR_S, -YEAR_S, 0.0)
CUT_ROUNDS = 1024
"""The owner cuts the log every so many rounds, so sizes are compared where it is equally long: half-way between two cuts."""


@pytest.mark.long
@pytest.mark.parametrize("rounds", [40, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(14400)])])
def test_clocks_that_jump_and_laptops_that_sleep_do_no_harm(rounds: int) -> None:
    sizes: dict[int, tuple[int, int]] = {}

    async def main() -> VirtualSwarm:
        # Tests' recorders keep all events.
        swarm, jumps = VirtualSwarm(campaign(total_steps=10 * (rounds + 100)), make_observer=lambda *_: lambda event: None), 0
        wrong_by_s = dict.fromkeys("ABL", 0.0)

        def with_clock(name: str, world: World) -> World:
            return dataclasses.replace(world, wall_time=lambda: world.wall_time() + wrong_by_s[name])

        for name in wrong_by_s:
            swarm.around[name] = partial(with_clock, name)
        swarm.start_all("ABL")
        await swarm.until_round(3)
        while swarm.round_of("A") < rounds:
            wrong_by_s["A"], wrong_by_s["L"] = JUMPS_S[jumps % 5], JUMPS_S[(jumps + 2) % 5]
            swarm.network.stop("L")
            await until_round_of_a(swarm, swarm.round_of("A") + 4 * 4 ** (jumps % 3))
            swarm.network.resume("L")
            jumps += 1
            await swarm.until(lambda: "L" in swarm.nodes["A"].log.last.members, HOUR_S)
            await swarm.until_round(swarm.round_of("A") + 2, HOUR_S)
            half_way = (swarm.round_of("A") - CUT_ROUNDS // 2) // CUT_ROUNDS
            sizes.setdefault(half_way, (disk_bytes(swarm), psutil.Process().memory_info().rss))
        return swarm

    swarm = simulate(main, limit_s=1e9)
    swarm.assert_replicas_agree()
    swarm.assert_same_commits()
    assert {"A", "B", "L"} <= set(swarm.nodes["A"].log.last.members)
    if rounds > 4 * CUT_ROUNDS:
        (disk_then, memory_then), (disk, memory) = sizes[3], sizes[4]
        assert disk < 1.05 * disk_then
        assert memory < 1.05 * memory_then, (memory_then, memory)


def disk_bytes(swarm: VirtualSwarm) -> int:
    """Return what all peers keep on their disks."""
    return sum(
        len(store.read(name) or b"") + sum(map(len, store.records(name)))
        for store in swarm.stores.values() for name in store.names("")
    )


async def until_round_of_a(swarm: VirtualSwarm, number: int) -> None:
    await swarm.until(lambda: swarm.round_of("A") >= number, HOUR_S)
