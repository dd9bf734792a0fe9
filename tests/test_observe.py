"""History, status, log, table and plot: what a person or a script is shown of a swarm."""

import gzip
import io
import json
import logging
import math
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from exchange_round import LAYOUT, make_plan_of, member
from hypothesis import given
from hypothesis import strategies as st
from observed_events import FIRST_COMMIT, OWNERS, ROUNDS, Clock, assembly, commit, new_board, shown, status_after
from rich.console import Console

from spes_p2p.client.local_swarm import closing_line, in_these_rounds, summarise
from spes_p2p.errors import UserError
from spes_p2p.messages.presence import PeerStatus
from spes_p2p.net.throughput import UNKNOWN_BYTES_PER_S
from spes_p2p.observe import history
from spes_p2p.observe.console import HEARTBEAT_S, RoundLog
from spes_p2p.observe.events import (
    BEFORE_TRAINING,
    BaseRestored,
    BytesMoved,
    Controlled,
    DigestMismatch,
    Evaluated,
    Event,
    Observer,
    PeersSeen,
    PeerStarted,
    PhaseTrained,
    RoundFailed,
    StateEntered,
    TasksEvaluated,
    TrainingProgress,
    WorkDropped,
    to_all,
)
from spes_p2p.observe.history import HISTORY_FILE, Entry, History, read_history
from spes_p2p.observe.log import setup_logging
from spes_p2p.observe.plot import collect_curves, plot_loss
from spes_p2p.observe.rounds import KEPT_READ, Rounds
from spes_p2p.observe.status import StatusBoard
from spes_p2p.observe.swarm_status import gather, swarm_status
from spes_p2p.observe.table import SwarmView, round_line
from spes_p2p.observe.units import human_bytes, human_bytes_up, human_count, human_indices, human_memory, human_seconds
from spes_p2p.peer.reporter import median_upload

KEPT: tuple[Event, ...] = (
    PeerStarted("a"),
    BaseRestored(BEFORE_TRAINING, 0, 100, 0, "d", "disk", OWNERS),
    PhaseTrained(1, 10, 500, math.inf, 0.1, 12.0, 0),
    commit(1),
    Evaluated(1, 4.25),
    RoundFailed(2, 1, "timeout", "no plan\nin time"),
    WorkDropped(1, 77, "old"),
    DigestMismatch(1, "a", "b"),
    TasksEvaluated(1, (("piqa", "acc", 0.5, 0.025),)),
)


def test_records_of_many_rounds_are_given_back_and_take_little_memory() -> None:
    members = tuple((f"peer-{i}-{random.Random(i).randbytes(16).hex()}", 1000 + i, i) for i in range(100))
    committed = [replace(commit(number), contributions=members, loss=math.inf) for number in range(4 * KEPT_READ)]
    tracemalloc.start()
    rounds, before = Rounds("a"), tracemalloc.get_traced_memory()[0]
    for event in committed:
        rounds.record(event, 1.5)
    bytes_each = (tracemalloc.get_traced_memory()[0] - before) / len(committed)
    tracemalloc.stop()
    first = [rounds.at(number) for number in rounds.after(9, 3)]
    assert [(each.round, each.time, each.contributions[7].tokens) for each in first] == [(n, 1.5, 1007) for n in (10, 11, 12)]
    rounds.record(Evaluated(3, 4.25), 2.0)
    assert rounds.at(3).validation_loss == 4.25
    assert not rounds.missing(range(len(committed)))
    assert bytes_each < 5000  # of which the last ones, as objects, are most


def test_history_gives_back_what_was_kept_in_order(tmp_path: Path) -> None:
    history = History("a", tmp_path / "run", wall_time=lambda: 12.5)
    for event in (StateEntered("training"), TrainingProgress(0, 1, 2, 3.0), BytesMoved("push", 1, 2), PeersSeen(1, 1), *KEPT):
        history.record(event)
    entries = read_history(tmp_path / "run")
    assert [entry.event for entry in entries if not isinstance(entry.event, PhaseTrained)] == [
        event for event in KEPT if not isinstance(event, PhaseTrained)
    ]
    trained = entries[2].event
    assert isinstance(trained, PhaseTrained)
    assert math.isnan(trained.loss)
    assert {entry.time for entry in entries} == {12.5}


@given(cut=st.integers(min_value=1), total=st.integers(1, 5))
def test_history_cut_anywhere_loses_at_most_the_torn_line_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, cut: int, total: int
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    file = run_dir / HISTORY_FILE
    history = History("a", run_dir)
    for number in range(total):
        history.record(Evaluated(number, 1.0))
    history.close()
    content = file.read_bytes()
    kept = content[: cut % len(content)]
    file.write_bytes(kept)
    whole = kept.count(b"\n")
    assert len(read_history(file)) == whole
    History("a", run_dir).record(Evaluated(99, 2.0))
    assert [entry.event for entry in read_history(file)] == [*(Evaluated(n, 1.0) for n in range(whole)), Evaluated(99, 2.0)]


NUM_KEPT = 40
EVENTS = [Evaluated(number, 1.0) for number in range(NUM_KEPT)]


def written_in_parts(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Write EVENTS; return the parts of the journal."""
    monkeypatch.setattr(history, "PART_BYTES", 500)
    for start in range(0, NUM_KEPT, 10):
        writer = History("a", run_dir)
        for event in EVENTS[start : start + 10]:
            writer.record(event)
        writer.close()
    parts = sorted(run_dir.glob("history-*"))
    assert [part.name for part in parts] == [f"history-{number:06}.jsonl.gz" for number in range(1, len(parts) + 1)]
    assert len(parts) > 3
    return parts


def read_events(run_dir: Path) -> list[Event]:
    return [entry.event for entry in read_history(run_dir)]


def test_a_long_history_is_in_compressed_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_in_parts(tmp_path, monkeypatch)
    assert (tmp_path / HISTORY_FILE).stat().st_size < 500
    assert read_events(tmp_path) == EVENTS
    assert [entry.event for entry in read_history(tmp_path / HISTORY_FILE)] == EVENTS


@pytest.mark.parametrize("moment", ["renamed", "begun anew", "half compressed", "compressed"])
def test_whoever_is_killed_while_a_part_begins_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    last = written_in_parts(tmp_path, monkeypatch)[-1]
    current, plain, packed = tmp_path / HISTORY_FILE, last.with_suffix(""), last.read_bytes()
    plain.write_bytes(gzip.decompress(packed) + current.read_bytes())
    current.unlink()
    if moment != "renamed":
        current.touch()
    if moment == "compressed":
        last.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        last.unlink()
    if moment == "half compressed":
        last.with_name(f"{plain.name}.gz.1.tmp").write_bytes(packed[:20])
    assert read_events(tmp_path) == EVENTS
    History("a", tmp_path).record(Evaluated(NUM_KEPT, 2.0))
    assert read_events(tmp_path) == [*EVENTS, Evaluated(NUM_KEPT, 2.0)]
    assert last.exists()
    assert not plain.exists()


def test_who_reads_while_a_part_begins_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_in_parts(tmp_path, monkeypatch)
    writer, really_open = History("a", tmp_path), gzip.open

    def write_and_open(path: Path) -> object:
        monkeypatch.setattr(gzip, "open", really_open)
        for event in EVENTS:
            writer.record(event)
        return really_open(path)

    monkeypatch.setattr(gzip, "open", write_and_open)
    assert read_events(tmp_path)[:NUM_KEPT] == EVENTS


def test_a_damaged_part_is_named_and_costs_only_its_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, *_ = written_in_parts(tmp_path, monkeypatch)
    first.write_bytes(first.read_bytes()[:-30])
    second.write_bytes(b"no gzip")
    found = read_events(tmp_path)
    assert found == [event for event in EVENTS if event in found]
    assert len(found) > NUM_KEPT - 20
    for part in (first, second):
        assert f"{part.name}: damaged" in caplog.text


def test_every_line_is_on_disk_as_soon_as_it_was_told(tmp_path: Path) -> None:
    history = History("a", tmp_path)
    history.record(Evaluated(0, 1.0))
    assert len(read_history(tmp_path)) == 1


def test_event_of_a_newer_version_is_left_out(tmp_path: Path) -> None:
    known = '{"time":1,"event":"Evaluated","round":1,"validation_loss":2.0,"invented":0}'
    (tmp_path / HISTORY_FILE).write_text(f'{{"time":1,"event":"Invented","x":1}}\n{known}\n')
    assert read_history(tmp_path) == [Entry(1.0, Evaluated(1, 2.0))]


@pytest.mark.parametrize("line", [
    b"no json", b"[]", b"{}", b"\xff\x00", b"", b'{"time":1,"event":"Evaluated"}', b"[" * 10**6,
    b'{"time":1%s,"event":"Evaluated","round":1,"validation_loss":2.0}' % (b"0" * 400),
], ids=lambda line: line[:12])
def test_a_damaged_line_is_named_once_and_costs_only_itself(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    good = b'{"time":1,"event":"Evaluated","round":1,"validation_loss":2.0}'
    (tmp_path / HISTORY_FILE).write_bytes(b"\n".join([good, line, good, b""]))
    for _ in range(2):
        assert read_history(tmp_path) == 2 * [Entry(1.0, Evaluated(1, 2.0))]
    assert caplog.messages == [f"{tmp_path / HISTORY_FILE}: 1 damaged line skipped, the first is line 2"]


def test_missing_history_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"history\.jsonl: cannot read the history"):
        read_history(tmp_path)


def test_a_folder_in_place_of_a_part_is_named(tmp_path: Path) -> None:
    (tmp_path / HISTORY_FILE).touch()
    (tmp_path / "history-000001.jsonl").mkdir()
    with pytest.raises(UserError, match=r"history-000001\.jsonl: cannot read the history"):
        read_history(tmp_path)


def test_run_dir_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="choose another --run-dir"):
        History("a", tmp_path / "run")


def test_status_survives_the_wire() -> None:
    status = status_after(commit(3, loss=2.0), Evaluated(3, 2.5), RoundFailed(4, 1, "timeout", ""), PeersSeen(3, 1))
    again = PeerStatus.from_bytes(status.to_bytes())
    assert swarm_status([again]) == swarm_status([status])
    assert again.owners == OWNERS


def test_board_follows_the_events() -> None:
    clock = Clock()
    board = new_board(clock)
    assert (board.status.stage, board.status.round, math.isnan(board.status.loss)) == ("joining", 0, True)
    board.update(BaseRestored(BEFORE_TRAINING, 0, 100, 0, "digest0", "download", ((), (), ())))
    board.update(assembly())
    assert (board.status.round, board.status.owned, math.isnan(board.status.loss)) == (0, (0, 2), True)
    board.update(StateEntered("training"))
    board.update(TrainingProgress(1, 3, 10, 1234.0))
    assert (board.status.stage, board.status.steps_done, board.status.steps_planned) == ("training", 3, 10)
    assert board.status.round == 0
    board.update(PhaseTrained(1, 10, 500, 4.6, 0.1, 12.0, 0))
    board.update(commit(1))
    clock.now = 30.0
    status = board.status
    assert (status.round, status.steps_done, status.loss, status.local_loss) == (1, 0, 4.5, 4.6)
    assert (status.owned, status.members) == ((0, 2), ("peer-aaaaaa", "peer-bbbbbb"))
    assert status.round_seconds == {"train": 12.0, "announce": 0.5, "exchange": 1.5}
    assert status.uptime_s == 30.0
    board.update(commit(2))
    assert (board.status.sent_bytes, board.status.round_sent_bytes) == (4_500_000, 1_500_000)
    assert "train" not in board.status.round_seconds


def test_a_paused_trainer_has_no_speed() -> None:
    assert status_after(TrainingProgress(1, 3, 10, 1234.0), StateEntered("paused")).tokens_per_second == 0.0


def test_base_of_a_round_without_me_tells_nothing_of_that_round() -> None:
    jumped = status_after(commit(3), BaseRestored(6, 60, 100, 6000, "digest6", "download", OWNERS))
    assert (jumped.round, jumped.members, jumped.round_tokens, math.isnan(jumped.loss)) == (6, (), 0, True)
    repaired = status_after(commit(3), BaseRestored(3, 30, 100, 3000, "digest3", "download", OWNERS))
    assert (repaired.members, repaired.loss) == (FIRST_COMMIT.members, 4.5)


def test_seconds_of_training_are_told_by_the_phase_alone() -> None:
    seconds = {"train": 7.0, "exchange": 1.5}
    assert status_after(commit(1, seconds=seconds)).round_seconds == {"exchange": 1.5}
    trained = status_after(PhaseTrained(1, 10, 500, 4.6, 0.1, 12.0, 0), commit(1, seconds=seconds))
    assert trained.round_seconds == {"train": 12.0, "exchange": 1.5}


def test_time_left_is_the_pace_of_the_rounds_times_the_rounds_left() -> None:
    clock = Clock()
    board = new_board(clock)
    assert math.isnan(board.status.seconds_left)
    for number, at in ((0, 0.0), (1, 10.0), (2, 20.0), (3, 500.0), (4, 510.0)):
        clock.now = at
        board.update(commit(number))
    assert board.status.seconds_left == 60.0
    clock.now = 514.0
    assert board.status.seconds_left == 56.0
    clock.now = 10_000.0
    assert board.status.seconds_left == 50.0
    board.update(commit(ROUNDS - 1))
    assert board.status.seconds_left > 0.0
    board.update(commit(ROUNDS))
    assert board.status.seconds_left == 0.0


VALID = {"peer_id": "p", "role": "trainer", "campaign": "c", "campaign_hash": "h", "total_rounds": 1}


def test_status_of_another_version_is_read() -> None:
    assert PeerStatus.from_bytes(msgpack.packb({**VALID, "invented": [1]})).peer_id == "p"


@pytest.mark.parametrize(
    "wrong",
    [
        {"peer_id": "\x1b[2J"},
        {"peer_id": "two\nlines"},
        {"campaign": "x" * 1000},
        {"round": -1},
        {"round": "many"},
        {"owners": [["\x07"]]},
        {"owned": 3},
        {"failures": {"\x1b": 1}},
        {"total_rounds": None},
    ],
)
def test_status_with_a_wrong_field_is_refused_and_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"^not a peer's status: {next(iter(wrong))}"):
        PeerStatus.from_bytes(msgpack.packb({**VALID, **wrong}))


@given(st.binary(max_size=64))
def test_no_bytes_raise_anything_but_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^not a peer's status"):
        PeerStatus.from_bytes(data)


def test_swarm_is_told_by_its_newest_round() -> None:
    behind = status_after(commit(3, loss=9.0), Evaluated(3, 8.0), peer_id="peer-zzzzzz")
    ahead = [status_after(TrainingProgress(5, 1, 2, 100.0), commit(5), peer_id=peer) for peer in ("peer-bbbbbb", "peer-aaaaaa")]
    helper = status_after(BaseRestored(5, 50, 100, 5000, "digest5", "download"), peer_id="helper", role="helper")
    swarm = gather([helper, behind, *ahead])
    assert (swarm.round, swarm.loss, swarm.validation_loss, swarm.base_digest) == (5, 4.5, 8.0, "digest5")
    assert (swarm.tokens_per_second, swarm.round_sent_bytes, swarm.digests_equal) == (200.0, 3_000_000, True)
    assert [peer.peer_id for peer in swarm.peers] == ["peer-aaaaaa", "peer-bbbbbb", "peer-zzzzzz", "helper"]


def test_different_bases_of_one_round_are_seen() -> None:
    odd = status_after(commit(5, base_digest="other"), peer_id="peer-bbbbbb")
    assert not gather([status_after(commit(5)), odd]).digests_equal
    assert gather([status_after(commit(5)), status_after(commit(4, base_digest="other"))]).digests_equal


def test_peer_that_is_still_joining_holds_no_different_base() -> None:
    assert gather([status_after(), status_after(BaseRestored(BEFORE_TRAINING, 0, 100, 0, "digest", "disk"))]).digests_equal


def test_swarm_is_assembled_by_round_0_and_done_with_the_last() -> None:
    waiting = gather([status_after(BaseRestored(BEFORE_TRAINING, 0, 100, 0, "d", "download", ((), (), ())))])
    assert (waiting.assembled, waiting.ownerless) == (False, ())
    assert gather([status_after(assembly())]).assembled
    assert "assembling, 1 trainer so far" in shown(list(waiting.peers))
    one = replace(waiting.peers[0], min_peers=2, stage="announcing")
    assert "assembling, 1 of 2 trainers so far" in (alone := shown([one]))
    assert ("waiting" in alone, "announcing" in alone) == (True, False)
    both = shown([one, replace(one, peer_id="peer-bbbbbb")])
    assert ("assembling, 2 trainers so far" in both, "announcing" in both) == (True, True)
    strangers = [replace(peer, min_peers=2, stage="announcing", vouched_alive=0) for peer in (one, replace(one, peer_id="B"))]
    unvouched = " ".join(shown(strangers, width=200).split())
    assert "! round 0 waits for a trainer that the owner vouches for; the owner invites one with --roles trainer" in unvouched
    assert ("waiting" in unvouched, "announcing" in unvouched) == (True, False)
    assert "vouches" not in shown([replace(peer, vouched_alive=1) for peer in strangers])
    begun = status_after(commit(5), PeersSeen(2, 1, vouched=0))
    for under_way in (begun, replace(begun, owners=((), (), ()))):
        said = shown([under_way], width=200)
        assert "! rounds go on, but the schedule waits for a trainer that the owner vouches for" in said
        assert ("assembling" in said, "begins anew" in said) == (False, False)
    for stands in (replace(begun, failing={"timeout": 1}), replace(begun, electorate=("gone",))):
        assert "! the schedule waits for a trainer that the owner vouches for" in shown([stands], width=200)
    assert [gather([status_after(commit(number))]).done for number in (0, ROUNDS - 1, ROUNDS)] == [False, False, True]


def test_a_phase_without_steps_so_far_shows_none() -> None:
    status = status_after(commit(5), StateEntered("training"))
    assert "%" not in shown([status])
    assert "training 30 %" in shown([status_after(commit(5), StateEntered("training"), TrainingProgress(6, 3, 10, 100.0))])


def test_last_round_is_told_by_a_peer_that_took_part() -> None:
    downloaded = status_after(BaseRestored(5, 50, 100, 5000, "digest5", "download", OWNERS), peer_id="peer-000000")
    swarm = gather([downloaded, status_after(commit(5))])
    assert (swarm.round_tokens, swarm.loss) == (1000, 4.5)


def test_held_out_loss_is_the_newest_that_anybody_knows_and_named_by_its_round() -> None:
    first = status_after(Evaluated(3, 8.0), commit(5))
    evaluator = status_after(Evaluated(3, 8.0), commit(5), Evaluated(4, 7.0), peer_id="peer-bbbbbb")
    assert gather([first, evaluator]).validation_loss == 7.0
    assert "held-out 7.000 (round 4) ·" in round_line([first, evaluator])
    assert "held-out 6.000 ·" in round_line([status_after(commit(5), Evaluated(5, 6.0))])


def test_plain_line_says_the_bytes_of_one_peer_however_many_have_committed() -> None:
    peers = [status_after(commit(5), peer_id=peer) for peer in ("peer-aaaaaa", "peer-bbbbbb")]
    late = status_after(commit(4), peer_id="peer-cccccc")
    for statuses in (peers, [*peers, late], [peers[0], late]):
        assert "1.50 MB up per peer in 2.00 s" in round_line(statuses)


def test_unknown_numbers_are_null_in_json() -> None:
    document = json.loads(json.dumps(swarm_status([status_after()]), allow_nan=False))
    assert document["loss"] is None
    assert document["peers"][0]["validation_loss"] is None


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="spes_p2p")
    return caplog


def observers(clock: Clock) -> Observer:
    board = new_board(clock)
    return to_all(board.update, RoundLog(board, clock).show)


def test_what_the_owner_ordered_is_shown_until_something_else_is() -> None:
    paused = Controlled(2, 3, "paused", "paused, from round 9 on learning_rate 0.1")
    statuses = [status_after(commit(1), commit(2), paused)]
    assert (statuses[0].state, statuses[0].control) == ("paused", paused.order)
    assert f"ordered by the owner: {paused.order}" in shown(statuses)
    assert round_line(statuses).split(" · ")[-1] == "paused"
    assert math.isnan(statuses[0].seconds_left)
    assert round_line([status_after(commit(ROUNDS), paused)]).split(" · ")[-1] == "done"
    resumed = [status_after(commit(1), paused, Controlled(3, 4, "running", ""), commit(3))]
    assert "order" not in shown(resumed)


def test_the_number_of_rounds_follows_the_schedule_and_the_rounds_that_moved_nothing() -> None:
    assert status_after(commit(3, total_rounds=9)).total_rounds == 9
    assert gather([status_after(commit(4, total_rounds=4))]).done


def test_a_round_is_one_line_with_what_a_person_wants(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    peer = observers(clock)
    for number in (1, 2):
        clock.now += 20
        peer(TrainingProgress(number, 10, 10, 1234.0))
        peer(PhaseTrained(number, 10, 500, 4.6, 0.1, 12.0, 0))
        peer(commit(number))
    assert log.messages[1:] == [
        "round 2/10 · loss 4.500 · 1.23k tokens/s · experts 0 2 · 2 trainers · trained 12.0 s · "
        "synced 2.00 s, 1.50 MB up, 2.00 MB down · 2m40s left"
    ]


def test_a_long_phase_speaks_once_a_minute(log: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    peer = observers(clock)
    for step in range(1, 101):
        clock.now += HEARTBEAT_S / 20
        peer(TrainingProgress(1, step, 100, 50.0))
    assert len(log.messages) == 5
    assert log.messages[0] == "round 1/10 · training, 20 % · 50 tokens/s"


@pytest.mark.parametrize(
    ("event", "level", "words"),
    [
        (RoundFailed(4, 2, "refused", "no"), logging.WARNING, ["round 4/10", "attempt 2", "refused: no"]),
        (WorkDropped(4, 12_345, "too old"), logging.WARNING, ["12.3k tokens", "too old"]),
        (DigestMismatch(4, "a" * 64, "b" * 64), logging.ERROR, ["agreed bbbbbbbbbbbb", "local aaaaaaaaaaaa"]),
        (PhaseTrained(4, 10, 500, 4.6, 0.1, 12.0, 3), logging.WARNING, ["skipped 3 steps", "non-finite"]),
        (Evaluated(4, 4.25), logging.INFO, ["round 4/10", "held-out loss 4.250"]),
        (Evaluated(0, 8.25), logging.INFO, ["round 0/10", "held-out loss 8.250 before training"]),
        (commit(4, dropped_parts=3), logging.INFO, ["3 of 10 parts left out"]),
    ],
)
def test_trouble_is_said_with_its_level(log: pytest.LogCaptureFixture, event: Event, level: int, words: list[str]) -> None:
    observers(Clock())(event)
    assert [record.levelno for record in log.records] == [level]
    assert [word for word in words if word not in log.messages[0]] == []


def test_round_0_says_that_the_swarm_is_assembled_and_who_trains_what(log: pytest.LogCaptureFixture) -> None:
    observers(Clock())(assembly())
    assert log.messages == ["round 0/10 · swarm assembled: 2 trainers · training experts 0 2 · bbbbbb 1-2"]


@pytest.mark.parametrize(
    ("number", "source", "expected"),
    [
        (BEFORE_TRAINING, "download", "downloaded base 0 (digest 0123456789ab); next: assembling the swarm"),
        (0, "disk", "base 0 is in place (digest 0123456789ab); asking for the rounds since"),
        (6, "rollback", "base 6 is that of an earlier round (digest 0123456789ab); next: round 7/10"),
        (ROUNDS, "download", "downloaded base 10 (digest 0123456789ab); the campaign is done"),
    ],
)
def test_restored_base_is_named_by_its_last_round(
    log: pytest.LogCaptureFixture, number: int, source: str, expected: str
) -> None:
    observers(Clock())(BaseRestored(number, 0, 100, 0, "0123456789abcdef", source))
    assert log.messages == [expected]


@pytest.fixture
def root_logger() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("spes_p2p")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers, root.level = before[0], before[1]
    ours.setLevel(before[2])


@pytest.mark.usefixtures("root_logger")
def test_logging_twice_set_up_speaks_once(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info")
    setup_logging("info")
    logging.getLogger("spes_p2p.peer").info("hello")
    logging.getLogger("spes_p2p.peer").warning("beware")
    logging.getLogger("some.library").info("noise")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["hello", "warning: beware"]


@pytest.mark.usefixtures("root_logger")
def test_json_log_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", as_json=True)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("spes_p2p.peer").exception("broken")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert (record["level"], record["logger"], record["message"]) == ("error", "spes_p2p.peer", "broken")
    assert "two\nlines" in record["exception"]


def test_json_log_of_an_event_has_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", as_json=True)
    board = StatusBoard(PeerStatus("me", "trainer", "demo", "abc", 60), lambda: 0.0)
    RoundLog(board, lambda: 0.0).show(RoundFailed(8, 1, "timeout", "no plan"))
    RoundLog(board, lambda: 0.0).show(Evaluated(7, math.nan))
    failed, evaluated = map(json.loads, capsys.readouterr().err.splitlines())
    assert failed["level"] == "warning"
    assert failed["event"] == {"name": "RoundFailed", "round": 8, "attempt": 1, "reason": "timeout", "detail": "no plan"}
    assert evaluated["event"] == {"name": "Evaluated", "round": 7, "validation_loss": None}


def test_unknown_log_level_is_named() -> None:
    with pytest.raises(UserError, match="log level 'loud': choose one of debug, info"):
        setup_logging("loud")


def test_table_fits_eighty_columns_and_has_a_row_a_peer() -> None:
    training = (StateEntered("training"), TrainingProgress(6, 123, 200, 1234.0))
    long = (Evaluated(100, 4.25), commit(105, merge_alpha=0.1))
    lines = shown([status_after(*long, peer_id=peer) for peer in ("peer-aaaaaa", "peer-bbbbbb")], width=80).splitlines()
    assert any("held-out 4.250 (round 100)" in line and line.rstrip().endswith("merge 0.100") for line in lines)
    statuses = [status_after(commit(5), *training, peer_id=peer) for peer in ("peer-aaaaaa", "peer-bbbbbb")]
    text = shown(statuses, width=80)
    rows = [line for line in text.splitlines() if "training 61 %" in line]
    assert [row.split()[0] for row in rows] == ["aaaaaa", "bbbbbb"]
    assert ["■·■" in rows[0], "·■■" in rows[1]] == [True, True]
    assert "…" not in text
    assert "round 5/10" in text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_lacks_columns_and_cuts_nothing(width: int) -> None:
    owners = tuple((f"peer-{'ab'[expert % 2] * 6}",) for expert in range(32))
    training = (StateEntered("training"), TrainingProgress(6, 123, 200, 1234.0))
    event = commit(5, owners=owners, sent_bytes=123_000_000, received_bytes=123_000_000)
    text = shown([status_after(event, *training, peer_id=peer) for peer in ("peer-aaaaaa", "peer-bbbbbb")], width=width)
    assert "…" not in text
    rows = [line.split() for line in text.splitlines() if "training 61 %" in line]
    assert [(row[0], row[1]) for row in rows] == [("aaaaaa", "5"), ("bbbbbb", "5")]
    assert ("■·■" in text) == (width == 80)


def test_many_experts_are_shown_as_ranges() -> None:
    owners = tuple(("peer-aaaaaa",) if expert < 40 or expert == 63 else ("peer-bbbbbb",) for expert in range(64))
    assert "0-39 63" in shown([status_after(commit(1, owners=owners))])


def test_what_is_wrong_is_said_under_the_table() -> None:
    lonely = status_after(commit(5, owners=(("peer-aaaaaa",), ())), RoundFailed(6, 1, "timeout", ""))
    odd = status_after(commit(5, base_digest="other"), peer_id="peer-bbbbbb")
    text = shown([lonely, odd], "peer 3 ended with code 1")
    assert [line.rstrip() for line in text.splitlines() if line.startswith("!")] == [
        "! no peer trains expert 1",
        "! peers at round 5 hold different bases",
        "! failed attempts at round 6 so far: timeout 1",
        "! peer 3 ended with code 1",
    ]
    over = status_after(RoundFailed(6, 1, "timeout", ""), commit(6))
    assert (over.failures, "failed" in shown([over])) == ({"timeout": 1}, False)


def test_markup_in_a_peers_words_is_not_obeyed() -> None:
    assert "[red]x" in shown([status_after(StateEntered("[red]x"))])


def test_empty_swarm_is_no_error() -> None:
    assert "no peer has answered yet" in shown([])


def test_without_a_terminal_there_is_one_line_a_round() -> None:
    output = io.StringIO()
    with SwarmView(Console(file=output, width=40)) as view:
        view.update([])
        for event in (commit(1), commit(1), commit(2)):
            view.update([status_after(event)], ["peer 3 ended"])
    assert [line.split(" · ")[0] for line in output.getvalue().splitlines()] == ["peer 3 ended", "round 1/10", "round 2/10"]


def test_first_plain_line_says_that_the_swarm_is_assembled() -> None:
    output = io.StringIO()
    restored = BaseRestored(BEFORE_TRAINING, 0, 100, 0, "digest0", "download", ((), (), ()))
    with SwarmView(Console(file=output, width=40)) as view:
        view.update([status_after(restored)])
        for _ in range(2):
            view.update([status_after(restored, assembly()), status_after(restored, peer_id="peer-bbbbbb")])
    assert output.getvalue() == "round 0/10 · swarm assembled: 2 trainers · 3 experts per layer\n"


def test_restarted_swarm_shows_no_line_before_its_next_round() -> None:
    output = io.StringIO()
    with SwarmView(Console(file=output, width=40)) as view:
        view.update([status_after(BaseRestored(5, 50, 100, 5000, "digest5", "disk", OWNERS))])
    assert output.getvalue() == ""


@pytest.mark.parametrize(("number", "done"), [(ROUNDS - 1, False), (ROUNDS, True)])
def test_swarm_is_shown_as_done_with_the_last_round(number: int, done: bool) -> None:
    assert ("done" in shown([status_after(commit(number))])) is done
    assert round_line([status_after(commit(number))]).endswith(" · done") is done


def test_beside_a_trainer_that_has_the_last_base_stands_done_whatever_it_does_there() -> None:
    trains = replace(status_after(commit(5)), total_rounds=9, stage="training")
    assert "training" in shown([in_these_rounds(trains, None)])
    ahead = replace(trains, peer_id="QmAhead", round=6)
    of_5_rounds = shown([in_these_rounds(each, 5) for each in (trains, ahead)])
    assert ("training" in of_5_rounds, of_5_rounds.count("done")) == (False, 3)
    stopped = shown([replace(trains, state="stopped"), replace(trains, peer_id="QmOther", round=4)])
    assert ("done" in stopped, "training" in stopped) == (True, True)


def test_a_run_of_a_swarm_ends_with_the_held_out_loss_of_the_last_base(tmp_path: Path) -> None:
    names = ["peer-0", "peer-1"]
    for name in names:
        (tmp_path / name).mkdir()
        history = History(name, tmp_path / name)
        last = [replace(commit(2), loss=math.nan), *([Evaluated(2, 6.5)] if name == "peer-1" else [])]
        for event in (Evaluated(0, 6.952), *last):
            history.record(event)
    line = closing_line(summarise(tmp_path, names, 12.3, ()))
    assert line.startswith("2 rounds, ")
    assert line.endswith(" in 12 s; held-out loss 6.500 (round 2); digests equal on all peers")


@pytest.mark.parametrize(("rounds", "start", "end"), [
    (None, "round 5/25 · ", " · 1m40s left"), (30, "round 5/25 · ", " · 1m40s left"), (9, "round 5/9 · ", " · 20.0 s left"),
    (5, "round 5/5 · ", " · done"), (4, "round 5/5 · ", " · done"),
])
def test_with_a_number_of_rounds_progress_and_time_left_are_those_of_these_rounds(
    rounds: int | None, start: str, end: str
) -> None:
    status = replace(status_after(commit(5)), total_rounds=25, seconds_left=100.0)
    line = round_line([in_these_rounds(status, rounds)])
    assert line.startswith(start)
    assert line.endswith(end)


def test_the_headline_of_an_ordinary_campaign_fits_on_80_columns() -> None:
    status = replace(
        status_after(commit(5)), campaign="fairy-tales-english2", campaign_hash="c3e4b015" * 8, round=1840, total_rounds=10000,
        campaign_step=184_000, total_steps=1_000_000, total_tokens=18_400_000, seconds_left=200_000.0,
    )
    headline = shown([status], width=80).splitlines()[0]
    assert headline == "fairy-tales-english2 c3e4b015   round 1840/10000   18.4M tokens   2d07h left"


@pytest.mark.parametrize("why", [{"vouched_alive": 0}, {"electorate": ("gone",)}, {"role": "helper"}])
def test_a_campaign_that_waits_for_peers_has_no_time_left(why: dict[str, Any]) -> None:
    goes_on = replace(status_after(commit(5)), seconds_left=100.0)
    waits = replace(goes_on, **why)
    assert "1m40s left" in round_line([goes_on])
    assert ("left" in round_line([waits]), " · waits · " in round_line([waits])) == (False, True)
    assert math.isnan(gather([waits]).seconds_left)
    for is_no_wait in ({"state": "paused"}, {"round": waits.total_rounds}):
        assert "waits ·" not in round_line([replace(waits, **is_no_wait)])


def test_plain_line_says_trouble_too() -> None:
    line = round_line([status_after(commit(5, owners=(("peer-aaaaaa",), ())))])
    assert "loss 4.500" in line
    assert "no peer trains expert 1" in line


def histories() -> dict[str, list[Entry]]:
    def history(own: float) -> list[Entry]:
        events: list[Event] = [Evaluated(BEFORE_TRAINING, 9.0)]
        events.append(assembly())
        for number in (1, 2, 3):
            merge_alpha = 0.1 if number == 1 else 0.0
            events += [PhaseTrained(number, 10, 500, own, 0.1, 1.0, 0), commit(number, 9.0 - number, merge_alpha=merge_alpha)]
        return [Entry(0.0, event) for event in [*events, Evaluated(3, math.nan)]]

    return {"a": history(5.0), "b": [*history(6.0)[:4], Entry(0.0, commit(4, math.nan))]}


def test_curves_join_the_histories_by_round() -> None:
    curves = collect_curves(histories())
    assert curves.training == [(1000, 8.0), (2000, 7.0), (3000, 6.0)]
    assert curves.held_out == [(0, 9.0)]
    assert curves.by_peer == {"a": [(1000, 5.0), (2000, 5.0), (3000, 5.0)], "b": [(1000, 6.0)]}
    assert (curves.merges, curves.rounds) == ([1000], 4)


def test_late_peers_history_alone_gives_the_held_out_loss_of_its_first_base() -> None:
    late: list[Event] = [BaseRestored(5, 50, 100, 5000, "d", "download", OWNERS), Evaluated(5, 3.0), commit(6)]
    assert collect_curves({"late": [Entry(0.0, event) for event in late]}).held_out == [(5000, 3.0)]


def test_plot_is_a_png(tmp_path: Path) -> None:
    plot_loss(histories(), tmp_path / "loss.png", "demo")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_a_round_or_a_folder_is_refused(tmp_path: Path) -> None:
    for entries in ([], [Entry(0.0, assembly())]):
        with pytest.raises(UserError, match="has no round with training"):
            plot_loss({"a": entries}, tmp_path / "loss.png", "demo")
    with pytest.raises(UserError, match=r"loss\.png: cannot write the plot"):
        plot_loss(histories(), tmp_path / "absent" / "loss.png", "demo")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (human_count(0), "0"),
        (human_count(999), "999"),
        (human_count(999_999), "1.00M"),
        (human_count(12_345), "12.3k"),
        (human_count(math.nan), "-"),
        (human_bytes(1_234_567), "1.23 MB"),
        (human_bytes(999.9), "1.00 kB"),
        (human_memory(24 << 30), "24 GiB"),
        (human_memory(1 << 20), "1 MiB"),
        (human_memory(24 * 10**9), "24.0 GB"),
        (human_bytes_up(1_230_001), "1.24 MB"),
        (human_bytes_up(1_230_000), "1.23 MB"),
        (human_bytes_up(99_910_000), "100 MB"),
        (human_bytes_up(999), "999 B"),
        (human_seconds(0.042), "0.04 s"),
        (human_seconds(59.97), "1m00s"),
        (human_seconds(3599.7), "1h00m"),
        (human_seconds(200_000), "2d07h"),
        (human_indices([7, 2, 0, 1]), "0-2 7"),
        (human_indices([]), "-"),
    ],
)
def test_numbers_as_people_read_them(text: str, expected: str) -> None:
    assert text == expected


def test_a_line_is_compared_with_those_of_trainers_not_with_what_a_helper_assumes_of_its_own() -> None:
    made = [replace(member(name, 10, (0,) * LAYOUT.num_experts), bandwidth=rate) for name, rate in (("A", 1e5), ("B", 2e5))]
    helper = replace(member("W", 0, (0,) * LAYOUT.num_experts), bandwidth=UNKNOWN_BYTES_PER_S, trains=False)
    assert median_upload(make_plan_of([*made, helper]), "A") == 2e5
    assert median_upload(make_plan_of([made[0], helper]), "A") == 0
