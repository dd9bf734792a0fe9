"""A virtual swarm whose newest base is gone with the peer that had it."""

from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign


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
