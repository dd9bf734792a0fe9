"""What the campaign's owner orders holds for everybody from the same round on, and nobody else can order anything."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from dataclasses import replace
from typing import Any

import pytest

from spes_p2p.campaign.orders import CampaignView, parse_order, revoked, rollback, unreached
from spes_p2p.client.owner import _accepted, _view
from spes_p2p.consensus.certificate import vote_message
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.consensus.control import describe, describe_news, is_rollback, number_of, owner_of, signed
from spes_p2p.errors import UPGRADE, PeerUnreachable, Refused, UserError
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Ballot, CertifiedCommit, Change, Control, ControlRequest, Known, Pardon, Vote
from spes_p2p.messages.fields import MAX_BANNED
from spes_p2p.messages.methods import CONTROL, PROTOCOL_VERSION
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.observe.events import BaseRestored, Controlled, DigestMismatch, RoundCommitted, RoundFailed, WorkDropped
from spes_p2p.rounds.archive import Archive, archived_rounds
from spes_p2p.rounds.schedule import scheduled
from spes_p2p.testing.in_memory_world import in_memory_world
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate
from spes_p2p.testing.simulated_identity import SimulatedIdentity

OWNER = "W"
OWNER_ID, OTHER_ID = "Qm" + "w" * 44, "Qm" + "x" * 44


def record(swarm: VirtualSwarm, number: int, state: Any = "running", signer: str = OWNER, **changes: Any) -> Control:
    """As the owner's command makes it."""
    return signed(replace(Control(swarm.campaign.hash, number, state, (), -1, b""), **changes), SimulatedIdentity(signer))


async def send(swarm: VirtualSwarm, peer: str, control: Control) -> Known:
    """What the command does with one peer."""
    endpoint = RpcEndpoint(in_memory_world(swarm.network, "visitor").transport, 5.0)
    return unpack(Known, await endpoint.ask(peer, CONTROL, pack(ControlRequest(control)), 5.0))


def applied(swarm: VirtualSwarm, number: int) -> dict[str, int]:
    """By peer, the round in whose commit it found this record."""
    found = {}
    for name, node in swarm.nodes.items():
        carrying = [d.commit.round for d in node.log.since(-1) if number_of(d.commit.control) == number]
        found.update({name: min(carrying)} if carrying else {})
    return found


def hold(swarm: VirtualSwarm, state: str) -> bool:
    """Does every living peer's commit say so?"""
    controls = [node.log.last.control for node in swarm.nodes.values()]
    return all(control is not None and control.state == state for control in controls)


async def paused(overlap: bool = False) -> VirtualSwarm:
    """A swarm of W, A, B and C after a pause in round 3 or so; everybody has applied it."""
    swarm = VirtualSwarm(campaign(total_steps=70, sync={"reform_after_s": 30.0, "overlap": overlap}))
    swarm.start_all()
    await swarm.until_round(2)
    await send(swarm, "B", record(swarm, 1, "paused"))
    await swarm.until(lambda: hold(swarm, "paused"))
    await swarm.until(lambda: len(set(swarm.rounds().values())) == 1)
    return swarm


async def finish(swarm: VirtualSwarm) -> None:
    await swarm.until_finished()
    swarm.assert_same_commits()
    swarm.assert_replicas_agree()
    assert all(peer.finished for peer in swarm.peers.values())


async def test_a_record_that_one_peer_got_holds_for_all_from_the_same_round_on() -> None:
    swarm = await paused()
    assert len(set(applied(swarm, 1).values())) == 1
    assert set(applied(swarm, 1)) == set("WABC")
    pause = record(swarm, 1, "paused")
    told = [recorder.of(Controlled) for recorder in swarm.recorders.values()]
    assert told == [[Controlled(applied(swarm, 1)["A"], 1, "paused", "paused", "paused")]] * 4
    assert all(node.controls.newest == pause for node in swarm.nodes.values())


@pytest.mark.long
async def test_in_a_pause_nobody_trains_and_after_it_everything_goes_on_from_the_same_bits() -> None:
    swarm = await paused()
    before, trained = swarm.peers["A"].replica.base, swarm.trained_tokens()
    assert all(peer.replica.ledger.pending.tokens == 0 for peer in swarm.peers.values()), "the last phase is in the base"
    await asyncio.sleep(300)
    assert set(swarm.rounds().values()) == {before.round}
    assert swarm.trained_tokens() == trained
    await send(swarm, "C", record(swarm, 2, "running"))
    await swarm.until_round(before.round + 1)
    assert swarm.digests()[before.round + 1] == {before.digest}, "the round that resumes moves nothing"
    await finish(swarm)
    assert swarm.recorders["A"].of(RoundCommitted)[-1].campaign_step == 70


def test_a_pause_costs_no_work_and_changes_no_bit_of_what_follows() -> None:
    """The same trainer with and without a pause: the same losses, the same tokens, the same last base.

    One trainer: the order in which a reducer adds several up is open, with a pause or without.
    """

    async def run(with_pause: bool) -> tuple[Any, ...]:
        swarm = VirtualSwarm(campaign(total_steps=60, sync={"min_peers": 1}))
        swarm.start_all("A")
        await swarm.until_round(2)
        if with_pause:
            await send(swarm, "W", record(swarm, 1, "paused"))
            await swarm.until(lambda: hold(swarm, "paused"))
            await asyncio.sleep(100)
            await send(swarm, "W", record(swarm, 2, "running"))
        await finish(swarm)
        committed = [commit for commit in swarm.recorders["A"].commits().values() if commit.tokens]
        losses = [commit.loss for commit in committed]
        return losses, committed[-1].total_tokens, swarm.trained_tokens(), committed[-1].base_digest

    assert simulate(lambda: run(True)) == simulate(lambda: run(False))


@pytest.mark.parametrize("victims", ["first in rank", "W", "WABC"])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_a_pause_holds_when_those_who_wait_are_killed_and_come_back(victims: str) -> None:
    swarm = await paused()
    number = swarm.round_of("A")
    killed = swarm.nodes["A"].coordinators()[0] if victims == "first in rank" else victims
    for name in killed:
        swarm.kill(name)
    await asyncio.sleep(100)
    for name in killed:
        swarm.start_again(name)
    await asyncio.sleep(100)
    assert {node.log.round for node in swarm.nodes.values()} == {number}
    assert hold(swarm, "paused")
    await send(swarm, "A", record(swarm, 2, "running"))
    await finish(swarm)


@pytest.mark.long
async def test_a_pause_holds_when_every_trainer_has_gone_and_another_comes() -> None:
    swarm = await paused()
    for name in "ABC":
        swarm.kill(name)
    await asyncio.sleep(50)
    swarm.start("D")
    await swarm.until(lambda: swarm.round_of("D") >= 0)
    await asyncio.sleep(200)
    assert hold(swarm, "paused")
    assert swarm.trained_tokens() == swarm.recorders["W"].of(RoundCommitted)[-1].total_tokens
    await send(swarm, "W", record(swarm, 2, "running"))
    await swarm.until(lambda: swarm.tasks["D"].done())
    assert swarm.peers["D"].finished


@pytest.mark.long
async def test_where_rounds_overlap_training_a_pause_keeps_the_work_of_the_phase_under_way_for_the_round_that_resumes() -> None:
    swarm = await paused(overlap=True)
    await asyncio.sleep(100)
    before, trained = swarm.peers["A"].replica.base, swarm.trained_tokens()
    assert all(peer.replica.ledger.pending.tokens for peer in swarm.peers.values())
    await asyncio.sleep(300)
    assert swarm.trained_tokens() == trained
    assert set(swarm.rounds().values()) == {before.round}
    swarm.restart("B")
    await send(swarm, "C", record(swarm, 2, "running"))
    await finish(swarm)
    commits = swarm.recorders["A"].commits()
    assert commits[before.round + 1].total_tokens == trained
    assert max(commits.values(), key=lambda commit: commit.round).total_tokens == swarm.trained_tokens()


@pytest.mark.long
async def test_who_joins_a_paused_swarm_waits_with_the_others_and_trains_when_it_goes_on() -> None:
    swarm = await paused()
    number = swarm.round_of("A")
    swarm.start("D")
    await swarm.until(lambda: swarm.round_of("D") == number)
    await asyncio.sleep(50)
    assert swarm.recorders["D"].of(Controlled) == [Controlled(number, 1, "paused", "paused", "paused")]
    await send(swarm, "D", record(swarm, 2, "running"))
    await swarm.until_round(number + 2)
    assert set(applied(swarm, 2)) == set("WABCD")
    assert len(set(applied(swarm, 2).values())) == 1
    assert "D" in swarm.recorders["A"].commits()[number + 1].members
    await finish(swarm)


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_stop_ends_the_campaign_for_all_after_the_round_that_applies_it(overlap: bool) -> None:
    swarm = VirtualSwarm(campaign(total_steps=1000, sync={"overlap": overlap}))
    swarm.start_all()
    await swarm.until_round(2)
    await send(swarm, "A", record(swarm, 1, "stopped"))
    await finish(swarm)
    assert set(swarm.rounds().values()) == {applied(swarm, 1)["W"]}
    lost = sum(event.tokens for recorder in swarm.recorders.values() for event in recorder.of(WorkDropped))
    assert bool(lost) == overlap
    assert swarm.trained_tokens() == swarm.recorders["A"].of(RoundCommitted)[-1].total_tokens + lost
    swarm.start("D")
    await swarm.until(lambda: swarm.tasks["D"].done())
    assert swarm.peers["D"].replica.base.digest == swarm.helper.replica.base.digest
    answer = await send(swarm, "W", record(swarm, 2, "running"))
    assert answer.newest == record(swarm, 1, "stopped"), "nothing follows a stop"


async def test_a_record_of_anybody_else_or_of_another_campaign_is_refused() -> None:
    swarm = VirtualSwarm(campaign(total_steps=60))
    swarm.start_all()
    await swarm.until_round(1)
    good = record(swarm, 1, "stopped")
    forged = [
        record(swarm, 1, "stopped", signer="A"),
        record(swarm, 1, "stopped", campaign="0" * 64),
        replace(good, number=2),
        replace(record(swarm, 1, "paused"), state="stopped"),
        replace(good, signature=b""),
    ]
    for control in forged:
        with pytest.raises(Refused, match="did not sign"):
            await send(swarm, "B", control)
    await finish(swarm)
    assert all(node.log.last.control is None for node in swarm.nodes.values())


@pytest.mark.long
async def test_a_record_that_is_sent_again_or_too_late_changes_nothing() -> None:
    swarm = await paused()
    await send(swarm, "A", record(swarm, 3, "running"))
    await swarm.until(lambda: hold(swarm, "running"))
    for late in (record(swarm, 1, "paused"), record(swarm, 2, "stopped"), record(swarm, 3, "stopped")):
        answer = await send(swarm, "B", late)
        assert answer.newest == record(swarm, 3, "running")
    await finish(swarm)
    assert number_of(swarm.peers["A"].node.log.last.control) == 3


@pytest.mark.long
async def test_of_two_records_that_wait_for_a_round_the_newer_one_holds() -> None:
    swarm = VirtualSwarm(campaign(total_steps=60), seconds_per_step=2.0)  # time for two meetings in a phase
    swarm.start_all()
    await swarm.until_round(1)
    await send(swarm, "A", record(swarm, 2, "running"))
    await send(swarm, "B", record(swarm, 1, "stopped"))
    await finish(swarm)
    assert swarm.peers["A"].node.log.last.step == 60
    assert not applied(swarm, 1)


@pytest.mark.long
async def test_a_damaged_record_on_the_disk_is_learned_again() -> None:
    swarm = await paused()
    for name in "AB":
        swarm.kill(name)
        swarm.stores[name] = swarm.stores[name].reopen()
        swarm.stores[name].write(CONTROL, [b"garbage"])
        swarm.start_again(name)
    await asyncio.sleep(50)
    assert hold(swarm, "paused")
    await send(swarm, "C", record(swarm, 2, "running"))
    await finish(swarm)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(1)
@pytest.mark.long
def test_whatever_is_ordered_and_whoever_dies_an_order_holds_from_one_round_on(seed: int) -> None:
    """Random orders to random peers, kills and restarts, at random times; then everybody is back and the campaign ends."""

    async def main() -> None:
        rng = random.Random(seed)
        sync = {"reform_after_s": 30.0, "overlap": seed % 2 == 1}
        swarm = VirtualSwarm(campaign(total_steps=10_000, sync=sync), seed, archive=Archive(2, 2))
        swarm.start_all()
        await swarm.until_round(3)
        for number in range(1, 9):
            await asyncio.sleep(rng.uniform(0, 40))
            kept = archived_rounds(swarm.stores["W"])
            back = rng.choice(kept) if kept and rng.random() < 0.5 else -1
            order = record(swarm, number, rng.choice(("running", "paused")), rollback=back)
            victim = rng.choice("ABCW")
            with contextlib.suppress(PeerUnreachable):
                await send(swarm, rng.choice("ABCW"), order)
            await asyncio.sleep(rng.choice((0.0, 0.3, 3.0)))
            swarm.kill(victim)
            await asyncio.sleep(rng.uniform(0, 20))
            swarm.start_again(victim)
        await send(swarm, "W", record(swarm, 9, "running"))
        await swarm.until(lambda: set(applied(swarm, 9)) == set("WABC"))
        for number in range(1, 10):
            assert len(set(applied(swarm, number).values())) <= 1
        await send(swarm, "A", record(swarm, 10, "stopped"))
        await finish(swarm)
        assert not any(replica_differs(swarm, name) for name in "ABC")

    simulate(main, 20_000.0)


def test_the_owner_is_who_made_base_0() -> None:
    swarm = VirtualSwarm(campaign())
    assert owner_of(swarm.genesis) == OWNER


# Back to an earlier round -----------------------------------------------------------------------------------------------


async def archiving(**sections: Any) -> VirtualSwarm:
    """A swarm of W, A, B and C whose helper keeps every second base, in round 6 or so."""
    swarm = VirtualSwarm(campaign(total_steps=100, **sections), archive=Archive(2, 2))
    swarm.start_all()
    await swarm.until_round(6)
    assert archived_rounds(swarm.stores["W"]) == [4, 6]
    return swarm


def rollback_of(swarm: VirtualSwarm, number: int) -> int:
    """The round of the commit that applied this record, the same for everybody."""
    (found,) = set(applied(swarm, number).values())
    assert is_rollback(swarm.nodes["W"].log.commit_at(found))
    return found


@pytest.mark.parametrize(("codec", "overlap"), [("fp16", False), ("int8", False), ("fp16", True)])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_a_rollback_takes_everybody_back_to_the_same_bits_and_training_goes_on(codec: str, overlap: bool) -> None:
    swarm = await archiving(sync={"codec": codec, "overlap": overlap}, outer={"shared_momentum": 0.9})
    there = swarm.digests()[4].pop()
    await send(swarm, "A", record(swarm, 1, rollback=4))
    await swarm.until(lambda: set(applied(swarm, 1)) == set("WABC"))
    number = rollback_of(swarm, 1)
    commit = swarm.nodes["A"].log.commit_at(number)
    assert (commit.base_digest, commit.step) == (there, swarm.nodes["A"].log.commit_at(4).step)
    await swarm.until_round(number + 1)
    for name in "WABC":
        back = [event for event in swarm.recorders[name].of(BaseRestored) if event.source == "rollback"]
        assert [(event.round, event.base_digest, event.campaign_step) for event in back] == [(number, there, commit.step)]
    dropped = [swarm.recorders[name].of(WorkDropped) for name in "ABC"]
    assert [[event.reason for event in each] for each in dropped] == [["the campaign was rolled back"]] * 3
    await finish(swarm)
    assert swarm.recorders["A"].of(RoundCommitted)[-1].campaign_step == 100
    assert all(not replica_differs(swarm, name) for name in "ABC")


def replica_differs(swarm: VirtualSwarm, name: str) -> bool:
    return bool(swarm.recorders[name].of(DigestMismatch))


@pytest.mark.long
async def test_who_was_away_during_a_rollback_follows_it_and_who_joins_later_begins_after_it() -> None:
    swarm = await archiving()
    await asyncio.sleep(3)
    swarm.kill("C")
    await send(swarm, "A", record(swarm, 1, rollback=4))
    await swarm.until(lambda: set(applied(swarm, 1)) == set("WAB"))
    number = rollback_of(swarm, 1)
    await swarm.until_round(number + 1)
    swarm.start_again("C")
    swarm.start("D")
    await swarm.until(lambda: min(swarm.round_of("C"), swarm.round_of("D")) > number)
    assert rollback_of(swarm, 1) == number
    await finish(swarm)
    assert swarm.samples["D"]


@pytest.mark.long
async def test_a_rollback_whose_base_nobody_here_keeps_waits_for_who_does_and_stops_no_round() -> None:
    swarm = await archiving()
    swarm.kill("W")
    await send(swarm, "A", record(swarm, 1, rollback=4))
    await swarm.until_round(8)
    assert not applied(swarm, 1)
    swarm.start_again("W")
    await swarm.until(lambda: set(applied(swarm, 1)) == set("WABC"))
    assert 4 in archived_rounds(swarm.stores["W"]), "the base that is gone back to stays"
    await finish(swarm)
    assert swarm.nodes["A"].log.commit_at(rollback_of(swarm, 1)).step == 40


@pytest.mark.long
async def test_a_paused_campaign_that_is_rolled_back_stays_paused() -> None:
    swarm = await archiving()
    await send(swarm, "A", record(swarm, 1, "paused"))
    await swarm.until(lambda: hold(swarm, "paused"))
    trained = swarm.trained_tokens()
    await send(swarm, "A", record(swarm, 2, "paused", rollback=4))
    await swarm.until(lambda: len(applied(swarm, 2)) == 4)
    await asyncio.sleep(100)
    assert {node.log.round for node in swarm.nodes.values()} == {rollback_of(swarm, 2)}
    assert swarm.trained_tokens() == trained
    await send(swarm, "A", record(swarm, 3, "running"))
    await finish(swarm)


@pytest.mark.parametrize("victim", ["the coordinator", "W"])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_who_is_killed_while_it_goes_back_goes_on_from_there(victim: str) -> None:
    swarm = await archiving(sync={"reform_after_s": 30.0})
    await send(swarm, "A", record(swarm, 1, rollback=4))
    await swarm.until(lambda: bool(applied(swarm, 1)), 100)
    name = swarm.nodes["A"].coordinators()[0] if victim == "the coordinator" else victim
    swarm.restart(name)
    await finish(swarm)
    assert swarm.nodes["A"].log.commit_at(rollback_of(swarm, 1)).step == 40


@pytest.mark.long
async def test_a_commit_without_a_plan_is_no_commit_unless_the_owners_record_leads_to_it() -> None:
    """What a majority of liars could sign: nobody takes it up."""
    swarm = await archiving()
    log, parent = swarm.nodes["A"].log, swarm.nodes["A"].log.last
    good = log.rolled_back(parent, record(swarm, 1, rollback=4))
    assert good is not None
    assert log.leads_to(parent, good)
    assert log.rolled_back(parent, record(swarm, 1, rollback=parent.round)) is None, "nobody has certified that base yet"
    wrong = [
        replace(good, base_digest="0" * 64),
        replace(good, step=good.step + 10),
        replace(good, control=None),
        replace(good, control=parent.control, plan="p", base_digest=parent.base_digest, helpers=("A",)),
        replace(good, control=record(swarm, 1, rollback=4, signer="A")),
        replace(good, control=record(swarm, 1), plan=""),
        replace(good, plan="p"),
        replace(good, plan="p", control=record(swarm, 1, "paused", signer="A")),
    ]
    ballot = Ballot(1, "A")
    for commit in wrong:
        message = vote_message(ballot, commit.id)
        votes = tuple(Vote(name, SimulatedIdentity(name).sign(message)) for name in parent.electorate)
        with pytest.raises(Refused, match="does not hold"):
            log.admits(CertifiedCommit(commit, ballot, votes))


# Another schedule -------------------------------------------------------------------------------------------------------


def rates(swarm: VirtualSwarm) -> dict[int, set[float]]:
    """For each round, the peak learning rates by which anybody trained towards it."""
    found: dict[int, set[float]] = {}
    for phases in swarm.phases.values():
        for number, phase in phases.items():
            assert phase.training is not None
            found.setdefault(number, set()).add(phase.training.learning_rate)
    return found


@pytest.mark.long
async def test_another_schedule_holds_for_all_from_its_round_on_for_joiners_and_after_rejoins_too() -> None:
    swarm = VirtualSwarm(campaign(total_steps=100))
    swarm.start_all()
    await swarm.until_round(1)
    change = Change(5, '{"learning_rate":0.5,"min_lr_ratio":1.0}')
    await send(swarm, "B", record(swarm, 1, changes=(change,)))
    await swarm.until_round(4)
    swarm.kill("C")
    swarm.start("D")
    await swarm.until(lambda: swarm.round_of("D") >= 5)
    swarm.start_again("C")
    swarm.restart("A")
    await finish(swarm)
    assert rates(swarm) == {number: {1e-3 if number < 5 else 0.5} for number in range(1, 11)}
    assert set(swarm.phases["D"]) >= {7, 8, 9, 10}
    shown = [{c.round: c.learning_rate for c in r.commits().values() if c.round >= 5} for r in swarm.recorders.values()]
    assert {rate for each in shown for rate in each.values()} == {0.5}


@pytest.mark.parametrize(("fields", "steps"), [
    ('{"total_steps":50}', [10, 20, 30, 40, 50]),
    ('{"total_steps":80}', [10, 20, 30, 40, 50, 60, 70, 80]),
    ('{"sync_steps":20}', [10, 20, 30, 50, 60]),
    ('{"total_steps":20}', [10, 20, 30]),
    ('{"batch_size":1}', [10, 20, 30, 40, 50, 60]),
    ('{"learning_rate":-1}', [10, 20, 30, 40, 50, 60]),
    ("[[", [10, 20, 30, 40, 50, 60]),
])  # fmt: skip
@pytest.mark.sampled(1)
async def test_the_campaign_ends_where_the_schedule_says_and_what_cannot_be_is_left_out_by_all(
    fields: str, steps: list[int]
) -> None:
    swarm = VirtualSwarm(campaign(total_steps=60))
    swarm.start_all()
    await swarm.until_round(1)
    await send(swarm, "A", record(swarm, 1, changes=(Change(4, fields),)))
    await finish(swarm)
    commits = list(swarm.recorders["A"].commits().values())
    assert [commit.campaign_step for commit in commits] == [0, *steps]
    assert {commit.total_rounds for commit in commits[4:]} == {len(steps)} or len(steps) < 4


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
async def test_a_complete_campaign_goes_on_when_its_owner_adds_steps(overlap: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    swarm = VirtualSwarm(campaign(total_steps=40, sync={"overlap": overlap}), checkpoint_every_s=1e6)
    swarm.start_all()
    await finish(swarm)
    await asyncio.gather(*(swarm.tasks[name] for name in "ABC"))
    last = swarm.nodes["W"].log.round
    await asyncio.sleep(100)
    for name in "ABC":
        swarm.network.kill(name)
    more = Change(last + 1, '{"total_steps":70}')
    await send(swarm, "W", record(swarm, 1, changes=(more,)))
    await asyncio.sleep(100)
    assert not swarm.recorders["W"].of(RoundFailed), "who left after the last round is not waited for"
    for name in "ABC":
        swarm.start_again(name)
    swarm.start("D")
    await finish(swarm)
    assert swarm.recorders["A"].of(RoundCommitted)[-1].campaign_step == 70
    assert swarm.recorders["D"].of(RoundCommitted)[-1].campaign_step == 70
    assert swarm.recorders["W"].commits()[last + 1].campaign_step == 40, "this round brings the order"
    with_its_moments = f"with the moments of this trainer when it left after round {last}"
    assert sum(with_its_moments in line for line in caplog.messages) == 3
    assert not any("no checkpoint of round" in line for line in caplog.messages)


@pytest.mark.long
async def test_trainers_that_still_serve_the_last_round_stay_when_steps_are_added() -> None:
    swarm = VirtualSwarm(campaign(total_steps=40, evaluation={"every_rounds": 1}, data={"validation_manifest": "v"}))
    swarm.evaluation_s = 10.0
    swarm.start_all()
    await swarm.until(lambda: swarm.nodes["W"].log.last.step == 40)
    await send(swarm, "W", record(swarm, 1, changes=(Change(swarm.nodes["W"].log.round + 1, '{"total_steps":60}'),)))
    assert not any(task.done() for task in swarm.tasks.values())
    await swarm.until(lambda: swarm.nodes["W"].log.last.step == 60)
    await finish(swarm)


def test_a_complete_campaign_takes_only_orders_that_add_steps() -> None:
    complete = view(round_number=6, step=60)
    order = parse_order(["schedule", "7", "total_steps=80"])(complete)
    assert describe(order, 6) == "from round 7 on total_steps 80"
    assert not view(round_number=6, step=60, newest=order).is_complete
    for words in ("pause", "stop", f"ban {OTHER_ID}", "rollback 2", "schedule 8 total_steps=80", "schedule 7 total_steps=60",
                  "schedule 7 learning_rate=1e-4"):
        with pytest.raises(UserError, match=r"^[^\n]*schedule 7 total_steps=NUMBER, with more than 60$"):
            parse_order(words.split())(complete)


def test_an_extension_can_be_changed_and_taken_back_until_a_round_applies_it() -> None:
    complete = view(round_number=6, step=60)
    order = parse_order(["schedule", "7", "total_steps=900"])(complete)
    extended = view(round_number=6, step=60, newest=order)
    shorter = parse_order(["schedule", "7", "total_steps=80"])(extended)
    assert describe(shorter, 6) == "from round 7 on total_steps 80"
    assert parse_order(["schedule", "7"])(extended).changes == ()
    assert describe(parse_order(["schedule", "8", "total_steps=80"])(extended), 7) == "from round 8 on total_steps 80"
    for words in ("schedule 7 total_steps=60", "schedule 7 total_steps=50"):
        with pytest.raises(UserError, match=r"schedule 7 total_steps=NUMBER, with more than 60$"):
            parse_order(words.split())(extended)
    for words in ("schedule 8 total_steps=80", "schedule 7"):
        with pytest.raises(UserError, match=r"give round 9 or later|order other settings from round 9 or later"):
            parse_order(words.split())(view(round_number=7, step=70, newest=order, applied=order))


def view(
    round_number: int = 3, newest: Control | None = None, step: int = 30, excluded: tuple[str, ...] = (),
    applied: Control | None = None,
) -> CampaignView:
    the_campaign = campaign(total_steps=60)
    return CampaignView(
        the_campaign.hash, OWNER_ID, the_campaign.config, newest, round_number, step, (2,), excluded, applied
    )


@pytest.mark.parametrize(("words", "is_reached"), [
    ("schedule 6 learning_rate=0.5", True), ("schedule 7 learning_rate=0.5", False), ("schedule 99 total_steps=2100", False),
    ("schedule 7 total_steps=80", True), ("require 1 from 6", True), ("require 1 from 7", False), ("pause", True),
])
def test_the_owner_is_told_that_an_order_begins_after_the_end(words: str, is_reached: bool) -> None:
    assert (unreached(parse_order(words.split())(view()), view()) == "") is is_reached
    longer = view(newest=parse_order(["schedule", "5", "total_steps=2000"])(view()))
    assert unreached(parse_order(words.split())(longer), longer) == ""


def test_steps_that_are_added_to_a_complete_campaign_are_reached() -> None:
    complete = view(6, step=60)
    assert unreached(parse_order(["schedule", "7", "total_steps=80"])(complete), complete) == ""


def test_a_schedule_and_a_requirement_that_are_not_in_effect_yet_are_taken_back_in_the_words_that_the_owner_is_told() -> None:
    for words, opposite, news in (
        ("schedule 99 learning_rate=0.5", "schedule 99", "taken back: from round 99 on learning_rate 0.5"),
        (f"require {PROTOCOL_VERSION} from 99", "require none", f"protocol {PROTOCOL_VERSION} no longer required"),
    ):
        earlier = parse_order(["schedule", "5", "learning_rate=0.1"])(view())
        ordered = parse_order(words.split())(view(newest=earlier))
        assert unreached(ordered, view(newest=earlier)).endswith(f"; take it back with control {opposite}")
        back = parse_order(opposite.split())(view(newest=ordered))
        assert back == replace(earlier, number=3)
        assert describe_news(back, ordered, 4) == news
        assert unreached(back, view(newest=ordered)) == ""


def test_only_what_is_ordered_and_not_in_effect_is_taken_back() -> None:
    newest = parse_order(["schedule", "6", "total_steps=90"])(view())
    newest = parse_order(["schedule", "9", "warmup_steps=80"])(view(newest=newest))
    for words, round_number, expected in (
        ("schedule 7", 3, "schedule 7: nothing is ordered from this round on; rounds with changes ahead: 6, 9"),
        ("schedule 6", 5, "schedule 6: in effect already; order other settings from round 7 or later on"),
        ("schedule 6", 3, "without its settings those of round 9 are wrong"),
        ("require none", 3, "require none: no protocol is required"),
    ):
        with pytest.raises(UserError, match=expected):
            parse_order(words.split())(view(round_number, newest))
    assert parse_order(["schedule", "9"])(view(newest=newest)).changes == newest.changes[:1]


def test_an_order_in_words() -> None:
    assert describe(None, 5) == ""
    changes = (Change(9, '{"learning_rate":0.0001,"total_steps":80}'), Change(12, "\x1b[31m"))
    control = Control("c", 1, "paused", changes, 4, b"")
    expected = "paused, rolled back to round 4, from round 9 on learning_rate 0.0001, total_steps 80, from round 12 on 31m"
    assert describe(control, 5) == expected


def test_a_change_is_listed_until_a_later_one_of_the_same_field_holds() -> None:
    def ordered(*changes: tuple[int, str]) -> Control:
        return Control("c", 1, "running", tuple(Change(number, training) for number, training in changes), -1, b"")

    rates = [f'{{"learning_rate":{rate}}}' for rate in (1, 2, 3)]
    twice = ordered((5, rates[0]), (5, rates[1]), (7, '{"total_steps":80}'), (9, rates[2]))
    rest = "from round 7 on total_steps 80, from round 9 on learning_rate 3"
    assert describe(twice, 2) == describe(twice, 7) == f"from round 5 on learning_rate 2, {rest}"
    assert describe(twice, 8) == rest  # the phase that round 9 takes has begun
    partly = ordered((5, '{"total_steps":60,"warmup_steps":2}'), (6, '{"total_steps":80}'))
    assert describe(partly, 9) == "from round 5 on warmup_steps 2, from round 6 on total_steps 80"


def test_news_of_an_order_are_what_it_changes() -> None:
    told: list[str] = []
    newest: Control | None = None
    for words in ("schedule 9 learning_rate=0.5", "pause", "resume", "schedule 9 learning_rate=0.5", f"ban {OTHER_ID}",
                  f"unban {OTHER_ID}", f"require {PROTOCOL_VERSION} from 9"):
        order = parse_order(words.split())(view(newest=newest))
        told.append(describe_news(order, newest, 4))
        newest = order
    assert newest is not None
    rate, short = "from round 9 on learning_rate 0.5", OTHER_ID[-6:]
    assert told == [rate, "paused", "resumed", rate, f"{short} banned", f"{short} no longer banned",
                    f"protocol {PROTOCOL_VERSION} required from round 9 on"]
    assert describe_news(replace(newest, number=9, rollback=4), newest, 4) == "rolled back to round 4"
    assert describe_news(newest, newest, 4) == ""


def test_what_the_guard_ordered_is_told_from_what_a_person_ordered() -> None:
    guard = " (by the owner's bootstrap peer: the held-out loss ran away)"
    back = replace(rollback(2, view()), by_guard=True)
    assert describe(back, 4) == describe_news(back, None, 4) == f"rolled back to round 2{guard}"
    paused = replace(parse_order(["pause"])(view(newest=back, applied=back)), by_guard=True)
    assert describe(paused, 4) == describe_news(paused, back, 4) == f"paused{guard}"
    there = view(newest=paused, applied=paused)
    banned, again = parse_order(["ban", OTHER_ID])(there), parse_order(["rollback", "2"])(there)
    assert describe(banned, 4) == f"paused{guard}, {OTHER_ID[-6:]} banned"
    assert (describe(again, 4), describe_news(again, paused, 4)) == (f"paused{guard}, rolled back to round 2",
                                                                     "rolled back to round 2")
    resumed = parse_order(["resume"])(there)
    assert describe_news(resumed, paused, 4) == "resumed"
    assert describe(parse_order(["pause"])(view(newest=resumed, applied=resumed)), 4) == "paused"
    assert describe(parse_order(["pause"])(view(newest=back, applied=back)), 4) == "paused"


def test_an_order_that_no_round_has_applied_is_no_fact_and_is_not_replaced_without_a_word() -> None:
    paused = parse_order(["pause"])(view())
    with pytest.raises(UserError, match=r"already ordered \(order 1\), but not in effect yet; it .* committed after round 3$"):
        parse_order(["pause"])(view(newest=paused))
    with pytest.raises(UserError, match=r"already paused \(order 1\)"):
        parse_order(["pause"])(view(newest=paused, applied=paused))
    stopped = parse_order(["stop"])(view(newest=paused, applied=paused))
    waits = view(newest=stopped, applied=paused)
    told = {word: revoked(parse_order([word])(waits), waits) for word in ("pause", "resume", "stop")}
    assert told == {"pause": "order 2 (stopped)", "resume": "order 2 (stopped)", "stop": ""}
    assert not revoked(parse_order(["ban", OTHER_ID])(waits), waits)


def test_an_order_keeps_what_was_ordered_before() -> None:
    first = parse_order(["schedule", "9", "learning_rate=0.5"])(view())
    second = parse_order(["schedule", "7", "learning_rate=0.2", "total_steps=80"])(view(newest=first))
    required = parse_order(["require", str(PROTOCOL_VERSION), "from", "9"])(view(newest=second))
    in_words = f"protocol {PROTOCOL_VERSION} required from round 9 on, from round 7 on learning_rate"
    assert describe(required, 3).startswith(in_words)
    paused = parse_order(["pause"])(view(newest=required))
    again = parse_order(["resume"])(view(newest=paused))
    assert again.requires == required.requires
    stopped = parse_order(["stop"])(view(newest=again))
    assert parse_order(["resume"])(view(newest=stopped)).state == "running", "no round has applied it yet"
    assert [c.number for c in (first, second, required, paused, again)] == [1, 2, 3, 4, 5]
    assert [c.state for c in (first, second, paused, again)] == ["running", "running", "paused", "running"]
    for number, expected in [(6, (1e-3, 60)), (7, (0.2, 80)), (8, (0.2, 80)), (9, (0.5, 80))]:
        training = scheduled(view().config, again, number).training
        assert (training.learning_rate, training.total_steps) == expected


async def test_an_order_follows_one_that_is_not_decided_yet_unless_that_rolls_back_to_a_base_that_somebody_keeps() -> None:
    swarm = VirtualSwarm(campaign())
    identity, config = SimulatedIdentity("visitor"), swarm.campaign.config

    def seen(newest: Control, applied: Control | None = None) -> CampaignView:
        log = CommitLog(identity, replace(swarm.genesis, round=5, step=50, control=applied))
        return _view(log, identity, config, {OWNER: Known(newest, 1, 5, 50, (4,))}, "address")

    stopped = record(swarm, 2, "stopped")
    assert parse_order(["resume"])(seen(stopped)).number == 3
    with pytest.raises(UserError, match="the rollback to round 4 is still pending"):
        seen(record(swarm, 2, rollback=4))
    waits = seen(record(swarm, 2, rollback=3))
    paused = parse_order(["pause"])(waits)
    assert (paused.number, paused.rollback, revoked(paused, waits)) == (3, -1, "order 2 (rolled back to round 3)")
    with pytest.raises(UserError, match="stopped permanently"):
        seen(stopped, stopped)


@pytest.mark.parametrize(("admission", "kept"), [("friends", (1, 2, 3)), ("invite", (1, 2)), ("open", (1, 2))])
def test_an_order_believes_certified_commits_and_no_stranger(admission: str, kept: tuple[int, ...]) -> None:
    swarm = VirtualSwarm(campaign(admission=admission))
    identity = SimulatedIdentity("visitor")
    last = replace(swarm.genesis, round=5, step=50, electorate=(OWNER, "A"), members=("A", "B"))
    lie = Known(record(swarm, 9, "stopped", signer="X"), 9, 10**6, 10**9, (4,), (OWNER,))
    known = {peer: Known(None, 0, 5, 50, (number,)) for number, peer in enumerate((OWNER, "A", "B"), 1)}
    view = _view(CommitLog(identity, last), identity, swarm.campaign.config, {**known, "X": lie}, "address")
    assert (view.newest, view.applied, view.round, view.step, view.excluded) == (None, None, 5, 50, ())
    assert view.archived == kept


def test_an_order_that_only_some_peers_have_beside_another_of_the_same_moment_is_no_success() -> None:
    swarm, identity = VirtualSwarm(campaign()), SimulatedIdentity("visitor")
    mine, other, lie = record(swarm, 2), record(swarm, 2, "stopped"), record(swarm, 2, "stopped", signer="X")

    def accepted(*newest: Control | None) -> int:
        return _accepted(mine, [Known(each, 1, 5, 50, ()) for each in newest], swarm.genesis, identity, "address")

    assert accepted(mine, mine, lie, None, record(swarm, 1), record(swarm, 3)) == 2
    with pytest.raises(UserError, match="another order 2 was given at the same time, and only one of both takes effect"):
        accepted(mine, mine, other)
    with pytest.raises(UserError, match="no peer accepted the order"):
        accepted(other, None)


def test_a_ban_stays_in_later_orders_until_it_is_lifted() -> None:
    once = parse_order(["ban", OTHER_ID])(view())
    assert describe(once, 3) == f"{OTHER_ID[-6:]} banned"
    with pytest.raises(UserError, match="is banned already"):
        parse_order(["ban", OTHER_ID])(view(newest=once))
    paused = parse_order(["pause"])(view(newest=once))
    assert paused.banned == (OTHER_ID,)
    assert parse_order(["unban", OTHER_ID])(view(newest=paused)).banned == ()
    full = replace(once, banned=tuple(f"Qm{number:044d}" for number in range(MAX_BANNED)))
    with pytest.raises(UserError, match=f"{MAX_BANNED} peers are banned, which is the most"):
        parse_order(["ban", OTHER_ID])(view(newest=full))


def test_a_pardon_is_ordered_once_for_each_exclusion_and_stays_in_later_orders() -> None:
    once = parse_order(["pardon", OTHER_ID])(view(excluded=(OTHER_ID,)))
    assert once.pardons == (Pardon(OTHER_ID, 3),)
    with pytest.raises(UserError, match="pardoned already, from the next round on"):
        parse_order(["pardon", OTHER_ID])(view(newest=once, excluded=(OTHER_ID,)))
    assert parse_order(["pause"])(view(newest=once)).pardons == once.pardons
    again = parse_order(["pardon", OTHER_ID])(view(newest=once, round_number=9, excluded=(OTHER_ID,), applied=once))
    assert again.pardons == (Pardon(OTHER_ID, 9),), "it was excluded again"
    full = replace(once, pardons=tuple(Pardon(f"Qm{number:044d}", number) for number in range(MAX_BANNED)))
    kept = parse_order(["pardon", OTHER_ID])(view(newest=full, excluded=(OTHER_ID,), applied=full)).pardons
    assert len(kept) == MAX_BANNED
    assert full.pardons[0] not in kept, "the oldest goes"


@pytest.mark.parametrize(("words", "expected"), [
    ("resume", "the campaign is not paused; see spes-p2p status with the same address"),
    ("schedule 4 learning_rate=1", "has started; give round 5 or later"),
    ("schedule 4 lr=1 rate=2", "give round 5 or later; and schedule 4: training.lr, training.rate cannot be changed"),
    ("schedule 9 learning_rate=-1", "training.learning_rate = -1: must be greater than 0"),
    ("schedule 9 learning_rate=true", "training.learning_rate = true: must be a number"),
    ("schedule 5 total_steps=30", "schedule 5: 40 steps are trained by then; give more total_steps, an earlier round, or stop"),
    ("schedule 10000000000000 total_steps=80", "give a round and the settings from that round on"),
    ("require 1 from 10000000000000", "give a protocol version and the first round"),
    ("rollback 10000000000000", "give the round to return to"),
    ("schedule 9 total_steps=10000000000000", "training.total_steps = 10000000000000: must be at most 1e+12"),
    (f"schedule 9 total_steps={'[' * 20000}", "is not NAME=NUMBER"),
    ("schedule 9 =5", "'=5' is not NAME=NUMBER"),
    ("schedule 9 learning_rate=1 learning_rate=2", "learning_rate is given twice"),
    ("schedule 9 total_steps=50", "schedule 9: 60 steps are trained by then"),
    ("schedule 9 total_steps=55", "must be a multiple of sync_steps = 10"),
    ("schedule 9 sync_steps=15", "must be a multiple of training.sync_steps = 15"),
    ("schedule 9 batch_size=1", "training.batch_size cannot be changed; give one of learning_rate, "),
    ("schedule 9 learningrate=1", "training.learningrate cannot be changed"),
    ("require 99 from 9", f"this program speaks protocol {PROTOCOL_VERSION} itself; {UPGRADE}"),
    (f"require {PROTOCOL_VERSION} from 4", "has started; give round 5 or later"),
    (f"ban {OTHER_ID[:-9]}", "give the whole id of one peer"),
    ("ban C", "give the whole id of one peer"),
    ("unban", "give the whole id of one peer"),
    (f"ban {OWNER_ID}", "this is the owner of the campaign"),
    (f"unban {OTHER_ID}", "not banned; banned peers: none"),
    (f"pardon {OTHER_ID}", "no proof excludes it; excluded peers: none"),
    ("pardon C", "give the whole id of one peer"),
    ("rollback 1", "no answering peer archives the base of that round; archived rounds: 2"),
    ("rollback 3", "no answering peer archives the base of that round; archived rounds: 2"),
])  # fmt: skip
def test_an_order_that_makes_no_sense_is_refused(words: str, expected: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_order(words.split())(view())
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)
