"""A peer that the owner banned takes no part from one round on, the same for everybody, whoever restarts or joins."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from test_control import finish

from spes_p2p.consensus.control import is_banned, rollback_commit, signed
from spes_p2p.errors import Refused, UserError
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Ballot, CommitsRequest, Control, ControlRequest, Known, Prepare
from spes_p2p.messages.methods import COMMITS, CONTROL, PREPARE, STATUS
from spes_p2p.messages.refusals import Code
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.rounds.archive import Archive
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.testing.simulated_identity import SimulatedIdentity


def record(swarm: VirtualSwarm, number: int, *banned: str, rollback: int = -1) -> Control:
    """As the owner's command makes it."""
    unsigned = Control(swarm.campaign.hash, number, "running", (), rollback, b"", banned=banned)
    return signed(unsigned, SimulatedIdentity(swarm.bootstrap))


def stranger(swarm: VirtualSwarm, name: str) -> RpcEndpoint:
    """An endpoint under this name that keeps to no rule."""
    return RpcEndpoint(swarm.network.transport(name), 5.0)


async def order(swarm: VirtualSwarm, peer: str, control: Control) -> None:
    await stranger(swarm, "visitor").ask(peer, CONTROL, pack(ControlRequest(control)), 5.0)


async def ban(swarm: VirtualSwarm, victim: str, number: int = 1) -> tuple[int, asyncio.Task[None]]:
    """Ban a peer; return the round that applies it and the banned peer's life, once all others have applied it."""
    life = swarm.tasks.pop(victim)
    swarm.peers.pop(victim)
    node = swarm.nodes.pop(victim)
    await order(swarm, sorted(swarm.peers)[0], record(swarm, number, victim))
    await swarm.until(lambda: all(is_banned(each.log.last.control, victim) for each in swarm.nodes.values()))
    found = {
        next(d.commit.round for d in each.log.since(-1) if is_banned(d.commit.control, victim))
        for each in (*swarm.nodes.values(), *([node] if is_banned(node.log.last.control, victim) else []))
    }
    (round_number,) = found
    return round_number, life


@pytest.mark.sampled(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("victim", ["coordinator", "follower"])
@pytest.mark.long
async def test_a_banned_peer_loses_seat_and_experts_in_the_round_that_applies_the_record(victim: str, overlap: bool) -> None:
    swarm = VirtualSwarm(campaign(total_steps=200, sync={"overlap": overlap}))
    swarm.start_all()
    await swarm.until_round(2)
    ranked = [peer for peer in swarm.nodes["A"].coordinators() if peer != "W"]
    name = ranked[0] if victim == "coordinator" else ranked[-1]
    before = swarm.nodes["W"].log.last
    assert name in before.electorate
    assert any(before.members[i] == name for owners in before.owners for i in owners)
    number, life = await ban(swarm, name)
    commit = swarm.nodes["W"].log.commit_at(number)
    assert name not in commit.members
    assert name not in commit.electorate
    assert all(commit.owners), "its experts have other owners"
    await asyncio.wait({life}, timeout=200)
    with pytest.raises(UserError, match=f"this peer \\({name}\\) cannot take part: the owner of this campaign banned"):
        life.result()
    await finish(swarm)


async def test_a_banned_peer_is_refused_on_every_stream_and_listed_nowhere() -> None:
    swarm = VirtualSwarm(campaign(total_steps=1000))
    swarm.start_all()
    await swarm.until_round(1)
    await ban(swarm, "C")
    swarm.network.kill("C")
    banned = stranger(swarm, "C")
    commit = swarm.nodes["W"].log.last
    requests = {
        STATUS: b"", COMMITS: pack(CommitsRequest(-1)), PREPARE: pack(Prepare(commit.round + 1, commit.id, Ballot(1, "C"))),
    }
    for peer in "WAB":
        for method, request in requests.items():
            with pytest.raises(Refused) as refused:
                await banned.ask(peer, method, request, 5.0)
            assert refused.value.code is Code.NOT_ADMITTED
        known = unpack(Known, await banned.ask(peer, CONTROL, pack(ControlRequest(None)), 5.0))
        assert known.newest == record(swarm, 1, "C"), "the record itself says why"
        await swarm.nodes[peer].refresh_contacts()
        assert set(swarm.nodes[peer].contacts) == {*"WAB"}


async def test_a_ban_outlives_restarts_and_joiners_know_it() -> None:
    swarm = VirtualSwarm(campaign(total_steps=1000))
    swarm.start_all()
    await swarm.until_round(1)
    number, _ = await ban(swarm, "C")
    for name in "WAB":
        swarm.restart(name)
    swarm.start("D")
    await swarm.until(lambda: swarm.round_of("D") > number)
    assert is_banned(swarm.nodes["D"].log.last.control, "C")
    swarm.network.kill("C")
    swarm.start_again("C")
    life = swarm.tasks.pop("C")
    swarm.peers.pop("C")
    await asyncio.wait({life}, timeout=300)
    with pytest.raises(UserError, match="banned this peer"):
        life.result()
    assert not any("C" in d.commit.members for d in swarm.nodes["D"].log.since(number))


async def test_a_newcomer_that_is_banned_already_ends_with_the_reason() -> None:
    swarm = VirtualSwarm(campaign(total_steps=1000))
    swarm.start_all()
    await swarm.until_round(1)
    await order(swarm, "W", record(swarm, 1, "X"))
    await swarm.until(lambda: all(is_banned(node.log.last.control, "X") for node in swarm.nodes.values()))
    swarm.start("X")
    life = swarm.tasks.pop("X")
    swarm.peers.pop("X")
    await asyncio.wait({life}, timeout=100)
    with pytest.raises(UserError, match="banned this peer"):
        life.result()


@pytest.mark.slow
async def test_a_lifted_ban_lets_the_peer_back_in() -> None:
    swarm = VirtualSwarm(campaign(total_steps=450))
    swarm.start_all()
    await swarm.until_round(1)
    number, life = await ban(swarm, "C")
    await asyncio.wait({life}, timeout=200)
    await order(swarm, "A", record(swarm, 2))
    await swarm.until(lambda: all(not is_banned(node.log.last.control, "C") for node in swarm.nodes.values()))
    swarm.network.kill("C")
    swarm.start_again("C")
    await swarm.until(lambda: "C" in swarm.nodes["W"].log.last.members)
    await finish(swarm)
    members = [decided.commit.round for decided in swarm.nodes["W"].log.since(number - 1) if "C" in decided.commit.members]
    assert min(members) > number


@pytest.mark.long
async def test_a_rollback_that_also_applies_a_ban_takes_the_seat_too() -> None:
    swarm = VirtualSwarm(campaign(total_steps=300), archive=Archive(2, 2))
    swarm.start_all()
    await swarm.until_round(5)
    kept = max(number for number in (2, 4) if number < swarm.nodes["W"].log.round)
    parent = swarm.nodes["W"].log.last
    victim = max(set(parent.electorate) - {"W"})
    made = rollback_commit(parent, record(swarm, 1, victim, rollback=kept), "d" * 64, 0)
    assert victim not in made.electorate
    assert dict(zip(made.electorate, made.incarnations, strict=True)).items() <= dict(
        zip(parent.electorate, parent.incarnations, strict=True)).items()
    everybody = rollback_commit(parent, record(swarm, 1, *parent.electorate, rollback=kept), "d" * 64, 0)
    assert everybody.electorate == parent.electorate, "somebody has to decide"
    life = swarm.tasks.pop(victim)
    swarm.peers.pop(victim)
    swarm.nodes.pop(victim)
    await order(swarm, "W", record(swarm, 1, victim, rollback=kept))
    await swarm.until(lambda: all(is_banned(node.log.last.control, victim) for node in swarm.nodes.values()))
    await finish(swarm)
    assert life.done()
    applied = [d.commit for d in swarm.nodes["W"].log.since(-1) if is_banned(d.commit.control, victim)]
    assert not any(victim in commit.electorate for commit in applied)


async def test_nobody_but_the_owner_bans() -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(1)
    good = record(swarm, 1, "C")
    for forged in (replace(good, banned=("A",)), signed(good, SimulatedIdentity("B"))):
        with pytest.raises(Refused, match="did not sign"):
            await order(swarm, "A", forged)
    await finish(swarm)
