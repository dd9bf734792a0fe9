"""The environment that the two commands make: known-good versions for everybody, and a plain word when it cannot be made."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def pins(python_version: str) -> dict[str, str]:
    """Name to version in constraints.txt, for one version of Python."""
    environment = {**{name: str(value) for name, value in default_environment().items()}, "python_version": python_version}
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    return {requirement.name: str(requirement.specifier).removeprefix("==") for requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate(environment)}


@pytest.mark.parametrize("python_version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_dependency_is_pinned_within_its_bounds(python_version: str) -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = config["options"]["install_requires"] + config["options.extras_require"]["test"]
    for requirement in map(Requirement, declared.split("\n")[1:]):
        assert requirement.specifier.contains(pins(python_version)[canonicalize_name(requirement.name)]), requirement


def test_the_constraints_leave_the_choice_of_torch_build_to_the_machine() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert "+" not in text
    assert "://" not in text
    assert not [name for name in pins("3.12") if name.startswith(("nvidia", "cuda", "triton"))]


def fake_python(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("body", "expected"), [
    ('case "$*" in --version) echo "Python 3.9.2";; *version_info*) exit 1;; esac',
     "error: Python 3.9.2 is too old; install Python 3.10 or newer and name it: PYTHON=python3.12 "),
    ('case "$*" in *ensurepip*) exit 1;; esac',
     "has no venv module; install it (Debian and Ubuntu: apt-get install python3-venv)"),
    (None, "is not installed; install Python 3.10 or newer"),
])
def test_a_python_that_will_not_do_costs_one_line(tmp_path: Path, body: str | None, expected: str) -> None:
    (tmp_path / "tools").mkdir()
    for name in ("tools/_environment", "tools/test", "setup.cfg", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python" if body is None else fake_python(tmp_path / "python", body)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    run = subprocess.run([tmp_path / "tools" / "test"], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert expected in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "tool", [path.name for path in sorted((ROOT / "tools").iterdir()) if path.is_file() and os.access(path, os.X_OK)]
)
def test_each_tool_explains_itself_and_does_nothing_else(tool: str) -> None:
    path = ROOT / "tools" / tool
    command = [path] if path.read_text().startswith("#!/usr/bin/env bash") else [sys.executable, path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([*command, "--help"], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"tools/{tool}" in ended.stdout or "--help" in ended.stdout


def test_the_attacks_have_no_table_without_results(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "attacks"), "table", str(tmp_path / "nothing")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.startswith(f"error: {tmp_path / 'nothing'}: no results; ")) == (1, True)
