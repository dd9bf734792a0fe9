"""Peers meet while other meetings go on."""

from __future__ import annotations

import asyncio

from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Ballot, Signed
from spes_p2p.messages.fields import MAX_MEMBERS
from spes_p2p.messages.framing import MAX_FRAME_BYTES
from spes_p2p.messages.rounds import Proposal
from spes_p2p.peer.coordinator import fitting
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign


async def test_the_short_phases_of_one_trainer_keep_nobody_out() -> None:
    """A phase takes a tenth of a second here, less than it takes to learn of a round and to announce for the next one."""
    swarm = VirtualSwarm(campaign(total_steps=20000, sync={"min_peers": 1}), seconds_per_step=0.01)
    swarm.start_all("A")
    await swarm.until(lambda: swarm.round_of("A") >= 3)
    began = swarm.round_of("A")
    swarm.start("B")
    swarm.start("C")
    await swarm.until(lambda: any({"B", "C"} <= set(c.members) for c in swarm.recorders["A"].commits().values()))
    assert swarm.round_of("A") < began + 30


async def test_who_came_too_late_and_is_dead_holds_up_one_round_at_most() -> None:
    swarm = VirtualSwarm(campaign(total_steps=20000, sync={"min_peers": 1}), seconds_per_step=0.01)
    swarm.start_all("A")
    await swarm.until(lambda: swarm.round_of("A") >= 3)
    swarm.start("B")
    await swarm.until(lambda: swarm.round_of("B") >= 3)
    swarm.kill("B")
    late = swarm.peers["A"].coordinators.too_late
    late.add("B", swarm.nodes["A"].log.last)
    await swarm.until(lambda: not late.peers)
    began, round_number = asyncio.get_running_loop().time(), swarm.round_of("A")
    await swarm.until(lambda: swarm.round_of("A") >= round_number + 20)
    assert asyncio.get_running_loop().time() - began < 40  # a round takes some 1 s, a wait in each `silence_s` more


def test_a_plan_takes_no_more_members_than_a_proposal_can_name() -> None:
    signed = [Signed(f"{i:06d}", b"announcement", b"") for i in range(MAX_MEMBERS + 5)]
    chosen = fitting(signed, MAX_FRAME_BYTES)
    proposal = Proposal(0, "", Ballot(0, "coordinator"), chosen)
    assert len(chosen) == MAX_MEMBERS
    longest = Signed("honest", b"announcement with a name", b"")
    assert longest not in fitting([*signed, longest], MAX_FRAME_BYTES)
    assert longest in fitting([*signed, longest], MAX_FRAME_BYTES, {"honest"})
    assert unpack(Proposal, pack(proposal)) == proposal


def test_what_does_not_fit_into_a_proposal_costs_nothing_and_who_is_trusted_comes_first() -> None:
    short, fat, vouched = (Signed(name, bytes(size), b"") for name, size in (("S", 100), ("F", 900), ("V", 600)))
    room = len(pack(vouched)) + len(pack(short))
    assert fitting([short, fat, vouched], room, {"V"}, {"V", "F"}) == (short, vouched)
    assert fitting([short, fat, vouched], len(pack(fat)), {"V"}, {"V", "F"}) == (short, vouched)
