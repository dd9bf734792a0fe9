"""Contributions and names that others are told: what certificates vouch for, and nothing that a liar adds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from remembering_swarm import RememberingSwarm
from synthetic_swarm import synthetic_swarm

from spes_p2p.client.chronicle import Chronicle, owners_first
from spes_p2p.client.dashboard.poll import SwarmHistory, _learn_past, _learn_rounds
from spes_p2p.client.dashboard.view import swarm_view
from spes_p2p.client.proven import learn_commits
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.messages.presence import Contribution, Named, PeerStatus, RoundRecord
from spes_p2p.observe.events import Evaluated, Event, PromptsContinued
from spes_p2p.observe.rounds import totals_of
from spes_p2p.observe.swarm_status import MAX_SILENT
from spes_p2p.peer.history_sync import pages
from spes_p2p.rounds.certified import Hearsay, certified


def moved(record: RoundRecord, to: str) -> RoundRecord:
    """All work is one member's."""
    others = tuple(replace(each, tokens=0) for each in record.contributions if each.peer != to)
    return replace(record, contributions=(*others, Contribution(to, record.tokens, 1)))


LIES: dict[str, Callable[[RoundRecord], RoundRecord]] = {
    "more tokens": lambda r: replace(r, tokens=r.tokens + 10, contributions=(
        replace(r.contributions[0], tokens=r.contributions[0].tokens + 10), *r.contributions[1:])),
    "more tokens in all": lambda r: replace(r, total_tokens=r.total_tokens + 10),
    "sums that do not fit": lambda r: replace(r, contributions=(
        replace(r.contributions[0], tokens=r.contributions[0].tokens + 10), *r.contributions[1:])),
    "no contributions": lambda r: replace(r, contributions=()),
    "a member twice": lambda r: replace(r, contributions=(*r.contributions, replace(r.contributions[0], tokens=0))),
    "another step": lambda r: replace(r, campaign_step=r.campaign_step + 1),
    "another base": lambda r: replace(r, base_digest="0" * 64),
    "a stranger's work": lambda r: replace(r, contributions=(
        replace(r.contributions[0], peer="liar"), *r.contributions[1:])),
    "a stranger without tokens": lambda r: replace(r, contributions=(*r.contributions, Contribution("liar", 0, 10**9))),
    "all work is the liar's": lambda r: moved(r, "C"),
    "a round to come": lambda r: replace(r, round=10**6),
    "no time": lambda r: replace(r, time=math.nan),
    "more experts": lambda r: replace(r, contributions=(
        replace(r.contributions[0], expert_steps=10**6), *r.contributions[1:])),
}


@pytest.mark.long
async def test_honest_records_are_certified_and_lies_are_not(tmp_path: Path) -> None:
    swarm = RememberingSwarm(tmp_path, total_steps=120)
    await swarm.begin()
    await swarm.until_round(3)
    swarm.kill("B")
    await swarm.until_round(5)
    await swarm.join("D")
    await swarm.until(lambda: "D" in swarm.nodes and swarm.round_of("D") >= 9)
    config, log = swarm.campaign.config, swarm.nodes["W"].log
    records = [record for name in "WAD" for record in swarm.histories[name].rounds.records if record.round <= log.round]
    assert len(records) > 20
    assert [certified(record, log, config) for record in records] == records
    record = swarm.records("A")[2]
    assert sum(each.tokens > 0 for each in record.contributions) == 3
    for lie, tell in LIES.items():
        assert certified(tell(record), log, config) is None, lie
    named = replace(record, names=(Named("A", "Ada", ""), Named("liar", "Ada", "")))
    assert certified(named, log, config) == replace(named, names=(Named("A", "Ada", ""),))
    false = replace(record, control="stopped", learning_rate=9.0, members=10**6)
    assert certified(false, log, config) == replace(record, members=len(log.commit_at(2).members))


@pytest.mark.long
async def test_a_peer_takes_over_no_lie(tmp_path: Path) -> None:
    """A joiner asks the liar first, since it trains."""
    swarm = RememberingSwarm(tmp_path, total_steps=100)
    await swarm.begin()
    await swarm.until_round(4)
    tell_lies(swarm, "A", 3)
    await swarm.join("D")
    await swarm.until(lambda: "D" in swarm.nodes and swarm.round_of("D") >= 6)
    await swarm.until(lambda: swarm.credits_all("D", 6))
    assert {each.peer for each in totals_of(swarm.records("D").values()).contributions} == {"A", "B", "C", "D"}
    told, true = ([swarm.records(name)[n].contributions for n in range(4)] for name in "DW")
    assert told == true


async def test_what_no_certificate_covers_needs_the_owners_helper_or_two_electors(tmp_path: Path) -> None:
    swarm = RememberingSwarm(tmp_path)
    await swarm.begin()
    await swarm.until_round(4)
    log, record = swarm.nodes["W"].log, replace(swarm.records("A")[2], validation_loss=4.0)
    lie = replace(record, loss=0.1, validation_loss=0.1)
    hearsay = Hearsay(log, swarm.campaign.config)
    first, second = sorted(set(log.last.electorate) - {"W"})[:2]
    assert hearsay.believed("W", record) == record

    def losses(peer: str, told: RoundRecord) -> list[float]:
        found = hearsay.believed(peer, told)
        assert found is not None
        return [loss for loss in (found.loss, found.validation_loss) if math.isfinite(loss)]

    assert losses(first, lie) == losses(first, lie) == losses("Z", lie) == []
    assert losses(second, record) == []
    assert losses(first, record) == [record.loss, 4.0]
    assert losses("Z", record) == [record.loss, 4.0]
    assert losses("Z", lie) == []
    assert Hearsay(log, swarm.campaign.config, own="Z").believed("Z", record) == record


async def test_a_dashboard_of_ones_own_trainer_draws_the_losses_that_it_tells(tmp_path: Path) -> None:
    swarm = RememberingSwarm(tmp_path, total_steps=100)
    await swarm.begin()
    await swarm.until_round(4)
    client: Any = Client(swarm, "C")
    await learn_commits(client.endpoint, client.log, "A")
    statuses = [PeerStatus(name, "trainer", "c", "h", 20, round=4, base_digest="d", uptime_s=float(name == "B"))
                for name in "AB"]
    drawn = {}
    for own in ("", "A"):
        history = SwarmHistory()
        await _learn_past(client, Chronicle(client, swarm.campaign.config, own), statuses[:1], history)
        drawn[own] = [record.round for record in history.rounds.records if math.isfinite(record.loss)]
    assert drawn == {"": [], "A": [record.round for record in history.rounds.records if record.tokens]}
    history = SwarmHistory()
    await _learn_past(client, Chronicle(client, swarm.campaign.config, "A"), statuses, history)
    assert {teller for told in history.traffic.values() for teller in told} == {"A"}


@pytest.mark.long
async def test_a_joiner_takes_no_loss_that_one_elector_tells(tmp_path: Path) -> None:
    swarm = RememberingSwarm(tmp_path, total_steps=100)
    await swarm.begin()
    await swarm.until_round(4)
    swarm.kill("W")
    for liar, lie in (("A", 0.1), ("B", 0.2)):
        for number, record in swarm.histories[liar].rounds._records.items():
            swarm.histories[liar].rounds._records[number] = replace(record, loss=lie, validation_loss=lie)
    await swarm.join("D")
    await swarm.until(lambda: "D" in swarm.nodes and swarm.round_of("D") >= 6)
    await swarm.until(lambda: swarm.credits_all("D", 6))
    assert all(math.isnan(swarm.records("D")[number].loss) for number in range(1, 4))


def tell_lies(swarm: RememberingSwarm, name: str, rounds: int) -> None:
    """From now on this peer says that somebody else trained everything in the first rounds."""
    known = swarm.histories[name].rounds._records
    for number in range(1, rounds + 1):
        first = replace(known[number].contributions[0], peer="liar", tokens=known[number].tokens)
        known[number] = replace(known[number], contributions=(first,), names=(Named("B", "Mallory", "Liars"),))


class Client:
    """A client's connection: asks the peers of a virtual swarm through the endpoint of one that tells it nothing."""

    def __init__(self, swarm: RememberingSwarm, by: str):
        self.endpoint, self.genesis = swarm.nodes[by].endpoint, swarm.genesis
        self.log = CommitLog(swarm.nodes[by].world.identity, swarm.genesis)

    def history(self, peer: str, after: int, newest: int) -> Any:
        return pages(self.endpoint, peer, after, newest)


@pytest.mark.parametrize("is_helper_there", [True, False])
@pytest.mark.long
async def test_a_dashboard_credits_nobody_for_a_lie(tmp_path: Path, is_helper_there: bool) -> None:
    swarm = RememberingSwarm(tmp_path, total_steps=100)
    await swarm.begin()
    await swarm.until_round(5)
    tell_lies(swarm, "A", 3)
    client: Any = Client(swarm, "C")
    chronicle = Chronicle(client, swarm.campaign.config)
    names = "AWB" if is_helper_there else "AB"
    statuses = [PeerStatus(name, "helper" if name == "W" else "trainer", "c", "h", 20, round=5, base_digest="d",
                           uptime_s=9.0 if name == "A" else 1.0) for name in names]
    history = SwarmHistory()
    await learn_commits(client.endpoint, client.log, names[0])
    await _learn_past(client, chronicle, statuses, history)
    records = [record for record in history.rounds.records if record.round <= 5]
    honest = [swarm.records("W")[record.round].contributions for record in records]
    assert [record.round for record in records] == list(range(6))
    assert [record.contributions for record in records] == honest
    assert owners_first(client, ["A", "W", "B"])[0] == "W"


async def test_no_stranger_says_when_rounds_were(tmp_path: Path) -> None:
    """Otherwise one that answers first raises an alarm for the owner, or keeps one from being raised."""
    swarm = RememberingSwarm(tmp_path, total_steps=100)
    await swarm.begin()
    await swarm.until_round(4)
    known = swarm.histories["A"].rounds._records
    for number in list(known):
        known[number] = replace(known[number], time=1e15)
    client: Any = Client(swarm, "C")
    await learn_commits(client.endpoint, client.log, "B")
    shown = PeerStatus("A", "trainer", "c", "h", 20, round=client.log.round, base_digest="d", standing="proven", uptime_s=1e9)
    statuses = [shown, replace(shown, peer_id="B", standing="vouched", uptime_s=1.0)]
    for some, lie in ((statuses, False), (statuses[:1], True)):
        history = SwarmHistory()
        await _learn_rounds(client, Chronicle(client, swarm.campaign.config), some, history)
        assert {record.teller for record in history.rounds.records} == ({"A"} if lie else {"B"})
        assert all(record.time <= time.time() for record in history.rounds.records)
        assert history.by_peer.keys() == {status.peer_id for status in some}, "each shows its own timeline"
    await _learn_rounds(client, Chronicle(client, swarm.campaign.config), statuses[1:], history)
    assert history.by_peer.keys() == {"A", "B"}, "one that does not answer once is not asked for all again"
    history.by_peer.update((f"gone {i}", ()) for i in range(MAX_SILENT))
    await _learn_rounds(client, Chronicle(client, swarm.campaign.config), statuses[1:], history)
    assert "A" not in history.by_peer
    assert len(history.by_peer) == 1 + MAX_SILENT


LATER: dict[str, tuple[Callable[[int], Event], Callable[[PeerStatus], PeerStatus], int, dict[str, Any]]] = {
    "a held-out loss of the last round": (
        lambda newest: Evaluated(newest, 4.25), lambda status: replace(status, validation_round=status.round), -1,
        {"validation_loss": 4.25},
    ),
    "what the model wrote of a round long ago": (
        lambda newest: PromptsContinued(1, ("there was",)),
        lambda status: replace(status, round=status.round + 1, continuations=("there was",)), 1,
        {"continuations": ("there was",)},
    ),
}
"""What a peer records later, its status then, and the round and fields of the record that a dashboard must have."""


@pytest.mark.parametrize("what", LATER)
async def test_a_dashboard_shows_what_comes_after_it_has_read_the_rounds(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spes_p2p.client.dashboard.poll.TIMELINE_ROUNDS", 1)
    event, later, round_number, expected = LATER[what]
    swarm = RememberingSwarm(tmp_path, total_steps=100)
    await swarm.begin()
    await swarm.until_round(5)
    client: Any = Client(swarm, "C")
    chronicle, history = Chronicle(client, swarm.campaign.config), SwarmHistory()
    await learn_commits(client.endpoint, client.log, "W")
    status = PeerStatus("W", "helper", "c", "h", 20, round=client.log.round, base_digest="d")
    await _learn_rounds(client, chronicle, [status], history)
    swarm.histories["W"].record(event(status.round))
    await _learn_rounds(client, chronicle, [later(status)], history)
    shown = history.rounds.records[status.round if round_number < 0 else round_number]
    assert {name: getattr(shown, name) for name in expected} == expected


def test_what_a_living_peer_calls_itself_counts_before_what_others_say() -> None:
    swarm = synthetic_swarm(3, 4, 3)
    first, second, third = swarm.statuses[:3]
    names = {peer.peer_id: Named(peer.peer_id, "Mallory", "Liars") for peer in (first, second, third)}
    statuses = [replace(first, name="Ada", team="Owls"), replace(second, name=""), replace(third, name=None)]
    view = swarm_view(statuses, {}, replace(swarm.totals, names=names), swarm.now)
    called = {peer["peer_id"]: (peer["name"], peer["team"]) for peer in view["peers"]}
    assert [called[peer.peer_id] for peer in (first, second, third)] == [("Ada", "Owls"), ("", ""), ("Mallory", "Liars")]
    assert {team: peers for team, peers, _ in view["teams"]} == {"Owls": 1, "Liars": 1}


