"""A trainer whose user wants the machine back leaves politely, and trains again when it may."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import psutil
import pytest
from network_swarm import LocalPeer, LocalPeers, call, free_port, write_variant

from spes_p2p.observe.events import BaseRestored, RoundFailed

START_S = 90.0
TRAINERS = ("peer-0", "peer-1", "peer-2")


def works_again(peer: LocalPeer, after: int) -> bool:
    """Whether the work of this peer is in a round after this one."""
    commits = [commit for number, commit in peer.commits.items() if number > after]
    return any(who == peer.peer_id and tokens > 0 for commit in commits for who, tokens, _ in commit.contributions)


@pytest.mark.network
def test_a_trainer_that_is_paused_leaves_and_trains_again_after_resume(campaign: Path, tmp_path: Path) -> None:
    config = write_variant(
        campaign, "long.yaml", training={"total_steps": 400_000, "sync_steps": 10}, merge={"merge_interval": 10}
    )
    with LocalPeers(tmp_path) as swarm:
        address = swarm.bootstrap(config).address
        port = str(free_port())
        for name in TRAINERS:
            swarm.join(name, address, *(("--metrics-port", port) if name == "peer-1" else ()))
        swarm.wait_for_round(2, START_S)
        sleeper, others = swarm["peer-1"], [swarm["peer-0"], swarm["peer-2"]]

        paused = call("pause", str(sleeper.run_dir), "--json")
        assert paused.code == 0, paused.stderr
        assert json.loads(paused.stdout)["state"] == "paused"
        assert json.loads(paused.stdout)["reason"] == "user"
        assert sleeper.children() == [], "its network and its trainer have ended"
        assert f"paused: until you type: spes-p2p resume {sleeper.run_dir}" in sleeper.log
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        assert 'spes_paused{reason="user"} 1.0' in metrics

        seen = call("status", str(sleeper.run_dir), "--json")
        assert json.loads(seen.stdout)["own"]["state"] == "paused", seen.stderr
        assert sleeper.peer_id not in [peer["peer_id"] for peer in json.loads(seen.stdout)["peers"]]

        mine = json.loads(call("me", str(sleeper.run_dir), "--json").stdout)
        assert (mine["state"], mine["round"], mine["experts"]) == ("paused", sleeper.round, [])
        included = [each for commit in sleeper.commits.values() for each in commit.contributions if each[0] == sleeper.peer_id]
        assert mine["tokens"] == sum(tokens for _, tokens, _ in included) > 0
        assert 0 < mine["share"] < 1

        at = sleeper.round
        swarm.wait_for_round(swarm.newest_round() + 4, 60, others)
        assert sleeper.round == at
        assert sleeper.peer_id not in swarm.commit(swarm.newest_round()).members
        for peer in (*others, swarm["bootstrap"]):
            assert peer.events(RoundFailed) == []
            assert "warning" not in peer.log

        left_at = swarm.newest_round()
        resumed = call("resume", str(sleeper.run_dir))
        assert (resumed.code, resumed.stdout.strip()) == (0, "running")
        swarm.wait(lambda: works_again(sleeper, left_at), 60, "the paused peer's work is in a round again")
        assert sleeper.events(BaseRestored)[-1].source in ("disk", "download")
        assert {len(found) for found in swarm.digests().values()} == {1}
        assert swarm.terminate("peer-1") == 0


def test_a_trainer_that_does_not_run_starts_paused(tmp_path: Path) -> None:
    assert "no trainer runs" in call("pause", str(tmp_path)).stdout
    assert (tmp_path / "pause").stat().st_mode & 0o777 == 0o600
    assert json.loads(call("resume", str(tmp_path), "--json").stdout) == {"state": "not running"}
    assert not (tmp_path / "pause").exists()


@pytest.mark.network
def test_a_machine_that_slept_catches_up_and_trains_again(campaign: Path, tmp_path: Path) -> None:
    """Asleep for longer than others wait: it is given up, and its rounds are decided without it."""
    config = write_variant(
        campaign, "long.yaml", training={"total_steps": 400_000, "sync_steps": 10}, merge={"merge_interval": 10}
    )
    with LocalPeers(tmp_path) as swarm:
        address = swarm.bootstrap(config).address
        for name in TRAINERS:
            swarm.join(name, address)
        swarm.wait_for_round(2, START_S)
        sleeper, others = swarm["peer-1"], [swarm["peer-0"], swarm["peer-2"]]
        asleep = [psutil.Process(sleeper.process.pid), *sleeper.children()]
        for process in asleep:
            process.suspend()
        gone = swarm.newest_round() + 1

        def is_given_up() -> bool:
            return any(sleeper.peer_id not in peer.commits[peer.round].members for peer in others if peer.round > gone)

        swarm.wait(is_given_up, 120, "the others go on without it")
        swarm.wait_for_round(swarm.newest_round() + 20, 60, others)
        left_at = swarm.newest_round()
        for process in asleep:
            process.resume()
        swarm.wait(lambda: works_again(sleeper, left_at), 90, "its work is in a round again")
        assert sleeper.is_running
        assert {len(found) for found in swarm.digests().values()} == {1}


@pytest.mark.network
def test_a_trainer_pauses_at_its_quota_and_stays_so_after_a_restart(campaign: Path, tmp_path: Path) -> None:
    config = write_variant(
        campaign, "long.yaml", training={"total_steps": 400_000, "sync_steps": 10}, merge={"merge_interval": 10}
    )
    with LocalPeers(tmp_path) as swarm:
        address = swarm.bootstrap(config).address
        options = ("--quota", "3MB/day")
        swarm.join("peer-0", address)
        thrifty = swarm.join("peer-1", address, *options)
        swarm.wait(lambda: "paused: until midnight" in thrifty.log, START_S + 60, "peer-1 has used its quota")
        assert thrifty.round > 2
        traffic = json.loads((thrifty.run_dir / "traffic.json").read_text())
        assert 0 < traffic["round_bytes"] < 3e6 - traffic["used_bytes"] + 2 * traffic["round_bytes"]
        assert traffic["used_bytes"] < 3e6 + traffic["round_bytes"]

        assert swarm.terminate("peer-1") == 0
        again = swarm.join("peer-1", address, *options)
        swarm.wait(lambda: "paused: until midnight" in again.log, 30, "it is still used up")
        assert "joined campaign" not in again.log
