"""What the simulator makes of the logs of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from exchange_round import commit_before, make_plan_of, member

from spes_p2p.campaign.files import read_campaign
from spes_p2p.consensus.output import LOG
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Ballot, CertifiedCommit, Commit, Verdict
from spes_p2p.observe.events import BaseRestored, DigestMismatch, RoundCommitted
from spes_p2p.storage.store import frame_record
from spes_p2p.testing.simulate import processes
from spes_p2p.testing.simulate.audit import Audit
from spes_p2p.testing.simulate.campaign_files import write_campaign
from spes_p2p.testing.simulate.decisions import Held, compare
from spes_p2p.testing.simulate.process_swarm import Process
from spes_p2p.testing.simulate.scenario import Scenario, peer_names
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign, simulate

Run = tuple[dict[str, list[Commit]], list[Held]]


def test_what_audits_and_proofs_found_is_read_from_the_logs_of_processes(tmp_path: Path) -> None:
    scenario = Scenario(peer_names(3), 2, attackers=1, attacks=("copy",), attack="copy", admission="open", audited_share=0.3)
    config = write_campaign(tmp_path / "campaign", scenario, 0)
    assert read_campaign(config).campaign.config.sync.audited_share == 0.3
    run = processes._Run(scenario, config, tmp_path, 0, None, lambda done, total: None)
    first = commit_before(make_plan_of([member(peer, 100, ()) for peer in ("A", "B", "X")]))
    failed = (Verdict("A", "X", 1, False), Verdict("A", "B", 1, False), Verdict("B", "A", 1, True))
    log = [first, replace(first, round=1, verdicts=failed, convicted=(2,)), replace(first, round=2, excluded=("X",))]
    for name in ("A", "B", "X"):
        run._swarm.peers[name] = Process(name, tmp_path / name, name, None)  # type: ignore[arg-type]
        (tmp_path / name).mkdir()
    run._audit.liars = frozenset("X")
    (tmp_path / "A" / LOG).write_bytes(
        b"".join(frame_record(pack(CertifiedCommit(commit, Ballot(0, "A"), ()))) for commit in log)
    )
    found, _ = run.result()
    assert found.attacked is not None
    assert (found.attacked.attackers_convicted, found.attacked.honest_failed) == (1, 1)
    assert (found.attacked.attackers_banned, found.attacked.honest_banned, found.attacked.banned_round) == (1, 0, 2)


def logs_and_bases(swarm: VirtualSwarm, names: str) -> Run:
    logs = {
        name: [unpack(CertifiedCommit, record).commit for record in swarm.stores[name].records(LOG)] for name in names
    }
    return logs, [
        Held(0.0, name, commit.round, commit.base_digest)
        for name in names for commit in swarm.recorders[name].of(RoundCommitted)
    ]


def run_with_a_reform() -> Run:
    """Logs and bases of four peers, of which three go on without the other one and the bootstrap until they meet again."""

    async def main() -> Run:
        swarm = VirtualSwarm(campaign(total_steps=160, sync={"min_peers": 4, "reform_after_s": 30.0}))
        swarm.start_all("ABCD")
        await swarm.until(lambda: swarm.round_of("D") >= 3)
        swarm.network.partition(["W", "D"], ["A", "B", "C"])
        await swarm.until(lambda: swarm.peers["D"].node.log.last.term == 1 and swarm.round_of("A") >= 10)
        swarm.network.heal()
        await swarm.until_finished()
        return logs_and_bases(swarm, "ABCD")

    return simulate(main)


def short_run() -> Run:
    """Logs and bases of three peers that go on undisturbed."""

    async def main() -> Run:
        swarm = VirtualSwarm(campaign(total_steps=60))
        swarm.start_all("ABC")
        await swarm.until_finished()
        return logs_and_bases(swarm, "ABC")

    return simulate(main)


def audited(run: Run) -> Audit:
    audit = Audit(4)
    compare(audit, 1.0, *run)
    return audit


@pytest.mark.long
def test_rounds_that_were_given_up_are_no_mismatch() -> None:
    run = run_with_a_reform()
    _, held = run
    assert len({each.digest for each in held if each.round == 8}) == 2, "held by both sides"
    audit = audited(run)
    assert not audit.violations
    assert audit.measured.reforms == 1


def test_a_base_that_no_commit_names_is_a_mismatch() -> None:
    logs, held = short_run()
    assert not audited((logs, held)).violations
    wrong = replace(held[2], peer="C", digest="0" * 64)
    assert [each.rule for each in audited((logs, [*held, wrong])).violations] == ["digest"]


def test_two_commits_after_one_are_a_fork() -> None:
    logs, held = short_run()
    other = replace(logs["A"][4], step=10**6)
    assert "fork" in {each.rule for each in audited(({**logs, "E": [other]}, held)).violations}


def test_a_corrupted_base_counts_again_when_it_is_right() -> None:
    audit = Audit(4)
    audit.has_base(1.0, "A", "commit", 7, "right")
    audit.corrupted("B")
    audit.has_base(2.0, "B", "commit", 7, "wrong")
    audit.observed(3.0, "B", DigestMismatch(7, "wrong", "right"))
    audit.observed(4.0, "B", BaseRestored(7, 70, 100, 1, "wrong", "disk"))  # killed before the repair was on its disk
    audit.has_base(4.0, "B", "commit", 7, "wrong")
    audit.has_base(5.0, "B", "commit", 7, "right")
    assert not audit.violations
    audit.has_base(6.0, "B", "commit", 7, "wrong")
    assert [each.rule for each in audit.violations] == ["digest"]
