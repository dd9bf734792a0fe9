"""Peers can tell of rounds that they were in, and of those before they came, as others told them."""

from __future__ import annotations

import asyncio
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from remembering_swarm import RememberingSwarm

from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.compact import expanded
from spes_p2p.messages.fields import LONGEST_NAME, LONGEST_WORD, MAX_MEMBERS, MAX_NAMES, MAX_STAGES
from spes_p2p.messages.methods import HISTORY, PAGE, SPEED
from spes_p2p.messages.presence import Contribution, HistoryPage, HistoryRequest, Named, RoundRecord
from spes_p2p.observe.events import Evaluated, Event, PhaseTrained, RoundCommitted, RoundFailed
from spes_p2p.observe.history import HISTORY_FILE, History, read_history
from spes_p2p.observe.rounds import Rounds, Totals, totals_of
from spes_p2p.peer import history_sync
from spes_p2p.peer.history_sync import (
    CONTRIBUTIONS_PER_MESSAGE,
    LEAST_RECORDS,
    NAME_WEIGHT,
    RECORDS_PER_MESSAGE,
    _page,
    pages,
)

FIRST = RoundCommitted(
    round=0, campaign_step=0, total_steps=50, tokens=0, total_tokens=0, loss=math.nan, members=("a", "b"),
    owners=(("a",), ("b",)), base_digest="d0", parts=0, dropped_parts=0,
    sent_bytes=10, received_bytes=20, seconds={"announce": 1.0},
)


def commit(number: int, tokens: int = 100) -> RoundCommitted:
    return replace(
        FIRST, round=number, campaign_step=10 * number, tokens=tokens, total_tokens=tokens * number, loss=5.0 - number,
        base_digest=f"d{number}", seconds={"exchange": 2.0, "apply": 0.5},
        contributions=(("a", tokens - 30, 6), ("b", 30, 4)),
    )


def history_after(folder: Path, *events: Event, peer_id: str = "a") -> History:
    history = History(peer_id, folder, wall_time=lambda: 1000.0)
    for event in events:
        history.record(event)
    return history


def test_after_a_restart_a_peer_knows_the_losses_of_the_last_rounds(tmp_path: Path) -> None:
    assert History("a", tmp_path / "empty").rounds.last_round() == {}
    history_after(tmp_path, FIRST, commit(1), Evaluated(1, 4.5), commit(2)).close()
    known = History("a", tmp_path).rounds.last_round()
    assert known == {"round": 2, "loss": 3.0, "validation_loss": 4.5, "validation_round": 1}


def test_a_record_says_what_the_round_was_and_what_it_cost_this_peer(tmp_path: Path) -> None:
    failed = RoundFailed(1, 0, "timeout", "")
    trained = PhaseTrained(1, 10, 70, 4.0, 0.1, 12.0, 0)
    history = history_after(tmp_path, FIRST, trained, failed, commit(1), Evaluated(1, 4.5), commit(2))
    first, second, third = history.rounds.records
    assert (first.round, math.isnan(first.loss), second.round, second.loss, second.validation_loss) == (0, True, 1, 4.0, 4.5)
    assert second.seconds == (("train", 12.0), ("exchange", 2.0), ("apply", 0.5))
    assert (second.failed_attempts, third.failed_attempts, second.members, second.teller) == (1, 0, 2, "a")
    assert third.seconds == (("exchange", 2.0), ("apply", 0.5))


def test_a_record_says_what_the_owner_had_ordered(tmp_path: Path) -> None:
    first, second = history_after(tmp_path, FIRST, replace(commit(1), control="paused")).rounds.records
    assert (first.control, second.control) == ("", "paused")


def test_contributions_add_up_to_the_tokens_of_the_base(tmp_path: Path) -> None:
    totals = totals_of(history_after(tmp_path, FIRST, commit(1), commit(2)).rounds.records)
    assert totals == Totals(2, (Contribution("a", 140, 12), Contribution("b", 60, 8)))
    assert totals.tokens == commit(2).total_tokens


def test_a_round_that_is_applied_again_counts_once(tmp_path: Path) -> None:
    history = history_after(tmp_path, FIRST, commit(1), Evaluated(1, 4.5), commit(1))
    assert totals_of(history.rounds.records).tokens == 100
    assert history.rounds.records[1].validation_loss == 4.5


def test_a_restarted_peer_knows_what_it_knew_and_a_torn_line_costs_one_record(tmp_path: Path) -> None:
    before = history_after(tmp_path, FIRST, commit(1), Evaluated(1, 4.5), PhaseTrained(2, 10, 70, 4.0, 0.1, 12.0, 0))
    before.add([replace(before.rounds.records[1], round=5, teller="b")])
    before.close()
    again = History("a", tmp_path)
    assert pack(again.rounds.records) == pack(before.rounds.records)
    with (tmp_path / HISTORY_FILE).open("a") as file:
        file.write('{"round":2,"campaign_st')
    torn = history_after(tmp_path, commit(2))
    assert [record.round for record in History("a", tmp_path).rounds.records] == [0, 1, 2, 5]
    assert torn.rounds.records[2].seconds[0] == ("train", 12.0)


def test_what_is_heard_completes_what_is_known_and_never_replaces_it(tmp_path: Path) -> None:
    one = history_after(tmp_path, FIRST, commit(2))
    other = history_after(tmp_path / "other", FIRST, commit(1), commit(2), Evaluated(2, 7.5), peer_id="b")
    assert one.rounds.missing(range(3)) == [1]
    one.add(other.rounds.records)
    assert [(record.round, record.teller) for record in one.rounds.records] == [(0, "a"), (1, "b"), (2, "a")]
    assert one.rounds.records[2].validation_loss == 7.5
    size = (tmp_path / HISTORY_FILE).stat().st_size
    one.add(other.rounds.records)
    assert (tmp_path / HISTORY_FILE).stat().st_size == size


def test_what_is_heard_is_no_event_of_this_peer_and_cannot_stop_it(tmp_path: Path) -> None:
    history = history_after(tmp_path, FIRST)
    [record] = history.rounds.records
    history.add([replace(record, round=1, time=math.inf, seconds=(("train", math.nan),))])
    assert [entry.event.round for entry in read_history(tmp_path) if isinstance(entry.event, RoundCommitted)] == [0]


def test_a_page_survives_the_wire(tmp_path: Path) -> None:
    page = HistoryPage(5.0, history_after(tmp_path, FIRST, commit(1)).rounds.records)
    assert pack(unpack(HistoryPage, pack(page))) == pack(page)


@pytest.mark.parametrize(
    "change", [{"teller": "\x1b[2J"}, {"round": -1}, {"seconds": (("train\n", 1.0),)}, {"base_digest": "x" * 999}]
)
def test_a_record_that_no_peer_would_write_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    [record] = history_after(tmp_path, FIRST).rounds.records
    with pytest.raises(WireError):
        unpack(HistoryPage, pack(HistoryPage(5.0, (replace(record, **change),))))


# In a swarm --------------------------------------------------------------------------------------------------------------


async def test_a_trainer_fetches_the_last_rounds_only_and_a_helper_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_sync, "FETCHED_ROUNDS", 3)
    monkeypatch.setattr(history_sync, "LOOK_BACK", 0)
    swarm = RememberingSwarm(tmp_path, total_steps=100)
    await swarm.begin()
    await swarm.until_round(6)
    for number in range(3):
        del swarm.histories["W"].rounds._records[number]
    await swarm.join("D")
    await swarm.join_as_helper("H")
    await swarm.until(lambda: "D" in swarm.nodes and swarm.round_of("D") >= 8)
    await asyncio.sleep(5.0)
    assert min(swarm.records("D")) > 0
    assert swarm.records("D").keys() >= {*range(min(swarm.records("D")), 9)}
    for helper in "WH":
        assert swarm.records(helper).keys() >= {*range(9)}


async def test_who_lacks_rounds_that_nobody_has_does_not_read_the_later_ones_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_sync, "RECORDS_PER_MESSAGE", 1)
    monkeypatch.setattr(history_sync, "LEAST_RECORDS", 1)
    told, page_of = list[int](), _page

    def page(rounds: Rounds, wanted: list[int]) -> tuple[RoundRecord, ...]:
        told.extend(wanted)
        return page_of(rounds, wanted)

    monkeypatch.setattr(history_sync, "_page", page)
    swarm = RememberingSwarm(tmp_path, total_steps=100)
    await swarm.begin()
    await swarm.until_round(6)
    told.clear()
    for history in swarm.histories.values():
        del history.rounds._records[1]
    await asyncio.sleep(8.0)
    assert told
    assert max(told) == 2


@pytest.mark.long
async def test_a_joiner_and_the_bootstrap_know_all_rounds_and_contributions(tmp_path: Path) -> None:
    swarm = RememberingSwarm(tmp_path, total_steps=100)
    await swarm.begin()
    swarm.nodes["A"].named, swarm.nodes["B"].named = ("Ada", "Night owls"), ("", "night owls")
    await swarm.until_round(4)
    swarm.nodes["A"].named = "Ada L.", "Night owls"
    await swarm.join("D")
    await swarm.until(lambda: "D" in swarm.nodes and swarm.round_of("D") >= 7)
    await swarm.until(lambda: all(swarm.credits_all(name, 7) for name in "WAD"))
    for number in range(1, 8):
        a, d, w = (swarm.records(name)[number] for name in "ADW")
        assert a.loss == d.loss == w.loss
        assert a.contributions == d.contributions == w.contributions
    totals = totals_of(swarm.records("D").values())
    assert {each.peer for each in totals.contributions} == {"A", "B", "C", "D"}
    assert {each.peer: each.name for each in totals.names.values()} == {"A": "Ada L.", "B": ""}
    assert totals.teams() == [("Night owls", 2, sum(each.tokens for each in totals.contributions if each.peer in "AB"))]
    assert all(each.expert_steps > 0 for each in totals.contributions)


@pytest.mark.long
async def test_a_peer_that_joins_again_without_a_name_has_none_in_its_own_journal_either(tmp_path: Path) -> None:
    """Who stayed hears that the name is gone; the peer itself knew of it before its restart only."""
    swarm = RememberingSwarm(tmp_path, total_steps=200)
    await swarm.begin()
    swarm.nodes["A"].named = "Ada", "Night owls"
    await swarm.until(lambda: bool(totals_of(swarm.records("A").values()).called("A").name))
    swarm.kill("A")
    swarm.prepare("A")
    swarm.start_again("A")
    await swarm.attach("A")
    await swarm.until(lambda: not any(totals_of(swarm.records(peer).values()).called("A").name for peer in "AW"))
    assert "A" not in totals_of(swarm.records("A").values()).names


@pytest.mark.parametrize("names", [pytest.param("W", marks=pytest.mark.slow), "WABC"])
@pytest.mark.long
async def test_damaged_journals_cost_later_joiners_neither_rounds_nor_credit(tmp_path: Path, names: str) -> None:
    """Each peer loses another round: what one lacks, another has."""
    swarm = RememberingSwarm(tmp_path, total_steps=400)
    await swarm.begin()
    await swarm.until_round(5)
    for number, name in enumerate(names, start=1):
        await swarm.restart_damaged(name, b'"event":"RoundCommitted","round":%d,' % number)
        assert swarm.histories[name].rounds.missing(range(5)) == [number]
        await swarm.until(functools.partial(swarm.credits_all, name, 5))
    await swarm.join("D")
    await swarm.until(lambda: "D" in swarm.nodes and swarm.round_of("D") >= 10)
    await swarm.until(lambda: all(swarm.credits_all(name, 10) for name in "WABCD"))


@pytest.mark.long
async def test_a_peer_answers_at_most_a_message_of_records(tmp_path: Path) -> None:
    swarm = RememberingSwarm(tmp_path)
    await swarm.begin()
    await swarm.until_round(1)
    history, node = swarm.histories["A"], swarm.nodes["W"]
    first = history.rounds.records[0]
    many = tuple(Contribution(f"peer-{i}", i, i) for i in range(MAX_MEMBERS))
    fitting = CONTRIBUTIONS_PER_MESSAGE // MAX_MEMBERS

    async def asked(after: int) -> list[int]:
        reply = await node.endpoint.ask("A", HISTORY, pack(HistoryRequest(after, 10**6)))
        page = unpack(HistoryPage, expanded(reply))
        return [record.round for record in page.records]

    history.add([replace(first, round=number) for number in range(10, 10 + 2 * RECORDS_PER_MESSAGE)])
    assert await asked(9) == list(range(10, 10 + RECORDS_PER_MESSAGE))
    full = replace(first, contributions=many, names=(), seconds=())
    history.add([replace(full, round=number) for number in range(1000, 1001 + 2 * fitting)])
    assert await asked(999) == list(range(1000, 1000 + fitting))
    heard = [page.records[-1].round async for page in pages(node.endpoint, "A", 999, 10**6)]
    called = tuple(Named(f"peer-{i:050}", "東" * LONGEST_NAME, "京" * LONGEST_NAME) for i in range(MAX_NAMES))
    named = replace(first, contributions=(), names=called, seconds=())
    history.add([replace(named, round=number) for number in range(9000, 9000 + RECORDS_PER_MESSAGE)])
    assert await asked(8999) == list(range(9000, 9000 + CONTRIBUTIONS_PER_MESSAGE // NAME_WEIGHT // MAX_NAMES))
    assert heard == [999 + fitting, 999 + 2 * fitting, 1000 + 2 * fitting]


def test_a_page_has_room_for_records_with_the_longest_fields(tmp_path: Path) -> None:
    (record,) = history_after(tmp_path, FIRST, commit(1)).rounds.records[:1]
    stages = tuple(("東" * (LONGEST_WORD - 2) + f"{number:02d}", 1.0) for number in range(MAX_STAGES))
    rounds = Rounds("A")
    for number in range(RECORDS_PER_MESSAGE):
        rounds.add(replace(record, round=number, seconds=stages))
    page = _page(rounds, list(range(RECORDS_PER_MESSAGE)))
    assert len(page) >= LEAST_RECORDS
    assert len(pack(HistoryPage(0.0, page))) < PAGE


async def test_a_bandwidth_test_is_no_traffic_of_a_round(tmp_path: Path) -> None:
    swarm = RememberingSwarm(tmp_path)
    await swarm.begin()
    await swarm.until_round(2)
    endpoint = swarm.nodes["A"].endpoint
    endpoint.sent[SPEED] += 10**9
    endpoint.received[SPEED] += 10**9
    number = swarm.nodes["A"].log.round
    await swarm.until(lambda: swarm.credits_all("A", number + 1))
    records = swarm.records("A")
    assert all(records[each].sent_bytes + records[each].received_bytes < 10**6 for each in (number, number + 1))
