"""A stranger that attacks a real peer over libp2p: its event loop, its memory, and how promptly it answers others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.network
BENCHMARK = Path(__file__).resolve().parents[1] / "tools" / "hostile_benchmark.py"
MAX_MB, SILENCE_S = 64.0, 10.0
"""The aims: memory for one hostile peer, the peer daemon's included, and the longest pause."""


@pytest.mark.parametrize("attack", ["messages", "promises", "streams", "frames", "records", "connections", "scene"])
def test_an_attack_costs_little_memory_and_no_pause(tmp_path: Path, attack: str) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARK), "--only", attack, "--seconds", "5", "--json", str(report)]
    subprocess.run(command, check=True, timeout=180, stdout=subprocess.DEVNULL)
    figures = json.loads(report.read_text())[attack]
    assert figures["python_mb"] + figures["p2pd_mb"] < MAX_MB
    assert figures["pause_s"] < SILENCE_S / 4
    assert figures["ping_p99_s"] < SILENCE_S / 2
