"""Which coordinator may end a peer's phase early, and when."""

from __future__ import annotations

import asyncio

import pytest

from spes_p2p.messages.codec import pack
from spes_p2p.messages.methods import PING
from spes_p2p.messages.rounds import Ping
from spes_p2p.observe.events import PhaseTrained
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign

pytestmark = pytest.mark.long

STEPS = 10


def swarm_of(names: str, overlap: bool = False) -> VirtualSwarm:
    swarm = VirtualSwarm(campaign(total_steps=10**6, sync={"min_peers": len(names), "overlap": overlap}))
    swarm.start_all(names)
    return swarm


async def tell_to_stop(swarm: VirtualSwarm, liar: str, others: str, rounds: int) -> None:
    """Have an elector tell the others to end each phase, again and again, until they have all decided that many rounds."""
    node = swarm.nodes[liar]
    while min(map(swarm.round_of, others)) < rounds:
        request = pack(Ping(node.log.round))
        await asyncio.gather(*(node.endpoint.is_there(peer, PING, request) for peer in others))
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("overlap", [False, True])
async def test_an_elector_cannot_end_the_phases_of_others(overlap: bool) -> None:
    swarm = swarm_of("ABCX", overlap)
    await swarm.until_round(0)
    await tell_to_stop(swarm, "X", "ABC", 5)
    for name in "ABC":
        phases = [event.steps for event in swarm.recorders[name].of(PhaseTrained) if event.steps]
        assert len(phases) >= 4
        assert set(phases) == {STEPS}


async def test_an_elector_whose_turn_it_is_not_cannot_end_a_phase_when_half_of_the_others_are_done() -> None:
    """The coordinator waits for this straggler."""
    swarm = swarm_of("ABCDE")
    await swarm.until_round(2)
    _, liar, *others = swarm.nodes["W"].coordinators()
    straggler = max(set(others) - {"W"})
    swarm.slow(straggler, 1.3)
    await tell_to_stop(swarm, liar, straggler, 3)
    assert swarm.recorders[straggler].of(PhaseTrained)[-1].steps == STEPS


@pytest.mark.parametrize("dead", [0, 1])
async def test_a_straggler_stops_for_the_coordinator_whose_turn_it_is(dead: int) -> None:
    """Also when the first in turn has died: the next one asks for it, and the straggler's work goes into the round."""
    swarm = swarm_of("ABCDE")
    await swarm.until_round(2)
    order = swarm.nodes["W"].coordinators()
    straggler = max(set("ABCDE") - set(order[:2]))
    for name in order[:dead]:
        swarm.kill(name)
    swarm.slow(straggler, 3.0)
    await swarm.until_round(3)
    assert 0 < swarm.recorders[straggler].of(PhaseTrained)[-1].steps < STEPS
    commit = swarm.nodes["W"].log.commit_at(3)
    assert commit.members.index(straggler) in commit.heard
