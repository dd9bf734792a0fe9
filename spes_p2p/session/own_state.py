"""What a trainer says to its user's other commands, and what these ask of it: two files in its run-dir, for its user only.

The trainer holds a lock on the first file while it runs, so the others know whether it does. The second file is the user's
order to pause; it outlasts restarts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter, ValidationError

from spes_p2p.config.addresses import is_peer_address
from spes_p2p.errors import RunDirInUse, UserError, printable
from spes_p2p.observe.json_values import to_json

STATE_FILE, ORDER_FILE = "own_state.json", "pause"
PREPARING, DONE = "preparing", "done"
OWNERS_PAUSE = "the campaign is paused"
LOCK_TRIES, LOCK_AGAIN_S = 5, 0.02
"""A reader that looks whether a trainer runs holds the lock for a moment."""


@dataclass(frozen=True)
class OwnState:
    """What the trainer with this run-dir does."""

    state: str
    """preparing: it looks for its campaign, or loads libraries, text and the base; running; pausing: it still leaves the round;
    paused; done: it ends, since the campaign has."""
    since: float
    """Unix time."""
    addresses: tuple[str, ...] = ()
    """Addresses as given to `join`."""
    reason: str = ""
    """Why it pauses: one of `events.PAUSE_REASONS`."""
    detail: str = ""
    """The same for people, with when it goes on. Before it trains: what it waits for; then: when it will pause."""
    trains: bool = False
    """Whether it has trained since it joined, and neither it nor its campaign has been paused since."""
    own_addresses: tuple[str, ...] = ()
    """Its own while it is in the swarm."""
    met_addresses: tuple[str, ...] = ()
    """Of peers that it met in the swarm, now or earlier."""

    @property
    def spare_addresses(self) -> tuple[str, ...]:
        """Where the swarm may be found if nobody answers at `addresses`."""
        return self.own_addresses + self.met_addresses

    @property
    def is_preparing(self) -> bool:
        """Whether it does not train yet."""
        return self.state == PREPARING

    @property
    def waits_for_owner(self) -> bool:
        """Whether it may train, and its campaign is paused."""
        return self.detail == OWNERS_PAUSE

    @property
    def line(self) -> str:
        """For people."""
        return state_line(self.state, self.detail, self.trains)


def state_line(state: str, detail: str, trains: bool) -> str:
    """Return an `OwnState` for people: one that runs and does not train waits."""
    shown = "waiting" if state == "running" and detail and not trains else state
    return printable(f"{shown}: {detail}" if detail else shown)


_STATE = TypeAdapter(OwnState)


class StateFile:
    """The first file, of the process that holds the run-dir."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / STATE_FILE
        self._file: IO[bytes] | None = None
        self._is_new = False
        """Whether this process made it."""

    def write(self, state: OwnState) -> None:
        """Replace what is said. Raises UserError if another process holds the run-dir."""
        if self._file is None or not self._path.exists():
            self._open()
        assert self._file is not None
        content = _STATE.dump_json(state)
        os.pwrite(self._file.fileno(), content, 0)
        self._file.truncate(len(content))

    def discard(self) -> None:
        """Give the run-dir up as if this process had never come. Does nothing if another process holds it."""
        if self._file is not None and self._is_new:
            self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Give the run-dir up. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._is_new = not self._path.exists()
        file = os.fdopen(_open_own(self._path, os.O_RDWR | os.O_CREAT), "r+b")
        for _ in range(LOCK_TRIES):
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._file = file
                return
            time.sleep(LOCK_AGAIN_S)
        file.close()
        raise _in_use(self._path.parent)


def _in_use(run_dir: Path) -> RunDirInUse:
    return RunDirInUse(f"{run_dir}: a running peer uses this run-dir; stop it, or give this one another --run-dir")


def require_unused(run_dir: Path) -> None:
    """Raise UserError if a trainer runs with this run-dir."""
    if read_own_state(run_dir) is not None:
        raise _in_use(run_dir)


def read_own_state(run_dir: Path) -> OwnState | None:
    """Return what the trainer with this run-dir says; None when none runs."""
    try:
        with os.fdopen(_open_own(run_dir / STATE_FILE, os.O_RDONLY), "rb") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            state = _STATE.validate_json(file.read())
            return state if all(map(is_peer_address, state.addresses + state.spare_addresses)) else OwnState("running", 0.0)
    except FileNotFoundError:
        return None
    except ValidationError:
        return OwnState("running", 0.0)  # it is being written


def last_said(run_dir: Path) -> OwnState:
    """Return what the last trainer with this run-dir said, which may have ended; an empty state if nobody can tell."""
    with suppress(OSError, ValidationError):
        state = _STATE.validate_json((run_dir / STATE_FILE).read_bytes())
        if all(map(is_peer_address, state.addresses + state.spare_addresses)):
            return state
    return OwnState("", 0.0)


def _open_own(path: Path, flags: int) -> int:
    """Open a regular file of this run-dir, never one that a link names. Raises FileNotFoundError, UserError."""
    try:
        opened = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            raise UserError(f"{path.parent}: cannot be a run-dir ({error.strerror}); choose another --run-dir") from None
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise UserError(f"{path}: is no regular file; remove it") from None
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return opened
    os.close(opened)
    raise UserError(f"{path}: is no regular file; remove it")


def own_state_json(state: OwnState | None) -> dict[str, object]:
    """Return the document of `pause --json` and `resume --json`."""
    return {"state": "not running"} if state is None else dict(to_json(state))


def is_pause_ordered(run_dir: Path) -> bool:
    """Return whether the user paused the trainer with this run-dir."""
    path = run_dir / ORDER_FILE
    return path.is_file() and not path.is_symlink()


def require_used(run_dir: Path) -> None:
    """Raise UserError unless a trainer has used this folder."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such folder; give the run-dir of your trainer")
    if not os.path.lexists(run_dir / STATE_FILE):
        from spes_p2p.session.run_dir import ADDRESS_FILE  # imports numpy

        if (run_dir / ADDRESS_FILE).is_file():
            raise UserError(f"{run_dir}: the run-dir of a bootstrap peer, which does not train; give that of a trainer (to "
                            "pause the whole campaign: spes-p2p control)")
        raise UserError(f"{run_dir}: no trainer has used this folder; give the run-dir of your trainer")


def require_running(run_dir: Path) -> OwnState:
    """Return what the trainer with this run-dir says. Raises UserError if none runs, with the command that starts it."""
    require_used(run_dir)
    state = read_own_state(run_dir)
    if state is None:
        said = last_said(run_dir)
        quoted = shlex.quote(str(run_dir))
        if said.state == DONE:
            raise UserError(f"{run_dir}: the campaign is over, and the trainer with this run-dir has ended; export the model "
                            f"with spes-p2p export --run-dir {quoted} --output checkpoint, or give the address of a peer")
        addresses = " ".join(said.addresses) or "ADDRESS"
        raise UserError(f"{run_dir}: no trainer runs with this run-dir; start it with spes-p2p join {addresses} "
                        f"--run-dir {quoted}, or give the address of a peer")
    return state


def order_pause(run_dir: Path, pauses: bool) -> None:
    """Order the trainer with this run-dir to pause, or to go on. Raises UserError unless a trainer has used it."""
    require_used(run_dir)
    path = run_dir / ORDER_FILE
    if path.is_symlink() or (path.exists() and (not path.is_file() or path.stat().st_size)):
        raise UserError(f"{path}: was not written by spes-p2p pause; move it away")
    if pauses:
        os.close(_open_own(path, os.O_WRONLY | os.O_CREAT))
    else:
        path.unlink(missing_ok=True)
