"""Reducers are lost in the middle of an exchange: their parts go to backups, and the round is committed with them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from exchange_round import LAYOUT, PART_BYTES, make_plan_of, member
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus.acceptor import INCARNATION_BYTES
from spes_p2p.consensus.signed import sign
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.methods import PROTOCOL_VERSION, ROUND
from spes_p2p.messages.rounds import Announcement, Manifest, Staged
from spes_p2p.net import throughput
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.rounds.codecs import CODECS, GroupCodecs
from spes_p2p.rounds.commit import staged_report, unserved_reducers
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.parts import to_mask
from spes_p2p.rounds.result_file import ResultFile
from spes_p2p.rounds.results import ABSENT, Results, bodies_name, load_results, results_name, save_results
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.testing.simulated_identity import SimulatedIdentity

CODEC = GroupCodecs(CODECS["none"], CODECS["none"], CODECS["none"])
PLAN = make_plan_of([
    member("A", 10, (4, 0, 0, 2)),
    member("B", 10, (0, 4, 0, 0)),
    member("C", 10, (0, 0, 4, 2)),
    member("D", 10, (0, 0, 0, 0), 0.0),
])


def results_of_plan() -> Results:
    return Results.empty(PLAN, LAYOUT, CODEC, PART_BYTES)


@given(st.permutations([0, 1, 2]), st.integers(1, 2))
def test_a_revision_moves_the_lost_reducers_parts_to_living_members_and_no_others(order: list[int], count: int) -> None:
    results, gone = results_of_plan(), set(order[:count])
    before = results.parts
    for lost in order[:count]:
        results.revise((lost,))
    for old, new in zip(before, results.parts, strict=True):
        assert (old.index, old.start, old.stop) == (new.index, new.start, new.stop)
        if old.reducer not in gone:
            assert new == old
        elif set(old.contributors) - gone:
            assert new.reducer not in gone
            assert PLAN.members[new.reducer].bandwidth > 0
            assert set(old.contributors) - gone <= set(new.contributors) <= set(old.contributors)
            assert new.index in {part.index for part in results.reduced_by(new.reducer, new.revision)}
        else:
            assert new.reducer in gone or set(new.contributors) <= gone


@pytest.mark.parametrize("lost", [(), (4,), (-1,), (1, 1), (0,)], ids=str)
def test_a_revision_that_cannot_be_is_refused(lost: tuple[int, ...]) -> None:
    results = results_of_plan()
    results.revise((0,))
    if lost != (1, 1):
        with pytest.raises(WireError):
            results.revise(lost)
    else:
        results.revise((1,))
        with pytest.raises(WireError):
            results.revise((1,))


def test_results_of_a_revision_survive_the_disk() -> None:
    results, store = results_of_plan(), MemoryStore()
    results.file = ResultFile(store.draft(bodies_name(results_name(PLAN))), results.parts)
    results.revise((1,))
    for part in results.parts:
        results.put(part.index, bytes(part.encoded_bytes))
    for revision, reducer in {(part.revision, part.reducer) for part in results.parts} - {(0, 1)}:
        own = results.reduced_by(reducer, revision)
        digests = b"".join(results.digests[part.index] for part in own)
        masks = b"".join(to_mask(part.contributors, len(PLAN.members)) for part in own)
        results.add_manifest(Manifest(PLAN.id, reducer, revision, digests, masks, bytes(len(masks)), bytes(len(digests))))
    save_results(store, results)
    restored = load_results(store, results_name(PLAN), lambda proposal: PLAN, LAYOUT, CODEC, PART_BYTES)
    assert restored is not None
    assert (restored.parts, restored.lost, restored.manifests) == (results.parts, ((1,),), results.manifests)
    assert {part.index for part in results.parts if part.revision or part.reducer != 1} == restored.encoded.keys()
    assert all(restored.encoded[index] == results.encoded[index] for index in restored.encoded)


def swarm_of(names: str, **sync: float) -> VirtualSwarm:
    swarm = VirtualSwarm(campaign(total_steps=50, experts={"redundancy": 2}, sync={"min_peers": len(names), **sync}))
    swarm.start_all(names)
    return swarm


def kill_in_exchange(swarm: VirtualSwarm, method: str, count: int) -> list[str]:
    """Kill this many reducers, but no coordinator, as they send the second frame of this method; return their names."""
    killed: list[str] = []

    def hook(peer: str, its_method: str, index: int) -> None:
        is_due = (its_method, index) == (method, 1) and peer in swarm.peers and len(killed) < count
        if is_due and peer in victims(swarm, peer, count):
            killed.append(peer)
            swarm.kill(peer)

    swarm.network.hook = hook
    return killed


def victims(swarm: VirtualSwarm, member: str, count: int) -> list[str]:
    """Of the plan that this member follows: the trainers but the coordinator that reduce the parts with most contributors."""
    results = max(swarm.peers[member].replica.exchanges.by_plan.values(), key=lambda exchange: exchange.plan.round).results
    plan, contributors = results.plan, Counter[str]()
    for part in results.parts:
        reducer = plan.members[part.reducer]
        if reducer.trains and reducer.peer != plan.proposal.ballot.coordinator:
            contributors[reducer.peer] = max(contributors[reducer.peer], len(part.contributors))
    return sorted(contributors, key=lambda peer: (-contributors[peer], peer))[:count]


def commit_that_lost(swarm: VirtualSwarm) -> Commit:
    log = next(iter(swarm.peers.values())).node.log
    return next(commit for commit in map(log.commit_at, range(log.round + 1)) if commit.lost)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("method", ["push", "pull"])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_the_parts_of_a_reducer_killed_in_the_exchange_are_committed_by_backups(method: str, count: int) -> None:
    swarm = swarm_of("ABCDEF", silence_s=5.0)
    await swarm.until_round(2)
    killed = kill_in_exchange(swarm, method, count)
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert len(killed) == count
    commit = commit_that_lost(swarm)
    assert {commit.members[i] for lost in commit.lost for i in lost} <= set(killed)
    survivor = min(swarm.peers)
    commits = swarm.recorders[survivor].commits()
    alone = sum(bool(owners) and set(owners) <= set(killed) for owners in commits[commit.round - 1].owners)
    assert commits[commit.round].dropped_parts <= alone, "only experts that nobody else trained may be missing"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["push", "pull"])
@pytest.mark.long
async def test_an_expert_that_was_handed_on_survives_the_death_of_its_reducer(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A's line is thin: others serve its experts, and one of them dies as it begins to."""
    monkeypatch.setattr(throughput, "LEAST_BYTES_PER_S", 1e6)  # so small updates measure no line
    swarm = VirtualSwarm(campaign(total_steps=80, sync={"min_peers": 4, "silence_s": 5.0}))
    swarm.start_bootstrap()
    for name in "ABCD":
        swarm.start(name, bandwidth=0.02 if name == "A" else 3.0)  # three times the bootstrap peer's
    await swarm.until_round(2)
    killed: list[str] = []

    def hook(peer: str, its_method: str, index: int) -> None:
        if killed or (its_method, index) != (method, 1) or peer not in swarm.peers:
            return
        exchanges = swarm.peers[peer].replica.exchanges.by_plan.values()
        results = max(exchanges, key=lambda exchange: exchange.plan.round).results
        names = [member.peer for member in results.plan.members]
        handed_on = any(
            names[part.reducer] == peer and [names[i] for i in part.contributors] == ["A"] for part in results.parts
        )
        if handed_on and peer in "BCD" and peer != results.plan.proposal.ballot.coordinator:
            killed.append(peer)
            swarm.kill(peer)

    swarm.network.hook = hook
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert killed
    commit = commit_that_lost(swarm)
    lost = {commit.members[i] for lost in commit.lost for i in lost}
    assert lost == set(killed)
    commits = swarm.recorders["A"].commits()
    gone_with_it = sum(set(owners) == set(killed) for owners in commits[commit.round - 1].owners)
    assert commits[commit.round].dropped_parts <= gone_with_it, "A's experts are in"
    assert "A" in {name for name, tokens, _ in commits[commit.round].contributions if tokens}


async def test_a_member_that_takes_the_plan_and_never_reports_holds_nobody_up() -> None:
    swarm = swarm_of("ABC")
    await swarm.until_round(2)
    idler = asyncio.ensure_future(take_part_and_idle(swarm))
    began = asyncio.get_running_loop().time()
    await swarm.until_round(5)
    assert asyncio.get_running_loop().time() - began < 120
    idler.cancel()
    await swarm.until_finished()
    swarm.assert_replicas_agree()


async def take_part_and_idle(swarm: VirtualSwarm) -> None:
    """A peer that announces itself for every round, takes each plan, and does nothing with it but live."""
    endpoint = RpcEndpoint(swarm.network.transport("X"), 5.0)
    for peer, living in swarm.peers.items():
        endpoint.transport.learn_addresses(peer, living.node.world.transport.addresses)
    while True:
        base = swarm.peers["A"].replica.base
        announcement = Announcement(
            swarm.campaign.hash, PROTOCOL_VERSION, base.round + 1, 0, 0.0, base.commit, base.digest,
            10, (1,) * 4, 4, 1.0, 1.0, 1.0, None, (),
        )
        try:
            async with endpoint.stream(swarm.peers["A"].node.coordinators()[0], ROUND) as stream:
                await stream.send(pack(sign(announcement, SimulatedIdentity("X"))))
                while True:
                    await stream.message()
        except (PeerUnreachable, Refused):
            await asyncio.sleep(0.5)


def reports(misses: dict[str, str], reduces: str = "ABC") -> tuple[Results, dict[int, Staged]]:
    """Return what members of PLAN report: each lacks the parts of the reducers in `misses`; only `reduces` made any."""
    results, names, encoded = results_of_plan(), "ABCD", b"mean"
    for reducer, name in enumerate(names):
        if own := results.reduced_by(reducer):
            is_made, width = name in reduces, len(to_mask((), len(names)))
            digests = (content_digest(encoded) if is_made else ABSENT) * len(own)
            masks = b"".join(to_mask(part.contributors if is_made else (), len(names)) for part in own)
            results.add_manifest(Manifest(PLAN.id, reducer, 0, digests, masks, bytes(width * len(own)), ABSENT * len(own)))
    staged = {}
    for index, name in enumerate(names):
        held = results_of_plan()
        held.manifests.update(results.manifests)
        for part in held.parts:
            if names[part.reducer] not in misses.get(name, ""):
                held.put(part.index, encoded)
        staged[index] = staged_report(held, index, "00" * INCARNATION_BYTES)
    return results, staged


@pytest.mark.parametrize(("misses", "living", "unserved"), [
    ({}, "ABCD", ""),
    (dict.fromkeys("BCD", "A"), "ABCD", "A"),
    (dict.fromkeys("BC", "A"), "ABCD", ""),  # D holds them: two hold a part
    (dict.fromkeys("BC", "A"), "ABC", "A"),
    ({"B": "A"}, "AB", ""),  # a single witness
    ({name: "ABC".replace(name, "") for name in "ABCD"}, "ABCD", ""),  # nobody would be left to reduce
])
def test_a_reducer_serves_nobody_if_no_two_hold_its_part(misses: dict[str, str], living: str, unserved: str) -> None:
    results, staged = reports(misses)
    assert {"ABCD"[i] for i in unserved_reducers(results, staged, set(map("ABCD".index, living)))} == set(unserved)


def test_a_reducer_that_trains_a_part_and_calls_it_absent_serves_nobody() -> None:
    results, staged = reports({}, reduces="BC")
    assert unserved_reducers(results, staged, set(range(4))) == {0}
