"""The simulator's real processes: faults strike them, the swarm goes on, and what nobody ordered is found out."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from network_swarm import ENVIRONMENT, ROOT

pytestmark = pytest.mark.slow

DEADLINE_S = 400.0


def started(run_dir: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spes_p2p", "simulate", "--processes", "--json", "--run-dir", str(run_dir), *options]
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    try:
        out, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, json.loads(out)


def running(run_dir: Path) -> list[psutil.Process]:
    """Peers and their daemons."""
    known = psutil.process_iter(["cmdline"])
    return [process for process in known if any(str(run_dir) in word for word in process.info["cmdline"] or ())]


def test_a_swarm_under_faults_goes_on_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ("--peers", "4", "--rounds", "6", "--fault-rate", "1", "--faults", "kill,restart,stop,join", "--seed", "2")
    code, found = ended(started(run_dir, *options))
    assert (found["violations"], found["orphan_processes"], code) == ([], 0, 0)
    assert found["rounds_committed"] >= 6
    assert sum(found["faults"].values()) >= 4
    assert [point["round"] for point in found["val_losses"]] == sorted({point["round"] for point in found["val_losses"]})
    assert not running(run_dir)


SCENARIO = """
peers: 4
rounds: 14
latency_s: 0
faults:
  - {fault: restart, round: 2, at: accept, seconds: 1}
  - {fault: stop, round: 4, at: push, skip: 1, seconds: 3}
  - {fault: corrupt, round: 5, at: reduce, what: garbage, seconds: 2}
  - {fault: restart, round: 6, at: save, peer: peer-1, seconds: 1}
  - {fault: slow, round: 8, at: training, peer: peer-2, factor: 4, seconds: 3}
  - {fault: leave, round: 9, at: staged, peer: peer-3, seconds: 1}
  - {fault: restart, round: 11, peer: bootstrap, seconds: 20}
  - {fault: restart, round: 11, peer: peer-1, seconds: 1}
"""


def test_faults_strike_real_processes_at_named_points(tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    code, found = ended(started(tmp_path / "run", str(tmp_path / "scenario.yaml")))
    assert (found["violations"], found["orphan_processes"], code) == ([], 0, 0)
    points = ("accept", "push", "reduce", "save", "staged", "training")
    assert found["faults_at"] == {**dict.fromkeys(points, 1), "start": 2}
    assert "joining through peers that this trainer met before" in (tmp_path / "run" / "peer-1" / "log.txt").read_text()
    assert not running(tmp_path / "run")


def test_a_peer_that_ends_by_itself_is_found_out(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = started(run_dir, "--peers", "3", "--rounds", "1000", "--fault-rate", "0")
    deadline = time.monotonic() + DEADLINE_S
    while not (run_dir / "peer-1" / "history.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    victim = next(each for each in running(run_dir / "peer-1") if "join" in each.info["cmdline"])
    victim.send_signal(signal.SIGKILL)
    code, found = ended(process)
    assert code == 1
    assert [(each["rule"], each["detail"].split(":")[0]) for each in found["violations"]] == [
        ("error", "peer-1 ended with code -9")
    ]
    assert not running(run_dir)
