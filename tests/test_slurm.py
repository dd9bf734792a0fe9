"""The SLURM script: what a node runs, and when a task is requeued."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from network_swarm import call

ROOT = Path(__file__).parents[1]
ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
LEAVES = 'trap "exit 0" TERM; kill -USR1 $PPID; while true; do :; done'
"""A peer whose node reaches its time limit, and which leaves when it is asked to."""


def run(folder: Path, *options: str, peer: str = "exit 0") -> subprocess.CompletedProcess[str]:
    """Run the script as task 3 of job 77, with a `spes-p2p` that does this and a `scontrol` that only writes down."""
    for name, text in {"spes-p2p": peer, "scontrol": f'echo "$@" >> {folder}/requeued'}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "ADDRESS": ADDRESS, "RUNS": str(folder / "my runs"),
        "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "77",
    }
    command = [str(ROOT / "tools/slurm_join"), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_dry_run_prints_a_command_that_join_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run(tmp_path, "--dry-run", "--max-upload", "20mbit")
    program, *arguments = shlex.split(made.stdout)
    run_dir = tmp_path / "my runs" / "peer-3"
    assert (program, made.returncode) == ("spes-p2p", 0)
    assert arguments == ["join", ADDRESS, "--devices", "all", "--run-dir", str(run_dir), "--max-upload", "20mbit"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # as on the nodes
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    ended = call(*arguments)
    assert ended.code == 2, ended.stderr
    assert "no peer answers" in ended.stderr.splitlines()[-1]
    assert not run_dir.exists()


@pytest.mark.parametrize(("peer", "code", "requeued"), [
    ("exit 0", 0, ""), ("exit 1", 1, "requeue 77\n"), ("exit 2", 2, ""), (LEAVES, 0, "requeue 77\n"),
    (LEAVES.replace("USR1", "TERM"), 0, ""),
])
def test_a_task_is_requeued_at_its_time_limit_and_after_a_failure(tmp_path: Path, peer: str, code: int, requeued: str) -> None:
    ended = run(tmp_path, peer=peer)
    record = tmp_path / "requeued"
    assert (ended.returncode, record.read_text() if record.exists() else "") == (code, requeued), ended.stderr
