"""Peers meet while other meetings go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from spes_p2p.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.swarm.memory import run_virtual


def test_who_vanishes_from_the_registry_while_a_peer_is_asked_for_heads_does_no_harm() -> None:
    async def main() -> None:
        swarm = VirtualSwarm(campaign(sync={"min_peers": 2}))
        swarm.start_all("AB")
        await swarm.until(lambda: swarm.round_of("A") >= 1 and len(swarm.nodes["A"].contacts) == 3)
        node = swarm.nodes["A"]
        node.contacts = {peer: replace(contact, round=node.log.round + 1) for peer, contact in node.contacts.items()}
        looking = asyncio.ensure_future(node._look_for_heads())
        await asyncio.sleep(0)
        assert not looking.done()
        node.contacts = {}
        await looking

    run_virtual(main())
