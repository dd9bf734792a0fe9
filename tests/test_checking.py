"""Reducers are checked: one that serves another result than its inputs give is excluded by proof, an honest one never."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spes_p2p.consensus.control import signed
from spes_p2p.consensus.signed import read_signed, sign
from spes_p2p.errors import Refused, UserError
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Commit, Control, ControlRequest, Known, Pardon
from spes_p2p.messages.methods import ACCUSE, CONTROL, INPUTS, PUSH, ROUND
from spes_p2p.messages.refusals import Code
from spes_p2p.messages.rounds import Accused, Inputs, InputsRequest, Pushed, WrongSum
from spes_p2p.model.layout import Group
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.observe.events import ResultsChecked, RoundFailed
from spes_p2p.peer.kept_inputs import Input
from spes_p2p.peer.proofs import Proofs, Proven
from spes_p2p.peer.reducer import EncodedMean, Reducer
from spes_p2p.rounds.checks import checkers, means_by_reducer
from spes_p2p.rounds.codecs import CODECS
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.sums import encode_mean, is_wrong, make_mean
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.testing.simulated_identity import SimulatedIdentity

GENESIS = VirtualSwarm(campaign()).genesis

Lie = Callable[[Reducer, Part, Mapping[int, Input], bytes], bytes]
"""(The exchange, the part, its inputs, the honest result) -> what the liar serves."""


def scale(reducer: Reducer, part: Part, inputs: Mapping[int, Input], honest: bytes) -> bytes:
    return part.codec.encode(part.codec.decode(honest, part.size) * np.float32(1.5))


def swap(reducer: Reducer, part: Part, inputs: Mapping[int, Input], honest: bytes) -> bytes:
    return part.codec.encode(part.codec.decode(honest, part.size)[::-1].copy())


def drop(reducer: Reducer, part: Part, inputs: Mapping[int, Input], honest: bytes) -> bytes:
    """Leave a contributor out, and name it."""
    left_out = min(set(inputs) - {reducer.context.me})
    rest = {i: (each.update.tokens, lambda body=each.body: part.codec.decode(body, part.size))
            for i, each in inputs.items() if i != left_out}
    mean = np.empty(part.size, np.float32)
    make_mean(part, reducer.context.plan.members, rest, mean, False)
    return part.codec.encode(mean)


def lying(liar: str, lie: Lie, monkeypatch: pytest.MonkeyPatch, from_round: int = 2) -> list[int]:
    """Let one peer lie in all its means from a round on; returns the rounds of its lies."""
    honest, lied = Reducer.encode_mean, list[int]()

    def encode_mean(self: Reducer, part: Part, updates: Mapping[int, Input]) -> EncodedMean:
        mean = honest(self, part, updates)
        if self.context.endpoint.peer_id != liar or self.context.plan.round < from_round or len(updates) < 2:
            return mean
        lied.append(self.context.plan.round)
        return replace(mean, encoded=lie(self, part, updates, mean.encoded))

    monkeypatch.setattr(Reducer, "encode_mean", encode_mean)
    return lied


def silent(liar: str, swarm: VirtualSwarm) -> None:
    """Let one peer refuse every check."""

    def inputs_of(plan: str, part: int, of_cell: bool = False) -> None:
        return None

    swarm.peers[liar].replica.exchanges.inputs_of = inputs_of  # type: ignore[method-assign]


def checked(swarm: VirtualSwarm) -> list[ResultsChecked]:
    return [event for recorder in swarm.recorders.values() for event in recorder.of(ResultsChecked)]


@pytest.mark.parametrize("codec", ["none", "fp16", "int8", "int4"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_honest_reducers_are_checked_and_nothing_is_proven(codec: str, overlap: bool) -> None:
    swarm = VirtualSwarm(campaign(total_steps=80, codec=codec, sync={"overlap": overlap}))
    swarm.start_all("ABCD")
    await swarm.until_finished()
    swarm.assert_same_commits()
    found = checked(swarm)
    assert sum(each.results for each in found) > 8
    last = max(each.round for each in found)  # after it, peers leave
    assert not [each for each in found if each.wrong or (each.unanswered and each.round < last)]
    assert not swarm.nodes["W"].log.last.excluded


@pytest.mark.parametrize("lie", [scale, swap, drop])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_a_reducer_that_lies_is_excluded_by_proof_within_three_rounds(lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = VirtualSwarm(campaign(total_steps=150, codec="int8"))
    lied = lying("B", lie, monkeypatch)
    swarm.start_all("ACD")
    swarm.start("B", bandwidth=4.0)  # it reduces
    life, node = swarm.tasks["B"], swarm.nodes["W"]
    await swarm.until(lambda: "B" in node.log.last.excluded)
    commit = node.log.last
    assert lied
    assert commit.round - min(lied) <= 3
    assert commit.excluded == ("B",)
    assert "B" not in {*commit.members, *commit.electorate}
    assert all(commit.owners)
    await asyncio.wait({life}, timeout=200)
    with pytest.raises(UserError, match="a proof excludes this peer"):
        life.result()
    for held in (swarm.tasks, swarm.peers, swarm.nodes):
        held.pop("B")
    await swarm.until_finished()
    swarm.assert_same_commits()
    swarm.assert_replicas_agree()
    assert {peer for each in checked(swarm) for peer in each.wrong} == {"B"}


async def test_a_proposal_accuses_no_more_reducers_than_a_commit_may_exclude(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all members would refuse it, in each attempt."""
    monkeypatch.setattr("spes_p2p.rounds.proposal.MAX_BANNED", 2)
    swarm = VirtualSwarm(campaign(total_steps=500))
    swarm.start_all("ABC")
    await swarm.until_round(3)
    proof, _ = proof_of(swarm)
    proofs = swarm.helper.replica.validity.proofs
    proofs._held = {peer: Proven(peer, "", replace(proof, part=place), {}) for place, peer in enumerate("CBA")}
    commit = swarm.nodes["W"].log.last
    assert [each.peer for each in proofs.accused(commit)] == ["A", "B"]
    assert [each.peer for each in proofs.accused(replace(commit, excluded=("A",)))] == ["B"]
    assert proofs.accused(replace(commit, excluded=("A", "X"))) == ()


async def test_a_reducer_that_no_commit_has_room_to_exclude_is_left_out_while_its_proof_is_recent(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spes_p2p.rounds.proposal.MAX_BANNED", 0)
    swarm = VirtualSwarm(campaign(total_steps=500, codec="int8"))
    lied = lying("B", scale, monkeypatch)
    swarm.start_all("ACD")
    swarm.start("B", bandwidth=4.0)  # it reduces
    log = swarm.nodes["W"].log
    await swarm.until(lambda: bool(lied))
    await swarm.until_round(first := lied[0] + 18)
    members = [log.commit_at(number).members for number in range(lied[0] + 1, first)]
    assert 9 <= sum("B" not in each for each in members) < len(members)
    assert len(set(lied)) <= 8
    assert not log.last.excluded
    swarm.assert_same_commits()


@pytest.mark.long
async def test_a_pardoned_reducer_takes_part_again_until_another_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pardon(swarm: VirtualSwarm, number: int) -> None:
        log = swarm.nodes["W"].log
        unsigned = Control(swarm.campaign.hash, number, "running", (), -1, b"", pardons=(Pardon("B", log.round),))
        order = ControlRequest(signed(unsigned, SimulatedIdentity("W")))
        known = unpack(Known, await RpcEndpoint(swarm.network.transport("visitor"), 5.0).ask("W", CONTROL, pack(order), 5.0))
        assert known.excluded == ("B",)
        await swarm.until(lambda: not log.last.excluded)

    async def until_excluded(swarm: VirtualSwarm) -> None:
        life, log = swarm.tasks["B"], swarm.nodes["W"].log
        await swarm.until(lambda: "B" in log.last.excluded)
        await asyncio.wait({life}, timeout=200)
        with pytest.raises(UserError, match="a proof excludes this peer"):
            life.result()
        swarm.kill("B")

    swarm = VirtualSwarm(campaign(total_steps=1000, codec="int8"))
    with monkeypatch.context() as lies:
        lying("B", scale, lies)
        swarm.start_all("ACD")
        swarm.start("B", bandwidth=4.0)  # it reduces
        await until_excluded(swarm)
    await pardon(swarm, 1)  # at once: the others still hold the proof
    swarm.start_again("B")
    log = swarm.nodes["W"].log
    again = log.round + 4
    await swarm.until(lambda: log.round >= again and "B" in {log.last.members[i] for i in log.last.heard})
    assert not any(each.commit.excluded for each in log.since(again - 4))
    swarm.restart("A")
    await swarm.until_round(log.round + 1)
    with monkeypatch.context() as lies:
        lying("B", scale, lies)
        await until_excluded(swarm)
    await pardon(swarm, 2)
    swarm.assert_same_commits()


@pytest.mark.slow
async def test_a_reducer_that_refuses_checks_reduces_only_in_some_rounds_nor_does_its_checker() -> None:
    swarm = VirtualSwarm(campaign(total_steps=300))
    swarm.start_all("ACD")
    swarm.start("B", bandwidth=4.0)
    silent("B", swarm)
    await swarm.until_round(20)
    log = swarm.nodes["W"].log
    kept = {results.plan.id: results for results in swarm.helper.replica.results.by_plan.values()}
    commits = [decided.commit for decided in log.since(1)]
    disputed = [{commit.members[i] for i in commit.disputed} for commit in commits]
    assert all(each == set() or ("B" in each and len(each) == 2) for each in disputed)
    quiet = [commit.round for commit, each in zip(commits, disputed, strict=True) if "B" in each]
    assert len(quiet) > 2
    assert not log.last.excluded
    for commit in commits:
        if commit.plan in kept and any(0 <= commit.round - number <= 3 for number in quiet):
            assert "B" not in means_by_reducer(commit, kept[commit.plan])


# Proofs -------------------------------------------------------------------------------------------------------------------


def proof_of(swarm: VirtualSwarm) -> tuple[WrongSum, str]:
    """What a checker of an honest reducer would tell if it accused it: the last round's inputs, and the reducer."""
    commit = swarm.nodes["W"].log.last
    for name, peer in (("W", swarm.helper), *swarm.peers.items()):
        kept = peer.replica.results.by_plan[commit.plan]
        for part in means_by_reducer(commit, kept).get(name, ()):
            inputs = peer.replica.exchanges.inputs_of(commit.plan, part.index) or {}
            peer.checking._asked[commit.plan] = {"whoever": {(part.index, False)}}
            return WrongSum(commit.round, commit.id, part.index, peer.checking._own_inputs(commit.plan, inputs)), name
    raise AssertionError("nobody made a mean")


def resigned(proof: WrongSum, **changes: Any) -> WrongSum:
    """The first contributor signs something else."""
    first, *rest = proof.inputs.updates
    pushed = read_signed(Pushed, first, SimulatedIdentity("any"))
    update = next(each for each in pushed.updates if each.part == proof.part)
    made = replace(Pushed(pushed.plan, (replace(update, **{k: v for k, v in changes.items() if k != "plan"}),)),
                   plan=changes.get("plan", pushed.plan))
    return replace(proof, inputs=Inputs((sign(made, SimulatedIdentity(first.peer)), *rest)))


def altered(proof: WrongSum) -> WrongSum:
    """The first contributor's record says something else than it signed."""
    first, *rest = proof.inputs.updates
    forged = replace(first, record=resigned(proof, tokens=1).inputs.updates[0].record)
    return replace(proof, inputs=Inputs((forged, *rest)))


FORGERIES: dict[str, tuple[Callable[[WrongSum], WrongSum], str]] = {
    "other bytes that a contributor signs, too": (lambda proof: resigned(proof, digest=b"\1" * 32), "other inputs of part"),
    "other tokens": (lambda proof: resigned(proof, tokens=1), "other inputs of part"),
    "an update for another plan": (lambda proof: resigned(proof, plan="0" * 64), "no update of part"),
    "an update of another part": (lambda proof: resigned(proof, part=9999), "no update of part"),
    "a signature under something else": (altered, "is not signed by it"),
    "a contributor left out": (lambda proof: replace(proof, inputs=Inputs(proof.inputs.updates[1:])), "other contributors"),
    "contributors in another order": (
        lambda proof: replace(proof, inputs=Inputs(proof.inputs.updates[::-1])), "no update of part"),
    "another round": (lambda proof: replace(proof, round=proof.round - 1), "not one of the last"),
    "another commit": (lambda proof: replace(proof, commit="0" * 64), "not one of the last"),
    "a part that is not there": (lambda proof: replace(proof, part=9999), "is no mean"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("sync_steps", "is_named"), [(20, True), (1, False)])
async def test_a_reducer_that_is_behind_is_named_unless_the_checker_comes_too_late(sync_steps: int, is_named: bool) -> None:
    async def behind(stream: Stream) -> None:
        raise Refused(Code.BEHIND, "that round is not known here yet, or no longer")

    swarm = VirtualSwarm(campaign(total_steps=10**6, training={"sync_steps": sync_steps}, merge={"merge_interval": None}))
    swarm.start_all("ACD")
    swarm.start("B", bandwidth=4.0)
    await swarm.until_round(1)
    await swarm.nodes["B"].endpoint.serve(INPUTS, behind)
    await swarm.until_round(12)
    named = [each.round for each in checked(swarm) if "B" in each.unanswered]
    assert bool(named) == is_named


@pytest.mark.long
@pytest.mark.parametrize("behind_s", [12.0, 1e6], ids=["learns late of a round", "misses the next round"])
async def test_a_reducer_that_is_late_is_named_by_nobody(behind_s: float) -> None:
    swarm = VirtualSwarm(campaign(total_steps=10**6, training={"sync_steps": 20}, merge={"merge_interval": None}))
    swarm.start_all("ACD")
    swarm.start("B", bandwidth=4.0)
    await swarm.until_round(1)
    node, clock, asked = swarm.nodes["B"], asyncio.get_running_loop().time, list[float]()
    answer, started = swarm.peers["B"].checking._on_inputs, node.endpoint.stream

    async def late(stream: Stream) -> None:
        asked.append(clock())
        if clock() < asked[0] + behind_s:
            raise Refused(Code.BEHIND, "that round is not known here yet, or no longer")
        await answer(stream)

    def announce(peer: str, method: str) -> object:
        return started("nobody" if method == ROUND and asked and clock() < asked[0] + behind_s else peer, method)

    await node.endpoint.serve(INPUTS, late)
    node.endpoint.stream = announce  # type: ignore[assignment, method-assign]
    await swarm.until(lambda: bool(asked))
    log, first = swarm.nodes["A"].log, swarm.nodes["A"].log.round
    await swarm.until(lambda: log.round >= first + 3)
    assert ("B" in log.commit_at(first + 1).members) == (behind_s < 20)
    assert not [each for each in checked(swarm) if "B" in each.unanswered]
    assert len(asked) > 5


@pytest.mark.long
async def test_a_reducer_says_that_a_checker_comes_a_round_too_late() -> None:
    swarm = VirtualSwarm(campaign(total_steps=500))
    swarm.start_all("ABC")
    await swarm.until_round(4)
    await swarm.until(lambda: len({swarm.round_of(name) for name in "ABC"}) == 1)
    node = swarm.nodes["A"]
    before = node.log.commit_at(node.log.round - 1)
    checked_by = {peer: by for peer, by in checkers(before, "friends").items() if {peer, by} <= set("ABC")}
    assert checked_by
    for reducer, by in checked_by.items():
        with pytest.raises(Refused) as refused:
            await swarm.nodes[by].endpoint.ask(reducer, INPUTS, pack(InputsRequest(before.plan, 0)), 5.0)
        assert refused.value.code is Code.BEHIND


async def test_no_proof_against_an_honest_reducer_holds_whatever_is_forged() -> None:
    swarm = VirtualSwarm(campaign(total_steps=500, codec="int4"))
    swarm.start_all("ABC")
    await swarm.until_round(3)
    proof, reducer = proof_of(swarm)
    judge = swarm.peers[next(name for name in "ABC" if name != reducer)].replica.validity.proofs
    assert not await judge.holds(proof, [reducer])
    for forge, reason in FORGERIES.values():
        with pytest.raises(Refused, match=reason):
            await judge.holds(forge(proof), [reducer])


@pytest.mark.long
async def test_who_tells_a_false_proof_is_not_heard_again() -> None:
    swarm = VirtualSwarm(campaign(total_steps=500))
    swarm.start_all("ABC")
    await swarm.until_round(3)
    proof, reducer = proof_of(swarm)
    teller, judge = [name for name in "ABC" if name != reducer][:2]
    board = swarm.nodes[teller].endpoint
    swarm.peers[teller].replica.validity.proofs.body = lambda *_: None  # type: ignore[method-assign]
    await board.ask(judge, ACCUSE, pack(altered(proof)), 5.0)
    await swarm.until(lambda: teller in swarm.peers[judge].replica.validity.proofs._liars)
    with pytest.raises(Refused, match="no proof of yours"):
        await board.ask(judge, ACCUSE, pack(proof), 5.0)
    number = swarm.nodes["W"].log.round
    await swarm.until_round(number + 3)
    assert not swarm.nodes["W"].log.last.excluded


@pytest.mark.slow
async def test_a_coordinator_that_accuses_without_proof_excludes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = VirtualSwarm(campaign(total_steps=500))
    swarm.start_all("ABC")
    await swarm.until_round(2)
    liar = swarm.nodes["W"].coordinators()[0]
    victim = next(name for name in "ABC" if name != liar)
    accused, told = Proofs.accused, list[str]()

    def lie(self: Proofs, commit: Commit) -> tuple[Accused, ...]:
        if self._endpoint.peer_id != liar:
            return accused(self, commit)
        told.append(commit.id)
        return (Accused(victim, "0" * 64),)

    monkeypatch.setattr(Proofs, "accused", lie)
    await swarm.until_round(5)
    failed = [event.detail for recorder in swarm.recorders.values() for event in recorder.of(RoundFailed)]
    assert told
    assert any("no proof that" in detail for detail in failed), failed
    assert not swarm.nodes["W"].log.last.excluded


@pytest.mark.slow
async def test_an_exclusion_outlives_restarts_and_joiners_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = VirtualSwarm(campaign(total_steps=2000, codec="int8"))
    lying("B", scale, monkeypatch)
    swarm.start_all("AC")
    swarm.start("B", bandwidth=4.0)
    await swarm.until(lambda: "B" in swarm.nodes["A"].log.last.excluded)
    life = swarm.tasks.pop("B")
    swarm.peers.pop("B")
    swarm.nodes.pop("B")
    await asyncio.wait({life}, timeout=200)
    life.exception()
    for name in "WAC":
        swarm.restart(name)
    swarm.start("D")
    await swarm.until(lambda: swarm.round_of("D") >= swarm.nodes["A"].log.round > 6)
    assert all(node.log.last.excluded == ("B",) for node in swarm.nodes.values())
    number = swarm.nodes["A"].log.round
    swarm.network.kill("B")
    swarm.start_again("B")
    life = swarm.tasks.pop("B")
    swarm.peers.pop("B")
    swarm.nodes.pop("B")
    await asyncio.wait({life}, timeout=300)
    with pytest.raises(UserError, match="a proof excludes this peer"):
        life.result()
    await swarm.until_round(number + 2)
    assert not any("B" in each.commit.members for each in swarm.nodes["D"].log.since(number - 1))


@pytest.mark.slow
async def test_lost_slow_and_restarted_contributors_make_no_reducer_guilty() -> None:
    swarm = VirtualSwarm(campaign(total_steps=200, codec="int4"))
    swarm.start_all("ABCD")
    killed = list[str]()

    def kill_in_the_middle(peer: str, method: str, index: int) -> None:
        if method == PUSH and index == 2 and peer in "ABCD" and len(killed) < 6:
            number = swarm.nodes["W"].log.round
            if number >= 1 + 2 * len(killed):
                killed.append(peer)
                swarm.network.kill(peer)

    swarm.network.hook = kill_in_the_middle
    done = 0
    while swarm.nodes["W"].log.round < 14:
        await asyncio.sleep(5.0)
        while done < len(killed):
            swarm.start_again(killed[done])
            done += 1
    assert len(killed) > 2
    assert sum(each.results for each in checked(swarm)) > 8
    assert not [each for each in checked(swarm) if each.wrong]
    assert not swarm.nodes["W"].log.last.excluded


# Arithmetic ---------------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32), scale_of=st.integers(-12, 4), carries=st.integers(-6, 6), count=st.integers(1, 6))
@pytest.mark.parametrize("codec", CODECS)
def test_an_honest_result_is_within_the_tolerance_and_six_roundings_are_not(
    codec: str, seed: int, scale_of: int, carries: int, count: int
) -> None:
    rng, plan_members = np.random.default_rng(seed), tuple(Member(name, 10, (), 1.0) for name in "ABCDEF")
    size = int(rng.integers(1, 700))
    part = Part(0, Group("shared", "shared", None, 0, size), 0, size, tuple(range(6)), 0, CODECS[codec])
    values = [rng.standard_normal(size, np.float32) * np.float32(10.0**scale_of) for _ in range(count)]
    inputs = {i: (10, part.codec.encode(each)) for i, each in enumerate(values)}
    mean = np.empty(size, np.float32)
    decoders = {i: (10, partial(part.codec.decode, body, size)) for i, (_, body) in inputs.items()}
    make_mean(part, plan_members, decoders, mean, True)
    residual = rng.standard_normal(size, np.float32) * np.float32(10.0 ** (scale_of + carries))
    honest, _ = encode_mean(part, mean, residual)
    assert not is_wrong(part, plan_members, inputs, honest, True)
    assume(mean.any())
    place = int(np.abs(mean).argmax())
    lie = part.codec.decode(honest, size).copy()
    distance = max(6 * part.codec.rounding(mean)[place], np.float32(1e-3) * np.abs(mean[place])) * np.sign(mean[place])
    if codec == "ternary":  # which sends one value's distance as a share of it
        lie += distance
    else:  # also where the honest result leaves the value out
        lie[place] = mean[place] + distance
    assert is_wrong(part, plan_members, inputs, part.codec.encode(lie), True)


@given(names=st.lists(st.text("abcdef", min_size=1), unique=True, min_size=1, max_size=9), commit_id=st.integers(0, 99))
def test_everybody_has_one_checker_which_is_another_member(names: list[str], commit_id: int) -> None:
    commit = replace(GENESIS, members=tuple(sorted(names)), tokens=commit_id, helpers=(names[0],), electorate=tuple(names[:2]))
    found = checkers(commit, "friends")
    assert set(found) == (set(names) if len(names) > 1 else set())
    assert sorted(found.values()) == sorted(found)
    assert all(peer != checker for peer, checker in found.items())
    if len(names) > 1:
        assert set(checkers(commit, "open").values()) <= set(names[:2])
        all_vouched = replace(commit, vouched=tuple(range(len(names))))
        assert checkers(all_vouched, "open") == checkers(all_vouched, "friends")
