"""The gate of an open campaign: a step that makes the model worse stays out, and whoever made it loses its influence."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from exchange_round import LAYOUT, Round, commit_before, make_plan_of, member, random_updates
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.consensus.admission import Service, add_service
from spes_p2p.messages.admission import Standing
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.fields import MAX_MEMBERS
from spes_p2p.messages.rounds import Staged
from spes_p2p.model.layout import Group
from spes_p2p.net.interfaces import World
from spes_p2p.observe.events import StepsJudged, StepsRejected
from spes_p2p.peer.judging import Judge
from spes_p2p.rounds.commit import make_commit
from spes_p2p.rounds.gate import (
    ERRORS,
    HARM_NATS,
    SLOW_HARM_NATS,
    SLOW_ROUNDS,
    STRIKES,
    Effect,
    Scores,
    barred,
    effect_of,
    harmful_groups,
    judges,
    owners_to_blame,
    suspects,
)
from spes_p2p.rounds.planned import Plan
from spes_p2p.testing.attacks.tamper import Liar
from spes_p2p.testing.attacks.updates import UpdateLiar
from spes_p2p.testing.simulate.scenario import Scenario, peer_names
from spes_p2p.testing.simulate.swarm import RecordingTrainer, VirtualSwarm, campaign
from spes_p2p.testing.simulate.virtual import run_seed
from spes_p2p.testing.virtual_loop import run_virtual

GROUPS = [group.name for group in LAYOUT.groups]
REPORT = Staged("plan", (), 0, (), b"", (), b"", "0" * 16)


def plan_of(standings: str) -> Plan:
    """v: vouched, p: a stranger past probation, n: a newcomer, o: one that trained expert 0 only, h: a vouched helper."""
    members = tuple(
        replace(member(name, 10, (10, *[0 if kind == "o" else 10] * 3)), standing=standing_of(kind), trains=kind != "h")
        for name, kind in zip("ABCDEFGHI", standings, strict=False)
    )
    return make_plan_of(members)


def standing_of(kind: str) -> Standing:
    kinds: dict[str, Standing] = {"n": "newcomer", "o": "newcomer", "p": "proven"}
    return kinds.get(kind, "vouched")


def verdict(*harmful: str) -> Staged:
    return replace(REPORT, judged=True, harmful=harmful)


# The rule ---------------------------------------------------------------------------------------------------------------


NAMES = st.sets(st.sampled_from(GROUPS)).map(sorted)


@given(st.integers(1, 4).flatmap(lambda honest: st.tuples(
    st.just(honest), st.lists(NAMES, max_size=honest - 1), st.lists(NAMES, max_size=3))), NAMES)
def test_a_minority_of_vouched_liars_and_strangers_decide_nothing(
    found: tuple[int, list[list[str]], list[list[str]]], harmful: list[str]
) -> None:
    honest, liars, strangers = found
    plan = plan_of("v" * (honest + len(liars)) + "n" * len(strangers))
    said = [harmful] * honest + liars + strangers
    assert harmful_groups(plan, {i: verdict(*names) for i, names in enumerate(said)}) == set(harmful)


def test_half_of_the_judges_are_not_enough_and_who_did_not_judge_does_not_count() -> None:
    plan = plan_of("vvvvhn")
    split = {0: verdict("expert.0"), 1: verdict("expert.0"), 2: verdict(), 3: verdict()}
    assert not harmful_groups(plan, split)
    assert harmful_groups(plan, {**split, 3: REPORT}) == {"expert.0"}
    assert not harmful_groups(plan, {**split, 4: verdict("expert.0"), 5: verdict("expert.0")}), "a helper, a newcomer"
    assert judges(plan) == (0, 1, 2, 3)
    assert not harmful_groups(plan, {0: REPORT})


def test_an_effect_is_harm_only_beyond_chance_and_a_loss_that_is_not_finite_always() -> None:
    before, rng = np.ones(16), np.random.default_rng(0)
    assert effect_of(before, before + 2 * HARM_NATS).exceeds(HARM_NATS)
    assert not effect_of(before, before + HARM_NATS / 2).exceeds(HARM_NATS)
    noisy = effect_of(before, before + rng.standard_normal(16))
    assert abs(noisy.nats) < ERRORS * noisy.error
    assert not replace(noisy, nats=abs(noisy.nats)).exceeds(HARM_NATS)
    for broken in (math.nan, math.inf):
        assert effect_of(before, np.full(16, broken)).exceeds(HARM_NATS)


def test_harm_that_is_small_in_each_round_adds_up() -> None:
    scores, small = Scores(), Effect(1.5 * SLOW_HARM_NATS, SLOW_HARM_NATS)
    assert not small.exceeds(SLOW_HARM_NATS), "one measurement proves nothing"
    for _ in range(SLOW_ROUNDS - 1):
        scores.add({"X": small, "A": Effect(-0.01, 0.001)})
        assert not scores.mean("X").exceeds(SLOW_HARM_NATS)
    for _ in range(4):
        scores.add({"X": small, "A": Effect(-0.01, 0.001)})
    assert scores.mean("X").exceeds(SLOW_HARM_NATS)
    assert not scores.mean("A").exceeds(SLOW_HARM_NATS)
    assert not scores.mean("unknown").exceeds(0)


def test_a_judge_remembers_as_many_members_as_a_round_can_have() -> None:
    """Anybody can have an expert judged under ever new names."""
    scores, harm = Scores(), Effect(0.1, 0.001)
    for number in range(SLOW_ROUNDS):
        scores.add({"X": harm} | {f"{number} {i}": harm for i in range(MAX_MEMBERS - 1)})
    assert len(scores._effects) == MAX_MEMBERS
    assert scores.mean("X").exceeds(SLOW_HARM_NATS), "whoever is still measured is not forgotten"


def commit_of(standings: str, harmful: tuple[str, ...]) -> tuple[Commit, Plan, set[int]]:
    """The commit of a round that all judges find harmful in these groups, and the parts of these groups."""

    async def main() -> tuple[Commit, Plan, set[int]]:
        plan = plan_of(standings)
        exchange = await Round.open(plan, random_updates(plan))
        await exchange.run()
        staged = {i: replace(each, judged=True, harmful=harmful) for i, each in exchange.staged().items()}
        results = exchange.collected()
        parts = {part.index for part in results.parts if part.group.name in harmful}
        return make_commit(commit_before(plan), plan, results, staged), plan, parts

    return run_virtual(main())


def test_a_commit_leaves_out_harmful_experts_and_names_the_strangers_that_trained_them() -> None:
    commit, _, parts = commit_of("vnvn", ("expert.0",))
    assert parts
    assert set(commit.dropped) == parts
    assert commit.rejected == (1, 3)
    assert set(commit.heard) == set(range(4)), "their shared weights stay in"


def test_where_a_newcomer_trained_an_expert_strangers_past_probation_are_not_blamed_for_it() -> None:
    """Otherwise two free identities of one attacker could bar an honest stranger."""
    assert commit_of("vpo", ("expert.0",))[0].rejected == (2,)
    assert commit_of("vpp", ("expert.0",))[0].rejected == (1, 2)
    assert commit_of("vpo", ("expert.0", "expert.1"))[0].rejected == (1, 2), "each expert has its own culprit"
    plan = plan_of("vppn")
    assert owners_to_blame(plan, (0, 1, 3)) == (3,)
    assert suspects(plan, (0, 1, 3)) == (1, 3)


def test_nobody_is_to_blame_for_what_all_train_or_only_vouched_members_trained() -> None:
    assert commit_of("vnvn", ("shared", "router"))[0].rejected == ()
    assert commit_of("vv", ("expert.1",))[0].rejected == ()
    assert commit_of("vnvn", ())[0].dropped == ()


def test_strangers_past_probation_are_suspected_of_harm_to_what_all_train() -> None:
    commit = commit_of("vpnp", ("shared", "router"))[0]
    assert (commit.suspected, commit.rejected) == ((1, 3), ())
    assert commit_of("vpnp", ("expert.0",))[0].suspected == ()


def test_a_round_in_which_everything_is_harmful_is_decided_and_moves_nothing() -> None:
    commit, _, parts = commit_of("vnv", tuple(GROUPS))
    assert set(commit.dropped) == parts
    assert commit.heard == ()


def test_a_member_that_is_rejected_twice_gets_no_work_and_begins_its_probation_again() -> None:
    commit = replace(commit_before(plan_of("vn")), heard=(0, 1))
    harm = replace(commit, rejected=(1,))
    assert barred([commit, harm]) == set()
    assert barred([harm, commit, *[harm] * (STRIKES - 1)]) == {"B"}
    services = {"A": Service(100, 3), "B": Service(100, 3)}
    add_service(services, harm)
    assert services == {"A": Service(101, 3)}


# Swarms -----------------------------------------------------------------------------------------------------------------


class Measuring(RecordingTrainer):
    """Its held-out loss is what the experts' weights add up to: noise hardly moves it, a common direction does."""

    def held_out_losses(self, seed: int, count: int) -> np.ndarray:
        first = self.layout.expert(0).start
        return np.full(count, 30 * float(self.local[first:].mean()))


def gated_swarm(strangers: str, **sync: Any) -> VirtualSwarm:
    """W, the vouched trainers A, B and C, and strangers. All losses are those of `Measuring`."""
    made = campaign(10**6, admission="open", sync={"min_peers": 3 + len(strangers), **sync})
    steps: list[VirtualSwarm] = []

    def make_trainer(base: np.ndarray, owned: tuple[int, ...]) -> Measuring:
        return Measuring(steps[0].layout, base, owned, 32, 1.0, 0)

    swarm = VirtualSwarm(made, make_trainer=make_trainer)
    steps.append(swarm)
    swarm.invitations = {name: swarm.invitation(name, ("trainer", "elector")) for name in "ABC"}
    return swarm


def harming(swarm: VirtualSwarm) -> Callable[[World], World]:
    def upwards(group: Group, update: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        size = np.sqrt(np.mean(np.square(update)))
        return update if group.expert is None else np.full_like(update, 10 * size)

    return lambda world: UpdateLiar(upwards).around(Liar(world, swarm.campaign.config, lambda lie: None))


def owned(commit: Commit, peer: str) -> set[int]:
    place = commit.members.index(peer) if peer in commit.members else -1
    return {expert for expert, owners in enumerate(commit.owners) if place in owners}


def judged(swarm: VirtualSwarm) -> list[StepsJudged]:
    return [event for recorder in swarm.recorders.values() for event in recorder.of(StepsJudged)]


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.sampled(1)
async def test_a_harmful_expert_stays_out_and_its_stranger_loses_it_but_not_the_vouched_owner(overlap: bool) -> None:
    swarm = gated_swarm("XY", overlap=overlap)
    swarm.around["X"] = harming(swarm)
    swarm.start_all("ABCXY")
    log = swarm.nodes["W"].log
    await swarm.until(lambda: "X" in barred(log.recent(log.round)))
    await swarm.until_round(log.round + 3)
    commits = [decided.commit for decided in log.since(0)]
    rejections = [commit for commit in commits if commit.rejected]
    assert {commit.members[i] for commit in rejections for i in commit.rejected} == {"X"}
    for commit in rejections:
        before = log.commit_at(commit.round - 1 - overlap)
        assert owned(before, "X"), "it had an expert in the phase whose work was rejected"
        assert commit.dropped
    assert not owned(commits[-1], "X")
    assert all(commits[-1].owners)
    assert commits[-1].workloads[commits[-1].members.index("X")].steps == 0
    harm = [each for each in judged(swarm) if each.harmful]
    assert all(dict(each.scores)["X"] < -HARM_NATS / 2 for each in harm), "the mean of its experts; clipping bounds each"
    assert {peer for each in swarm.recorders["Y"].of(StepsRejected) for peer in each.peers} == {"X"}
    assert 30 * swarm.peers["A"].replica.base.values[swarm.layout.expert(0).start :][: 4 * 192].mean() < 1
    swarm.assert_same_commits()
    swarm.assert_replicas_agree()


async def test_one_vouched_liar_of_three_can_leave_nothing_out() -> None:
    swarm = gated_swarm("X")
    swarm.start_all("ABCX")
    lied = list[str]()

    def everything(plan: str) -> tuple[str, ...]:
        lied.append(plan)
        return tuple(group.name for group in swarm.layout.groups)

    swarm.peers["A"]._member._judge.harmful = everything  # type: ignore[method-assign]
    await swarm.until_round(4)
    assert lied
    assert not any(decided.commit.rejected or decided.commit.dropped for decided in swarm.nodes["W"].log.since(-1))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_an_honest_swarm_is_judged_nothing_is_left_out_and_trainers_get_their_weights_back(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, measured = Judge._measure, list[str]()

    def checked(self: Judge, *args: Any) -> Any:
        trainer: Any = self._replica.trainer
        before = trainer.local
        found = measure(self, *args)
        np.testing.assert_allclose(trainer.local, before, rtol=0, atol=1e-6)
        measured.append(self._node.peer_id)
        return found

    monkeypatch.setattr(Judge, "_measure", checked)
    swarm = gated_swarm("XY", overlap=overlap)
    swarm.start_all("ABCXY")
    await swarm.until_round(5)
    assert set(measured) == set("ABC"), "vouched trainers, and nobody else"
    assert {peer for each in judged(swarm) for peer, _ in each.scores} == set("ABCXY")
    assert not [each for each in judged(swarm) if each.harmful]
    assert not any(decided.commit.dropped for decided in swarm.nodes["W"].log.since(-1))
    swarm.assert_replicas_agree()


async def test_a_judgement_that_is_cancelled_ends_once_the_trainer_has_its_weights_back(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[str]()

    def measure(self: Judge, *args: Any) -> dict[Any, Any]:
        measured.append(self._node.peer_id)
        return {}

    swarm = gated_swarm("X")
    swarm.start_all("ABCX")
    await swarm.until_round(1)
    monkeypatch.setattr(Judge, "_measure", measure)
    peer = swarm.peers["A"]
    task = asyncio.ensure_future(peer._member._judge._measured(next(iter(peer.replica.results.by_plan.values()))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert measured == ["A"]


@pytest.mark.slow
def test_a_reversed_update_of_a_real_model_is_clipped_and_its_sender_convicted_before_the_gate_has_to() -> None:
    made = Scenario(peer_names(6), 10, vary=False, attackers=1, attacks=("flip",), admission="open")
    clean, attacked = (run_seed(replace(made, attack=attack), 1) for attack in (None, "flip"))
    assert clean.attacked is not None
    assert attacked.attacked is not None
    assert clean.attacked.loss is not None
    assert attacked.attacked.loss is not None
    assert attacked.attacked.loss < 1.06 * clean.attacked.loss
    assert (attacked.attacked.attackers_convicted, attacked.attacked.honest_failed) == (1, 0)
    assert not [line for run in (clean, attacked) for line in run.log if "StepsRejected" in line]
