"""Who left politely comes back in the same round: nobody waits for a reform, and no seat that was given up votes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from spes_p2p.errors import Refused
from spes_p2p.messages.refusals import Code
from spes_p2p.observe.events import BaseRestored, CaughtUp, PeersSeen, RoundCommitted, RoundFailed
from spes_p2p.peer import replica
from spes_p2p.peer.exchanges import Exchanges
from spes_p2p.peer.kept_results import KINDS
from spes_p2p.peer.node import CONTACT_TTL_S
from spes_p2p.rounds.results import KEPT_ROUNDS
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign

SOON_S = 60.0


async def left_in_round_3(trainers: str, leavers: str) -> VirtualSwarm:
    swarm = VirtualSwarm(campaign(total_steps=6000, sync={"min_peers": 1, "reform_after_s": 600.0}))
    swarm.start_all(trainers)
    await swarm.until_round(3)
    for name in leavers:
        swarm.peers[name].leave()
    await swarm.until(lambda: all(swarm.tasks[name].done() for name in leavers))
    return swarm


async def assert_goes_on(swarm: VirtualSwarm) -> None:
    number = swarm.nodes["W"].log.round
    await swarm.until_round(number + 2, SOON_S)
    assert swarm.nodes["W"].log.last.term == 0
    swarm.assert_same_commits()
    swarm.assert_replicas_agree()


@pytest.mark.parametrize(("trainers", "leavers"), [("A", "A"), ("AB", "AB"), ("ABC", "ABC"), ("ABC", "AB"), ("ABC", "B")])
@pytest.mark.sampled(2)
@pytest.mark.long
async def test_those_who_left_and_are_back_go_on_at_once(trainers: str, leavers: str) -> None:
    swarm = await left_in_round_3(trainers, leavers)
    for name in leavers:
        swarm.restart(name)
    await assert_goes_on(swarm)


@pytest.mark.parametrize("helper_ends", ["is killed", "leaves"])
@pytest.mark.parametrize("trainers", ["A", "AB", "ABC"])
@pytest.mark.sampled(2)
async def test_a_swarm_that_was_shut_down_politely_goes_on_when_all_are_back(trainers: str, helper_ends: str) -> None:
    swarm = await left_in_round_3(trainers, trainers)
    if helper_ends == "leaves":
        swarm.helper.leave()
        await swarm.until(lambda: swarm.tasks["W"].done())
    for name in ("W", *trainers):
        swarm.restart(name)
    await assert_goes_on(swarm)


async def test_rounds_that_only_donors_of_a_base_may_keep_are_asked_of_these_and_of_helpers(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "replayable_rounds", lambda *model: KEPT_ROUNDS)
    asked, swarm = set[str](), await left_in_round_3("ABCDE", "B")
    left_at = swarm.round_of("B")

    def note(frame: Frame) -> Frame:
        if frame.method in KINDS and frame.sender == "B" and not frame.is_answer and swarm.round_of("B") == left_at:
            asked.add(frame.receiver)
        return frame

    await swarm.until(lambda: swarm.round_of("A") >= left_at + 2 * KEPT_ROUNDS, 2 * SOON_S)
    swarm.network.tap = note
    swarm.restart("B")
    newest = swarm.peers["B"].replica.newest
    newest.downloaded_round, newest.donors = left_at, frozenset("A")
    await swarm.until(lambda: swarm.round_of("B") > left_at)
    assert asked == {"A", "W"}


async def test_who_left_is_not_there_for_the_others_though_its_contact_has_not_expired_until_it_is_back() -> None:
    swarm = await left_in_round_3("ABC", "B")
    await asyncio.sleep(CONTACT_TTL_S / 2)
    for trainers in (2, 3):
        for name in "WAC":
            seen = swarm.recorders[name].of(PeersSeen)[-1]
            assert (seen.trainers, "B" in seen.living) == (trainers, trainers == 3)
        if trainers == 2:
            swarm.restart("B")
            await asyncio.sleep(CONTACT_TTL_S)


async def test_who_missed_rounds_reports_once_from_which_to_which_it_caught_up_and_the_others_never_do() -> None:
    swarm = await left_in_round_3("ABC", "B")
    left_at = swarm.round_of("B")
    await swarm.until(lambda: swarm.round_of("A") >= left_at + 4, SOON_S)
    seen = len(swarm.recorders["B"].events)
    swarm.restart("B")
    await swarm.until(lambda: "B" in swarm.nodes["W"].log.last.members)
    events = swarm.recorders["B"].events[seen:]
    [caught_up] = [event for event in events if isinstance(event, CaughtUp)]
    assert (caught_up.since, caught_up.round >= left_at + 4) == (left_at, True)
    after = events[events.index(caught_up) + 1 :]
    assert any(isinstance(event, BaseRestored | RoundCommitted) and event.round == caught_up.round for event in after)
    assert swarm.recorders["A"].of(CaughtUp) == []


@pytest.mark.parametrize("missed", [KEPT_ROUNDS - 1, 2 * KEPT_ROUNDS])
async def test_who_missed_more_rounds_than_peers_keep_asks_nobody_for_them(
    missed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "replayable_rounds", lambda *model: KEPT_ROUNDS)
    asked, swarm = set[str](), await left_in_round_3("ABC", "B")
    left_at = swarm.round_of("B")

    def note(frame: Frame) -> Frame:
        if frame.method == "plan" and frame.sender == "B" and not frame.is_answer:
            asked.add(frame.receiver)
        return frame

    await swarm.until(lambda: swarm.round_of("A") >= left_at + missed, 2 * SOON_S)
    swarm.network.tap = note
    swarm.restart("B")
    await swarm.until(lambda: swarm.round_of("B") >= left_at + missed)
    assert bool(asked) == (missed < KEPT_ROUNDS)


async def test_who_is_back_trains_its_samples_itself() -> None:
    swarm = await left_in_round_3("ABC", "B")
    swarm.restart("B")
    number = swarm.nodes["W"].log.round
    await swarm.until_round(number + 1, SOON_S)
    assert "B" in swarm.nodes["W"].log.last.members
    assert swarm.nodes["W"].log.commit_at(number + 1).cursor.returned == ()
    mine = {(i.epoch, p) for i in swarm.samples["B"][number + 1] for p in range(i.start, i.stop)}
    for other in "ABC":
        theirs = [i for r, taken in swarm.samples[other].items() if (other, r) != ("B", number + 1) for i in taken]
        assert not mine & {(i.epoch, p) for i in theirs for p in range(i.start, i.stop)}


async def test_a_helper_that_is_away_has_no_seat_until_it_is_back() -> None:
    swarm = VirtualSwarm(campaign(total_steps=6000, sync={"min_peers": 1, "reform_after_s": 600.0}))
    swarm.start_all("AB")
    await swarm.until_round(2)
    swarm.kill("W")
    await swarm.until_round(5)
    assert "W" not in swarm.nodes["A"].log.last.electorate, "its death and one more must not end the campaign"
    swarm.restart("W")
    await swarm.until_round(swarm.round_of("A") + 4)
    assert "W" in swarm.nodes["A"].log.last.electorate
    swarm.assert_same_commits()


@pytest.mark.long
async def test_who_comes_back_and_finds_nobody_at_first_catches_up_when_the_others_appear() -> None:
    """As a bootstrap peer that is started alone: the others find it some time later, and go on without it until then."""
    swarm = VirtualSwarm(campaign(total_steps=6000, sync={"min_peers": 1, "reform_after_s": 600.0}))
    swarm.start_all("AB")
    await swarm.until_round(2)
    swarm.kill("W")
    await swarm.until_round(6)
    swarm.network.partition(("W",), ("A", "B"))
    swarm.restart("W")
    await asyncio.sleep(30.0)
    swarm.network.heal()
    await swarm.until(lambda: swarm.nodes["W"].log.round >= 6, SOON_S)
    await swarm.until_round(swarm.round_of("A") + 4)
    assert "W" in swarm.nodes["A"].log.last.electorate
    swarm.assert_same_commits()


@pytest.mark.parametrize("asleep_s", [60.0, pytest.param(1200.0, marks=pytest.mark.long)])
@pytest.mark.long
async def test_a_laptop_that_slept_catches_up_and_trains_again(asleep_s: float) -> None:
    """Its connections break, the registry forgets it, and all of its timers expire when it wakes."""
    swarm = VirtualSwarm(campaign(total_steps=60000, sync={"min_peers": 1}))
    swarm.start_all("ABC")
    await swarm.until_round(3)
    swarm.network.stop("B")
    for other in "ACW":
        swarm.network.disconnect("B", other)
    await asyncio.sleep(asleep_s)
    left_at = swarm.nodes["A"].log.round
    assert left_at > swarm.nodes["B"].log.round
    swarm.network.resume("B")
    await swarm.until(lambda: swarm.round_of("B") > left_at + 3, SOON_S)
    await swarm.until(lambda: "B" in swarm.nodes["W"].log.last.members, SOON_S)
    assert not swarm.tasks["B"].done()
    swarm.assert_same_commits()
    swarm.assert_replicas_agree()


@pytest.mark.long
async def test_a_member_that_does_not_know_the_plan_of_a_round_costs_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it was with a peer that had come back: it refused what others pushed to it and pulled from it."""
    known, refused = Exchanges._known, list[str]()
    swarm = VirtualSwarm(campaign(total_steps=400))
    swarm.start_all("ABCD")
    await swarm.until_round(3)
    number, back = swarm.nodes["A"].log.round, swarm.peers["B"].replica.exchanges

    async def forgetful(exchanges: Exchanges, plan: str, revision: int) -> Any:
        found = await known(exchanges, plan, revision)
        if exchanges is back and found.plan.round == number + 1:
            refused.append(plan)
            raise Refused(Code.NOT_HERE, "that plan is not known here")
        return found

    monkeypatch.setattr(Exchanges, "_known", forgetful)
    await swarm.until_round(number + 4)
    assert refused
    for name in "ACD":
        assert swarm.recorders[name].of(RoundFailed) == []
        commits = swarm.recorders[name].commits()
        assert commits.keys() >= set(range(number + 5))
        assert commits[number + 1].dropped_parts < commits[number + 1].parts
        assert not any(commits[each].dropped_parts for each in commits if each != number + 1)
    swarm.assert_replicas_agree()
