"""What a trainer contributed, by its journal of certified rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_run import CONFIG, run_dir
from synthetic_swarm import synthetic_swarm

from spes_p2p.campaign.files import read_run_dir
from spes_p2p.client import me
from spes_p2p.client.me import StillPreparing, as_of, look_at, own_share, render, with_standing
from spes_p2p.config.campaign import make_peer_config
from spes_p2p.consensus.output import LOG
from spes_p2p.errors import UserError
from spes_p2p.messages.presence import Contribution, RoundRecord
from spes_p2p.net.identity import RSAIdentity
from spes_p2p.observe.events import BaseRestored, Controlled, Event, PeerStarted, PhaseTrained, RoundCommitted
from spes_p2p.observe.history import HISTORY_FILE, Entry
from spes_p2p.session.observers import observing
from spes_p2p.session.own_state import STATE_FILE, OwnState, StateFile
from spes_p2p.session.run_dir import ADDRESS_FILE

ME, OTHER = "QmMe", "QmOther"
RUNNING = OwnState("running", 0.0)


def committed(number: int, mine: int, theirs: int, **changes: Any) -> RoundCommitted:
    event = RoundCommitted(
        round=number, campaign_step=10 * number, total_steps=200, tokens=mine + theirs, total_tokens=1000 * number, loss=4.0,
        members=(ME, OTHER), owners=((ME,), (OTHER,), (ME, OTHER)), base_digest="d", parts=4, dropped_parts=0, sent_bytes=0,
        received_bytes=0, contributions=((ME, mine, 20), (OTHER, theirs, 10)),
    )
    return replace(event, **changes)


def restored(number: int, source: str) -> BaseRestored:
    return BaseRestored(number, 10 * number, 200, 1000 * number, "d", source)


def phase(seconds: float) -> PhaseTrained:
    return PhaseTrained(1, 10, 300, 4.0, 0.0, seconds, 0)


def journal(*events: Event) -> list[Entry]:
    return [Entry(100.0 + 10 * number, event) for number, event in enumerate(events)]


def test_it_sums_the_certified_rounds() -> None:
    rounds = [committed(1, 300, 700), committed(2, 0, 1000, contributions=((OTHER, 1000, 10),)), committed(3, 500, 500)]
    share = own_share(journal(*rounds), ME, 20, RUNNING, now=122.0)
    assert (share.tokens, share.rounds, share.expert_steps) == (800, 2, 40)
    assert share.share == pytest.approx(800 / 3000)
    assert (share.round, share.total_rounds, share.experts) == (3, 20, (0, 2))
    assert share.next_round_s == pytest.approx(8.0)
    assert "800 trained here are in the model, 26.7 % of all\n" in render(share)
    assert "round 3/20; the next in about 8.00 s" in render(share)
    ended = own_share(journal(*rounds), ME, 3, RUNNING, now=122.0)
    assert (ended.campaign_state, "round 3/3; the campaign is done" in render(ended)) == ("done", True)


def test_no_round_is_expected_while_the_owner_has_paused_the_campaign() -> None:
    events = [committed(1, 300, 700), committed(2, 300, 700), Controlled(2, 1, "paused")]
    share = own_share(journal(*events), ME, 20, RUNNING, now=122.0)
    assert "round 2/20; the campaign is paused" in render(share)
    waits = own_share(journal(*events), ME, 20, replace(RUNNING, detail="the campaign is paused"), now=122.0)
    assert "QmMe · waiting: the campaign is paused\n" in render(waits)
    forecast = replace(RUNNING, detail="3.0 GB of 20.0 GB used today", trains=True)
    assert " · running: 3.0 GB of 20.0 GB used today\n" in render(own_share(journal(*events), ME, 20, forecast, now=122.0))
    share = own_share(journal(*events, Controlled(2, 2, "running")), ME, 20, RUNNING, now=112.0)
    assert "round 2/20; the next in about 8.00 s" in render(share)


def test_a_trainer_that_still_prepares_is_told_from_a_wrong_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trainer has used this folder"):
        look_at(tmp_path, tmp_path / "identity.key")
    state = StateFile(tmp_path)
    try:
        state.write(OwnState("preparing", 0.0))
        with pytest.raises(StillPreparing, match=r"the trainer is still preparing; try again in a minute"):
            look_at(tmp_path, tmp_path / "identity.key")
    finally:
        state.close()
    with pytest.raises(UserError, match="ended or paused before it had its campaign"):
        look_at(tmp_path, tmp_path / "identity.key")


@pytest.mark.parametrize("source", ["rollback", "reform"])
def test_work_that_was_taken_back_does_not_count(source: str) -> None:
    events = [committed(1, 300, 700), committed(2, 400, 600), committed(3, 500, 500), restored(1, source)]
    share = own_share(journal(*events), ME, 20, RUNNING, now=0.0)
    assert (share.tokens, share.round, share.share) == (300, 1, 0.3)
    again = own_share(journal(*events, committed(2, 100, 900)), ME, 20, RUNNING, now=0.0)
    assert (again.tokens, again.round) == (400, 2)


def test_a_restart_counts_no_round_twice() -> None:
    events = [committed(1, 300, 700), restored(0, "disk"), committed(1, 300, 700), restored(1, "disk")]
    share = own_share(journal(*events), ME, 20, RUNNING, now=0.0)
    assert (share.tokens, share.rounds, share.experts) == (300, 1, (0, 2))


def test_rounds_that_the_journal_has_lost_count_by_the_records_of_others() -> None:
    contributions = Contribution(ME, 300, 20), Contribution(OTHER, 700, 10)
    record = replace(synthetic_swarm(1, 2, 2).records[-1], round=1, contributions=contributions)
    told: list[Event | RoundRecord] = [record, committed(2, 200, 800), record, replace(record, round=2)]
    entries = [(100.0 + number, entry) for number, entry in enumerate(told)]
    share = own_share(entries, ME, 20, RUNNING, now=0.0)
    assert (share.tokens, share.rounds, share.expert_steps) == (500, 2, 40)


def test_hours_are_those_of_training_steps() -> None:
    assert own_share(journal(phase(1800), phase(900)), ME, 20, None, now=0.0).hours == 0.75


def test_of_a_run_dir_that_two_identities_used_it_tells_of_the_last_one(tmp_path: Path) -> None:
    folder = run_dir(tmp_path, [])
    (folder / STATE_FILE).touch()
    RSAIdentity(folder / "identity.key")
    known = read_run_dir(folder)
    assert known is not None
    for peer, seconds in ((OTHER, 1800), (ME, 600), (ME, 300)):
        with observing(known[0], make_peer_config(run_dir=folder), peer, "trainer") as observers:
            observers.all(phase(seconds))
    share = look_at(folder)
    assert (share.peer_id, share.hours, share.others) == (ME, 0.25, (OTHER,))
    assert render(share).endswith("\n  journal  other entries are another identity's (mOther) and do not count here")
    given = look_at(folder, folder / "identity.key")
    assert (given.hours, given.others) == (0, (OTHER, ME))


def test_a_trainer_that_does_not_run_has_no_experts_and_no_next_round() -> None:
    share = own_share(journal(committed(1, 300, 700), committed(2, 300, 700)), ME, 20, None, now=0.0)
    assert (share.state, share.experts, share.tokens) == ("not running", (), 600)
    assert math.isnan(share.next_round_s)
    assert "600 trained here are in the model, 30.0 % of all up to round 2\n" in render(share)


def test_the_share_of_a_paused_trainer_is_one_of_the_swarms_newest_base() -> None:
    share = own_share(journal(committed(2, 600, 400)), ME, 20, OwnState("paused", 0.0), now=0.0)
    assert as_of(share, 2, 9999) == share
    newer = render(as_of(share, 4, 4000))
    assert "600 trained here are in the model, 15.0 % of all up to the swarm's round 4\n" in newer
    assert "; the base here is of round 2/20" in newer


def test_it_has_the_name_that_the_trainer_has_now() -> None:
    named = committed(1, 300, 700, names=((OTHER, "Eve", ""), (ME, "Ada", "Owls")))
    share = own_share(journal(named, committed(2, 300, 700)), ME, 20, RUNNING, now=0.0)
    assert (share.name, share.team, render(share).split(" · ")[0]) == ("Ada", "Owls", "Ada QmMe, Owls")
    share = own_share(journal(named, committed(2, 300, 700, names=((ME, "", ""),))), ME, 20, RUNNING, now=0.0)
    assert (share.name, share.team, render(share).split(" · ")[0]) == ("", "", "QmMe")


def test_a_new_trainer_has_nothing_yet() -> None:
    share = own_share([], ME, 20, replace(RUNNING, state="paused", detail="until 22:00"), now=0.0)
    assert (share.tokens, share.rounds, share.round) == (0, 0, 0)
    assert "paused: until 22:00" in render(share)


@pytest.mark.parametrize("rule", ["open", "friends"])
def test_a_stranger_reads_that_it_is_on_probation_and_what_that_means_for_its_credit(tmp_path: Path, rule: str) -> None:
    run_dir(tmp_path, [], PeerStarted(ME), config=CONFIG.model_copy(update={"admission": rule}))
    (tmp_path / STATE_FILE).write_text("")
    shown = render(with_standing(look_at(tmp_path), tmp_path))
    told = "  standing on probation (0 of 10 rounds): until it ends, all newcomers together count for at most a quarter of the "
    assert (told in shown, "so less may be credited than was trained" in shown) == (rule == "open", rule == "open")


def test_a_trainer_in_an_open_campaign_reads_what_its_standing_is(tmp_path: Path) -> None:
    run_dir(tmp_path, [], PeerStarted(ME), config=CONFIG.model_copy(update={"admission": "open"}), owner=ME)
    (tmp_path / STATE_FILE).write_text("")
    share = with_standing(look_at(tmp_path), tmp_path)
    assert (share.standing, share.probation) == ("vouched", None)
    assert "  standing the owner vouches for this trainer\n" in render(share)
    assert "  standing probation passed: this trainer's work counts in full" in render(replace(share, standing="proven"))


@pytest.mark.parametrize("rule", ["open", "friends"])
def test_a_trainer_that_the_owner_banned_reads_that_it_is_excluded(
    tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir(tmp_path, [], PeerStarted(ME), config=CONFIG.model_copy(update={"admission": rule}))
    (tmp_path / STATE_FILE).write_text("")
    monkeypatch.setattr(me, "takes_part", lambda commit, peer: peer != ME)
    assert "  standing excluded, by the owner's order or by a proof" in render(with_standing(look_at(tmp_path), tmp_path))


def test_a_damaged_log_is_for_the_trainer_to_tell_when_it_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir(tmp_path, [], PeerStarted(ME))
    (tmp_path / STATE_FILE).touch()
    (tmp_path / LOG).write_bytes(b"torn")
    assert with_standing(look_at(tmp_path), tmp_path).peer_id == ME
    assert caplog.messages == []


@pytest.mark.parametrize("lose", [Path.unlink, Path.touch])
def test_a_lost_journal_is_said_beside_the_zeros_that_follow_from_it(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    run_dir(tmp_path, [])
    RSAIdentity(tmp_path / "identity.key")
    (tmp_path / STATE_FILE).touch()
    lose(tmp_path / HISTORY_FILE)
    assert not look_at(tmp_path).is_lost
    (tmp_path / LOG).touch()
    share = look_at(tmp_path)
    assert share.is_lost
    assert render(share).endswith("\n  journal  history.jsonl is lost, so nothing above counts what came before; once the "
                                  "trainer runs again, it asks others for the past")


def test_a_bootstrap_peers_run_dir_is_said_to_be_no_trainers(tmp_path: Path) -> None:
    folder = run_dir(tmp_path / "bootstrap", synthetic_swarm(2, 4, 3).records)
    with pytest.raises(UserError, match="no trainer has used this folder; give the run-dir of your trainer"):
        look_at(folder, folder / "identity.key")
    (folder / ADDRESS_FILE).touch()
    with pytest.raises(UserError, match=r"run-dir of a bootstrap peer, which does not train; .* spes-p2p control"):
        look_at(folder, folder / "identity.key")
