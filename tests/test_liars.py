"""A coordinator or elector that lies: honest peers refuse what does not follow from signed evidence, say why, and go on."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus.acceptor import read_votes
from spes_p2p.consensus.electorate import coordinator_order
from spes_p2p.consensus.output import VOTES, Identity
from spes_p2p.consensus.proposer import Proposer, ProposerState, Send
from spes_p2p.consensus.signed import read_signed, sign
from spes_p2p.errors import Refused
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Commit, Signed
from spes_p2p.messages.methods import ACCEPT
from spes_p2p.messages.rounds import Announcement, Evidence, Ping, Proposal, Staged
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.observe.events import RoundFailed
from spes_p2p.peer import coordinator
from spes_p2p.peer.durable import read_record
from spes_p2p.peer.node import Node
from spes_p2p.peer.validity import Validity, absent_of
from spes_p2p.rounds import commit as rounds_commit
from spes_p2p.rounds.base import save_base
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.proposal import derive_plan
from spes_p2p.rounds.results import RESULTS_OF, save_results
from spes_p2p.testing.attacks.deciding import COMMIT_LIES, PROPOSAL_LIES, ProposalLie, altered
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate
from spes_p2p.testing.simulated_identity import SimulatedIdentity


def next_coordinator(swarm: VirtualSwarm) -> str:
    return coordinator_order(swarm.peers["A"].node.log.last)[0]


async def swarm_in_round_2(merge: dict[str, Any] | None = None) -> VirtualSwarm:
    swarm = VirtualSwarm(campaign(total_steps=50, merge=merge or {}))
    swarm.start_all()
    await swarm.until_round(2)
    return swarm


async def assert_the_others_go_on(swarm: VirtualSwarm, liar: str, lied: list[str], logged: str, caplog: Any) -> None:
    """The lie was told, refused for its reason, and is in nobody's log; the campaign ends as planned."""
    await swarm.until(lambda: all(swarm.tasks[name].done() for name in swarm.peers if name != liar))
    assert lied
    assert logged in caplog.text
    swarm.assert_same_commits()
    commits = [each.commit for each in swarm.peers[min(set(swarm.peers) - {liar})].node.log.since(-1)]
    assert commits[-1].step == 50
    assert not {commit.id for commit in commits} & set(lied)
    assert not {commit.plan for commit in commits} & set(lied)


# Commits ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", COMMIT_LIES)
@pytest.mark.sampled(2)
@pytest.mark.long
async def test_a_commit_that_does_not_follow_from_its_evidence_gets_no_honest_vote(
    field: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    swarm = await swarm_in_round_2()
    liar, lied, make_commit = next_coordinator(swarm), list[str](), rounds_commit.make_commit

    def lying(commit: Commit, plan: Plan, *rest: Any) -> Commit:
        made = make_commit(commit, plan, *rest)
        if plan.proposal.ballot.coordinator != liar:
            return made
        made = dataclasses.replace(made, **COMMIT_LIES[field](made, liar))
        lied.append(made.id)
        return made

    monkeypatch.setattr(coordinator, "make_commit", lying)
    await assert_the_others_go_on(swarm, liar, lied, f"does not follow from its evidence: {field}", caplog)


@pytest.mark.long
async def test_an_invented_report_gets_no_honest_vote(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    swarm = await swarm_in_round_2()
    liar, lied, hold = next_coordinator(swarm), list[str](), Validity.hold

    def hold_lie(self: Validity, commit: Commit, results: Any, reports: tuple[Signed, ...]) -> None:
        if results.plan.proposal.ballot.coordinator == liar:
            first = next(each for each in reports if each.peer != liar)
            staged = dataclasses.replace(read_signed(Staged, first, SimulatedIdentity("any")), incarnation="f" * 16)
            forged = dataclasses.replace(first, record=pack(staged))
            reports = tuple(forged if each is first else each for each in reports)
            lied.append(commit.id)
        hold(self, commit, results, reports)

    monkeypatch.setattr(Validity, "hold", hold_lie)
    await assert_the_others_go_on(swarm, liar, lied, "is not signed by it", caplog)


# Proposals ----------------------------------------------------------------------------------------------------------------


def reroute(proposal: Proposal, before: Proposal, liar: Identity) -> Proposal:
    """As another coordinator got it, and passed it on."""
    place = next(i for i, each in enumerate(proposal.announcements) if each.peer != liar.peer_id)
    signed = proposal.announcements[place]
    rerouted = altered(signed, liar, SimulatedIdentity(signed.peer), attempt=1)
    return dataclasses.replace(proposal, announcements=(
        *proposal.announcements[:place], rerouted, *proposal.announcements[place + 1 :]))


def farthest(proposal: Proposal, before: Proposal, liar: Identity) -> Proposal:
    """Each expert's donor is another one than the nearest."""
    donors = tuple(
        tuple((next(e for e in range(4) if e not in (own, *nearest)),) for own, nearest in enumerate(layer))
        for layer in proposal.donors or ()
    )
    return dataclasses.replace(proposal, donors=donors)


LIES: dict[str, tuple[ProposalLie, str]] = {
    **PROPOSAL_LIES,
    "an announcement to another coordinator": (reroute, "announced to another coordinator"),
    "experts that are not the nearest": (farthest, "not the most similar"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.sampled(2)
@pytest.mark.long
async def test_a_proposal_from_which_no_plan_follows_is_refused_by_its_members(
    lie: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tell, reason = LIES[lie]
    swarm = await swarm_in_round_2({"merge_top_k": 1} if tell is farthest else {})
    liar, lied, before = next_coordinator(swarm), list[str](), swarm.peers["A"].replica.base.plan
    make_plan = coordinator.Coordination._make_plan

    async def lying(self: Any, *args: Any) -> Plan:
        plan: Plan = await make_plan(self, *args)
        lies = not lied and plan.merge is not None if tell is farthest else self._node.peer_id == liar and plan.round <= 4
        if not lies:
            return plan
        assert before is not None
        told = tell(plan.proposal, before.proposal, SimulatedIdentity(liar))
        lied.append(told.id)
        return dataclasses.replace(plan, proposal=told)

    monkeypatch.setattr(coordinator.Coordination, "_make_plan", lying)
    await assert_the_others_go_on(swarm, liar, lied, "", caplog)
    failed = [event.detail for recorder in swarm.recorders.values() for event in recorder.of(RoundFailed)]
    assert any(reason in detail for detail in failed), failed


@pytest.mark.parametrize("calls_absent", ["all", "one", "none"])
@pytest.mark.long
async def test_a_coordinator_that_leaves_the_others_out_does_not_unseat_them(
    calls_absent: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A plan with the liar alone is valid. If it calls others absent, nobody votes for it; if not, they keep their seats."""
    caplog.set_level(logging.INFO)
    swarm = await swarm_in_round_2()
    liar, lied, make_plan = next_coordinator(swarm), list[str](), coordinator.Coordination._make_plan

    async def alone(self: Any, *args: Any) -> Plan:
        if self._node.peer_id == liar:
            self._members.alive = {liar: self._members.alive[liar]}
        return await make_plan(self, *args)

    async def all_others(endpoint: RpcEndpoint, electors: Sequence[str]) -> tuple[str, ...]:
        if endpoint.peer_id != liar or calls_absent == "none":
            return await absent_of(endpoint, electors)
        absent = tuple(electors)[: 1 if calls_absent == "one" else None]
        lied.extend(absent)
        return absent

    monkeypatch.setattr(coordinator.Coordination, "_make_plan", alone)
    monkeypatch.setattr(coordinator, "absent_of", all_others)
    await swarm.until(lambda: swarm.nodes["W"].log.round >= 3)
    commit = swarm.nodes["W"].log.commit_at(3)
    assert (commit.members == (liar,)) == (calls_absent == "none")
    assert ("keeps its seat" in caplog.text) == bool(lied) == (calls_absent != "none")
    assert len(set(commit.electorate) - {liar}) >= 2
    await swarm.until_round(4)


# Signed records -----------------------------------------------------------------------------------------------------------


def test_a_record_of_one_kind_does_not_pass_as_another() -> None:
    identity = SimulatedIdentity("A")
    signed = sign(Evidence(()), identity)
    assert read_signed(Evidence, signed, identity) == Evidence(())
    with pytest.raises(Refused, match="not signed"):
        read_signed(Ping, signed, identity)
    with pytest.raises(Refused, match="not signed"):
        read_signed(Evidence, dataclasses.replace(signed, peer="B"), identity)


@pytest.fixture(scope="module")
def honest() -> tuple[Proposal, Any]:
    """A proposal of round 2, and the node that derives its plan."""

    async def main() -> tuple[Proposal, Any]:
        swarm = await swarm_in_round_2()
        plan = swarm.peers["A"].replica.base.plan
        assert plan is not None
        return plan.proposal, swarm.nodes["A"]

    return simulate(main)


@given(data=st.data())
def test_whatever_a_proposal_says_a_plan_follows_or_it_is_refused(honest: tuple[Proposal, Any], data: st.DataObject) -> None:
    """Any field of it, or of a member's announcement that the member signed, may be anything that a record can hold."""
    proposal, node = honest
    recent, identity = node.log.recent(proposal.round - 1), SimulatedIdentity("any")
    served = node.log.services(proposal.round - 1)
    assert derive_plan(proposal, recent, node.rules, identity, served).proposal == proposal
    if data.draw(st.booleans()):
        strange = data.draw(st.from_type(Proposal))
        names = data.draw(st.sets(st.sampled_from([field.name for field in dataclasses.fields(Proposal)])))
        changed = dataclasses.replace(proposal, **{name: getattr(strange, name) for name in names})
    else:
        first, *rest = proposal.announcements
        said, odd = read_signed(Announcement, first, identity), data.draw(st.from_type(Announcement))
        names = data.draw(st.sets(st.sampled_from([field.name for field in dataclasses.fields(Announcement)])))
        lie = dataclasses.replace(said, **{name: getattr(odd, name) for name in names})
        changed = dataclasses.replace(proposal, announcements=(sign(lie, SimulatedIdentity(first.peer)), *rest))
    try:
        plan = derive_plan(changed, recent, node.rules, identity, served)
    except Refused:
        return
    assert plan.members


def test_a_plan_that_was_derived_once_is_derived_anew_from_other_inputs(honest: tuple[Proposal, Any]) -> None:
    proposal, node = honest
    recent, rules = node.log.recent(proposal.round - 1), node.rules

    class Distrustful(SimulatedIdentity):
        @staticmethod
        def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
            return False

    plan = derive_plan(proposal, recent, rules, SimulatedIdentity("any"), {})
    assert derive_plan(proposal, recent, rules, SimulatedIdentity("other"), {}) is plan
    with pytest.raises(Refused, match="not signed"):
        derive_plan(proposal, recent, rules, Distrustful("any"), {})
    assert derive_plan(proposal, recent, dataclasses.replace(rules, num_samples=121), SimulatedIdentity("any"), {}) != plan
    with pytest.raises(Refused, match="another round"):
        derive_plan(proposal, recent[1:], rules, SimulatedIdentity("any"), {})


# After a crash ------------------------------------------------------------------------------------------------------------


async def test_a_malformed_proposal_on_the_disk_costs_its_assignments_and_nothing_else(
    caplog: pytest.LogCaptureFixture
) -> None:
    swarm = await swarm_in_round_2()
    base = swarm.peers["B"].replica.base
    assert base.plan is not None
    results = swarm.peers["B"].replica.results.by_plan[base.plan.id]
    swarm.kill("B")
    wrong = dataclasses.replace(base.plan, proposal=dataclasses.replace(base.plan.proposal, announcements=()))
    store = swarm.stores["B"] = swarm.stores["B"].reopen()
    save_base(store, dataclasses.replace(base, plan=wrong))
    results.plan, results.file = wrong, None
    save_results(store, results)
    swarm.start_again("B")
    await swarm.until_finished()
    swarm.assert_replicas_agree()
    assert swarm.peers["B"].node.log.last.step == 50
    assert "without the assignments of round 2 (" in caplog.text
    assert "nothing is to be done" in caplog.text
    assert "is left out" in caplog.text


@pytest.mark.long
async def test_a_commit_that_died_with_its_coordinator_is_proposed_again_with_its_evidence() -> None:
    """One elector voted, crashed and lost its results; the evidence is on its disk with the vote, and it serves it."""
    swarm = await swarm_in_round_2()
    victim = next_coordinator(swarm)
    voters: list[str] = []

    def kill_after_a_vote(peer: str, method: str, index: int) -> None:
        if method == ACCEPT and peer != victim and victim in swarm.peers:
            voters.append(peer)
            swarm.kill(victim)

    swarm.network.hook = kill_after_a_vote
    await swarm.until(lambda: victim not in swarm.peers, 200)
    (voter,) = voters
    swarm.kill(voter)
    swarm.stores[voter] = swarm.stores[voter].reopen()
    votes = read_votes(read_record(swarm.stores[voter], VOTES))
    assert votes is not None
    assert votes.accepted is not None
    for name in swarm.stores[voter].names(RESULTS_OF):
        swarm.stores[voter].delete(name)
    for peer in (*swarm.peers.values(), swarm.helper):
        if peer.node.peer_id != voter:
            peer.replica.validity._valid.clear()
            peer.replica.results.evidence.clear()
    swarm.start_again(voter)
    assert swarm.nodes[voter].decisions.validity.attachments(votes.accepted) == votes.attachments
    await swarm.until(lambda: swarm.nodes[voter].log.round >= 3, 400)
    assert swarm.nodes[voter].log.commit_at(3).id == votes.accepted.id
    await swarm.until_finished()
    swarm.assert_replicas_agree()


async def test_an_elector_that_has_nothing_of_the_plan_fetches_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = await swarm_in_round_2()
    first = next_coordinator(swarm)
    assert "W" in swarm.nodes["A"].log.last.electorate
    honest, stranger = swarm.nodes[first].decisions.validity, swarm.nodes["W"].decisions.validity
    checks: list[asyncio.Task[None]] = []
    hold, drive = honest.hold, coordinator._drive

    async def propose_late(node: Node, proposer: Proposer, sends: Sequence[Send]) -> None:
        await asyncio.sleep(3.0 if proposer.state is ProposerState.PROPOSING else 0.0)
        await drive(node, proposer, sends)

    async def check(commit: Commit, evidence: bytes) -> None:
        stranger.kept.by_plan.clear()
        wrong = dataclasses.replace(commit, tokens=commit.tokens + 1)
        with pytest.raises(Refused, match="does not follow from its evidence: tokens"):
            await stranger.require(wrong, evidence, first)
        assert not stranger.is_valid(wrong)
        await stranger.require(commit, evidence, first)
        assert stranger.is_valid(commit)

    def hold_and_check(commit: Commit, results: Any, reports: Any) -> None:
        hold(commit, results, reports)
        checks.append(asyncio.ensure_future(check(commit, honest.evidence_of(commit))))

    monkeypatch.setattr(honest, "hold", hold_and_check)
    monkeypatch.setattr(coordinator, "_drive", propose_late)
    await swarm.until(lambda: bool(checks) and checks[0].done())
    checks[0].result()


async def test_a_certified_commit_that_contradicts_its_plan_is_refused_and_its_signers_are_named() -> None:
    """As a majority of lying electors could certify it."""
    swarm = await swarm_in_round_2()
    node = swarm.nodes["A"]
    decided = node.log.at(node.log.round)
    wrong = dataclasses.replace(decided, commit=dataclasses.replace(decided.commit, step=decided.commit.step + 1))
    with pytest.raises(Refused, match=f"contradicts its plan .step.; signed by {decided.votes[0].elector}"):
        node.decisions.validity.require_fit(wrong)
    node.decisions.validity.require_fit(decided)
    await swarm.until_finished()
