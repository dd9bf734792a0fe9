"""An attacker among real processes: it lies, is banned where the lie is provable, and its harm is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from network_swarm import ENVIRONMENT, ROOT

pytestmark = pytest.mark.network

DEADLINE_S = 800.0
OPTIONS = ("--json", "--peers", "3", "--rounds", "4", "--attackers", "1", "--attacks", "turncoat", "--admission", "open")


def test_a_lying_reducer_among_processes_is_banned_and_nobody_else_suffers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "spes_p2p", "simulate", "--processes", "--run-dir", str(tmp_path / "run"), *OPTIONS]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=False)
    found = json.loads(done.stdout)
    assert (found["violations"], found["orphan_processes"], done.returncode) == ([], 0, 0)
    attack = found["attacks"]["turncoat"]
    assert attack["lies"] > 0
    assert (attack["attackers_banned"], attack["honest_banned"]) == (1, 0)
    assert attack["loss_over_clean"] is not None
    assert attack["memory_over_clean_max"] != 0
