"""A peer that is asked to leave goes soon, and takes no sample twice or away."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from test_lost_base import bootstrap_that_knows_more_than_it_has

from spes_p2p.simulate.swarm import VirtualSwarm, campaign, samples, simulate


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("moment", ["exchanging", "committing"])
def test_who_leaves_during_a_round_gives_back_nothing_that_the_round_includes(
    moment: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        swarm = VirtualSwarm(campaign(total_steps=150, sync={"overlap": overlap}))
        swarm.start_all()
        await swarm.until_round(3)
        leaver = swarm.peers.pop("B")
        enter = leaver._enter

        def leave_at(phase: str) -> None:
            enter(phase)
            if phase == moment:
                leaver.leave()

        monkeypatch.setattr(leaver, "_enter", leave_at)
        await swarm.until(swarm.tasks["B"].done)
        swarm.network.kill("B")
        await swarm.until_finished()
        log = swarm.nodes["A"].log
        in_round = {number + overlap: trained for number, trained in swarm.samples["B"].items()}
        included = [i for r, trained in in_round.items() if r <= log.round and "B" in log.head_at(r).members for i in trained]
        others = [i for name in "AC" for trained in swarm.samples[name].values() for i in trained]
        counts = Counter(samples(included + others))
        assert set(counts.values()) == {1}
        epoch = [position for epoch, position in counts if epoch == 0]
        assert sorted(epoch) == list(range(len(epoch)))

    simulate(main)


def test_who_waits_for_a_base_that_nobody_has_can_leave() -> None:
    async def main() -> None:
        swarm = await bootstrap_that_knows_more_than_it_has()
        await asyncio.sleep(20)
        assert swarm.helper.replica.base_lost_since() is not None
        swarm.helper.leave()
        await swarm.until(swarm.tasks["W"].done, timeout_s=20)

    simulate(main)
