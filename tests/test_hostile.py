"""A stranger that attacks real peers over libp2p: their event loops, their memory, how promptly they answer others, rounds."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.consensus.signed import read_signed
from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.consensus import Signed
from spes_p2p.messages.methods import WORK
from spes_p2p.messages.rounds import Announcement
from spes_p2p.net.identity import RSAIdentity

TOOLS = Path(__file__).resolve().parents[1] / "tools"
MAX_MB, SILENCE_S = 64.0, 10.0
"""The aims: memory for one hostile peer, the peer daemon's included, and the longest pause."""
SENT = {
    "messages": {"announcements", "long_announcements", "votes", "commits"}, "promises": {"streams"}, "streams": {"streams"},
    "frames": {"frames"}, "records": {"records"}, "connections": {"connections"}, "scene": {"frames", "streams", "records"},
}
"""What each attack must have sent."""


def measured(report: Path, *options: str) -> dict[str, Any]:
    """Run the benchmark and return its figures."""
    command = [sys.executable, str(TOOLS / "hostile_benchmark.py"), *options, "--json", str(report)]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)
    figures: dict[str, Any] = json.loads(report.read_text())
    return figures


def expect_sent(sent: dict[str, int], attack: str) -> None:
    """Each part of the attack was sent, and no record of it was stored."""
    assert {kind for kind in SENT[attack] if sent.get(kind, 0) > 0} == SENT[attack]
    assert not sent.get("records_stored")


@pytest.mark.network
@pytest.mark.parametrize("attack", SENT)
def test_an_attack_costs_little_memory_and_no_pause(tmp_path: Path, attack: str) -> None:
    figures = measured(tmp_path / "report.json", "--only", attack, "--seconds", "5")[attack]
    expect_sent(figures["sent"], attack)
    assert figures["python_mb"] + figures["p2pd_mb"] < MAX_MB
    assert figures["pause_s"] < SILENCE_S / 4
    assert figures["ping_p99_s"] < SILENCE_S / 2


@pytest.mark.network
def test_rounds_go_on_while_an_outsider_attacks_a_trainer_and_the_bootstrap_peer(tmp_path: Path) -> None:
    figures = measured(tmp_path / "report.json", "--rounds", "2", "--phase-s", "1")
    expect_sent(figures["sent"], "scene")
    assert [len(seconds) for seconds in figures["took_s"].values()] == [2, 2]


def test_the_announcement_of_the_attack_is_valid_and_just_below_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TOOLS)
    stranger = RSAIdentity(tmp_path / "key")
    packed = pack(importlib.import_module("hostile_benchmark").longest_announcement(stranger, "c" * 64))
    assert WORK - 64 < len(packed) <= WORK
    read_signed(Announcement, unpack(Signed, packed), stranger)
