"""What `status`, dashboard, directory and alerts believe: no stranger can fake a round, a loss, or the campaign's end."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from spes_p2p.client.alerts import alerts
from spes_p2p.client.connection import VOUCHED_WAIT_S, SwarmConnection
from spes_p2p.client.dashboard.listed import seen
from spes_p2p.client.proven import corrected, learn_commits
from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.messages.audits import Audited
from spes_p2p.messages.consensus import Ballot, CertifiedCommit, Control, Verdict
from spes_p2p.messages.presence import PeerStatus
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.net.shares import Shares
from spes_p2p.observe.swarm_status import SwarmStatus, gather, swarm_status
from spes_p2p.observe.table import render_status
from spes_p2p.testing.in_memory_world import in_memory_world
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate
from spes_p2p.testing.simulated_identity import SimulatedIdentity

CAMPAIGN = campaign(total_steps=100)
ROUNDS, DIGEST, ADDRESS = 4, "d" * 64, "/ip4/127.0.0.1/tcp/1/p2p/W"


@pytest.fixture(scope="module")
def log() -> CommitLog:
    """The certified commits of some rounds by W, A, B and C, as a client learns them from one of the peers."""
    found = CommitLog(SimulatedIdentity("client"), VirtualSwarm(CAMPAIGN).genesis)

    async def main() -> None:
        swarm = VirtualSwarm(CAMPAIGN)
        swarm.start_all()
        await swarm.until_round(ROUNDS)
        for peer in ("B", "W"):
            swarm.kill(peer)
        client = in_memory_world(swarm.network, "client")
        await learn_commits(RpcEndpoint(client.transport, 5.0), found, "A")

    simulate(main)
    return found


@pytest.mark.parametrize("late_s", [30.0, 90.0])
async def test_a_client_waits_up_to_a_minute_for_a_peer_for_which_the_owner_vouches(
    late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = VirtualSwarm(CAMPAIGN)
    swarm.start_all()
    await swarm.until_round(ROUNDS)

    async def late(shares: Shares, peer: str, size: int) -> None:
        await asyncio.sleep(late_s)

    monkeypatch.setattr(Shares, "answer", late)
    found = CommitLog(SimulatedIdentity("client"), swarm.genesis)
    endpoint = RpcEndpoint(in_memory_world(swarm.network, "client").transport, 5.0)
    connection = SwarmConnection([], CAMPAIGN, found, Mock(), endpoint)
    clock = asyncio.get_running_loop().time
    began = clock()
    await connection.learn_commits({"A": ROUNDS})
    assert found.round == -1, "genesis does not name A"
    assert clock() - began < 10.0
    began = clock()
    await connection.learn_commits(dict.fromkeys(["A", "B", "W"], ROUNDS))
    if late_s < VOUCHED_WAIT_S:
        assert found.round >= ROUNDS
    else:
        assert clock() - began < 3 * 5.0 + VOUCHED_WAIT_S + 1.0


def honest(log: CommitLog) -> list[PeerStatus]:
    shown = PeerStatus(
        "A", "trainer", CAMPAIGN.config.name, CAMPAIGN.hash, CAMPAIGN.config.total_rounds, round=log.round, base_digest=DIGEST,
        loss=4.0, validation_loss=4.2, validation_round=log.round - 1, members=("A", "B", "C"), tokens_per_second=10.0,
    )
    return [replace(shown, peer_id=peer, role="helper" if peer == "W" else "trainer") for peer in "ABCW"]


LIES: dict[str, dict[str, Any]] = {
    "a far round": {"round": 10**6, "total_rounds": 10**6},
    "the end": {"total_rounds": 1, "state": "running"},
    "a stop": {"state": "stopped", "control": "stopped"},
    "another base": {"base_digest": "e" * 64},
    "a better loss": {"loss": 0.1},
    "a held-out loss": {"validation_loss": 0.1, "validation_round": 10**6},
    "the held-out loss of this round": {"validation_loss": 0.1, "validation_round": ROUNDS},
    "harmful peers": {"scores": {"A": -9.0}},
    "its speed": {"tokens_per_second": 1e12, "dropped_tokens": 10**9, "failures": {"refused": 10**6}, "digest_mismatches": 9},
    "an order": {"pending": "stopped"},
    "absent electors": {"electorate": ("V", "Y", "Z")},
}


@pytest.mark.parametrize(
    ("liar", "lie"), [*(("X", lie) for lie in LIES), *(("B", lie) for lie in LIES if lie not in ("another base", "its speed"))]
)
def test_a_lie_changes_no_figure_of_the_campaign(log: CommitLog, liar: str, lie: str) -> None:
    """X is eight strangers; B is a member, which is believed as far as it alone is concerned."""
    truth, names = honest(log), [liar] if liar == "B" else [f"X{number}" for number in range(8)]
    said = replace(replace(truth[0], loss=3.9, members=("A", "B", "C", *names)), **LIES[lie])
    told = [each for each in truth if each.peer_id != liar] + [replace(said, peer_id=name) for name in names]
    if liar == "X":
        assert summary(told) != summary(truth), "without the correction it is believed"
    assert summary(corrected(told, log, CAMPAIGN)) == summary(corrected(truth, log, CAMPAIGN))


def summary(statuses: list[PeerStatus]) -> list[object]:
    """All figures but the peers' own, what the directory shows, and the alerts."""
    swarm = replace(gather(statuses), peers=(), tokens_per_second=0.0)
    shown = replace(seen(statuses, ADDRESS), tokens_per_second=0.0, trainers=0)
    return [repr(swarm), repr(shown), alerts(swarm, [], 0.0)]


def test_an_order_that_no_commit_carries_yet_is_shown_as_such_by_the_owners_word_alone(log: CommitLog) -> None:
    liar = replace(honest(log)[0], pending="stopped")
    told = [liar, *honest(log)[1:]]
    assert gather(corrected(told, log, CAMPAIGN)).pending == ""
    order = Control(CAMPAIGN.hash, 1, "paused", (), -1, b"")
    swarm = gather(shown := corrected(told, log, CAMPAIGN, order))
    assert (swarm.state, swarm.control, swarm.pending) == ("running", "", "paused")
    console = Console(width=120)
    with console.capture() as shows:
        console.print(render_status(shown))
    assert "ordered by the owner, not in effect yet: paused" in shows.get()
    assert gather(corrected(told, log, CAMPAIGN, log.last.control)).pending == ""


def test_a_stranger_is_no_trainer_and_has_no_speed(log: CommitLog) -> None:
    told = corrected([*honest(log), replace(honest(log)[0], peer_id="X")], log, CAMPAIGN)
    assert (seen(told, ADDRESS).trainers, gather(told).tokens_per_second) == (3, 30.0)


def test_an_honest_campaign_is_shown_as_its_commits_say(log: CommitLog) -> None:
    swarm = gather(corrected(honest(log), log, CAMPAIGN))
    assert (swarm.round, swarm.done, swarm.digests_equal) == (log.round, False, True)
    assert (swarm.loss, swarm.validation_loss, swarm.tokens_per_second) == (4.0, 4.2, 30.0)
    assert (swarm.total_tokens, swarm.campaign_step, swarm.electorate) == (log.last.tokens, log.last.step, log.last.electorate)
    assert [peer.owned for peer in swarm.peers if peer.peer_id == "W"] == [()]
    assert sorted(expert for peer in swarm.peers for expert in peer.owned) == [0, 1, 2, 3]


def test_scores_are_those_of_electors_in_an_open_campaign(log: CommitLog) -> None:
    open_campaign = campaign(total_steps=100, admission="open")
    judged = [
        replace(each, campaign_hash=open_campaign.hash, scores={"A": 0.1 if each.peer_id in "ABW" else -9.0})
        for each in [*honest(log), replace(honest(log)[0], peer_id="X"), replace(honest(log)[0], peer_id="Y")]
    ]
    only = replace(log.last, electorate=("A", "B", "W"))
    log_of_open = CommitLog(SimulatedIdentity("client"), replace(only, round=-1))
    judged = [replace(each, round=0) for each in judged]
    assert gather(corrected(judged, log_of_open, open_campaign)).scores == {"A": 0.1}


def test_an_audit_is_shown_where_a_certified_commit_has_the_verdict(log: CommitLog) -> None:
    open_campaign = campaign(total_steps=100, admission="open")
    passed, false = Audited(3, "B", True, 4, 0.99, 1.0), Audited(4, "B", False, 4, 0.1, 0.2)
    told = [
        replace(each, campaign_hash=open_campaign.hash, round=0, audits=(passed,) if each.peer_id == "A" else (false, passed))
        for each in honest(log)
    ]
    last = replace(log.last, electorate=("W", "C"), verdicts=(Verdict("A", "B", 3, True), Verdict("A", "B", 4, True)))
    shown = corrected(told, CommitLog(SimulatedIdentity("client"), replace(last, round=-1)), open_campaign)
    assert gather(shown).audits == {"B": passed}
    assert {each.peer_id: each.audits for each in shown if each.audits} == {"A": (passed,)}, "also of an auditor without a vote"


def of_an_open_campaign(log: CommitLog, rounds: int, *passed: str) -> CommitLog:
    """Rounds with work of A, for whom the owner vouches, and of B; C takes part without. `passed`: whose audit, in round 0."""
    a, b = (log.last.members.index(name) for name in "AB")
    last = replace(log.last, electorate=("W",), vouched=(a,), heard=(a, b))
    found = CommitLog(SimulatedIdentity("client"), replace(last, round=-1))
    for number in range(rounds):
        verdicts = tuple(Verdict("A", peer, number, True) for peer in passed if number == 0)
        found.put(CertifiedCommit(replace(last, round=number, verdicts=verdicts), Ballot(0, "W"), ()))
    return found


def test_in_an_open_campaign_no_number_of_strangers_chooses_a_figure_of_all(log: CommitLog) -> None:
    """Identities cost nothing, and a newcomer is a member after one round."""
    open_campaign, known = campaign(total_steps=1000, admission="open"), of_an_open_campaign(log, log.round + 1)
    a, *strangers, w = [
        replace(each, campaign_hash=open_campaign.hash, round_seconds={"train": 10.0}) for each in honest(log)
    ]
    vouched = [a, replace(w, loss=math.nan, validation_loss=math.nan, members=())]  # W has only downloaded the base

    def shown(**lies: Any) -> SwarmStatus:
        return gather(corrected([*vouched, *(replace(each, **lies) for each in strangers)], known, open_campaign))

    def of_all(swarm: SwarmStatus) -> str:
        return repr(replace(swarm, peers=(), tokens_per_second=0.0))

    for lie in (
        {"loss": 0.1}, {"base_digest": "e" * 64}, {"validation_loss": 0.1, "validation_round": known.round},
        {"loss": 0.1, "base_digest": "e" * 64}, {"seconds_left": 1.0}, {"round_seconds": {"train": 1e9}},
        {"failing": {"left": 9}, "failures": {"left": 9}},
    ):
        assert of_all(shown(**lie)) == of_all(shown())
    fastest = sum(each.steps for each in log.last.workloads[1:]) * 2 * 16 / 10.0
    assert shown(tokens_per_second=1e12).tokens_per_second == 10.0 + fastest
    assert shown(tokens_per_second=1.0).tokens_per_second == 10.0 + 2 * 1.0
    unvouched = gather(corrected([replace(each, loss=3.0) for each in strangers], known, open_campaign))
    assert unvouched.loss == 3.0, "while no vouched peer answers"


def test_no_number_of_strangers_makes_an_honest_line_slow_or_the_speed_of_all_unknown(log: CommitLog) -> None:
    open_campaign, known = campaign(total_steps=1000, admission="open"), of_an_open_campaign(log, log.round + 1)
    a, *strangers, w = [
        replace(each, campaign_hash=open_campaign.hash, upload=1e6, round_seconds={"train": 10.0, "exchange": 9.0})
        for each in honest(log)
    ]

    def shown(**lies: Any) -> SwarmStatus:
        return gather(corrected([a, w, *(replace(each, **lies) for each in strangers)], known, open_campaign))

    def has_slow_line(**lies: Any) -> bool:
        return any(each.kind == "slow_line" for each in alerts(shown(**lies), (), 0.0))

    assert not has_slow_line(upload=1e12), "of A, beside whom most are strangers"
    assert has_slow_line(upload=1e3, round_seconds={"train": 1e15, "exchange": 9.0}), "theirs, whatever they say of the phase"
    for speed in (math.nan, -1e15, -0.0):
        assert shown(tokens_per_second=speed).tokens_per_second == a.tokens_per_second


def test_whom_the_owner_vouches_for_and_who_is_on_probation_is_what_commits_say(log: CommitLog) -> None:
    open_campaign = campaign(total_steps=1000, admission="open")
    says_so = [replace(each, campaign_hash=open_campaign.hash, standing="vouched") for each in honest(log)]
    told = [*says_so, replace(says_so[0], peer_id="X")]

    def shown(rounds: int, *passed: str) -> tuple[dict[str, str], str]:
        statuses = corrected(told, of_an_open_campaign(log, rounds, *passed), open_campaign)
        console = Console(width=120)
        with console.capture() as lines:
            console.print(render_status(statuses))
        return {each.peer_id: each.standing for each in statuses}, lines.get()

    vouched, unknown = {"A": "vouched", "W": "vouched"}, {"X": ""}
    standings, text = shown(4)
    assert standings == vouched | unknown | {"B": "newcomer", "C": "newcomer"}
    assert "the owner vouches for: A\n" in text
    assert "on probation: B (4 of 10 rounds, needs a passed audit), C (0 of 10 rounds, needs a passed audit)" in text
    standings, text = shown(12)
    assert (standings["B"], "B (10 of 10 rounds, needs a passed audit)" in text) == ("newcomer", True)
    standings, text = shown(12, "B", "C")
    assert standings == vouched | unknown | {"B": "proven", "C": "newcomer"}
    assert "past probation: B\n" in text
    assert "on probation: C (0 of 10 rounds)\n" in text
    [b] = [each for each in swarm_status(corrected(told, of_an_open_campaign(log, 40, "B"), open_campaign))["peers"]
           if each["peer_id"] == "B"]
    assert b["probation"] == {"rounds": 40, "rounds_needed": 10, "audits": 1, "audits_needed": 1}, "long after its audit"
    assert {each.standing for each in corrected(honest(log), log, CAMPAIGN)} == {""}, "among friends"


def test_peers_of_another_campaign_are_left_out(log: CommitLog) -> None:
    other = replace(honest(log)[0], peer_id="X", campaign_hash="0" * 64)
    assert [each.peer_id for each in corrected([*honest(log), other], log, CAMPAIGN)] == ["A", "B", "C", "W"]


def test_before_round_0_everybody_waits(log: CommitLog) -> None:
    genesis = CommitLog(SimulatedIdentity("client"), log.genesis)
    waiting = [replace(each, round=0, owners=(), members=(), loss=math.nan) for each in honest(log)]
    assert not gather(corrected(waiting, genesis, CAMPAIGN)).assembled
