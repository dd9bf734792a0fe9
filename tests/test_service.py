"""The unit of a trainer: what is typed is what systemd runs, and commands say what is left to do where no systemd runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from network_swarm import call

from spes_p2p.client.service import unit_text
from spes_p2p.config.addresses import EXAMPLE_ADDRESS

HARD = ["a b", "100%", "$HOME", 'say "x"', "back\\slash", "", "it's", "two\nlines", "${A}", "%h", "ünï", "#no", ";"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user for whom no systemd runs."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(line: str) -> list[str]:
    """What systemd makes of a command line: quotes, escapes, specifiers, and no variables but in words after the first."""
    found = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    words = [re.sub(r"\\(.)", lambda each: {"n": "\n"}.get(each[1], each[1]), quoted or plain) for quoted, plain in found]
    words = [word.replace("%%", "%") for word in words]
    return [words[0], *(word.replace("$$", "$") for word in words[1:])]


def test_systemd_runs_the_words_that_were_typed(tmp_path: Path) -> None:
    text = unit_text(HARD, Path("runs/peer"), tmp_path)
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    assert words_of(line) == [sys.executable, "-m", "spes_p2p", "join", *HARD]
    for expansion in re.findall(r"(?<!%)(?:%%)*%(?!%)|(?<!\$)(?:\$\$)*\$(?!\$)", line):
        raise AssertionError(f"systemd would expand {expansion}")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("folder", ["plain", "a b", "100%"])
def test_systemd_takes_the_unit(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    unit = tmp_path / "spes-test.service"
    unit.write_text(unit_text([EXAMPLE_ADDRESS, "--hours", "22-8", *HARD], Path("runs/peer"), tmp_path / folder))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = ["systemd-analyze", "--user", "verify", str(unit)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "spes-test" not in ended.stderr


def test_without_systemd_the_unit_is_written_and_the_rest_is_said(home: Path) -> None:
    ended = call("service", "install", "--", EXAMPLE_ADDRESS, "--hours", "22-8", "--run-dir", "runs/night")
    assert ended.code == 0, ended.stderr
    unit = home / "config/systemd/user/spes-p2p.service"
    assert f"wrote {unit}" in ended.stdout
    assert "systemctl --user daemon-reload && systemctl --user enable --now spes-p2p" in ended.stdout
    assert "loginctl enable-linger" in ended.stdout
    assert f"join {EXAMPLE_ADDRESS} --hours 22-8 --run-dir runs/night\n" in unit.read_text()
    assert f"WorkingDirectory={home}\n" in unit.read_text()

    found = json.loads(call("service", "status", "--json").stdout)
    assert found == {"unit": str(unit), "installed": True, "active": "unknown", "trainer": None}
    assert "not running" in call("service", "status").stdout

    removed = call("service", "remove")
    assert (removed.code, unit.exists()) == (0, False)
    assert "systemctl --user disable --now spes-p2p" in removed.stdout
    assert "not installed" in call("service", "status").stdout


def test_with_systemd_the_unit_is_started_and_stopped(home: Path) -> None:
    (home / "bin").mkdir()
    fake = home / "bin/systemctl"
    fake.write_text(f'#!/bin/sh\necho "$*" >> {home}/calls\n[ "$2" != is-active ] || echo active\n')
    fake.chmod(0o755)
    assert "started" in call("service", "install", "--name", "second", "--", EXAMPLE_ADDRESS).stdout
    assert "installed, active" in call("service", "status", "--name", "second").stdout
    assert call("service", "remove", "--name", "second").stdout.strip().endswith("second.service")
    assert (home / "calls").read_text().splitlines() == [
        "--user daemon-reload", "--user enable --now second", "--user is-active second", "--user disable --now second",
        "--user daemon-reload",
    ]
