"""Every peer can tell of every round: those it was in, and those before it came, as others told it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from spes_p2p.observe.chronicle import ROUNDS_FILE, Chronicle
from spes_p2p.observe.events import Evaluated, Event, PhaseTrained, RoundCommitted, RoundFailed
from spes_p2p.observe.rounds import NOTHING, Contribution, Totals
from spes_p2p.simulate.swarm import Recorder, VirtualSwarm, campaign, simulate
from spes_p2p.swarm.remember import HISTORY, RECORDS_A_MESSAGE, HistoryPage, HistoryRequest, remember, serving
from spes_p2p.swarm.wire import WireError, pack, unpack

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


def chronicle_after(folder: Path, *events: Event, peer_id: str = "a") -> Chronicle:
    chronicle = Chronicle(peer_id, folder, wall_time=lambda: 1000.0)
    for event in events:
        chronicle.tell(event)
    return chronicle


def test_a_record_says_what_the_round_was_and_what_it_cost_this_peer(tmp_path: Path) -> None:
    failed = RoundFailed(1, 0, "timeout", "")
    trained = PhaseTrained(1, 10, 70, 4.0, 0.1, 12.0, 0)
    chronicle = chronicle_after(tmp_path, FIRST, trained, failed, commit(1), Evaluated(1, 4.5), commit(2))
    first, second, third = chronicle.records
    assert (first.round, math.isnan(first.loss), second.round, second.loss, second.validation_loss) == (0, True, 1, 4.0, 4.5)
    assert second.seconds == (("train", 12.0), ("exchange", 2.0), ("apply", 0.5))
    assert (second.failed_attempts, third.failed_attempts, second.members, second.teller) == (1, 0, 2, "a")
    assert third.seconds == (("exchange", 2.0), ("apply", 0.5))


def test_a_record_says_what_the_owner_had_ordered(tmp_path: Path) -> None:
    first, second = chronicle_after(tmp_path, FIRST, replace(commit(1), control="paused")).records
    assert (first.control, second.control) == ("", "paused")


def test_contributions_add_up_to_the_tokens_of_the_base(tmp_path: Path) -> None:
    chronicle = chronicle_after(tmp_path, FIRST, commit(1), commit(2))
    assert chronicle.totals == Totals(2, (Contribution("a", 140, 12), Contribution("b", 60, 8)))
    assert chronicle.totals.tokens == commit(2).total_tokens


def test_contributions_stop_at_a_gap_until_somebody_knows_more(tmp_path: Path) -> None:
    chronicle = chronicle_after(tmp_path, FIRST, commit(1), commit(3))
    assert chronicle.totals.round == 1
    chronicle.hear((), Totals(2, (Contribution("b", 200, 8),)))
    chronicle.tell(commit(3))
    assert chronicle.totals.tokens == 300


def test_a_restarted_peer_knows_what_it_knew_and_a_torn_line_costs_one_record(tmp_path: Path) -> None:
    before = chronicle_after(tmp_path, FIRST, commit(1), Evaluated(1, 4.5))
    before.close()
    again = Chronicle("a", tmp_path)
    assert pack(again.records) == pack(before.records)
    assert again.totals == before.totals
    with (tmp_path / ROUNDS_FILE).open("a") as file:
        file.write('{"round":2,"campaign_st')
    torn = chronicle_after(tmp_path, commit(2))
    assert [record.round for record in Chronicle("a", tmp_path).records] == [0, 1, 2]
    assert torn.totals.round == 2


def test_what_is_heard_completes_what_is_known_and_never_replaces_it(tmp_path: Path) -> None:
    one = chronicle_after(tmp_path, FIRST, commit(2))
    (other_folder := tmp_path / "other").mkdir()
    other = chronicle_after(other_folder, FIRST, commit(1), commit(2), Evaluated(2, 7.5), peer_id="b")
    assert one.missing(range(3)) == [1]
    one.hear(other.records, other.totals)
    assert [(record.round, record.teller) for record in one.records] == [(0, "a"), (1, "b"), (2, "a")]
    assert one.records[2].validation_loss == 7.5
    assert one.totals == other.totals


def test_a_page_survives_the_wire(tmp_path: Path) -> None:
    chronicle = chronicle_after(tmp_path, FIRST, commit(1))
    page = HistoryPage(5.0, chronicle.records, chronicle.totals)
    assert pack(unpack(HistoryPage, pack(page))) == pack(page)


@pytest.mark.parametrize(
    "change", [{"teller": "\x1b[2J"}, {"round": -1}, {"seconds": (("train\n", 1.0),)}, {"base_digest": "x" * 999}]
)
def test_a_record_that_no_peer_would_write_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    [record] = chronicle_after(tmp_path, FIRST).records
    with pytest.raises(WireError):
        unpack(HistoryPage, pack(HistoryPage(5.0, (replace(record, **change),), NOTHING)))


# In a swarm --------------------------------------------------------------------------------------------------------------


class Remembering(Recorder):
    """A recorder that keeps a chronicle too."""

    def __init__(self, chronicle: Chronicle):
        super().__init__()
        self.chronicle = chronicle

    def tell(self, event: Event) -> None:
        super().tell(event)
        self.chronicle.tell(event)


class RememberingSwarm(VirtualSwarm):
    """Peers that keep chronicles, as in a session."""

    def __init__(self, folder: Path, total_steps: int = 60):
        super().__init__(campaign(total_steps))
        self.folder = folder
        self.chronicles: dict[str, Chronicle] = {}
        self.asking: dict[str, asyncio.Task[None]] = {}

    def prepare(self, name: str) -> None:
        (self.folder / name).mkdir()
        self.chronicles[name] = Chronicle(name, self.folder / name, lambda: asyncio.get_running_loop().time())
        self.recorders[name] = Remembering(self.chronicles[name])

    async def attach(self, name: str) -> None:
        node, chronicle = self.nodes[name], self.chronicles[name]
        await node.board.serve(HISTORY, serving(chronicle, lambda: asyncio.get_running_loop().time()))
        asking = remember(node, chronicle)
        self.asking[name] = self.network.run_peer(name, asking)

    async def begin(self, names: str = "ABC") -> None:
        for name in ("W", *names):
            self.prepare(name)
        self.start_all(names)
        for name in ("W", *names):
            await self.attach(name)

    async def join(self, name: str) -> None:
        self.prepare(name)
        self.start(name)
        await self.attach(name)

    def known(self, name: str) -> list[int]:
        return [record.round for record in self.chronicles[name].records]


def test_a_joiner_and_the_bootstrap_know_all_rounds_and_contributions(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = RememberingSwarm(tmp_path, total_steps=100)
        await swarm.begin()
        await swarm.until_round(4)
        await swarm.join("D")
        await swarm.until(lambda: "D" in swarm.nodes and swarm.round_of("D") >= 7)
        await swarm.until(lambda: all(set(range(8)) <= set(swarm.known(name)) for name in "WAD"))
        told = {name: {r.round: r for r in swarm.chronicles[name].records} for name in "WAD"}
        for number in range(1, 8):
            assert told["A"][number].loss == told["D"][number].loss == told["W"][number].loss
        await swarm.until(lambda: swarm.chronicles["D"].totals.round >= 7)
        log = swarm.nodes["D"].log
        for name in "WAD":
            totals = swarm.chronicles[name].totals
            assert totals.tokens == log.head_at(totals.round).tokens
        assert {each.peer for each in swarm.chronicles["D"].totals.contributions} == {"A", "B", "C", "D"}
        assert all(each.expert_steps > 0 for each in swarm.chronicles["D"].totals.contributions)

    simulate(main)


def test_a_peer_answers_at_most_a_message_of_records(tmp_path: Path) -> None:
    async def main() -> None:
        swarm = RememberingSwarm(tmp_path)
        await swarm.begin()
        await swarm.until_round(1)
        chronicle, node = swarm.chronicles["A"], swarm.nodes["W"]
        [first, *_] = chronicle.records
        chronicle.hear([replace(first, round=number) for number in range(10, 10 + 2 * RECORDS_A_MESSAGE)], NOTHING)
        reply = await node.board.ask("A", HISTORY, pack(HistoryRequest(9, 10**6)))
        page = unpack(HistoryPage, reply)
        assert [record.round for record in page.records] == list(range(10, 10 + RECORDS_A_MESSAGE))

    simulate(main)
