"""A long campaign: memory and disk of its peers stay bounded, and clocks that jump and laptops that sleep do no harm."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from spes_p2p.net.interfaces import World
from spes_p2p.observe.events import Event
from spes_p2p.observe.history import HISTORY_FILE, History
from spes_p2p.testing.simulate.swarm import Recorder, VirtualSwarm, campaign, simulate

HOUR_S, YEAR_S = 3600.0, 365 * 86400.0
JUMPS_S = (HOUR_S, -HOUR_S, YEAR_S, -YEAR_S, 0.0)


class LongCampaign:
    """A swarm of two trainers, a laptop and a bootstrap peer that keep their histories, with wall clocks that the test sets."""

    def __init__(self, folder: Path, rounds: int):
        self.histories: dict[str, History] = {}
        self.wrong_by_s = dict.fromkeys("ABL", 0.0)
        self._folder = folder
        self.swarm = VirtualSwarm(campaign(total_steps=10 * (rounds + 100)), make_observer=self._observer)
        for name in self.wrong_by_s:
            self.swarm.around[name] = partial(self._with_clock, name)
        self.swarm.start_all("ABL")

    def disk_bytes(self) -> int:
        """What all peers have on disk."""
        stored = sum(
            len(blob) for store in self.swarm.stores.values()
            for blob in (*store._blobs.values(), *(record for log in store._logs.values() for record in log))
        )
        return stored + sum((self._folder / name / HISTORY_FILE).stat().st_size for name in self.histories)

    def memory_bytes(self) -> int:
        """What Python holds. What only the test's trainers record is dropped first."""
        for name in self.swarm.samples:
            self.swarm.samples[name].clear()
            for number in sorted(self.swarm.phases[name])[:-1]:
                del self.swarm.phases[name][number]
        for trainer in self.swarm.trainers.values():
            trainer.trained_samples.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    def _observer(self, name: str, recorder: Recorder) -> Callable[[Event], None]:
        if name not in self.histories:
            self.histories[name] = History(name, self._folder / name, self.swarm.network.wall_time)
        return self.histories[name].record

    def _with_clock(self, name: str, world: World) -> World:
        return dataclasses.replace(world, wall_time=lambda: world.wall_time() + self.wrong_by_s[name])


async def until_round_of_a(swarm: VirtualSwarm, number: int) -> None:
    await swarm.until(lambda: swarm.round_of("A") >= number, HOUR_S)


@pytest.mark.parametrize("rounds", [40, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(14400)])])
def test_clocks_that_jump_and_laptops_that_sleep_do_no_harm(tmp_path: Path, rounds: int) -> None:
    async def main() -> LongCampaign:
        long = LongCampaign(tmp_path, rounds)
        swarm, jumps = long.swarm, 0
        await swarm.until_round(3)
        while swarm.round_of("A") < rounds:
            long.wrong_by_s["A"], long.wrong_by_s["L"] = JUMPS_S[jumps % 5], JUMPS_S[(jumps + 2) % 5]
            swarm.network.stop("L")
            await until_round_of_a(swarm, swarm.round_of("A") + 4 * 4 ** (jumps % 3))
            swarm.network.resume("L")
            jumps += 1
            await swarm.until(lambda: "L" in swarm.nodes["A"].log.last.members, HOUR_S)
            await swarm.until_round(swarm.round_of("A") + 2, HOUR_S)
        return long

    long = simulate(main, limit_s=1e9)
    long.swarm.assert_replicas_agree()
    long.swarm.assert_same_commits()
    assert {"A", "B", "L"} <= set(long.swarm.nodes["A"].log.last.members)
