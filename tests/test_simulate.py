"""The simulator: swarms under faults keep their invariants, a seed replays exactly, what is broken is found out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import math
import random
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import psutil
import pytest
from network_swarm import CHILDREN_END_WITHIN_S, ENVIRONMENT, ROOT, START_TIMEOUT_S, call, wait_until

from spes_p2p.consensus.acceptor import Acceptor, VoteState
from spes_p2p.errors import UserError
from spes_p2p.observe.events import PhaseTrained, RoundCommitted
from spes_p2p.peer import reducer as reducing
from spes_p2p.peer.exchange_context import SentUpdate
from spes_p2p.peer.node import Node
from spes_p2p.peer.phases import PhaseRunner
from spes_p2p.rounds import next_base as staging
from spes_p2p.rounds import plan, sums
from spes_p2p.rounds.accounting import Ledger
from spes_p2p.rounds.apply import NextBase
from spes_p2p.rounds.ownership import Owners, assign_experts
from spes_p2p.rounds.parts import Part
from spes_p2p.testing.attacks.kinds import KINDS as ATTACK_KINDS
from spes_p2p.testing.simulate import virtual
from spes_p2p.testing.simulate.audit import Audit, Figures
from spes_p2p.testing.simulate.campaign_files import VOCABULARY, write_campaign
from spes_p2p.testing.simulate.churn import absences
from spes_p2p.testing.simulate.command import simulate_processes, simulate_virtual
from spes_p2p.testing.simulate.faults import KINDS, Fault, SwarmView, random_fault
from spes_p2p.testing.simulate.injector import Injector
from spes_p2p.testing.simulate.points import POINTS
from spes_p2p.testing.simulate.report import Attacked, RunReport, beyond_training
from spes_p2p.testing.simulate.scenario import BOOTSTRAP, MachineSettings, Scenario, load_scenario, peer_names
from spes_p2p.testing.simulate.swarm import VirtualSwarm
from spes_p2p.testing.simulate.virtual import QUIET_ROUNDS, SILENCE_S, run_seed, run_seeds
from spes_p2p.testing.virtual_loop import run_virtual

RARE = ("decide", "download", "donate", "replay", "leave")
"""Points that are reached only after some other fault."""
REGRESSIONS: tuple[int, ...] = (1, 5, 304)
"""Seeds of the default scenario that once broke an invariant."""


def assert_sound(result: RunReport) -> None:
    assert result.violations == ()


def rules_broken(scenario: Scenario) -> set[str]:
    return {violation.rule for violation in run_seed(scenario, 0).violations}


def commit(number: int, members: tuple[str, ...], owners: Owners, total_tokens: int, trained: str = "") -> RoundCommitted:
    """`trained`: members whose work it includes."""
    return RoundCommitted(
        number, 4 * number, 400, 0, total_tokens, 1.0, members, owners, f"digest {number}", 1, 0, 0, 0, {"exchange": 1.0},
        contributions=tuple((peer, 100, 0) for peer in trained),
    )


@pytest.mark.parametrize("kind", ["restart", "stop", "partition", "corrupt", "disconnect"])
@pytest.mark.sampled(1)
@pytest.mark.long
def test_a_fault_at_every_point_of_a_round_breaks_no_invariant(kind: str) -> None:
    points = [point for point in POINTS if point not in RARE]
    faults = tuple(
        Fault(kind, 2 * number, point, peers=("peer-1",) if kind == "partition" else (), seconds=6.0, what="garbage")
        for number, point in enumerate(points, start=1)
    )
    result = run_seed(Scenario(peer_names(3), 2 * len(points) + 3, faults, vary=False), 0)
    assert_sound(result)
    assert result.points == dict.fromkeys(points, 1)
    assert result.figures.rounds_committed >= len(points)


@pytest.mark.slow
def test_a_member_that_loses_nobody_but_its_coordinator_holds_the_round_up_for_a_moment() -> None:
    names = peer_names(4)
    pairs = itertools.product((names[1], BOOTSTRAP), (names[0], names[2], names[3]), ("push", "reduce", "staged"))
    faults = tuple(Fault("disconnect", 2 * k, point, peers=(a, b)) for k, (a, b, point) in enumerate(pairs, start=1))
    result = run_seed(Scenario(names, 2 * len(faults) + 3, faults, vary=False), 0)
    assert_sound(result)
    assert sum("loses its connection to" in line for line in result.log) == len(faults)
    assert max(result.figures.round_s) < 30


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("point", ["announce", "vote", "apply"])
@pytest.mark.long
def test_a_bit_of_a_base_that_changes_is_not_taken_for_work_that_nobody_sent(point: str, seed: int) -> None:
    faults = tuple(Fault("corrupt", number, point, peers=("peer-1",), what="base") for number in range(3, 15, 2))
    assert_sound(run_seed(Scenario(peer_names(3), 18, faults, vary=False, overlap=True), seed))


@pytest.mark.parametrize("kind", ["restart", "stop", "partition"])
@pytest.mark.slow
def test_whoever_is_lost_at_any_point_of_a_round_holds_it_up_for_less_than_two_silences(kind: str) -> None:
    points = [point for point in POINTS if point not in (*RARE, "start", "training", "checkpoint", "save", "apply")]
    faults = tuple(Fault(kind, 6 * number, point, seconds=40.0) for number, point in enumerate(points, start=1))
    result = run_seed(Scenario(peer_names(5), 6 * len(points) + 6, faults, vary=False), 0)
    assert_sound(result)
    figures = result.figures
    assert len(figures.exclude_s) >= 10
    assert max(figures.exclude_s) < 2 * SILENCE_S


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.sampled(1)
@pytest.mark.long
def test_who_leaves_and_comes_back_on_its_disk_takes_part_again(overlap: bool) -> None:
    points = ("training", "announce", "promise", "push", "vote", "decided")
    faults = tuple(
        Fault("leave", 2 * number, point, peers=("peer-1",), seconds=3.0) for number, point in enumerate(points, start=1)
    )
    result = run_seed(Scenario(peer_names(3), 2 * len(points) + 2, faults, vary=False, overlap=overlap), 0)
    assert_sound(result)
    assert result.points == dict.fromkeys(points, 1)
    assert sum("started again" in line for line in result.log) == len(points)
    last = next(line for line in reversed(result.log) if " commit " in line)
    assert all(name in last for name in peer_names(3))


@pytest.mark.slow
@pytest.mark.parametrize("seed", REGRESSIONS)
def test_a_seed_that_once_failed_stays_sound(seed: int) -> None:
    assert_sound(run_seed(Scenario(peer_names(5), 50, fault_rate=0.5), seed))


def test_random_faults_break_no_invariant() -> None:
    assert_sound(run_seed(Scenario(peer_names(5), 12, fault_rate=0.5), 1))


@pytest.mark.long
def test_work_that_is_clipped_counts_as_missing_only_if_no_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    make_mean, says_so = sums.make_mean, True

    def halve(part: Part, members: Any, updates: Any, mean: np.ndarray, clips: bool, behind: Any) -> set[int]:
        clipped = make_mean(part, members, updates, mean, clips, behind)
        if part.group.expert is not None:
            return clipped
        mean *= np.float32(0.5)
        return set(updates) if says_so else clipped

    for user in (sums, reducing):  # checkers make the same mean
        monkeypatch.setattr(user, "make_mean", halve)
    scenario = Scenario(peer_names(3), 3, vary=False)
    result = run_seed(scenario, 0)
    assert any("UpdatesClipped" in line for line in result.log)
    assert_sound(result)
    says_so = False
    assert "work" in rules_broken(scenario)


def test_the_control_of_the_peer_that_coordinates_counts() -> None:
    run = virtual._Run(Scenario(peer_names(3), 2, vary=False), 0)
    run_virtual(run.main())
    sent, received = map(max, zip(*run._control_bytes.values(), strict=True))
    most = run.result()
    assert sent > most.control_bytes_median[0] > 3 * 100
    assert received > most.control_bytes_median[1] > 3 * 100
    held, read = most.registry_bytes_per_min
    assert held > read > 3 * 1000


@pytest.mark.long
def test_peers_that_cannot_be_dialled_and_thin_uploads_take_part() -> None:
    machines = {"peer-1": MachineSettings(nat="symmetric"), "peer-2": MachineSettings(upload="10kbit"),
                "peer-3": MachineSettings(nat="cone")}
    run = virtual._Run(Scenario(peer_names(5), 6, vary=False, machines=machines), 0)
    run_virtual(run.main())
    assert_sound(run.result())
    base = run._swarm.peers["peer-0"].replica.base
    assert base.plan is not None
    members = {member.peer: member for member in base.plan.members}
    assert members.keys() >= machines.keys()
    assert all(members[name].tokens > 0 for name in machines)
    assert members["peer-1"].bandwidth == members["peer-3"].bandwidth == 0
    line = run._swarm.network.lines.of("peer-2")
    assert (line.up, line.down) == (1250.0, 12.5e6)


@pytest.mark.long
def test_a_seed_replays_exactly() -> None:
    scenario = Scenario(peer_names(3), 3, fault_rate=1.0)
    first = run_seed(scenario, 3)
    assert any("fault: " in line for line in first.log)
    assert run_seed(scenario, 3).log == first.log


@pytest.mark.network
def test_the_command_replays_a_seed_in_another_process(tmp_path: Path) -> None:
    def replay(name: str) -> str:
        options = ("--rounds", "3", "--fault-rate", "1", "--seed", "3", "--event-log", str(tmp_path / name))
        assert call("simulate", "--virtual", *options).code == 0
        return (tmp_path / name).read_text()

    assert replay("first") == replay("again")


@pytest.mark.network
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_simulation_that_is_ended_leaves_no_process_behind_and_says_nothing(number: int) -> None:
    command = [sys.executable, "-m", "spes_p2p", "simulate", "--virtual", "--seeds", "4", "--jobs", "2", "--rounds", "1000"]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def workers() -> list[psutil.Process]:
        return [child for child in psutil.Process(process.pid).children() if "--multiprocessing-fork" in child.cmdline()]

    wait_until(lambda: len(workers()) == 2, START_TIMEOUT_S, "both workers start")
    started = workers()
    process.send_signal(number)
    try:
        told = process.communicate(timeout=START_TIMEOUT_S)
    finally:
        process.kill()
    assert not psutil.wait_procs(started, timeout=CHILDREN_END_WITHIN_S)[1]
    if number == signal.SIGTERM:
        assert (process.returncode, *told) == (128 + number, b"", b"")


@pytest.mark.slow
def test_electors_that_forget_their_votes_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each coordinator is cut off with a decision that nobody else has heard of: the next one must come to the same."""
    faults = tuple(Fault("partition", number, "decided", seconds=30.0) for number in range(2, 6))
    scenario = Scenario(peer_names(4), 6, faults, vary=False)
    assert_sound(run_seed(scenario, 0))

    def forget(self: Acceptor, votes: VoteState) -> None:
        self.votes = replace(votes, promised=None, accepted_ballot=None, accepted=None)

    monkeypatch.setattr(Acceptor, "apply", forget)
    assert "fork" in rules_broken(scenario)


@pytest.mark.long
def test_bases_that_differ_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**6))

    class Flawed(NextBase):
        def piece(self, number: int) -> np.ndarray:
            return super().piece(number) + np.float32(1e-3 * (next(calls) % 2))

    monkeypatch.setattr(staging, "NextBase", Flawed)
    assert "digest" in rules_broken(Scenario(peer_names(3), 3, vary=False))


@pytest.mark.long
def test_experts_of_a_dead_peer_that_find_no_owner_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def assign_once(experts: int, room: Mapping[str, int], last: Sequence[Sequence[str]], *rest: Any) -> Owners:
        if any(last):
            return tuple(tuple(peer for peer in owners if peer in room) for owners in last)
        return assign_experts(experts, room, last, *rest)

    monkeypatch.setattr(plan, "assign_experts", assign_once)
    scenario = Scenario(peer_names(4), 6, (Fault("kill", 2, "training", "peer-1", ("peer-1",)),), vary=False)
    assert "ownerless" in rules_broken(scenario)


@pytest.mark.long
def test_a_peer_that_stands_still_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    train = PhaseRunner.train

    def train_once(self: PhaseRunner) -> Awaitable[None]:
        stands_still = self.node.peer_id == "peer-1" and self.replica.base.round >= 1
        return asyncio.sleep(10**6) if stands_still else train(self)

    monkeypatch.setattr(PhaseRunner, "train", train_once)
    assert "stuck" in rules_broken(Scenario(peer_names(3), 3, vary=False))


def test_no_random_fault_strikes_while_every_trainer_is_in_one() -> None:
    view = SwarmView(1, (), 3, None, "joiner-0")
    assert random_fault(random.Random(0), ("kill", "corrupt"), ("push",), view) is None


@pytest.mark.parametrize(("admission", "is_scripted", "strikes"), [
    ("friends", False, True), ("open", False, False), ("open", True, True),
])
async def test_random_kills_spare_the_owner_of_an_open_campaign_who_may_be_the_only_elector(
    admission: Literal["friends", "open"], is_scripted: bool, strikes: bool
) -> None:
    scenario, killed = Scenario(peer_names(3), 6, admission=admission), list[str]()
    there = {name: SimpleNamespace(done=lambda: False) for name in (BOOTSTRAP, *scenario.peer_names)}
    swarm: Any = SimpleNamespace(nodes=there, tasks=there, peers=scenario.peer_names, kill=killed.append)
    injector = Injector(swarm, scenario, random.Random(0), Audit(2), lambda name: None, lambda peer, text: None)
    injector.strike(Fault("kill", 1, peers=(BOOTSTRAP,), is_scripted=is_scripted))
    assert killed == [BOOTSTRAP] * strikes


def test_exclusion_new_owners_and_joiners_are_measured_from_what_peers_tell() -> None:
    audit = Audit(2)
    audit.observed(0.0, "a", commit(0, ("a", "b"), (("a",), ("b",)), 0))
    for peer in "ab":
        audit.observed(10.0, peer, PhaseTrained(1, 4, 100, 1.0, 0.0, 10.0, 0))
    audit.observed(11.0, "a", commit(1, ("a", "b"), (("a",), ("b",)), 200))
    audit.gone(13.0, "b")
    audit.joined(14.0, "c")
    audit.observed(21.0, "a", PhaseTrained(2, 4, 100, 1.0, 0.0, 10.0, 0))
    audit.observed(29.0, "a", commit(2, ("a", "c"), (("a",), ("c",)), 300))
    for peer in "ac":
        audit.observed(39.0, peer, PhaseTrained(3, 4, 100, 1.0, 0.0, 10.0, 0))
    audit.observed(40.0, "c", commit(3, ("a", "c"), (("a",), ("c",)), 500, trained="ac"))
    found = audit.figures(pending_tokens=0)
    assert audit.violations == []
    assert (found.rounds_committed, found.exclude_s, found.reown_rounds) == (3, [8.0], [1])
    assert found.joiner_first_contribution_s == [26.0]
    assert (found.tokens_trained, found.tokens_included, found.work_lost_tokens) == (500, 500, 0)
    assert (found.round_s, found.training_s) == ([11.0, 18.0, 11.0], [10.0, 10.0, 10.0])
    assert beyond_training([RunReport(0, found, (), {}, {})]) == 0.25


@pytest.mark.long
def test_work_survives_the_churn_of_volunteers() -> None:
    result = run_seed(Scenario(peer_names(4), 15, vary=False, churn=8640.0, step_s=90.0), 0)
    assert_sound(result)
    assert result.faults["leave"]
    assert result.faults["restart"] >= 3
    assert result.figures.tokens_included >= 0.95 * result.figures.tokens_trained
    assert max(result.figures.reown_rounds, default=1) <= 2
    assert beyond_training([result]) <= 0.05


def test_volunteers_sleep_at_night_and_come_back_in_bursts() -> None:
    day_s, nights = 2400.0, 3
    for sleeps in (False, True):
        away = list(itertools.takewhile(lambda each: each[0] < nights * day_s, absences("A", sleeps, day_s, random.Random(1))))
        assert all(0 <= (at_s + fault.seconds) % (day_s / 48) % (day_s / 48 - 1e-6) < 1e-6 for at_s, fault in away)
        assert all(at_s + fault.seconds <= after for (at_s, fault), (after, _) in itertools.pairwise(away))
        assert sum(fault.seconds >= day_s / 3 for _, fault in away) == (nights if sleeps else 0)


def test_with_overlap_a_round_waits_for_the_phase_before() -> None:
    """Round 2 carries phase 1; b dies, and what is left of phase 1 after that is nobody's delay."""
    audit = Audit(1, overlap=True)
    audit.observed(0.0, "a", commit(0, ("a", "b"), (("a",),), 0))
    audit.gone(1.0, "b")
    audit.observed(10.0, "a", PhaseTrained(1, 4, 100, 1.0, 0.0, 10.0, 0))
    audit.observed(13.0, "a", commit(2, ("a",), (("a",),), 100))
    assert audit.figures(0).exclude_s == [3.0]


BAD = {
    "peers: 0": "line 1: peers = 0: must be greater than 0",
    "peers: 3\nrounds: 0": "line 2: rounds = 0: must be greater than 0",
    "fault: x": "unknown field 'fault'",
    "faults:\n  - {fault: explode, round: 2}": "line 2: faults.0.fault = 'explode': must be 'kill'",
    "faults:\n  - {fault: kill, round: 2, peer: peer-9}": "faults.0.peer = 'peer-9': no such peer; there are bootstrap, peer-0",
    "faults:\n  - {fault: kill, round: 2, at: pusch}": "faults.0.at = 'pusch': did you mean 'push'?",
    "faults:\n  - {fault: kill, round: 2, at: somewhere}": "faults.0.at = 'somewhere': must be one of start, training",
    "faults:\n  - {fault: kill, round: 2, when: push}": "unknown field 'faults.0.when'",
    "faults:\n  - {fault: stop, round: 2, peer: peer-0, seconds: -1}": "faults.0.seconds = -1: must be greater than 0",
    "rounds: 9\nfaults:\n  - {fault: kill, round: 10}": "line 3: faults.0.round = 10: is after the last round, 9",
    "faults:\n  - {fault: kill, round: 5, peer: peer-0}\n  - {fault: stop, round: 7, peer: peer-0}":
        "line 3: faults.1.peer = 'peer-0': was killed before round 7",
    "faults:\n  - {fault: join, round: 5, peer: late}\n  - {fault: stop, round: 4, peer: late}":
        "line 3: faults.1.peer = 'late': has not joined by round 4",
    "faults:\n  - {fault: join, round: 5, peer: peer-0}":
        "faults.0.peer = 'peer-0': cannot join in round 5: it is there already",
    "faults:\n  - {fault: join, round: 5}": "faults.0.peer = (nothing): must name the peer that joins",
    "faults:\n  - {fault: leave, round: 5, peer: bootstrap}": "the bootstrap peer does not leave; kill or restart it",
    "faults:\n  - {fault: kill, round: 5, peer: peer-0, seconds: 3}":
        "line 2: faults.0.seconds = 3.0: a kill is permanent; 'restart' starts the peer again",
    "faults:\n  - {fault: join, round: 5, peer: late, seconds: 3}": "faults.0.seconds = 3.0: a join has no duration",
    "faults:\n  - {fault: disconnect, round: 5, seconds: 3}": "faults.0.seconds = 3.0: a disconnect has no duration",
    "faults:\n  - {fault: disconnect, round: 5, peers: [peer-1]}": "must be the two peers that lose each other",
    "faults:\n  - {fault: stop, round: 5, peers: [peer-1]}": "is for a partition or a disconnect",
    "machines: {peer-7: {speed: 2}}": "line 1: machines.peer-7 = 'given': no such peer",
    "nat: {cone: 0.5, symmetric: 0.6}": "line 1: nat.symmetric = 0.6: must be at most 1 together with cone = 0.5",
    "nat: {conical: 0.5}": "unknown field 'nat.conical'",
    "peers: 3\nloss: [0.1, 0.01]": "line 2: loss = [0.1, 0.01]: must be a number from 0 to 0.5, or two: [least, greatest]",
    "latency_s: fast": "line 1: latency_s = 'fast': must be a number of at least 0, or two: [least, greatest]",
    "machines: {bootstrap: {nat: cone}}": "line 1: machines.bootstrap.nat = 'cone': must be open: others join by it",
    "bandwidth: fast": "bandwidth = 'fast': must be a bandwidth such as 100mbit or 1gbit",
    "": "this file is empty",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_scenario_is_one_line_and_exit_code_2(text: str, tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    ended = call("simulate", "--virtual", str(path))
    assert ended.code == 2
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"error: {path}")
    assert BAD[text] in ended.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--peers", "0"), "--peers 0: must be greater than 0"),
        (("--faults", "kill,melt"), "--faults 'melt': must be 'kill'"),
        (("--points", "lunch"), "--points 'lunch': must be one of"),
        (("--fault-rate", "2"), "--fault-rate 2.0: must be at most 1"),
        (("--virtual", "--peers", "10000000"), "--peers 10000000: must be at most 1024"),
        (("--seeds", "0"), "--seeds 0: give at least 1"),
        (("--seeds", "2", "--event-log", "x"), "holds one run"),
        (("missing.yaml",), "missing.yaml: cannot read the scenario file"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(options: tuple[str, ...], message: str) -> None:
    ended = call("simulate", "--virtual", *options)
    assert (ended.code, ended.stderr.count("\n")) == (2, 1)
    assert message in ended.stderr


def unseen(what: str) -> contextlib.AbstractContextManager[Callable[[int, int], None]]:
    return contextlib.nullcontext(lambda done, total: None)


def test_progress_says_of_which_runs_the_rounds_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()

    def ended(*arguments: Any) -> list[RunReport]:
        raise UserError("no run is needed")

    def shown(what: str) -> contextlib.AbstractContextManager[Callable[[int, int], None]]:
        told.append(what)
        return unseen(what)

    monkeypatch.setattr("spes_p2p.testing.simulate.command.run_seeds", ended)
    for options in ({}, {"attackers": 1, "attacks": ["all"], "admission": "open"}):
        with pytest.raises(UserError, match="no run is needed"):
            simulate_virtual(None, {"rounds": 4, **options}, range(2), 1, None, None, shown)
    assert told == ["simulating 2 runs of 4 rounds", f"simulating {2 * (2 + len(ATTACK_KINDS))} runs of 4 rounds"]


def test_kinds_of_attacks_that_take_too_many_processes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def done(scenario: Scenario, *rest: Any) -> tuple[RunReport, list[dict[str, float]]]:
        return RunReport(0, Figures(), (), {}, {}, attacked=Attacked(scenario.attack, None, None)), []

    monkeypatch.setattr("spes_p2p.testing.simulate.processes.run_processes", done)
    monkeypatch.setattr("spes_p2p.client.local_swarm.check_memory", lambda *given: None)
    (tmp_path / "run").mkdir()
    for attacks, left_out in ((["all"], ["sybils", "slander"]), (["scale"], [])):
        options = {"peers": 3, "attackers": 1, "attacks": attacks, "rounds": 4}
        found, told = simulate_processes(None, options, 0, None, tmp_path / "run", unseen)
        assert found["attacks_left_out"] == left_out
        assert any("left out" in line and "sybils, slander" in line for line in told) == bool(left_out)


@pytest.mark.long
def test_attacked_peers_train_the_model_and_text_of_a_campaign_file(tmp_path: Path) -> None:
    small = Scenario(peer_names(3), 3, vary=False, attackers=1, attacks=("noise",), attack="noise")
    result = run_seed(replace(small, config=write_campaign(tmp_path, small, 0)), 0)
    assert_sound(result)
    assert result.attacked is not None
    assert result.attacked.lies
    assert result.attacked.loss is not None
    assert 4.0 < result.attacked.loss < math.log(VOCABULARY)  # the built-in language has 32 words: ln 32 = 3.47


def test_an_event_log_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.testing.simulate.command.run_seeds", None)
    with pytest.raises(UserError, match="there is no folder"):
        simulate_virtual(None, {}, range(1), 1, None, tmp_path / "missing" / "log.txt", unseen)


def test_an_event_log_may_be_a_pipe_or_a_device() -> None:
    simulate_virtual(None, {"rounds": 1}, range(1), 1, None, Path("/dev/null"), unseen)


def test_a_scenario_file_says_who_gets_which_fault_and_link(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        "peers: 3\nrounds: 20\nbandwidth: 80mbit\nmachines: {peer-1: {speed: 0.25, bandwidth: 8mbit}}\n"
        "faults:\n  - {fault: stop, peer: peer-2, round: 4, at: push, seconds: 20}\n  - {fault: join, peer: late, round: 5}\n"
    )
    scenario = load_scenario(path, {"rounds": 10})
    assert scenario.peer_names == ("peer-0", "peer-1", "peer-2")
    assert (scenario.rounds, scenario.fault_rate, scenario.bandwidth_bytes_per_s) == (10, 0.0, 1e7)
    assert (scenario.machine("peer-1").speed, scenario.machine("peer-1").bandwidth_bytes_per_s) == (0.25, 1e6)
    stop, join = scenario.faults
    assert (stop.kind, stop.peers, stop.reached_by, stop.at, stop.seconds) == ("stop", ("peer-2",), "peer-2", "push", 20)
    assert (join.kind, join.peers, join.reached_by) == ("join", ("late",), None)


def test_the_rounds_of_a_run_are_those_with_faults_and_quiet_ones_follow() -> None:
    ended = call("simulate", "--virtual", "--peers", "2", "--rounds", "2", "--fault-rate", "0", "--jobs", "1")
    found = re.match(r"(\d+) rounds, with the quiet ones at the end, committed by 2 peers in 1 run, ", ended.stdout)
    assert found is not None
    assert int(found[1]) > 2


def test_rounds_of_all_runs_are_counted_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "PROGRESS_EVERY_S", 0.02)
    told = list[tuple[int, int]]()
    run_seeds(Scenario(peer_names(2), 5, fault_rate=0.0), range(2), 2, lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {2 * (5 + QUIET_ROUNDS)}
    assert told == sorted(told)
    assert told[-1] == (16, 16)
    assert len({done for done, _ in told}) > 3


def test_rounds_while_peers_still_start_are_not_counted_and_quiet_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "START_TOGETHER", 2)
    monkeypatch.setattr(virtual, "START_S", 100.0)
    told = list[int]()
    run_seed(Scenario(peer_names(3), 2, fault_rate=0.0), 0, told.append)
    assert told.count(2) > 5
    assert max(told) == told[-1] == 2 + QUIET_ROUNDS


def test_what_peers_held_in_lives_that_ended_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "FAULTS_PER_COLLECTION", 1)
    lives, start = list[weakref.ref[Node]](), VirtualSwarm.start

    def started(swarm: VirtualSwarm, name: str, *machine: Any, **options: Any) -> None:
        start(swarm, name, *machine, **options)
        lives.append(weakref.ref(swarm.nodes[name]))

    monkeypatch.setattr(VirtualSwarm, "start", started)
    gc.disable()
    try:
        run_seed(Scenario(peer_names(4), 20, fault_rate=0.0, churn=120.0), 0)
        held = sum(life() is not None for life in lives)
    finally:
        gc.enable()
    assert held < len(lives) / 4


@pytest.mark.slow
def test_ten_thousand_rounds_under_random_faults_break_no_invariant() -> None:
    ended = call("simulate", "--virtual", "--seeds", "100", "--rounds", "100", "--json")
    found = json.loads(ended.stdout)
    assert found["violations"] == []
    assert ended.code == 0
    assert found["rounds_committed"] >= 10_000
    assert set(found["faults"]) == set(KINDS)


def _work_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Ledger.settle

    def broken(self: Ledger, trainer: Any, old: Any, new: Any, accepted: Any) -> int:
        kept = [(part, values()) for part, values in accepted]
        dropped = settle(self, trainer, old, new, accepted)
        for part, values in kept:
            if part.group.expert is None:
                again = np.zeros_like(trainer.read(part.group))
                again[part.start - part.group.start : part.stop - part.group.start] = values
                trainer.add(part.group, again)
        return dropped

    monkeypatch.setattr(Ledger, "settle", broken)


def _reducers_leave_somebody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    make_mean = sums.make_mean

    def broken(part: Part, members: Any, updates: dict[int, Any], mean: np.ndarray, clips: bool, behind: Any) -> set[int]:
        if 1 in updates:
            updates = {**updates, 1: (updates[1][0], lambda: np.zeros(part.size, np.float32))}
        return make_mean(part, members, updates, mean, clips, behind)

    for user in (sums, reducing):  # checkers make the same mean
        monkeypatch.setattr(user, "make_mean", broken)


def _somebody_weighs_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    has_update = SentUpdate.has

    def broken(self: SentUpdate, part: Any) -> bool:
        if has_update(self, part) and self.context.endpoint.peer_id == "peer-1":
            self.tokens_of = lambda part: self.context.plan.members[self.context.me].tokens // 2  # a greater weight is clamped
        return has_update(self, part)

    monkeypatch.setattr(SentUpdate, "has", broken)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("harm", [_work_counts_twice, _reducers_leave_somebody_out, _somebody_weighs_otherwise])
@pytest.mark.sampled(1)
@pytest.mark.long
def test_work_that_counts_twice_or_not_at_all_is_found_though_all_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, harm: Callable[[pytest.MonkeyPatch], None], overlap: bool
) -> None:
    harm(monkeypatch)
    assert rules_broken(Scenario(peer_names(3), 5, vary=False, overlap=overlap)) == {"work"}


@pytest.mark.slow
def test_work_that_counts_twice_is_found_in_four_bits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(peer_names(3), 6)
    assert_sound(run_seed(scenario, 0))
    _work_counts_twice(monkeypatch)
    assert rules_broken(scenario) == {"work"}
