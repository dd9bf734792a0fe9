"""The unit of a trainer: what is typed is what systemd runs, and commands say what is left to do where no systemd runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from network_swarm import call

from spes_p2p.client.service import unit_text
from spes_p2p.config.addresses import EXAMPLE_ADDRESS
from spes_p2p.session.own_state import OwnState, StateFile

HARD = ["a b", "100%", "$HOME", 'say "x"', "back\\slash", "", "it's", "${A}", "%h", "ünï", "#no", ";"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user for whom no systemd runs."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def program(home: Path, name: str, script: str) -> None:
    """Put a program of this user in place of one of systemd's."""
    (home / "bin").mkdir(exist_ok=True)
    (home / "bin" / name).write_text(f"#!/bin/sh\n{script}")
    (home / "bin" / name).chmod(0o755)


def units(home: Path) -> list[str]:
    return sorted(path.name for path in home.glob("config/systemd/user/*"))


def assert_refused(arguments: list[str], *expected: str) -> None:
    ended = call("service", *arguments)
    assert (ended.code, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1), ended
    for part in expected:
        assert part in ended.stderr


def words_of(line: str) -> list[str]:
    """What systemd makes of a command line: quotes, escapes, specifiers, and no variables but in words after the first."""
    found = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    words = [re.sub(r"\\(.)", r"\1", quoted or plain) for quoted, plain in found]
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
    assert "systemd does not run here for this user" in ended.stdout
    assert "checked" not in ended.stdout
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("nohup ")]
    words = [sys.executable, "-m", "spes_p2p", "join", EXAMPLE_ADDRESS, "--hours", "22-8", "--run-dir", "runs/night"]
    assert shlex.split(line) == ["nohup", *words, ">>", "spes-p2p.log", "2>&1", "&"]
    for command in ("systemctl", "loginctl", "journalctl"):
        assert command not in ended.stdout
    assert f"join {EXAMPLE_ADDRESS} --hours 22-8 --run-dir runs/night\n" in unit.read_text()
    assert f"WorkingDirectory={home}\n" in unit.read_text()

    found = json.loads(call("service", "status", "--json").stdout)
    assert found == {"unit": str(unit), "installed": True, "active": "unknown", "trainer": None}
    told = call("service", "status").stdout.splitlines()
    assert told == [f"{unit}: installed; systemd does not answer", "trainer: not running"]

    removed = call("service", "remove")
    assert (removed.code, removed.stdout, unit.exists()) == (0, f"removed {unit}\n", False)
    assert "not installed; systemd does not answer" in call("service", "status").stdout


def test_with_json_installing_and_removing_say_what_there_is_now_and_what_was_told(home: Path) -> None:
    unit = home / "config/systemd/user/spes-p2p.service"
    installed = json.loads(call("service", "install", "--json", "--", EXAMPLE_ADDRESS).stdout)
    told = installed.pop("told")
    assert installed == {"unit": str(unit), "installed": True, "active": "unknown", "trainer": None}
    assert (told[0], told[-1][:6]) == (f"wrote {unit}", "nohup ")
    removed = json.loads(call("service", "remove", "--json").stdout)
    assert removed == {**installed, "installed": False, "told": [f"removed {unit}"]}


@pytest.mark.parametrize(("answers", "why"), [
    (False, "the service did not start it, or systemd does not answer here"), (True, "the service did not start it"),
])
def test_a_trainer_that_runs_on_is_told_when_its_unit_is_removed(answers: bool, why: str, home: Path) -> None:
    if answers:
        program(home, "systemctl", "exit 0\n")
    call("service", "install", "--", EXAMPLE_ADDRESS, "--run-dir", "runs/100% mine")
    state = StateFile(home / "runs/100% mine")
    state.write(OwnState("running", 0.0))
    _, told = call("service", "remove").stdout.splitlines()
    assert told.startswith(f"the trainer that runs with {home}/runs/100% mine goes on ({why}); to end it: Ctrl-C or kill; ")
    assert told.endswith(f"spes-p2p pause '{home}/runs/100% mine'")
    state.close()


def test_no_unit_is_made_for_a_run_dir_that_a_trainer_uses_which_the_service_did_not_start(home: Path) -> None:
    state = StateFile(home / "runs/mine")
    state.write(OwnState("running", 0.0))
    install = ["install", "--", EXAMPLE_ADDRESS, "--run-dir", "runs/mine"]
    assert_refused(install, "runs/mine: a trainer runs with it that this service did not start; end it first")
    assert not units(home)
    program(home, "systemctl", "exit 0\n")  # the unit is active
    assert call("service", *install).code == 0
    state.close()


def test_two_units_with_the_same_run_dir_are_refused(home: Path) -> None:
    assert call("service", "install", "--", EXAMPLE_ADDRESS).code == 0
    assert_refused(["install", "--name", "second", "--", EXAMPLE_ADDRESS], "runs/peer: the unit spes-p2p trains there")
    assert call("service", "install", "--name", "second", "--", EXAMPLE_ADDRESS, "--run-dir", "runs/other").code == 0
    assert units(home) == ["second.service", "spes-p2p.service"]


def test_the_line_without_systemd_runs_the_words_that_were_typed(home: Path) -> None:
    said = call("service", "install", "--", EXAMPLE_ADDRESS, "--run-dir", "it's $HOME; a b").stdout
    (line,) = [line for line in said.splitlines() if line.startswith("nohup ")]
    assert shlex.split(line)[5:8] == [EXAMPLE_ADDRESS, "--run-dir", "it's $HOME; a b"]


def test_a_unit_that_systemd_does_not_start_is_told_with_what_to_type(home: Path) -> None:
    program(home, "systemctl", '[ "$2" = daemon-reload ]\n')
    said = call("service", "install", "--", EXAMPLE_ADDRESS).stdout
    assert "systemctl --user daemon-reload && systemctl --user enable --now spes-p2p.service" in said
    assert "nohup" not in said


def test_with_systemd_the_unit_is_started_and_stopped(home: Path) -> None:
    program(home, "systemctl", f'echo "$*" >> {home}/calls\n[ "$2" != is-active ] || echo active\n')
    said = call("service", "install", "--name", "second", "--", EXAMPLE_ADDRESS).stdout
    assert "started" in said
    assert "loginctl enable-linger" in said
    assert "nohup" not in said
    assert "installed, active" in call("service", "status", "--name", "second").stdout
    assert call("service", "remove", "--name", "second").stdout.strip().endswith("second.service")
    assert (home / "calls").read_text().splitlines() == [
        "--user daemon-reload", "--user enable second.service", "--user restart second.service",
        "--user is-active second.service", "--user disable --now second.service", "--user daemon-reload",
    ]


@pytest.mark.parametrize("name", ["backup", "backup.service"])
@pytest.mark.parametrize("command", [["install"], ["remove"], ["status"]])
@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_unit_of_the_user_s_own_stays_as_it_is(name: str, command: list[str], is_dangling: bool, home: Path) -> None:
    program(home, "systemctl", f'echo "$*" >> {home}/calls\n')
    theirs = home / "config/systemd/user/backup.service"
    theirs.parent.mkdir(parents=True)
    text = b"[Service]\n# Nachts f\xfcr alle\nExecStart=/usr/bin/restic\n"
    if is_dangling:
        theirs.symlink_to("/nonexistent/backup.service")
    else:
        theirs.write_bytes(text)
    addresses = ["--", EXAMPLE_ADDRESS] if command == ["install"] else []
    assert_refused([*command, "--name", name, *addresses], str(theirs), "not written by spes-p2p", "--name")
    assert theirs.is_symlink() if is_dangling else theirs.read_bytes() == text
    assert not (home / "calls").exists()


def test_installing_again_replaces_the_unit_and_the_trainer_that_runs(home: Path) -> None:
    program(home, "systemctl", f'echo "$*" >> {home}/calls\n')
    for hours in ("22-8", "23-7"):
        assert call("service", "install", "--", EXAMPLE_ADDRESS, "--hours", hours).code == 0
    assert "--hours 23-7" in (home / "config/systemd/user/spes-p2p.service").read_text()
    assert (home / "calls").read_text().count("restart spes-p2p.service") == 2


@pytest.mark.parametrize(("option", "value"), [
    ("--hours", "25-3"), ("--quota", "20GB"), ("--memory", "much"), ("--max-upload", "fast"), ("--log-level", "silly"),
    ("--metrics-port", "99999999"), ("--experts", "-5"), ("--devices", "tpu"), ("--listen", "localhost"),
    ("--invite", "no.txt"),
])
def test_options_that_join_refuses_make_no_unit(option: str, value: str, home: Path) -> None:
    assert_refused(["install", "--", EXAMPLE_ADDRESS, option, value], option if option != "--listen" else value)
    assert units(home) == []


@pytest.mark.parametrize("word", ["a\rb", "a\nb", "a\x1bb", "a\x85b", "a\u2028b", "a\udcffb"])
@pytest.mark.parametrize("option", ["--run-dir", "--identity"])
def test_words_that_a_unit_cannot_hold_are_named(option: str, word: str, home: Path) -> None:
    assert_refused(["install", "--", EXAMPLE_ADDRESS, option, word], repr(word))
    assert units(home) == []


def test_no_folder_swallows_the_next_line_of_the_unit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(["install", "--", EXAMPLE_ADDRESS, "--run-dir", "runs\\"], "no such folder", "runs")
    (home / "folder\\").mkdir()
    monkeypatch.chdir(home / "folder\\")
    assert_refused(["install", "--", EXAMPLE_ADDRESS], "no such folder", "folder")
    assert units(home) == []


@pytest.mark.parametrize(("name", "unit"), [
    ("foo.timer", "foo.timer.service"), ("foo.service", "foo.service"), ("foo", "foo.service"),
])
@pytest.mark.parametrize("answers", [True, False])
def test_commands_name_the_file_that_was_written(name: str, unit: str, answers: bool, home: Path) -> None:
    program(home, "systemctl", f'echo "$*" >> {home}/calls\nexit {0 if answers else 1}\n')
    said = call("service", "install", "--name", name, "--", EXAMPLE_ADDRESS).stdout
    assert units(home) == [unit]
    call("service", "status", "--name", name)
    said += call("service", "remove", "--name", name).stdout
    assert units(home) == []
    ran = "\n".join(line for line in (home / "calls").read_text().splitlines() if not line.endswith("daemon-reload"))
    named = re.findall(r"(?:--now|enable(?! --now)|restart|is-active|-u) (\S+)", f"{ran}\n{said}")
    assert set(named) == {unit}
    assert len(named) >= (4 if answers else 2)


@pytest.mark.parametrize(("script", "expected"), [
    ("echo 'Failed to initialize manager' >&2; exit 1\n", "could not be checked (Failed to initialize manager)"),
    (None, "could not be checked (systemd-analyze does not run)"),
    ("echo \"$3:5: Unknown key\" >&2\n", "spes-p2p.service:5: Unknown key"),
    ("echo 'other.service: something' >&2\n", None),
])
def test_what_systemd_says_of_the_unit_is_told(script: str | None, expected: str | None, home: Path) -> None:
    program(home, "systemctl", "exit 0\n")
    if script is not None:
        program(home, "systemd-analyze", script)
    said = call("service", "install", "--", EXAMPLE_ADDRESS).stdout
    assert expected in said if expected else "checked" not in said and "other.service" not in said
