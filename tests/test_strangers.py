"""Who is no elector cannot decide, block or end a campaign: its ballots are refused by everybody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from spes_p2p.consensus.signed import sign
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Accept, Ballot, CommitsRequest, Leave, Milestone, MilestoneRequest, Prepare
from spes_p2p.messages.methods import ACCEPT, COMMITS, LEAVE, MILESTONE, PREPARE
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.samples import Interval
from spes_p2p.net import shares
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.shares import STREAM_COST
from spes_p2p.observe.events import RoundFailed
from spes_p2p.rounds.proposal import read_leave
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.testing.simulated_identity import SimulatedIdentity


@pytest.mark.parametrize("name", ["X", "A"])
@pytest.mark.long
async def test_a_strangers_ballots_are_refused_and_the_swarm_finishes(name: str) -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_bootstrap()
    for peer in "ABC":
        swarm.start(peer)
    await swarm.until(lambda: swarm.round_of("A") >= 2)
    endpoint = RpcEndpoint(swarm.network.transport("X"), 5.0)
    commit = swarm.peers["A"].node.log.last
    forged = replace(commit, round=commit.round + 1, parent=commit.id, electorate=("X",), helpers=("X",), step=10**6)
    for elector in ("A", "B", "C", "W"):
        with pytest.raises(Refused):
            await endpoint.ask(elector, PREPARE, pack(Prepare(commit.round + 1, commit.id, Ballot(2**63, name))), 5.0)
        with pytest.raises(Refused):
            await endpoint.ask(elector, ACCEPT, pack(Accept(Ballot(10**6, name), forged)), 5.0)
    await swarm.until(lambda: all(swarm.tasks[peer].done() for peer in "ABC"))
    assert swarm.recorders["A"].commits()[6].campaign_step == 60


async def test_who_leaves_gives_back_only_samples_that_it_was_assigned() -> None:
    swarm = VirtualSwarm(campaign(total_steps=6000))
    swarm.start_all("ABC")
    await swarm.until_round(1)
    swarm.kill("C")
    endpoint, commit = RpcEndpoint(swarm.network.transport("C"), 5.0), swarm.nodes["W"].log.last
    everything = (Interval(0, 0, 10**9), Interval(7, 0, 3), Interval(0, 3, 3))
    await endpoint.ask("W", LEAVE, pack(sign(Leave(commit.id, everything), SimulatedIdentity("C"))), 5.0)
    node = swarm.nodes["W"]
    (signed,) = node.departures.gone(commit.id).values()
    returned = read_leave(signed, node.log.recent(commit.round), node.rules, SimulatedIdentity("W")).untrained
    assert set(returned) == set(commit.workloads[commit.members.index("C")].slices)


async def test_a_newcomer_that_is_turned_away_as_busy_asks_the_same_coordinator_again() -> None:
    swarm = VirtualSwarm(campaign(400))
    swarm.start_all()
    await swarm.until_round(2)
    until_s, turned_away = asyncio.get_running_loop().time() + 20, 0
    for node in swarm.nodes.values():
        pace = node.endpoint.shares.pace

        async def busy(peer: str, cost: int, pace: Callable[[str, int], Awaitable[None]] = pace) -> None:
            nonlocal turned_away
            if peer == "D" and cost > STREAM_COST and asyncio.get_running_loop().time() < until_s:
                turned_away += 1
                raise Refused(Code.BUSY, "too many newcomers", retry_s=4.0)
            await pace(peer, cost)

        node.endpoint.shares.pace = busy  # type: ignore[method-assign]
    swarm.start("D")
    await swarm.until(lambda: "D" in swarm.nodes["A"].log.last.members, 60)
    assert turned_away > 2
    assert not swarm.recorders["D"].of(RoundFailed)


@pytest.mark.parametrize(("method", "request_of"), [(COMMITS, CommitsRequest), (MILESTONE, MilestoneRequest)])
async def test_a_stranger_gets_commits_and_milestones_at_a_pace(
    method: str, request_of: Callable[[int], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "ANSWERS_BITS", 8 * 2**10)
    swarm, taken = VirtualSwarm(campaign(400)), list[int]()
    swarm.start_all()
    await swarm.until_round(2)
    log = swarm.nodes["W"].log
    log.milestone = Milestone(log.at(0), (), b"")
    stranger = RpcEndpoint(swarm.network.transport("X"), 5.0)
    until_s = asyncio.get_running_loop().time() + 20
    while asyncio.get_running_loop().time() < until_s:
        with contextlib.suppress(Refused):
            taken.append(len(await stranger.ask("W", method, pack(request_of(-1)))))
    assert 2**12 < sum(taken) < 40 * 2**10
