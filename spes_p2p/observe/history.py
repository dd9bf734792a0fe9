"""A peer's journal, `history.jsonl` in its run-dir: one JSON line per kept event, and per round record from another peer.
Plots, summaries and the records of all rounds are read from it.

Whenever it has PART_BYTES, it becomes the next part, `history-000001.jsonl.gz`, and begins anew. A part that a crash left
uncompressed counts until the next start. Damaged lines are skipped; missing rounds are fetched from other peers.
"""

from __future__ import annotations

import errno
import gzip
import json
import logging
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from pydantic import TypeAdapter

from spes_p2p.errors import UserError
from spes_p2p.messages.presence import RoundRecord
from spes_p2p.observe import events
from spes_p2p.observe.contributed import Contributed
from spes_p2p.observe.events import BaseRestored, Event, RoundCommitted
from spes_p2p.observe.json_values import to_json
from spes_p2p.observe.rounds import Rounds
from spes_p2p.observe.units import counted
from spes_p2p.storage.files import write_whole

logger = logging.getLogger(__name__)

HISTORY_FILE = "history.jsonl"
PART = re.compile(r"history-(\d{6})\.jsonl(\.gz)?")
PART_BYTES = 2**22
"""Compressing as much takes some hundredths of a second."""

KEPT = (events.PeerStarted, BaseRestored, events.PhaseTrained, RoundCommitted, events.Controlled, events.Evaluated,
        events.RoundFailed, events.WorkDropped, events.UpdatesClipped, events.ResultsChecked, events.StepsJudged,
        events.StepsRejected, events.PhaseAudited, events.VerdictsTaken, events.DigestMismatch, events.TasksEvaluated,
        events.PromptsContinued)
_KINDS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in (*KEPT, RoundRecord)}


class Entry(NamedTuple):
    """An event of the peer itself."""

    time: float
    """Unix time on the peer that wrote it."""
    event: Event


class History:
    """Observer that appends the events in KEPT; a restart continues the file."""

    def __init__(self, peer_id: str, run_dir: Path, wall_time: Callable[[], float] = time.time):
        """Open the file. Raises UserError if it cannot be written."""
        path = run_dir / HISTORY_FILE
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(path)
            for part in _parts(run_dir):
                with suppress(OSError):
                    _compress(part)
            self.contributed = Contributed(peer_id)
            self.rounds = read_rounds(run_dir, peer_id, self.contributed.see)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); choose another --run-dir") from None
        self._wall_time = wall_time

    def record(self, event: Event) -> None:
        """Append the event, if it is one of KEPT."""
        if isinstance(event, KEPT):
            now = round(self._wall_time(), 3)
            self._append({"time": now, "event": type(event).__name__, **to_json(event)})
            self.rounds.record(event, now)
            self.contributed.see(event)

    def add(self, records: Iterable[RoundRecord]) -> None:
        """Append another peer's records, as far as they add information."""
        for record in records:
            if self.rounds.add(record):
                self.contributed.see(record)
                self._append({"event": RoundRecord.__name__, **to_json(record)})

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        """Write a line. A full disk loses the whole line, but does not stop the peer."""
        text = json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        before = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(text) != len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(before)
            logger.warning("%s: cannot write an event (%s)", self._file.name, error.strerror)
        if before + len(text) >= PART_BYTES:
            with suppress(OSError):
                self._begin_anew(Path(self._file.name))

    def _begin_anew(self, path: Path) -> None:
        """Turn the file into the next part. Where it cannot be compressed, the next start does it."""
        parts = _parts(path.parent)
        part = path.with_name(f"history-{_number(parts[-1]) + 1 if parts else 1:06}.jsonl")
        path.rename(part)
        try:
            old, self._file = self._file, path.open("ab", buffering=0)
        except OSError:
            part.rename(path)
            raise
        old.close()
        _compress(part)


def read_history(path: Path) -> list[Entry]:
    """Return the events of a history file, or of a run-dir's, oldest first. Raises UserError if there is no such file."""
    return [Entry(at, what) for at, what in read_journal(path) if not isinstance(what, RoundRecord)]


def read_journal(path: Path) -> list[tuple[float, Event | RoundRecord]]:
    """Return what a history file, or a run-dir's, has, with Unix times. Raises UserError if it cannot be read."""
    file = path / HISTORY_FILE if path.is_dir() else path
    try:
        return list(_lines(file))
    except OSError as error:
        name = error.filename or file
        raise UserError(f"{name}: cannot read the history ({error.strerror}); give the --run-dir of a peer") from None


def read_rounds(
    run_dir: Path, peer_id: str = "", on_entry: Callable[[Event | RoundRecord], None] = lambda entry: None
) -> Rounds:
    """Return the round records in a run-dir; none without a history file. `on_entry` gets all entries. Raises OSError."""
    rounds = Rounds(peer_id)
    with suppress(FileNotFoundError):
        for at, what in _lines(run_dir / HISTORY_FILE):
            if isinstance(what, RoundRecord):
                rounds.add(what)
            else:
                rounds.record(what, at)
            on_entry(what)
    return rounds


def _lines(file: Path) -> Iterator[tuple[float, Event | RoundRecord]]:
    """Yield entries, without a torn last line (the writer was killed), damaged lines and unknown kinds."""
    parts, current = _opened(file)
    for path in parts:
        try:
            with _opened_part(path) as lines:
                yield from _entries(path, lines)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            _say(f"{path}: damaged, its rest is skipped")
    if current is not None:
        with current:
            yield from _entries(file, current)


def _opened(file: Path) -> tuple[list[Path], IO[bytes] | None]:
    """Return the parts, and the open file that follows the last of them; None where it begins anew in this moment."""
    if file.name != HISTORY_FILE:
        return [], file.open("rb")
    parts = _parts(file.parent)
    while True:
        current = None
        if file.exists() or not parts:
            current = file.open("rb")
        before, parts = parts, _parts(file.parent)
        if list(map(_number, before)) == list(map(_number, parts)):
            return parts, current
        if current is not None:  # it has become a part meanwhile
            current.close()


def _opened_part(part: Path) -> IO[bytes]:
    """Open a part, also one that is compressed in this moment."""
    if part.suffix != ".gz":
        with suppress(FileNotFoundError):
            return part.open("rb")
        part = part.with_name(f"{part.name}.gz")
    return cast(IO[bytes], gzip.open(part))


def _entries(file: Path, lines: Iterable[bytes]) -> Iterator[tuple[float, Event | RoundRecord]]:
    damaged = list[int]()
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            found = _from_json(json.loads(line))
            if found["event"] in _KINDS:
                yield float(found["time"]), _KINDS[found["event"]].validate_python(found)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            damaged.append(number)
    if damaged:
        _say(f"{file}: {counted(len(damaged), 'damaged line')} skipped, the first is line {damaged[0]}")


@lru_cache(maxsize=64)
def _say(damage: str) -> None:
    """Warn, but only once: the dashboard reads a trainer's journal again with each of its rounds."""
    logger.warning("%s", damage)


def _parts(run_dir: Path) -> list[Path]:
    """Return the parts, oldest first, each compressed if it exists so."""
    found = {_number(path): path for path in sorted(run_dir.glob("history-*")) if PART.fullmatch(path.name)}
    return [found[number] for number in sorted(found)]


def _number(part: Path) -> int:
    match = PART.fullmatch(part.name)
    assert match is not None
    return int(match[1])


def _compress(part: Path) -> None:
    """Compress a part that is not yet. Raises OSError, and leaves it as it is."""
    plain = part.with_name(part.name.removesuffix(".gz"))
    if part == plain:
        write_whole(part.with_name(f"{part.name}.gz"), gzip.compress(plain.read_bytes(), compresslevel=3))
    plain.unlink(missing_ok=True)


def _from_json(value: Any) -> Any:
    """Undo what `to_json` does to numbers: None was not finite."""
    if isinstance(value, dict):
        return {name: _from_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    return math.nan if value is None else value


def _cut_torn_line(path: Path) -> None:
    """Remove an unfinished line after the last newline."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            file.truncate(whole)
