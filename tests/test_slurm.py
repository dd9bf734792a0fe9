"""The SLURM script: what a node runs, and when a task is requeued."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
from network_swarm import call

from spes_p2p.campaign.files import CAMPAIGN_FILE
from spes_p2p.config.quantities import parse_bytes

ROOT = Path(__file__).parents[1]
ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
LEAVES = 'trap "exit 0" TERM; kill -USR1 $PPID; while true; do :; done'
"""A peer whose node reaches its time limit, and which leaves when it is asked to."""


def run(folder: Path, *options: str, peer: str = "exit 0", port: int = 9) -> subprocess.CompletedProcess[str]:
    """Run the script as task 3 of job 77, with a `spes-p2p` that does this and a `scontrol` that only writes down."""
    for name, text in {"spes-p2p": peer, "scontrol": f'echo "$@" >> {folder}/requeued'}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "ADDRESS": ADDRESS.replace("tcp/9", f"tcp/{port}"),
        "RUNS": str(folder / "my runs"), "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "77",
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
    ("exit 0", 0, ""), ("exit 1", 1, "requeue 77\n"), (LEAVES, 0, "requeue 77\n"),
    (LEAVES.replace("USR1", "TERM"), 0, ""),
])
def test_a_task_is_requeued_at_its_time_limit_and_after_a_failure(tmp_path: Path, peer: str, code: int, requeued: str) -> None:
    ended = run(tmp_path, peer=peer)
    record = tmp_path / "requeued"
    assert (ended.returncode, record.read_text() if record.exists() else "") == (code, requeued), ended.stderr


@pytest.mark.parametrize(("listens", "was_in_the_campaign", "requeued"), [
    (False, False, "requeue 77\n"), (True, False, ""), (False, True, ""),
])
def test_a_first_start_is_requeued_while_nobody_listens_and_bad_input_is_not(
    tmp_path: Path, listens: bool, was_in_the_campaign: bool, requeued: str
) -> None:
    if was_in_the_campaign:
        run_dir = tmp_path / "my runs" / "peer-3"
        run_dir.mkdir(parents=True)
        (run_dir / CAMPAIGN_FILE).touch()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        ended = run(tmp_path, peer="exit 2", port=server.getsockname()[1])
    record = tmp_path / "requeued"
    assert (ended.returncode, record.read_text() if record.exists() else "") == (2, requeued), ended.stderr


def test_a_task_asks_for_cores_and_memory_for_all_its_gpus() -> None:
    lines = (ROOT / "tools/slurm_join").read_text().splitlines()
    options = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")]
    asked = dict(option.split("=", 1) for option in options if "=" in option)
    gpus = int(asked["gpus-per-node"])
    assert int(asked["cpus-per-task"]) > gpus
    assert parse_bytes(asked["mem"].replace("G", "GiB"), "--mem") >= gpus * 8 * 2**30
