"""`spes-p2p service`: a systemd user unit that runs a trainer from login on, or from boot with lingering.

Where no systemd runs for this user, the unit is written, and the command that starts the trainer without it is said.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.errors import UserError
from spes_p2p.session.own_state import OwnState, read_own_state
from spes_p2p.storage.files import write_whole

MARK = "# Written by spes-p2p service install"
"""How a unit begins that may be replaced and removed."""
UNIT = f"{MARK}; installing again replaces it.\n" """\
[Unit]
Description=spes_p2p trainer

[Service]
WorkingDirectory={folder}
ExecStart={command}
X-RunDir={run_dir}
Restart=on-failure
RestartSec=10
# Bad input: starting again cannot help.
RestartPreventExitStatus=2
# Only the trainer is told to stop: it leaves politely, and ends its other processes itself.
KillMode=mixed
TimeoutStopSec=120
# Programs in front of you go first.
Nice=10
# A trainer that grows without bound ends before the machine suffers.
MemoryMax=90%
TasksMax=512
LimitNOFILE=8192
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""
SYSTEMCTL_TIMEOUT_S = 150.0
"""Above the unit's TimeoutStopSec."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class Service:
    """What is known of a unit."""

    unit: str
    """Path of its file."""
    installed: bool
    active: str
    """As `systemctl is-active` says: active, inactive, failed and so on; unknown without systemd."""
    trainer: OwnState | None
    """What the trainer says; None when it does not run."""

    @property
    def line(self) -> str:
        """For people."""
        if self.active == "unknown":
            return f"{'installed' if self.installed else 'not installed'}; systemd does not answer"
        return f"installed, {self.active}" if self.installed else "not installed"


def unit_path(name: str) -> Path:
    """Return the path of a unit file; .service may follow its name. Raises UserError for a name that systemd does not take."""
    stem = name.removesuffix(".service")
    if not NAME.fullmatch(stem):
        raise UserError(f"--name {name!r}: must be up to 64 letters, digits, '_', '.' or '-', and begin with a letter or digit")
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "systemd/user" / f"{stem}.service"


def unit_text(arguments: Sequence[str], run_dir: Path, folder: Path) -> str:
    """Return the unit that runs `spes-p2p join` with these arguments in this folder, to which relative paths refer."""
    words = [_quoted(sys.executable, is_program=True), *map(_quoted, ("-m", "spes_p2p", "join", *arguments))]
    return UNIT.format(folder=_path(folder), command=" ".join(words), run_dir=_path(folder / run_dir))


def install(name: str, arguments: Sequence[str], run_dir: Path) -> list[str]:
    """Write the unit and start it; return what to tell the user. Raises UserError."""
    path = unit_path(name)
    _read_ours(path)
    for other in path.parent.glob("*.service"):
        if other != path and other.is_file() and _run_dir(other.read_text(errors="replace")) == Path.cwd() / run_dir:
            raise UserError(f"{run_dir}: the unit {other.stem} trains there; choose another --run-dir, or --name {other.stem}")
    if read_own_state(run_dir) is not None and not _systemctl("is-active", path.name):
        raise UserError(f"{run_dir}: a trainer runs with it that this service did not start; end it first: Ctrl-C or kill")
    write_whole(path, unit_text(arguments, run_dir, Path.cwd()).encode())
    told = [f"wrote {path}"]
    if not _systemctl("daemon-reload"):
        command = shlex.join(("nohup", sys.executable, "-m", "spes_p2p", "join", *arguments))
        told.append("systemd does not run here for this user; install again where it does. To start the trainer without it:")
        told.append(f"{command} >> {path.stem}.log 2>&1 &")
        return told
    told += _verify(path)
    # A trainer that runs already would go on with its old arguments if the unit were only started.
    if _systemctl("enable", path.name) and _systemctl("restart", path.name):
        told.append("started; it starts again at each login")
    else:
        told.append(f"to start it:              systemctl --user daemon-reload && systemctl --user enable --now {path.name}")
    told.append("to run it without login:  loginctl enable-linger")
    told.append(f"its log:                  journalctl --user -u {path.name} -f")
    return told


def remove(name: str) -> list[str]:
    """Stop the trainer and remove its unit; return what to tell the user. Raises UserError if there is none."""
    path = unit_path(name)
    text = _read_ours(path)
    if not text:
        raise UserError(f"{path}: no such unit; give the --name with which it was installed")
    stopped = _systemctl("disable", "--now", path.name)
    path.unlink()
    _systemctl("daemon-reload")
    told, run_dir = [f"removed {path}"], _run_dir(text)
    if run_dir is not None and read_own_state(run_dir) is not None:
        starter = "the service did not start it" if stopped else "the service did not start it, or systemd does not answer here"
        told.append(f"the trainer that runs with {run_dir} goes on ({starter}); to end it: Ctrl-C or kill; to free the "
                    f"machine: spes-p2p pause {shlex.quote(str(run_dir))}")
    return told


def look_at(name: str) -> Service:
    """Return what is known of a unit. Raises UserError."""
    path = unit_path(name)
    text = _read_ours(path)
    run_dir = _run_dir(text)
    trainer = read_own_state(run_dir) if run_dir else None
    ended = _ended("systemctl", "--user", "is-active", path.name)
    return Service(str(path), bool(text), ended.stdout.strip() if ended and ended.stdout.strip() else "unknown", trainer)


def _read_ours(path: Path) -> str:
    """Return the text of a unit, "" if there is none. Raises UserError if it is not one that `install` wrote."""
    if not os.path.lexists(path):
        return ""
    text = path.read_text(errors="replace") if path.is_file() else ""
    if not text.startswith(MARK):
        raise UserError(f"{path}: not written by spes-p2p service install; choose another --name")
    return text


def _run_dir(text: str) -> Path | None:
    """Return the run-dir of a unit's trainer."""
    found = re.search(r"^X-RunDir=(.*)$", text, re.MULTILINE)
    return Path(found[1].replace("%%", "%")) if found else None


def _verify(path: Path) -> list[str]:
    """Return what systemd has against a unit, or that it could not be asked."""
    ended = _ended("systemd-analyze", "--user", "verify", str(path))
    said = ended.stderr.splitlines() if ended else ["systemd-analyze does not run"]
    found = [f"systemd-analyze: {line}" for line in said if path.name in line]
    if found or (ended and ended.returncode == 0):
        return found
    return [f"the unit could not be checked ({said[-1] if said else 'systemd-analyze failed'})"]


def _quoted(word: str, is_program: bool = False) -> str:
    """Quote a word for ExecStart; systemd expands no variable in the first one, the program."""
    if not word.isprintable():
        raise UserError(f"{word!r}: a unit takes no such character; leave it out or rename the file")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if not is_program:
        escaped = escaped.replace("$", "$$")
    return escaped if re.fullmatch(r"[\w./:=,@+-]+", escaped) else f'"{escaped}"'


def _path(path: Path) -> str:
    """Return an absolute path as a setting that takes the rest of its line."""
    text = os.path.abspath(path)
    if text != text.strip() or not text.isprintable() or text.endswith("\\"):
        raise UserError(f"{text!r}: systemd takes no such folder; choose another one")
    return text.replace("%", "%%")


def _systemctl(*words: str) -> bool:
    ended = _ended("systemctl", "--user", *words)
    return ended is not None and ended.returncode == 0


def _ended(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command; None if it cannot be run."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=SYSTEMCTL_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
