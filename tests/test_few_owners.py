"""A member that is lost in a swarm with few owners costs the next rounds no more than its own line."""

from __future__ import annotations

import asyncio
import statistics

import pytest

from spes_p2p.messages.methods import PULL, PUSH
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.net.rpc import Stream
from spes_p2p.rounds.claims import LOST_ROUNDS
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign

PEERS, EXPERTS = 16, 8
MBIT = (20, 10, 5)


async def hang(stream: Stream) -> None:
    """Live, and say nothing."""
    await asyncio.sleep(10**6)


@pytest.mark.long
async def test_after_a_lost_reducer_owners_on_slow_lines_send_their_experts_once() -> None:
    layout = Layout([TensorSpec("embed", (2**18,), "shared")] + [
        TensorSpec(f"experts.{e}.down_proj", (2**17,), "expert", 0, e) for e in range(EXPERTS)
    ])
    network = MemoryNetwork(latency_s=0.05)
    names = [f"{i:02d}" for i in range(PEERS)]
    for i, name in enumerate(names):
        network.set_bandwidth(name, *(MBIT[i % 3] * 125e3,) * 2)
    network.set_bandwidth("W", *(MBIT[0] * 125e3,) * 2)
    swarm = VirtualSwarm(
        campaign(
            total_steps=10**6, codec="int8", sync={"min_peers": PEERS}, model={"moe_num_experts": EXPERTS},
            merge={"merge_interval": None},
        ),
        network=network, layout=layout,
    )
    swarm.start_bootstrap()
    for name in names:
        swarm.start(name, experts=1)
    await swarm.until_round(5)
    victim = swarm.nodes[names[1]].endpoint
    for method in (PULL, PUSH):
        await victim.serve(method, hang)
    log = swarm.nodes["W"].log
    await swarm.until(lambda: any(each.commit.lost for each in log.since(0)))
    lost = next(each.commit.round for each in log.since(0) if each.commit.lost)
    await swarm.until_round(lost + LOST_ROUNDS)
    spent = {number: event.seconds["exchange"] for number, event in swarm.recorders[names[0]].commits().items() if number}
    before = statistics.median(spent[number] for number in range(3, lost))
    assert max(spent[lost + later] for later in range(1, LOST_ROUNDS + 1)) <= 1.3 * before
