"""What happened, one JSON line an event, in `history.jsonl` of the run-dir. Plots and the dashboard are drawn from it."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from spes_p2p.errors import UserError
from spes_p2p.observe.events import (
    BaseRestored,
    Controlled,
    DigestMismatch,
    Evaluated,
    Event,
    PhaseTrained,
    RoundCommitted,
    RoundFailed,
    WorkDropped,
)
from spes_p2p.observe.plain import plain

logger = logging.getLogger(__name__)

HISTORY_FILE = "history.jsonl"

KEPT = (BaseRestored, PhaseTrained, RoundCommitted, Controlled, Evaluated, RoundFailed, WorkDropped, DigestMismatch)
_KEPT_BY_NAME = {kind.__name__: kind for kind in KEPT}


@dataclass(frozen=True)
class Entry:
    """One line of the history."""

    time: float
    """Unix time of the peer that wrote it."""
    event: Event


class History:
    """Observer that appends the events worth keeping; after a restart it goes on where the file ends."""

    def __init__(self, run_dir: Path, wall_time: Callable[[], float] = time.time):
        """Raises UserError when the file cannot be written."""
        path = run_dir / HISTORY_FILE
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            cut_torn_line(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); choose another --run-dir") from None
        self._wall_time = wall_time

    def tell(self, event: Event) -> None:
        """Append the event, if it is one of KEPT, and hand the line to the operating system.

        A line that finds no room is left out whole: for the history alone no peer stops.
        """
        if not isinstance(event, KEPT):
            return
        line = {"time": round(self._wall_time(), 3), "event": type(event).__name__, **plain(event)}
        text = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(before)
            logger.warning("%s: an event is not kept (%s)", self._file.name, error.strerror)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        self._file.close()


def read_history(path: Path) -> list[Entry]:
    """All entries of a history file, or of the one in a run-dir, oldest first.

    A torn last line (the writer was killed) is left out, as are events that this version does not know.
    Raises UserError when there is no such file or an earlier line is damaged.
    """
    file = path / HISTORY_FILE if path.is_dir() else path
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{file}: cannot read the history ({error.strerror}); give the --run-dir of a peer") from None
    entries = (_parse(line, f"{file}, line {number}") for number, line in enumerate(lines[:-1], start=1))
    return [entry for entry in entries if entry is not None]


def _parse(line: bytes, where: str) -> Entry | None:
    try:
        record: dict[str, Any] = json.loads(line)
        kind = _KEPT_BY_NAME.get(record["event"])
        if kind is None:
            return None
        known = {field.name: field.type for field in fields(kind)}
        values = {name: _restored(value, known[name]) for name, value in record.items() if name in known}
        return Entry(float(record["time"]), kind(**values))
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{where}: not a line of a history; remove the line") from None


def _restored(value: Any, annotation: Any) -> Any:
    if value is None and annotation == "float":
        return math.nan
    if isinstance(value, list):
        return tuple(_restored(item, None) for item in value)
    return value


def cut_torn_line(path: Path) -> None:
    """Drop what follows the last newline: a line that the writer did not finish."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
