"""Whole swarms in one process: the peers are real, time and the network are simulated."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections import Counter
from collections.abc import Callable

import pytest

from spes_p2p.consensus import electorate
from spes_p2p.consensus.acceptor import read_votes
from spes_p2p.consensus.electorate import coordinator_order
from spes_p2p.consensus.output import VOTES
from spes_p2p.consensus.signed import read_signed, sign
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import CertifiedCommit, Commit
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import ROUND
from spes_p2p.messages.rounds import Announcement
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.observe.events import BaseRestored, DigestMismatch, Evaluated, PhaseTrained, RoundCommitted
from spes_p2p.peer.durable import read_record
from spes_p2p.rounds.codecs import CODECS
from spes_p2p.rounds.digest import state_digest
from spes_p2p.testing.simulate.swarm import LAYOUT, NUM_SAMPLES, VirtualSwarm, campaign, samples, simulate
from spes_p2p.testing.simulated_identity import SimulatedIdentity

SILENCE_S = 5.0


async def test_peers_agree_bit_for_bit_after_every_round() -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    commits = swarm.recorders["A"].commits()
    assert sorted(commits) == list(range(7))
    assert commits[6].campaign_step == 60
    assert commits[6].total_tokens == sum(commit.tokens for commit in commits.values())
    assert all(commit.dropped_parts == 0 for commit in commits.values())


def test_streams_that_have_ended_are_freed_without_the_garbage_collector() -> None:
    """Else a swarm in one process leaves most of its memory, and a fifth of its time, to it."""

    async def main() -> tuple[int, int]:
        swarm, opened = VirtualSwarm(campaign()), Counter[str]()
        network = swarm.network
        network.hook = lambda sender, method, index: opened.update([method] if index == 0 else [])
        swarm.start_all()
        await swarm.until_round(4)
        return opened.total(), sum(type(each) is Stream for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        opened, left = simulate(main)
    finally:
        gc.enable()
    assert left < opened / 20


@pytest.mark.sampled(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("evaluation_s", [pytest.param(0.01, marks=pytest.mark.slow), 1.0, 8.0])
@pytest.mark.long
async def test_every_peer_hears_what_the_last_base_is_worth(overlap: bool, evaluation_s: float) -> None:
    """The bootstrap peer too when it is asked to leave as soon as the trainers have left.

    With overlap, a round does not wait 8 s for the evaluator: that evaluation is in no plan, except the last one's.
    """
    swarm = VirtualSwarm(campaign(evaluation={"every_rounds": 4}, sync={"overlap": overlap}))
    swarm.evaluation_s = evaluation_s
    swarm.start_all()
    await swarm.until_finished()
    swarm.helper.leave()
    await swarm.tasks["W"]
    last = swarm.peers["A"].replica.base.round
    told = {name: swarm.recorders[name].of(Evaluated) for name in "WABC"}
    heard = [last] if overlap and evaluation_s == 8.0 else [0, 4, last]
    assert [event.round for event in told["W"]] == heard
    assert all(events[-len(heard):] == told["W"] for events in told.values())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.long
async def test_a_base_in_memory_has_the_bits_of_one_on_disk_and_is_there_once(overlap: bool) -> None:
    swarm = VirtualSwarm(campaign(total_steps=80, sync={"overlap": overlap}))
    swarm.start_all("AB")
    swarm.start("C", base_in_memory=True)
    await swarm.until_round(2)
    swarm.restart("C")
    swarm.start("D")
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    bases = {name: swarm.peers[name].replica.base for name in "AC"}
    assert bases["C"].values.flags.owndata
    assert not bases["A"].values.flags.owndata
    assert not bases["C"].values.flags.writeable
    _, offered, _ = swarm.peers["C"].replica.store.snapshots._find(bases["C"].commit)
    assert offered is bases["C"].values


@pytest.mark.long
def test_every_codec_gives_equal_bits_on_all_peers() -> None:
    for codec in CODECS:

        async def main(codec: str = codec) -> None:
            swarm = VirtualSwarm(campaign(total_steps=20, codec=codec))
            swarm.start_all()
            await swarm.until_finished()
            swarm.assert_replicas_agree()

        simulate(main)


async def test_a_reducer_keeps_what_its_encoding_dropped_for_the_next_round() -> None:
    swarm = VirtualSwarm(campaign(codec="fp16"))
    swarm.start_all()
    await swarm.until_round(2)
    for name, peer in swarm.peers.items():
        results = next(results for results in peer.replica.results.by_plan.values() if results.plan.round == 2)
        summed = {p.start for p in results.reduced_by(results.plan.index(name) or 0) if len(p.contributors) > 1}
        assert set(peer.replica.work.residuals.by_key) == summed
    assert any(dropped.any() for peer in swarm.peers.values() for dropped in peer.replica.work.residuals.by_key.values())


@pytest.mark.long
def test_the_same_seed_gives_the_same_run() -> None:
    def final_digest(seed: int) -> str:
        async def main() -> str:
            swarm = VirtualSwarm(campaign(total_steps=30), seed)
            swarm.start_all()
            await swarm.until_round(1)
            swarm.kill("C")
            await swarm.until_finished()
            return swarm.final_digests().pop()

        return simulate(main)

    assert final_digest(1) == final_digest(1)
    assert final_digest(1) != final_digest(2)


async def test_a_peer_killed_while_it_trains_is_out_of_the_next_round_and_its_experts_find_owners() -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(2)
    await asyncio.sleep(3)
    swarm.kill("B")
    died = now()
    await swarm.until_round(3)
    assert now() - died < 10 + 3 * SILENCE_S
    commit = swarm.recorders["A"].commits()[3]
    assert commit.members == ("A", "C")
    assert all(owners and "B" not in owners for owners in commit.owners)
    await swarm.until_finished()
    swarm.assert_replicas_agree()


@pytest.mark.parametrize("method", ["push", "pull"])
@pytest.mark.parametrize("frame", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.long
async def test_a_peer_killed_in_the_middle_of_the_exchange_costs_its_parts_and_nothing_else(method: str, frame: int) -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(2)
    kill_at_frame(swarm, method, frame, lambda peer: peer != next_coordinator(swarm))
    await swarm.until_finished()
    assert len(swarm.peers) == 2
    swarm.assert_replicas_agree()


STAGES = {
    "while it gathers": ("round", 0, "member"),
    "when it asks for promises": ("prepare", 0, "coordinator"),
    "when it sends the plan": ("round", 0, "coordinator"),
    "while parts are pushed": ("push", 1, "coordinator"),
    "while parts are pulled": ("pull", 1, "coordinator"),
    "when it asks for the first vote": ("accept", 0, "coordinator"),
    "before the first vote comes back": ("accept", 0, "elector"),
    "when it knows the decision and has told nobody": ("decide", 0, "coordinator"),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.sampled(2)
async def test_a_coordinator_killed_in_any_stage_stops_nobody_and_forks_nothing(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, frame, sender = STAGES[stage]
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(2)
    victim = next_coordinator(swarm)
    swarm.network.hook = frame_hook(swarm, method, frame, victim, sender == "coordinator")
    if method == "decide":
        decisions = swarm.nodes[victim].decisions
        learn = decisions.learn

        def learn_and_die(decided: CertifiedCommit) -> None:
            learn(decided)
            swarm.kill(victim)

        monkeypatch.setattr(decisions, "learn", learn_and_die)
    await swarm.until(lambda: victim not in swarm.peers, 200)
    died = now()
    await swarm.until_round(4)
    assert now() - died < 2 * 15 + 6 * SILENCE_S
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    commits = swarm.recorders[min(swarm.peers)].commits()
    assert commits[6].total_tokens == sum(commit.tokens for commit in commits.values())


async def test_who_lost_the_coordinator_first_is_in_the_round_of_the_next() -> None:
    """The helper asks the next in rank while that one still asks whether the coordinator is there. Its attempt begins before it
    has an answer to that, since it has lost the coordinator itself; the helper is in."""
    swarm = VirtualSwarm(campaign(sync={"min_peers": 3}))
    swarm.start_all("ABCD")
    await swarm.until_round(2)
    commit = swarm.peers["A"].node.log.last
    first, second, *_ = coordinator_order(commit)
    helper = SimulatedIdentity("W")
    announcement = read_signed(Announcement, swarm.helper.announcer.announcement(attempt=1), helper)
    announcement = dataclasses.replace(announcement, round=commit.round + 1, commit=commit.id)
    swarm.kill("W")
    lost: list[None] = []

    def lose(sender: str, method: str, index: int) -> None:
        if method == ROUND and sender != first and not lost:
            lost.append(None)
            swarm.network.stop(first)

    swarm.network.hook = lose
    await swarm.until(lambda: bool(lost))
    await asyncio.sleep(1.0)
    async with RpcEndpoint(swarm.network.transport("W"), 5.0).stream(second, ROUND) as stream:
        await stream.send(pack(sign(announcement, helper)))
        reply = await stream.any_message()
    swarm.network.resume(first)
    assert reply.kind in (Kind.PROPOSAL, Kind.PASSED)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("voters", [1, 2])
@pytest.mark.long
async def test_a_commit_that_was_accepted_before_its_coordinator_died_is_the_one_decided(voters: int) -> None:
    """With a majority of votes it was decided; with one, the next coordinator, which sees that vote, must propose it too."""
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(2)
    victim = next_coordinator(swarm)
    votes: list[str] = []

    def kill_after_votes(peer: str, method: str, index: int) -> None:
        if method == "accept" and peer != victim and victim in swarm.peers:
            votes.append(peer)
            if len(votes) == voters:
                swarm.kill(victim)

    swarm.network.hook = kill_after_votes
    await swarm.until(lambda: victim not in swarm.peers, 200)
    voter = read_votes(read_record(swarm.stores[votes[0]], VOTES))
    await swarm.until_round(3)
    survivor = swarm.peers[min(swarm.peers)]
    assert voter is not None
    assert voter.accepted is not None
    assert survivor.node.log.commit_at(3).id == voter.accepted.id
    assert victim in voter.accepted.members
    await swarm.until_finished()
    swarm.assert_replicas_agree()


@pytest.mark.long
async def test_a_joiner_downloads_the_base_and_trains_from_the_next_round() -> None:
    swarm = VirtualSwarm(campaign(total_steps=80))
    swarm.start_all()
    await swarm.until_round(2)
    await asyncio.sleep(4)
    swarm.start("D")
    await swarm.until_round(4)
    commit = swarm.recorders["A"].commits()[4]
    assert commit.members == ("A", "B", "C", "D")
    assert {owner for owners in commit.owners for owner in owners} == set("ABCD")
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert swarm.recorders["D"].of(BaseRestored)[0].source == "download"
    assert swarm.trainers["D"].trained_samples
    assert not any(swarm.recorders[name].of(DigestMismatch) for name in "ABCD")


async def test_a_joiner_cuts_nobodys_phase_short() -> None:
    swarm = VirtualSwarm(campaign(total_steps=40, sync={"min_peers": 1, "join_grace_s": 0.0}), seconds_per_step=3.0)
    swarm.start_all("A")
    await swarm.until_round(1)
    swarm.start("D")
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert [phase.steps for phase in swarm.recorders["A"].of(PhaseTrained)][:2] == [10, 10]


@pytest.mark.parametrize("delay_s", [0.5, 4.0, 10.6])
@pytest.mark.sampled(1)
async def test_a_peer_restarted_on_its_disk_continues(delay_s: float) -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(2)
    await asyncio.sleep(delay_s)
    swarm.restart("B")
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert swarm.recorders["B"].of(BaseRestored)[-1].source == "disk"
    assert "B" in swarm.recorders["A"].commits()[6].members


@pytest.mark.long
async def test_who_crashed_between_push_and_commit_does_not_send_the_same_work_again() -> None:
    """Its push is in the new base, its codes died with it: what its checkpoint has pending there must not go twice."""
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(2)
    victim = next(name for name in "ABC" if name != next_coordinator(swarm))
    swarm.network.hook = frame_hook(swarm, "accept", 0, victim, False)
    await swarm.until(lambda: victim not in swarm.peers, 200)
    swarm.network.hook = None
    swarm.restart(victim)
    await swarm.until(lambda: swarm.round_of(victim) == 3)
    peer, trainer = swarm.peers[victim], swarm.trainers[victim]
    results = next(results for results in peer.replica.results.by_plan.values() if results.plan.round == 3)
    assert all(results.plan.index(victim) in results.contributors(part) for part in results.parts[:1])
    shared = LAYOUT.group("shared")
    pending = trainer.read(shared) - peer.replica.base.values[shared.start : shared.stop]
    assert not pending.any()
    await swarm.until_finished()
    swarm.assert_replicas_agree()


async def test_an_elector_that_is_asked_for_a_vote_after_the_commit_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    swarm = VirtualSwarm(campaign(total_steps=500))
    swarm.start_all()
    await swarm.until_round(2)
    elector = next(name for name in "ABC" if name != next_coordinator(swarm))
    log, validity = swarm.nodes[elector].log, swarm.nodes[elector].decisions.validity
    require, late = validity.require, list[int]()

    async def require_late(commit: Commit, evidence: bytes, peer: str) -> None:
        await swarm.until(lambda: log.round >= commit.round)
        late.append(commit.round)
        await require(commit, evidence, peer)

    validity.require = require_late  # type: ignore[method-assign]
    await swarm.until_round(5)
    assert 3 in late
    assert not [record for record in caplog.records if "no vote" in record.message]


@pytest.mark.parametrize("delay_s", [0.0, 4.0, 10.2, 10.4, 10.6, 10.8])
@pytest.mark.sampled(2)
@pytest.mark.long
async def test_a_whole_swarm_killed_at_once_continues_from_the_last_committed_round(delay_s: float) -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(2)
    await asyncio.sleep(delay_s)
    before = {name: swarm.peers[name].node.log.round for name in "ABC"}
    for name in "WABC":
        swarm.kill(name)
    await asyncio.sleep(60)
    for name in "CBAW":
        swarm.restart(name)
    await swarm.until(lambda: all(swarm.round_of(name) >= before[name] for name in "ABC"), 60)
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert all(swarm.recorders[name].of(BaseRestored)[-1].source == "disk" for name in "ABC")
    assert [swarm.peers["A"].node.log.commit_at(number).step for number in range(7)] == list(range(0, 70, 10))


@pytest.mark.long
async def test_the_bootstrap_peer_may_be_away_while_the_others_train() -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(1)
    swarm.kill("W")
    await swarm.until_round(3)
    swarm.restart("W")
    await swarm.until_finished()
    swarm.assert_replicas_agree()


@pytest.mark.parametrize("pause_s", [7.0, 40.0, 200.0])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_a_peer_that_was_silent_too_long_catches_up_and_its_work_is_not_lost(pause_s: float) -> None:
    swarm = VirtualSwarm(campaign(total_steps=300))
    swarm.start_all()
    await swarm.until_round(2)
    swarm.network.pause("B")
    await asyncio.sleep(pause_s)
    swarm.network.resume("B")
    resumed = swarm.round_of("A")
    await swarm.until(lambda: swarm.round_of("B") >= resumed, 60)
    await swarm.until(lambda: "B" in max(swarm.recorders["A"].commits().items())[1].members, 60)
    await swarm.until_round(resumed + 4)
    swarm.assert_same_commits()
    commits = swarm.recorders["A"].commits()
    trained, announced = swarm.trained_tokens(), commits[max(commits)].total_tokens
    assert announced <= trained


@pytest.mark.long
async def test_a_peer_that_is_cut_off_comes_back_and_nothing_was_forked() -> None:
    swarm = VirtualSwarm(campaign(total_steps=150))
    swarm.start_all()
    await swarm.until_round(2)
    swarm.network.partition(["A"], ["B", "C", "W"])
    cut = swarm.round_of("B")
    await asyncio.sleep(100)
    assert swarm.round_of("A") <= cut + 1
    assert swarm.round_of("B") > cut + 4
    swarm.network.heal()
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert "A" in swarm.recorders["B"].commits()[15].members


async def test_a_peer_that_cannot_be_dialled_trains_and_is_heard_but_reduces_nothing() -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_bootstrap()
    swarm.start("A")
    swarm.start("B")
    swarm.start("C", bandwidth=0.0)
    served: list[str] = []
    swarm.network.hook = lambda peer, method, index: served.append(method) if peer == "C" else None
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    commits = swarm.recorders["A"].commits()
    assert all("C" in commit.members for commit in commits.values())
    assert commits[6].total_tokens == swarm.trained_tokens()
    commit = swarm.peers["A"].node.log.last
    assert "C" not in commit.electorate
    assert commit.roots[commit.members.index("C")] == b""


@pytest.mark.long
async def test_a_slow_peer_gets_fewer_steps_and_is_waited_for() -> None:
    swarm = VirtualSwarm(campaign(total_steps=80))
    swarm.start_bootstrap()
    for name, speed in (("A", 1.0), ("B", 1.0), ("C", 0.25)):
        swarm.start(name, speed)
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    steps = {name: [phase.steps for phase in swarm.recorders[name].of(PhaseTrained)] for name in "ABC"}
    assert steps["A"][2:] == [10] * 6
    assert all(2 <= count <= 3 for count in steps["C"][2:])
    assert all(commit.members == ("A", "B", "C") for commit in swarm.recorders["A"].commits().values())
    assert_no_sample_twice(swarm, "ABC")


@pytest.mark.long
async def test_within_an_epoch_no_sample_is_trained_twice_and_none_is_left_out() -> None:
    swarm = VirtualSwarm(campaign(total_steps=180))
    swarm.start_all()
    await swarm.until_finished()
    assert_no_sample_twice(swarm, "ABC")
    trained = [sample for name in "ABC" for sample in samples(swarm.trainers[name].trained_samples)]
    assert sorted(trained) == [(i // NUM_SAMPLES, i % NUM_SAMPLES) for i in range(len(trained))]
    assert len(trained) == 3 * 180 * 2


@pytest.mark.parametrize("delay_s", [0.1, 3.0, 10.0, 10.2, 10.3, 10.4, 10.6, 10.8])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_who_leaves_politely_loses_no_sample_and_its_experts_find_owners_at_once(delay_s: float) -> None:
    swarm = VirtualSwarm(campaign(total_steps=150))
    swarm.start_all()
    await swarm.until_round(3)
    await asyncio.sleep(delay_s)
    left_at = now()
    leaver = swarm.peers.pop("B")
    leaver.leave()
    await swarm.until(swarm.tasks["B"].done)
    assert now() - left_at < SILENCE_S
    swarm.network.kill("B")
    await swarm.until(lambda: "B" not in last_commit(swarm).members)
    assert now() - left_at < 20
    assert all(owners and "B" not in owners for owners in last_commit(swarm).owners)
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    commits = swarm.recorders["A"].commits()
    included = [i for number, trained in swarm.samples["B"].items() if "B" in commits[number].members for i in trained]
    counts = Counter(samples(included + [i for name in "AC" for i in swarm.trainers[name].trained_samples]))
    assert max(counts.values()) == 1
    epoch = [position for epoch, position in counts if epoch == 0]
    assert sorted(epoch) == list(range(len(epoch)))


async def test_a_lone_trainer_goes_on_by_itself() -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(2)
    swarm.kill("B")
    await swarm.until_round(3)
    swarm.kill("C")
    await swarm.until_finished(300)
    commit = swarm.recorders["A"].commits()[6]
    assert commit.members == ("A",)
    assert commit.owners == (("A",),) * 4


@pytest.mark.long
async def test_who_has_other_bits_than_most_repairs_them() -> None:
    swarm = VirtualSwarm(campaign())
    swarm.start_all()
    await swarm.until_round(2)
    replica = swarm.peers["B"].replica
    wrong = replica.base.values.copy()
    wrong[7] += 1.0
    await replica.store.install(dataclasses.replace(replica.base, values=wrong, digest=state_digest(wrong), pieces=b""))
    await swarm.until_finished()
    assert [event.round for event in swarm.recorders["B"].of(DigestMismatch)] == [2]
    swarm.assert_replicas_agree()


# What the tests need of a swarm ------------------------------------------------------------------------------------------


def now() -> float:
    return asyncio.get_running_loop().time()


def last_commit(swarm: VirtualSwarm) -> RoundCommitted:
    commits = swarm.recorders["A"].commits()
    return commits[max(commits)]


def next_coordinator(swarm: VirtualSwarm) -> str:
    return max(swarm.peers.values(), key=lambda peer: peer.node.log.round).node.coordinators()[0]


def kill_at_frame(swarm: VirtualSwarm, method: str, frame: int, eligible: Callable[[str], bool]) -> None:
    """The first eligible peer that sends this frame of this method dies before it does."""

    def hook(peer: str, its_method: str, index: int) -> None:
        if (its_method, index) == (method, frame) and peer in swarm.peers and eligible(peer):
            swarm.network.hook = None
            swarm.kill(peer)

    swarm.network.hook = hook


def frame_hook(swarm: VirtualSwarm, method: str, frame: int, victim: str, its_own: bool) -> Callable[[str, str, int], None]:
    """The victim dies when it, or somebody else, sends this frame of this method."""

    def hook(peer: str, its_method: str, index: int) -> None:
        if (its_method, index) == (method, frame) and victim in swarm.peers and (peer == victim) == its_own:
            swarm.kill(victim)

    return hook


def assert_no_sample_twice(swarm: VirtualSwarm, names: str) -> None:
    counts = Counter(sample for name in names for sample in samples(swarm.trainers[name].trained_samples))
    assert max(counts.values()) == 1


async def test_a_trainer_knows_how_many_average_with_it_in_each_phase() -> None:
    swarm = VirtualSwarm(campaign(total_steps=150))
    swarm.start_all("ABC")
    await swarm.until(lambda: 4 in swarm.phases.get("A", {}))
    swarm.kill("C")
    alone_from = swarm.round_of("A") + 4
    await swarm.until(lambda: alone_from in swarm.phases["A"])
    peers = {number: phase.averaged_peers for number, phase in swarm.phases["A"].items()}
    assert peers[4] == pytest.approx(3, abs=0.1)
    assert peers[alone_from] == pytest.approx(2, abs=0.1)


async def test_a_commit_that_contradicts_its_plan_is_refused_and_no_crash() -> None:
    swarm = VirtualSwarm(campaign(total_steps=60))
    swarm.start_all()
    await swarm.until_round(2)
    replica, log = swarm.peers["A"].replica, swarm.nodes["A"].log
    decided = log.at(log.round)
    wrong = dataclasses.replace(decided, commit=dataclasses.replace(decided.commit, lost=((99,),)))
    assert await replica.complete_results(decided.commit) is not None
    with pytest.raises(Refused, match="contradicts its plan: roots"):
        await replica.complete_results(wrong.commit)


@pytest.mark.long
async def test_a_helper_that_comes_first_and_lacks_the_base_leaves_the_round_to_trainers(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(electorate, "HOME_CONNECTIONS", 2)
    swarm = VirtualSwarm(campaign(total_steps=200, sync={"min_peers": 3}))
    swarm.start_all()
    await swarm.until_round(3)
    log = swarm.nodes["W"].log
    assert {log.at(number).ballot.coordinator for number in range(1, 4)} == {"W"}
    monkeypatch.setattr(swarm.helper.coordinators, "_holds_last_base", lambda: False)
    await swarm.until(lambda: log.round >= 8)
    by = [log.at(number).ballot.coordinator for number in range(5, 9)]
    assert "W" not in by
    monkeypatch.undo()
    monkeypatch.setattr(electorate, "HOME_CONNECTIONS", 2)
    await swarm.until(lambda: log.round >= 11)
    assert log.at(11).ballot.coordinator == "W"
    swarm.assert_replicas_agree()
