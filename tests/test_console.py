"""What a person at a terminal is told: by a helper of rounds and peers, of long waits, and of what goes on at this moment."""

from __future__ import annotations

import io
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from observed_events import OWNERS, ROUNDS, Clock, assembly, commit, new_board, shown, status_after
from rich.console import Console
from synthetic_swarm import synthetic_swarm

from spes_p2p.messages.presence import Contribution
from spes_p2p.observe.console import (
    DOWNLOAD_EVERY_S,
    FORECAST_EVERY_S,
    HEARTBEAT_S,
    SLOW_LINK_EVERY_S,
    WHY_CLIPPED,
    RoundLog,
    farewell,
    farewell_of_bootstrap,
)
from spes_p2p.observe.events import (
    BaseRestored,
    CaughtUp,
    Controlled,
    DownloadProgress,
    Evaluated,
    Observer,
    PeersSeen,
    PhaseTrained,
    QuotaForecast,
    RoundCommitted,
    RoundFailed,
    StandingChanged,
    StateEntered,
    TrainingProgress,
    UpdatesClipped,
    to_all,
)
from spes_p2p.observe.progress import ProgressLine
from spes_p2p.observe.status import StatusBoard
from spes_p2p.observe.swarm_status import gather

ELECTORS = ("helper", "peer-aaaaaa", "peer-bbbbbb")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="spes_p2p")
    return caplog


def console_of(clock: Clock, peer_id: str, role: str) -> Observer:
    board = new_board(clock, peer_id, role)
    return to_all(board.update, RoundLog(board, clock).show)


def test_while_the_swarm_assembles_each_change_says_how_many_trainers_are_there(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    board = new_board(clock, "helper", "helper")
    helper = to_all(board.update, RoundLog(board, clock, min_peers=3).show)
    helper(BaseRestored(-1, 0, 50, 0, "d", "disk", ((), ()), 10))
    for trainers in (0, 1, 1, 2):
        helper(PeersSeen(trainers, 1, tuple(f"peer-{i}" for i in range(trainers)), ()))
    assert log.messages[1:] == [f"waiting for trainers: {count} of the 3 that the first round needs" for count in (0, 1, 2)]


def test_a_stranger_says_once_and_then_each_minute_that_round_0_waits_for_a_vouched_trainer(
    log: pytest.LogCaptureFixture,
) -> None:
    clock, seen = Clock(), PeersSeen(2, 1, ("helper", "peer-aaaaaa", "peer-bbbbbb"), (), 0)
    board = new_board(clock, "peer-aaaaaa", "trainer")
    trainer = to_all(board.update, RoundLog(board, clock, min_peers=2).show)
    trainer(BaseRestored(-1, 0, 50, 0, "d", "download", ((), ()), 10))
    trainer(StateEntered("announcing"))
    why = "round 0 waits for a trainer that the owner vouches for; the owner invites one with --roles trainer,elector, or "
    why += "begins anew with sync.min_peers: 0"
    for _ in range(3):
        trainer(seen)
    clock.now += HEARTBEAT_S
    trainer(seen)
    trainer(replace(seen, vouched=1))
    assert log.messages[1:] == [why, f"waiting for 1m00s: {why}"]


@pytest.mark.parametrize("owners", [(("peer-aaaaaa",),), ((),)])
@pytest.mark.parametrize("role", ["helper", "trainer"])
def test_a_peer_says_once_that_the_schedule_waits_for_a_vouched_trainer(
    role: str, owners: tuple[tuple[str, ...], ...], log: pytest.LogCaptureFixture
) -> None:
    peer = console_of(Clock(), "peer-aaaaaa", role)
    seen = PeersSeen(2, 1, ("peer-aaaaaa", "peer-bbbbbb"), (), 0)
    peer(seen)
    peer(replace(commit(3), owners=owners))
    for event in (seen, seen, seen, replace(seen, vouched=1), seen, replace(seen, vouched=None), seen, seen):
        peer(event)
    why = "rounds go on, but the schedule waits for a trainer that the owner vouches for; the owner invites one with --roles"
    assert [message for message in log.messages if "vouches" in message] == [f"{why} trainer,elector"] * 2


@pytest.mark.parametrize("fails", ["majority", "round"])
def test_who_sees_rounds_stand_does_not_say_that_they_go_on(fails: str, log: pytest.LogCaptureFixture) -> None:
    peer = console_of(Clock(), "peer-aaaaaa", "trainer")
    peer(commit(3))
    if fails == "round":
        peer(RoundFailed(4, 0, "timeout", ""))
    for _ in range(2):
        peer(PeersSeen(2, 1, ("peer-aaaaaa",), ("peer-aaaaaa", "helper") if fails == "majority" else ("peer-aaaaaa",), 0))
    [said] = [message for message in log.messages if "vouches" in message]
    assert said.startswith("the schedule waits for a trainer that the owner vouches for")


def test_a_stranger_is_told_when_its_probation_has_ended_and_when_it_begins_again(log: pytest.LogCaptureFixture) -> None:
    peer = console_of(Clock(), "peer-aaaaaa", "trainer")
    for number, standing in ((12, "proven"), (20, "newcomer")):
        peer(StandingChanged(number, standing))
    assert [message.split(":")[1] for message in log.messages] == [" probation passed", " on probation"]


def test_a_round_has_no_time_left_while_the_schedule_waits(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    peer, seen = console_of(clock, "peer-aaaaaa", "trainer"), PeersSeen(2, 1, ("peer-aaaaaa",), (), 1)
    for number, vouched in ((1, 1), (2, 1), (3, 0), (4, 1)):
        for _ in range(2):
            peer(replace(seen, vouched=vouched))
        clock.now += 10
        peer(commit(number))
    ends = [message.split(" · ")[-1] for message in log.messages if "loss" in message]
    assert ends[1:] == ["1m20s left", "the schedule waits", "1m00s left"]


def test_who_got_the_base_after_it_saw_the_others_says_that_it_waits(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    board = new_board(clock, "peer-aaaaaa", "trainer")
    trainer = to_all(board.update, RoundLog(board, clock, min_peers=2).show)
    trainer(PeersSeen(1, 1, ("helper", "peer-aaaaaa"), ()))
    trainer(BaseRestored(-1, 0, 50, 0, "d", "download", ((), ()), 10))
    for _ in range(2):
        trainer(PeersSeen(1, 1, ("helper", "peer-aaaaaa"), ()))
    assert log.messages[1:] == ["waiting for trainers: 1 of the 2 that the first round needs"]
    trainer(StateEntered("announcing"))
    clock.now += HEARTBEAT_S
    trainer(PeersSeen(1, 1, ("helper", "peer-aaaaaa"), ()))
    assert log.messages[2:] == ["waiting for trainers for 1m00s: 1 of the 2 that the first round needs"]


def test_a_helper_that_waits_for_the_first_trainers_repeats_it_every_ten_minutes(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    board = new_board(clock, "helper", "helper")
    helper = to_all(board.update, RoundLog(board, clock).show)
    helper(BaseRestored(-1, 0, 50, 0, "d", "disk", ((), ()), 10))
    helper(StateEntered("waiting"))
    for _ in range(21):
        helper(PeersSeen(0, 1, (), ()))
        clock.now += HEARTBEAT_S
    count = "0 of the 1 that the first round needs"
    assert log.messages[1:] == [
        f"waiting for trainers{waited}: {count}" for waited in ("", " for 10m00s", " for 20m00s")
    ]


def test_a_step_is_worth_a_warning_where_it_is_far_too_large_or_repeatedly_too_large(log: pytest.LogCaptureFixture) -> None:
    trainer = console_of(Clock(), "peer-aaaaaa", "trainer")
    for number, factor in ((2, 0.95), (3, 0.9), (5, 0.9)):
        trainer(UpdatesClipped(number, (), (("router", factor),)))
    assert log.messages == []
    trainer(UpdatesClipped(6, (), (("router", 0.95), ("experts", 0.9))))
    trainer(UpdatesClipped(7, (), (("router", 0.95),)))
    trainer(UpdatesClipped(9, (), (("experts", 0.2),)))
    trainer(UpdatesClipped(10, (), (("shared", 0.7), *((f"expert.{n}", 0.4 + n / 100) for n in range(8)))))
    for number in (11, 12, 111):
        trainer(UpdatesClipped(number, (("peer-aaaaaa", 2), ("peer-bbbbbb", 1)), ()))
    assert [(record.levelno, record.message.partition(": ")[2]) for record in log.records] == [
        (logging.WARNING, "clipped the step of router to 0.95 of its size"),
        (logging.WARNING, "clipped the step of experts to 0.2 of its size"),
        (logging.WARNING, "clipped the step of expert.0 to 0.4 of its size, the step of expert.1 to 0.41 of its size, "
                          "the step of expert.2 to 0.42 of its size, those of 6 more groups by less"),
        (logging.WARNING, f"clipped 2 parts of this peer's update, 1 part of bbbbbb's update{WHY_CLIPPED}"),
        (logging.WARNING, "clipped 2 parts of this peer's update, 1 part of bbbbbb's update"),
    ]


def test_a_campaign_that_is_under_way_waits_for_no_first_round_where_nobody_owns_experts(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    board = new_board(clock, "peer-aaaaaa", "trainer")
    trainer = to_all(board.update, RoundLog(board, clock, min_peers=2).show)
    trainer(BaseRestored(6, 60, 100, 6000, "d", "disk", (), 10))
    trainer(PeersSeen(1, 1, ("helper", "peer-aaaaaa"), ()))
    assert log.messages == ["base 6 is in place (digest d); asking for the rounds since"]


def test_a_helper_says_once_that_rounds_wait_for_a_trainer_and_once_that_they_go_on(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    helper = console_of(clock, "helper", "helper")
    here = PeersSeen(1, 1, ("helper", "peer-aaaaaa"), ("peer-aaaaaa",))
    helper(commit(2))
    helper(here)
    log.clear()
    for attempt in range(40):  # killed: first it counts as there, then not
        clock.now += 15
        helper(RoundFailed(3, attempt, "coordinator_lost", "aaaaaa cannot be dialled"))
        helper(here if attempt < 2 else PeersSeen(0, 1, ("helper",), ("peer-aaaaaa",)))
    helper(here)
    helper(commit(3))
    helper(commit(4))
    assert [message.split(" · loss")[0] for message in log.messages] == [
        "round 3/10, attempt 0 failed (coordinator_lost: aaaaaa cannot be dialled); nothing applied, work kept",
        "aaaaaa left · no trainer is here: rounds wait until one joins",
        "aaaaaa joined · 1 trainer",
        "round 3/10",
        "round 4/10",
    ]
    assert ["rounds go on" in message for message in log.messages[-2:]] == [True, False]


def test_a_helper_that_starts_without_trainers_says_that_rounds_wait_and_warns_not(log: pytest.LogCaptureFixture) -> None:
    helper = console_of(Clock(), "helper", "helper")
    helper(BaseRestored(6, 60, 100, 6000, "d", "disk", (("peer-aaaaaa",),), 10))
    for attempt in range(9):
        helper(RoundFailed(7, attempt, "coordinator_lost", ""))
        helper(PeersSeen(0, 1, ("helper",), ("peer-aaaaaa",)))
        assert (len(log.messages) > 1) == (attempt > 0), "at first it may not have found them yet"
    assert log.messages[1:] == ["no trainer is here: rounds wait until one joins"]


def test_a_round_that_fails_again_and_again_says_so_once_a_minute_and_how_many_attempts_it_took(
    log: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    trainer = console_of(clock, "peer-aaaaaa", "trainer")
    trainer(commit(2))
    trainer(PeersSeen(1, 0, ("peer-aaaaaa",), ("helper", "peer-aaaaaa")))
    for attempt in range(6):
        trainer(RoundFailed(3, attempt, "coordinator_lost", f"Qm{'h' * 38}helper cannot be dialled"))
        trainer(PeersSeen(1, 0, ("peer-aaaaaa",), ("helper", "peer-aaaaaa")))
        clock.now += 15
    trainer(commit(3))
    first, explained, later, decided = log.messages[1:]
    missing = "1 of 2 electors missing (helper); rounds wait until a majority is back, or the owner's bootstrap peer "
    missing += "reforms the swarm (start it if it is down)"
    assert explained == f"round 3/10 · {missing}"
    assert first.startswith("round 3/10, attempt 0 failed (coordinator_lost: helper cannot be dialled)")
    assert later == (
        f"round 3/10: 5 attempts failed in 1m00s, the last: coordinator_lost: helper cannot be dialled · {missing}"
    )
    assert "decided after 6 failed attempts" in decided


def test_a_peer_that_catches_up_says_in_one_line_from_which_round_to_which(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    trainer = console_of(clock, "peer-aaaaaa", "trainer")
    trainer(BaseRestored(2, 20, 100, 2000, "d", "disk", OWNERS, 10))
    trainer(Controlled(2, 1, "running", "from round 2 on learning_rate 0.1", "from round 2 on learning_rate 0.1"))
    trainer(CaughtUp(2, 6, 0.5))
    for number in range(3, 7):
        trainer(Evaluated(number - 1, 4.0))
        trainer(commit(number, seconds={"apply": 0.5}))
        if number < 6:
            trainer(Controlled(number, number, "paused" if number % 2 else "running", "paused" if number % 2 else "", "news"))
    trainer(commit(7))
    trainer(CaughtUp(7, 9, 2.0))
    trainer(BaseRestored(9, 90, 100, 9000, "d9", "download", OWNERS, 10))
    assert log.messages[:2] == [
        "base 2 is in place (digest d); asking for the rounds since",
        "round 6/10 · loss 4.500 · experts 0 2 · 2 trainers · caught up from round 2 in 0.50 s · ordered by the owner: paused",
    ]
    assert log.messages[3:] == ["downloaded base 9 (digest d9), caught up from round 7 in 2.00 s; next: round 10/10"]
    assert "synced" in log.messages[2]


def test_of_old_orders_only_those_that_stop_training_are_told_and_of_new_ones_what_they_change(
    log: pytest.LogCaptureFixture
) -> None:
    rate, paused = "from round 2 on learning_rate 0.1", "paused (by the guard), from round 2 on learning_rate 0.1"
    for first in (Controlled(2, 1, "running", rate, rate), Controlled(2, 2, "paused", paused, paused)):
        trainer = console_of(Clock(), "peer-aaaaaa", "trainer")
        trainer(BaseRestored(2, 20, 100, 2000, "d", "disk", OWNERS, 10))
        trainer(first)
        trainer(commit(3))
        trainer(Controlled(3, 3, "running", rate, "resumed"))
    told = [message for message in log.messages if "owner" in message]
    resumed = "round 3/10 · ordered by the owner: resumed"
    assert told == [resumed, "ordered by the owner: paused (by the guard)", resumed]


def test_a_helper_says_each_round_in_one_line(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    helper = console_of(clock, "helper", "helper")
    for committed in (assembly(), commit(1), commit(2, dropped_parts=3)):
        clock.now += 20
        helper(committed)
    assert log.messages == [
        "round 0/10 · swarm assembled: 2 trainers · aaaaaa 0 2, bbbbbb 1-2",
        "round 1/10 · loss 4.500 · 1.00k tokens · 2 trainers · synced 2.00 s, 1.50 MB up, 2.00 MB down · 3m00s left",
        "round 2/10 · loss 4.500 · 1.00k tokens · 2 trainers · synced 2.00 s, 1.50 MB up, 2.00 MB down · "
        "3 of 10 parts left out · 2m40s left",
    ]


def test_a_trainer_says_each_round_in_one_line_with_its_use_of_a_device_of_known_peak(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    trainer = console_of(clock, "peer-aaaaaa", "trainer")
    for number, mfu in ((1, 0.314), (2, math.nan)):
        trainer(PhaseTrained(number, 20, 1000, 4.5, 0.0, 10.0, 0, mfu=mfu))
        clock.now += 20
        trainer(commit(number, seconds={"train": 10.0, "announce": 2.0}))
    with_peak, without = log.messages
    assert "trained 10.0 s at 31 % MFU · " in with_peak
    assert "trained 10.0 s · " in without


def test_a_trainer_that_did_not_train_says_no_speed(log: pytest.LogCaptureFixture) -> None:
    trainer = console_of(Clock(), "peer-aaaaaa", "trainer")
    trainer(PhaseTrained(1, 20, 1000, 4.5, 0.0, 10.0, 0))
    trainer(commit(1, seconds={"train": 10.0, "announce": 2.0}))
    trainer(commit(2, seconds={"announce": 2.0}))
    trained, idle = log.messages
    assert "tokens/s" in trained
    assert "tokens/s" not in idle
    assert "trained nothing" in idle


def test_a_helper_says_who_comes_and_who_goes(log: pytest.LogCaptureFixture) -> None:
    helper = console_of(Clock(), "helper", "helper")
    for living in (("helper",), ("helper",), ("helper", "peer-aaaaaa", "peer-bbbbbb"), ("helper", "peer-bbbbbb")):
        helper(PeersSeen(len(living) - 1, 1, living, ELECTORS))
    assert log.messages == ["aaaaaa joined, bbbbbb joined · 2 trainers", "aaaaaa left · 1 trainer"]


def test_a_helper_that_starts_says_who_is_there_already(log: pytest.LogCaptureFixture) -> None:
    helper = console_of(Clock(), "helper", "helper")
    for living in (("helper", "peer-aaaaaa"), ("helper", "peer-aaaaaa", "peer-bbbbbb")):
        helper(PeersSeen(len(living) - 1, 1, living, ELECTORS))
    assert log.messages == ["aaaaaa is here · 1 trainer", "bbbbbb joined · 2 trainers"]


def test_a_trainer_does_not_repeat_who_is_there(log: pytest.LogCaptureFixture) -> None:
    trainer = console_of(Clock(), "peer-aaaaaa", "trainer")
    for living in (("peer-aaaaaa",), ("peer-aaaaaa", "peer-bbbbbb")):
        trainer(PeersSeen(len(living), 0, living, ELECTORS))
    assert log.messages == []


def test_a_long_wait_says_what_for_and_which_electors_are_missing(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    trainer = console_of(clock, "peer-aaaaaa", "trainer")
    trainer(commit(3))
    trainer(StateEntered("announcing"))
    log.clear()
    for _ in range(30):
        clock.now += HEARTBEAT_S / 12
        trainer(PeersSeen(1, 1, ("helper", "peer-aaaaaa"), ELECTORS))
    assert log.messages == [
        f"round 4/10 · waiting for the plan for {minutes}m00s · 1 of 3 electors missing (bbbbbb)" for minutes in (1, 2)
    ]


def test_a_download_speaks_every_ten_seconds_and_its_end_is_told_once(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    trainer = console_of(clock, "peer-aaaaaa", "trainer")
    for done in range(1, 101):
        clock.now += DOWNLOAD_EVERY_S / 40
        trainer(DownloadProgress("the base", done, 100))
    trainer(DownloadProgress("the base", 100, 100))
    trainer(BaseRestored(2, 20, 100, 2000, "d", "download", OWNERS, 10))
    assert log.messages == [
        "downloading the base: 40 %", "downloading the base: 80 %", "downloaded base 2 (digest d); next: round 3/10",
    ]


def test_a_peer_without_a_base_does_not_speak_for_those_who_have_one() -> None:
    waiting = status_after(peer_id="peer-cccccc")
    swarm = gather([waiting, status_after(commit(5))])
    assert (swarm.round, swarm.loss, swarm.base_digest) == (5, 4.5, "digest5")


def test_missing_electors_are_named_and_a_lost_majority_is_said() -> None:
    seen = PeersSeen(2, 1, ELECTORS, ELECTORS)
    one = status_after(commit(5), seen)
    helper = status_after(seen, peer_id="helper", role="helper")
    swarm = gather([one, helper])
    assert (swarm.electorate, swarm.electors_missing, swarm.majority_missing) == (ELECTORS, ("peer-bbbbbb",), False)
    assert "! no answer from 1 of 3 electors (bbbbbb)" in shown([one, helper])
    assert gather([one]).majority_missing
    assert "no answer from 2 of 3 electors (helper, bbbbbb); rounds wait until a majority is back" in shown([one], width=200)
    assert "electors" not in shown([one, helper, status_after(commit(5), seen, peer_id="peer-bbbbbb")])
    asleep = shown([replace(one, peer_id="helper", role="helper")])
    assert "! no trainer is here; rounds go on when one joins" in asleep
    assert "electors" not in asleep


def test_time_in_a_phase_is_counted_from_its_beginning() -> None:
    clock = Clock()
    board = new_board(clock)
    clock.now = 30.0
    board.update(StateEntered("announcing"))
    clock.now = 42.0
    assert board.status.stage_seconds == 12.0
    assert board.status.stages == (("joining", 42.0), ("announcing", 12.0))
    board.update(commit(1))
    assert board.status.stages == (("announcing", 0.0),)


def test_a_bootstrap_peer_says_at_the_end_of_its_campaign_what_it_is_still_there_for(log: pytest.LogCaptureFixture) -> None:
    helper, trainer = console_of(Clock(), "helper", "helper"), console_of(Clock(), "peer-aaaaaa", "trainer")
    over = "others can export it from this peer until you end it"
    for number, expected in ((ROUNDS - 1, False), (ROUNDS, True)):
        helper(commit(number))
        assert (f"the campaign is over; {over}" in log.messages[-1]) == expected
    trainer(commit(ROUNDS))
    assert over not in log.messages[-1]
    helper(BaseRestored(ROUNDS, 100, 100, 0, "d", "disk", total_rounds=ROUNDS))
    assert log.messages[-1].endswith(f"the campaign is done; {over}")


def line_at_a_terminal(*events: StateEntered | TrainingProgress | DownloadProgress | BaseRestored | RoundCommitted) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, color_system=None)
    board = new_board(Clock())
    line = ProgressLine(board, console)
    peer = to_all(board.update, line.update)
    for event in (BaseRestored(2, 20, 100, 2000, "digest2", "disk"), *events):
        peer(event)
    console.print(line.renderable)
    return output.getvalue()


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((StateEntered("announcing"),), ["round 3 · waiting for the plan"]),
        ((StateEntered("training"), TrainingProgress(3, 5, 20, 1234.0)), ["round 3 · training", "25 % · 1.23k tokens/s"]),
        ((BaseRestored(-1, 0, 100, 0, "d", "disk", ((), ())), StateEntered("waiting")), ["round 0 · serving"]),
        ((StateEntered("downloading"), DownloadProgress("the base", 1, 4)), ["downloading the base", "25 %"]),
        ((commit(ROUNDS), StateEntered("waiting")), ["the campaign is over · serving its model"]),
        ((StateEntered("invented"),), ["round 3 · invented"]),
    ],
)
def test_at_a_terminal_one_line_says_what_goes_on(events: tuple[StateEntered, ...], expected: list[str]) -> None:
    line = line_at_a_terminal(*events)
    assert [text for text in expected if text not in line] == []


def test_the_line_of_a_peer_that_waits_for_the_first_trainers_counts_them() -> None:
    console = Console(file=io.StringIO(), width=120)
    board = StatusBoard(replace(status_after(), min_peers=2), Clock())
    line = ProgressLine(board, console)
    peer, told = to_all(board.update, line.update), list[str]()
    peer(BaseRestored(-1, 0, 100, 0, "d", "disk", ((), ())))
    for event in (StateEntered("announcing"), PeersSeen(1, 1, (), ()), PeersSeen(2, 1, (), ()), PeersSeen(2, 1, (), (), 0),
                  StateEntered("waiting")):
        peer(event)
        with console.capture() as shows:
            console.print(line.renderable)
        told.append(shows.get().split("  ")[0].strip())
    waiting = [f"waiting for trainers: {count} of 2" for count in (0, 1)]
    vouched = "waiting for a trainer that the owner vouches for"
    lines = [*waiting, "round 0 · waiting for the plan", vouched, "round 0 · serving"]
    assert [text.startswith(line) for text, line in zip(told, lines, strict=True)] == [True] * 5, told


def test_without_a_terminal_there_is_no_live_line() -> None:
    output = io.StringIO()
    line = ProgressLine(new_board(Clock()), Console(file=output))
    line.start()
    line.update(StateEntered("training"))
    line.close()
    line.close()
    assert output.getvalue() == ""


def test_a_trainer_that_goes_says_what_came_of_its_work_and_how_to_go_on() -> None:
    half = (Contribution("peer-aaaaaa", 72_000, 120), Contribution("peer-bbbbbb", 9, 9))
    records = [replace(record, contributions=half) for record in synthetic_swarm(2, 4, 1).records]
    left, done = status_after(commit(2)), status_after(commit(ROUNDS))
    stopped = status_after(commit(4, total_rounds=4), Controlled(4, 1, "stopped", "stopped"))
    work = "144k tokens trained here are in the base"
    go_on = "to continue, join again with --run-dir runs/peer"
    assert farewell(left, records, Path("runs/peer")) == f"left · {work} · {go_on}"
    start_again = "left · to continue, start it again with --run-dir runs/b"
    assert farewell_of_bootstrap(left, Path("runs/b")) == start_again
    assert farewell_of_bootstrap(left, Path("runs/b"), Path("my.key")) == f"{start_again} --identity my.key"
    assert farewell(done, records, Path("my runs/peer")).endswith("export --run-dir 'my runs/peer' --output checkpoint")
    take = f"{work} · export it: spes-p2p export --run-dir runs/peer --output checkpoint"
    assert farewell(done, records, Path("runs/peer")) == f"the campaign is done · {take}"
    assert farewell(stopped, records, Path("runs/peer")) == f"the campaign was stopped by its owner · {take}"
    at_once = status_after(assembly(), Controlled(0, 1, "stopped", "stopped"))
    for over, ended in ((done, "is done"), (stopped, "was stopped by its owner"), (at_once, "was stopped by its owner")):
        assert farewell_of_bootstrap(over, Path("runs/b")) == (
            f"left · the campaign {ended} · export it: spes-p2p export --run-dir runs/b --output checkpoint · for others to "
            "export it from here, start this peer again"
        )
    assert "no round includes work of this peer yet" in farewell(left, (), Path("runs/peer"))
    assert farewell(left, records, Path("runs/peer"), Path("my.key")) == f"left · {work} · {go_on} --identity my.key"


def test_a_trainer_whose_line_holds_rounds_up_is_told_after_two_of_them_and_once_an_hour(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    trainer = console_of(clock, "peer-aaaaaa", "trainer")
    slow: dict[str, Any] = {"upload": 125e3, "median_upload": 12.5e6, "seconds": {"exchange": 9.0}}
    short, fair, unknown = {**slow, "seconds": {"exchange": 0.2}}, {**slow, "upload": 5e6}, {**slow, "upload": 0.0}
    for number, changes in enumerate([slow, short, fair, unknown, slow, slow, slow], start=1):
        trainer(PhaseTrained(number, 5, 100, 4.0, 0.0, 12.0, 0))
        trainer(replace(commit(number), **changes))
    clock.now += SLOW_LINK_EVERY_S
    trainer(replace(commit(8), **slow))
    told = [message.split(" · ")[0] for message in log.messages if "rounds wait for this link: 1.00Mbit/s up" in message]
    assert told == [f"round 6/{ROUNDS}", f"round 8/{ROUNDS}"]


def test_what_the_quota_leaves_is_said_at_the_start_once_it_is_known_and_every_hour(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    trainer = console_of(clock, "peer-aaaaaa", "trainer")
    caplog.set_level(logging.INFO, "spes_p2p")
    for at, pauses_at in ((0, math.nan), (30, math.nan), (60, 9e8), (90, 9e8), (60 + FORECAST_EVERY_S, math.inf)):
        clock.now = at
        trainer(QuotaForecast(20, 10, pauses_at, f"told at {at:g}"))
    assert caplog.messages == ["quota: told at 0", "quota: told at 60", "quota: told at 3660"]
