"""Whole swarms in one process: the peers are real, time and the network are simulated."""

from __future__ import annotations

from virtual_swarm import VirtualSwarm, campaign

from spes_p2p.swarm.memory import run_virtual


def test_peers_agree_bit_for_bit_after_every_round():
    async def main():
        swarm = VirtualSwarm(campaign())
        swarm.start_bootstrap()
        for name in "ABC":
            swarm.start(name)
        await swarm.until(lambda: all(swarm.peers[n].finished for n in "ABC"))
        assert sorted(swarm.digests()) == list(range(7))
        assert all(len(digests) == 1 for digests in swarm.digests().values())
        final = swarm.recorders["A"].commits()[6]
        assert final.campaign_step == 60
        assert final.total_tokens == sum(swarm.recorders["A"].commits()[r].tokens for r in range(7))
        assert final.dropped_parts == 0

    run_virtual(main())
