"""Attackers in the simulator: each lies as its kind says, nothing it says about itself counts, and its harm is measured."""

from __future__ import annotations

import argparse
import asyncio
import json
import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_p2p.consensus.electorate import quorum
from spes_p2p.messages.consensus import Accept, Vote
from spes_p2p.messages.samples import Interval
from spes_p2p.net.interfaces import World
from spes_p2p.observe.events import RoundCommitted
from spes_p2p.research.queue import append_result
from spes_p2p.testing.attacks.deciding import Equivocation
from spes_p2p.testing.attacks.kinds import ATTACKS, KINDS, AttackKind
from spes_p2p.testing.attacks.tamper import Liar, tampered
from spes_p2p.testing.attacks.updates import TOKENS
from spes_p2p.testing.in_memory_world import in_memory_world
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulate import virtual
from spes_p2p.testing.simulate.audit import Audit, Figures
from spes_p2p.testing.simulate.report import Attacked, RunReport, attack_figures, lines, summary
from spes_p2p.testing.simulate.scenario import DEFAULT_ATTACKED_ROUNDS, Scenario, peer_names, runs_of
from spes_p2p.testing.simulate.swarm import EXPERTS, LAYOUT, VirtualSwarm, campaign
from spes_p2p.testing.simulate.virtual import run_seed
from spes_p2p.testing.synthetic import SyntheticTrainer
from spes_p2p.training.interface import Phase, PhaseReport

ROOT = Path(__file__).resolve().parents[1]
OWNED, STEPS, STEP_TOKENS, HONEST = (0, 2), 5, 32, "ABCDE"
TRAINING: set[AttackKind] = {"scale", "flip", "zero", "noise", "free-ride", "copy"}
"""Kinds that only send other updates."""


# What attackers send ----------------------------------------------------------------------------------------------------


def trained(kind: AttackKind | None, phases: int = 1) -> tuple[SyntheticTrainer, np.ndarray, PhaseReport]:
    """A peer's trainer after some phases with this attack, its weights before the last one, and that phase's report."""

    told = list[str]()

    async def main() -> tuple[SyntheticTrainer, np.ndarray, PhaseReport]:
        world = in_memory_world(MemoryNetwork(), "X")
        if kind is not None:
            world = ATTACKS[kind].around(Liar(world, campaign().config, told.append))
        trainer = SyntheticTrainer(LAYOUT, np.zeros(LAYOUT.size, np.float32), OWNED, STEP_TOKENS, 1.0, 0)
        for number in range(phases):
            phase = Phase(number, 0, STEPS, STEPS, (Interval(0, 0, 2 * STEPS),))
            before = trainer.local
            report = await world.run_blocking(trainer.train, phase, lambda: False, lambda *_: None)
        return trainer, before, report

    found = asyncio.run(main())
    assert bool(told) == (kind is not None)
    return found


def moved(kind: AttackKind | None, expert: int | None = OWNED[0]) -> np.ndarray:
    trainer, before, _ = trained(kind)
    group = next(group for group in LAYOUT.groups if group.expert == expert)
    return (trainer.local - before)[group.start : group.stop]


def test_scaled_and_flipped_updates_are_multiples_of_the_honest_one() -> None:
    np.testing.assert_allclose(moved("scale"), 1000 * moved(None), rtol=1e-4)
    np.testing.assert_allclose(moved("flip"), -10 * moved(None), rtol=1e-4)


def test_noise_is_only_in_experts_and_zero_is_nothing() -> None:
    np.testing.assert_array_equal(moved("noise", None), moved(None, None))
    assert np.std(moved("noise")) > 100 * np.std(moved(None))
    for expert in (None, OWNED[0]):
        np.testing.assert_allclose(moved("zero", expert), 0, atol=1e-9)


@pytest.mark.parametrize("kind", ["zero", "weight"])
def test_a_false_weight_is_claimed_for_the_attackers_experts_only(kind: AttackKind) -> None:
    _, _, report = trained(kind)
    assert report.tokens == TOKENS
    assert report.routed == tuple(TOKENS if expert in OWNED else 0 for expert in range(EXPERTS))


@pytest.mark.parametrize("kind", ["free-ride", "copy"])
def test_a_free_rider_claims_a_phase_and_trains_one_step(kind: AttackKind) -> None:
    trainer, _, report = trained(kind)
    assert (report.steps, report.tokens, report.untrained) == (STEPS, STEPS * STEP_TOKENS, ())
    assert sum(map(len, trainer.trained_samples)) == 2


def test_a_copy_is_what_the_weights_moved_since_the_last_phase() -> None:
    trainer, before, _ = trained("copy", phases=3)
    once, start, _ = trained("free-ride")
    np.testing.assert_allclose(trainer.local - before, 0, atol=1e-9)  # nothing moved between these phases
    assert np.any(once.local != start)


# What counts ------------------------------------------------------------------------------------------------------------


def committed(number: int, tokens: int, contributions: dict[str, int], digest: str = "d") -> RoundCommitted:
    members = tuple(sorted(contributions))
    return RoundCommitted(
        number, 4 * number, 400, 0, tokens, 1.0, members, ((members[0],),) * EXPERTS, digest, 1, 0, 0, 0, {},
        contributions=tuple((peer, each, 0) for peer, each in contributions.items()),
    )


@pytest.mark.parametrize(("liars", "rules"), [(frozenset("X"), []), (frozenset[str](), ["tokens", "digest", "fork"])])
def test_what_an_attacker_reports_about_itself_is_no_violation(liars: frozenset[str], rules: list[str]) -> None:
    audit = Audit(EXPERTS, liars=liars)
    audit.observed(1.0, "A", committed(1, 1000, {"A": 0, "X": 1000}))
    for peer, said in (("A", "d"), ("X", "e")):
        audit.has_base(2.0, peer, "c", 1, said)
        audit.decided(3.0, peer, "p", 0, said, is_reform=False)
    assert [violation.rule for violation in audit.violations] == rules


def test_an_honest_base_with_more_tokens_than_honest_peers_trained_and_attackers_claimed_is_a_violation() -> None:
    audit = Audit(EXPERTS, liars=frozenset("X"))
    audit.observed(1.0, "A", committed(1, 1500, {"A": 0, "X": 1000}))
    assert [violation.rule for violation in audit.violations] == ["tokens"]


def run(seed: int, attack: AttackKind | None, loss: float | None, round_s: float, banned: int = 0) -> RunReport:
    grown = 5_000_600 if attack else 1_000
    attacked = Attacked(attack, loss, grown, 7, banned, honest_banned=0, banned_round=3 if banned else None)
    return RunReport(seed, Figures(round_s=[round_s]), (), {}, {}, attacked=attacked)


def test_each_attack_is_compared_with_the_clean_run_of_its_seed() -> None:
    runs = [run(0, None, 2.0, 5.0), run(0, "scale", 3.0, 6.0, 1), run(1, None, 1.0, 9.0), run(1, "scale", 1.2, 9.5)]
    found = attack_figures(runs)
    assert found["attacks"]["scale"] == {
        "lies": 14, "loss_over_clean": 1.5, "rounds_delayed_s_max": 1.0, "round_s_over_clean": 1.2,
        "memory_over_clean_max": 4_999_600, "attackers_banned": 1,
        "attackers_banned_round_max": 3, "honest_banned": 0, "attackers_convicted": 0, "honest_failed": 0,
        "invariant_violations": 0,
    }
    assert (found["loss_over_clean"], found["attackers_banned"], found["honest_banned"]) == (1.5, 1, 0)
    unfinished = attack_figures([*runs, run(0, "zero", None, 6.0)])
    assert unfinished["loss_over_clean"] is None, "a run that did not end is no success"


def test_an_attack_from_a_seat_is_compared_with_the_clean_run_with_seats() -> None:
    scenario = Scenario(peer_names(4), 3, attackers=1, attacks=("scale", "outbid"), admission="open")
    planned = runs_of(scenario)
    assert [(each.attack, each.seated, "peer-3" in each.vouched) for each in planned] == [
        (None, False, False), (None, True, True), ("scale", False, False), ("outbid", False, True)
    ]
    friends = replace(scenario, admission="friends")
    assert [each.attack for each in runs_of(friends)] == [None, "scale", "outbid"]

    def seated(attack: AttackKind | None, loss: float) -> RunReport:
        plain = run(0, attack, loss, 5.0)
        assert plain.attacked is not None
        return replace(plain, attacked=replace(plain.attacked, are_captured=True))

    found = attack_figures([run(0, None, 2.0, 5.0), seated("outbid", 5.0), seated(None, 4.0), run(0, "scale", 2.2, 5.0)])
    assert {kind: each["loss_over_clean"] for kind, each in found["attacks"].items()} == {"outbid": 1.25, "scale": 1.1}


def test_what_a_run_without_rounds_does_not_tell_is_null_and_not_said_to_be_small() -> None:
    stopped = RunReport(1, Figures(), (), {}, {}, attacked=Attacked("slander", None, None, 7))
    runs = [run(0, None, 2.0, 5.0), run(0, "slander", 3.0, 6.0), run(1, None, 1.0, 9.0), stopped]
    found = summary("virtual", 5, runs, 1.0, lambda run: "")
    names = ("loss_over_clean", "rounds_delayed_s_max", "memory_over_clean_max")
    for each in (found, found["attacks"]["slander"]):
        assert [each[name] for name in names] == [None, None, None]
    assert found["attacks"]["slander"]["round_s_over_clean"] is None
    (line,) = (each for each in lines(found) if each.startswith("slander: "))
    assert line.startswith("slander: last round not reached, a run without a round, memory not measured, 0 attackers")


def test_the_records_of_tools_attacks_hold_what_its_tables_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "attacks"))
    runs = [run(0, None, 2.0, 5.0), run(0, "scale", 3.0, 6.0, 1)]
    named, scenario = zip(("none", "scale"), runs, strict=True), Scenario(peer_names(6), 7, audited_share=0.02)
    kept = [json.loads(json.dumps(tool["record_of"]("one", attack, scenario, each))) for attack, each in named]
    assert attack_figures([tool["report_of"](each) for each in kept]) == attack_figures(runs)
    for each in kept:
        append_result(tmp_path / "results", each)
    tool["table"](argparse.Namespace(results=tmp_path / "results"))
    told = capsys.readouterr().out
    assert "| `scale` | 1 | 1.5 | +1.0 s | +20 % | +5 MB | 7 | 1 (3) | 0 | 0, 0 |" in told
    assert '"rounds": 7, "audited_share": 0.02}' in told
    asked = {
        "setting": ["one", "friends"], "attacks": ["outbid"], "seeds": 2, "rounds": 7, "audited_share": 0.02,
        "config": Path("a"), "device": "b",
    }
    wanted = tool["runs_of"](argparse.Namespace(**asked))
    assert [each[:3] for each in wanted] == [
        (setting, seed, attack) for seed in (0, 1) for setting, attacks in
        (("one", ("none", "seated", "outbid")), ("friends", ("none", "outbid"))) for attack in attacks
    ]
    assert {scenario.admission for setting, _, _, scenario in wanted if setting == "one"} == {"open"}
    for *_, each in wanted:
        assert (each.rounds, each.audited_share, each.config, each.device) == (7, 0.02, Path("a"), "b")


def test_tools_attacks_keeps_runs_with_other_rounds_and_audited_shares_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool, results = runpy.run_path(str(ROOT / "tools" / "attacks")), tmp_path / "results"
    half, few = (Scenario(peer_names(6), 7, audited_share=share) for share in (0.5, 0.02))
    longer = replace(half, rounds=8)
    for scenario, loss in ((half, 1.0), (few, 3.0)):
        append_result(results, tool["record_of"]("one", "none", scenario, run(0, None, loss, 5.0)))
    append_result(results, tool["record_of"]("one", "scale", few, run(0, "scale", 3.3, 5.0)))
    tool["table"](argparse.Namespace(results=results))
    told = capsys.readouterr().out
    assert "| `scale` | 1 | 1.1 |" in told
    assert ["{0: 1.0}" in told, "{0: 3.0}" in told] == [True, True]
    old = {"setting": "one", "seed": 0, "attack": "scale"}  # without rounds and share
    records = [json.loads(line) for line in results.read_text().splitlines()]
    asked = {"setting": ["one"], "attacks": ["none"], "seeds": 1, "rounds": 7, "audited_share": 0.5}
    alone = tool["runs_of"](argparse.Namespace(**asked, config=None, device="cpu"))
    assert [(*each[:3], each[3].attack, each[3].audited_share) for each in alone] == [("one", 0, "none", None, 0.5)]
    wanted = [("one", 0, attack, each) for each in (half, few, longer) for attack in ("none", "scale")]
    assert tool["left_of"](wanted, records) == [("one", 0, "scale", half), *wanted[4:]]
    assert tool["left_of"](wanted, [old]) == [each for each in wanted if each[2:] != ("scale", half)]


# Whole swarms -------------------------------------------------------------------------------------------------------------


def attacked(kind: AttackKind | None, **changes: Any) -> RunReport:
    made = Scenario(peer_names(4), 3, vary=False, attackers=1, attacks=KINDS, attack=kind)
    return run_seed(replace(made, **changes), 0)


@pytest.mark.slow
def test_a_seed_with_an_attacker_replays_exactly_and_differs_from_the_clean_one() -> None:
    first = attacked("scale")
    assert first.violations == ()
    assert attacked("scale").log == first.log
    assert attacked(None).log != first.log
    assert first.attacked is not None
    assert first.attacked.loss is not None


def test_memory_is_not_measured_in_a_run_that_ends_before_it_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "STUCK_S", 2.0)
    monkeypatch.setattr(virtual, "STUCK_PHASES", 0)
    found = attacked("copy")
    assert [violation.rule for violation in found.violations] == ["stuck"]
    assert found.attacked is not None
    assert found.attacked.memory_bytes is None


@cache
def in_the_open(kind: AttackKind | None) -> RunReport:
    """A run of a real model with one attacker of six, of whom the owner vouches for three honest ones.

    Without audits: a convicted attacker trains no more, which costs so short a run more than what it did.
    """
    return attacked(kind, peer_names=peer_names(6), rounds=10, admission="open", audited_share=0.0)


@pytest.mark.long
@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["scale", "weight", "flip", "tarpit", "zero", "slander", "free-ride", "copy", "noise"])
def test_in_an_open_campaign_one_attacker_of_six_costs_at_most_3_percent_of_the_loss(kind: AttackKind) -> None:
    clean, found = in_the_open(None), in_the_open(kind)
    assert found.violations == ()
    figures = attack_figures([clean, found])
    assert figures["attacks"][kind]["lies"] > 0
    assert figures["honest_banned"] == 0
    assert figures["loss_over_clean"] < 1.03


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sybils", "turncoat"])
def test_in_an_open_campaign_of_twenty_rounds_the_costliest_kinds_cost_at_most_3_percent_of_the_loss(kind: AttackKind) -> None:
    """With audits, which convict sybils. Shorter runs cost more: who is found out trains no more."""
    whole = Scenario(peer_names(6), DEFAULT_ATTACKED_ROUNDS, attackers=1, attacks=(kind,), admission="open")
    found = [run_seed(each, 0) for each in runs_of(whole)]
    assert [each.violations for each in found] == [()] * len(found)
    figures = attack_figures(found)
    assert figures["attacks"][kind]["lies"] > 0
    assert (figures["honest_banned"], figures["attackers_banned"]) == (0, int(kind == "turncoat"))
    assert figures["loss_over_clean"] < 1.03


@pytest.mark.parametrize("kind", sorted(set(KINDS) - TRAINING))
@pytest.mark.sampled(1)
@pytest.mark.long
async def test_one_attacker_of_six_stops_nobody_and_has_nothing_of_its_own_decided(kind: AttackKind) -> None:
    swarm, told = VirtualSwarm(campaign(total_steps=10**6, sync={"min_peers": 5})), list[str]()

    def around(world: World) -> World:
        return ATTACKS[kind].around(Liar(world, swarm.campaign.config, told.append))

    swarm.around["X"] = around
    swarm.start_all(HONEST + "X")

    async def until_round(number: int) -> None:
        """Of all honest peers, whatever becomes of the attacker."""
        while any(swarm.round_of(name) < number for name in HONEST):
            await asyncio.sleep(1.0)
            assert not [name for name in (*HONEST, "W") if swarm.tasks[name].done()]
            assert asyncio.get_running_loop().time() < 3000, swarm.rounds()

    await until_round(3)
    swarm.lose_disk("B")  # it needs a base, perhaps of the attacker
    await until_round(6)
    while not told:
        await until_round(swarm.round_of("A") + 1)
    last = min(swarm.nodes[name].log.round for name in HONEST)
    for number in range(last + 1):
        (commit,) = {swarm.nodes[name].log.commit_at(number) for name in HONEST}
        assert commit.electorate != ("X",)
    assert set(swarm.nodes["A"].log.last.excluded) == ({"X"} if kind in ("reducer", "turncoat") else set())


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", sorted(kind for kind in KINDS if ATTACKS[kind].needs_seat))
async def test_two_lying_electors_of_seven_have_nothing_of_their_own_decided(
    kind: AttackKind, caplog: pytest.LogCaptureFixture
) -> None:
    honest, liars, rounds = "ABCD", "XY", 8
    swarm, told = VirtualSwarm(campaign(total_steps=10**6, sync={"min_peers": 6}, admission="open")), list[str]()
    for name in liars:
        swarm.around[name] = lambda world: ATTACKS[kind].around(Liar(world, swarm.campaign.config, told.append))
    for name in honest + liars:
        swarm.invitations[name] = swarm.invitation(name, ("trainer", "elector"))
    swarm.start_all(honest + liars)
    while any(swarm.round_of(name) < rounds for name in honest):
        await asyncio.sleep(1.0)
        assert not [name for name in (*honest, "W") if swarm.tasks[name].done()]
        assert asyncio.get_running_loop().time() < 6000, swarm.rounds()
    logs = [swarm.nodes[name].log for name in honest]
    assert set(logs[0].commit_at(1).electorate) == {*honest, *liars, "W"}
    assert told
    for number in range(rounds + 1):
        (commit,) = {log.commit_at(number) for log in logs}
        assert not set(commit.electorate) <= set(liars)
    assert set(logs[0].last.excluded) == (set(liars) if kind == "turncoat" else set())
    assert "is not applied" not in caplog.text


@pytest.mark.long
async def test_of_two_valid_commits_in_a_ballot_all_decide_the_one_that_most_honest_electors_vote_for() -> None:
    swarm, liars = VirtualSwarm(campaign(total_steps=10**6, sync={"min_peers": 5})), list[Equivocation]()

    def around(world: World) -> World:
        liars.append(Equivocation(world.identity))
        return tampered(Liar(world, swarm.campaign.config), liars[0])

    swarm.around["X"] = around
    swarm.start_all(HONEST + "X")
    told = dict[int, tuple[Accept, dict[str, Vote]]]()
    while not told or min(swarm.round_of(name) for name in HONEST) <= max(told):
        await asyncio.sleep(1.0)
        told = liars[0].second if liars else told
        assert asyncio.get_running_loop().time() < 3000, swarm.rounds()
    for number, (asked, votes) in told.items():
        (decided,) = {swarm.nodes[name].log.commit_at(number) for name in HONEST}
        needed = quorum(swarm.nodes["A"].log.commit_at(number - 1).electorate)
        assert votes.keys() - {"X"}, "honest electors derive it from its evidence"
        assert (decided == asked.commit) == (len(votes) >= needed)


@pytest.mark.slow
def test_a_fork_that_an_elector_makes_is_healed_and_costs_it_its_place() -> None:
    """In this seed the liar has two halves of the electors decide otherwise in round 1."""
    found = run_seed(Scenario(peer_names(6), 5, attackers=1, attacks=KINDS, attack="equivocation"), 0)
    assert {violation.rule for violation in found.violations} == {"fork", "error"}
    assert all("decided twice" in violation.detail for violation in found.violations if violation.rule == "error")
    assert found.attacked is not None
    assert (found.attacked.attackers_banned, found.attacked.honest_banned) == (1, 0)
    assert found.attacked.loss is not None, "rounds go on"
