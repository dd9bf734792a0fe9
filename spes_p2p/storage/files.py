"""Writing files durably."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spes_p2p.errors import UserError

TEMPORARY = ".tmp"
"""Suffix of files that are being written. A `DirectoryStore` of the folder deletes those that no process has in use."""


def require_writable(folder: Path) -> None:
    """Raise UserError unless this folder exists or can be made, and can be written to. Called before long work."""
    nearest = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not nearest.is_dir():
        which = "" if nearest == folder else f"{nearest} "
        raise UserError(f"{folder}: {which}is a file; choose another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: this user may not write to {nearest}; choose another folder")


def require_place(file: Path, option: str) -> None:
    """Raise UserError unless this file, of an option, can be written: its folder has to exist. Called before long work."""
    if file.exists() and not file.is_file():
        raise UserError(f"{option} {file}: is {'a folder' if file.is_dir() else 'no regular file'}; name a file")
    if not os.path.lexists(file.parent):
        raise UserError(f"{option} {file}: there is no folder {file.parent}; make it first, or choose another one")
    require_writable(file.parent)


@contextmanager
def alone_in(folder: Path, advice: str) -> Iterator[None]:
    """Hold a folder while a command works in it. Raises UserError with this advice if another command does."""
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another command works in this folder; {advice}") from None
        except OSError:
            pass  # a file system without such locks
        yield
    finally:
        os.close(held)


def mark_in_use(descriptor: int) -> None:
    """Mark the file as in use while the descriptor or a copy of it is open."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file atomically and durably: to a temporary name of this process, fsync, rename. `mode` is subject to the umask.

    Raises UserError where there is something other than a file. An OSError names the file. Nothing is left of a failure.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is no regular file; move it away, or name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    temporary.unlink(missing_ok=True)
    try:
        # "x": never through a link that somebody put there
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            mark_in_use(file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
