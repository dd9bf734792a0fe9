"""Durable blobs and logs in a directory (`Store`).

A blob is written to a temporary file, flushed and renamed, so at any instant the old or the new blob exists, whole. Files of
replaced and deleted blobs are spares: a later blob of the same kind (name up to the first "-") overwrites one, since writing to
allocated pages is several times faster. A spare is reused only when no process maps it: each mapping holds a shared lock on its
file. A log is a sequence of (length, crc, record); anything after the last whole record is a torn write and is dropped.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import mmap
import os
import re
import struct
import tempfile
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from spes_p2p.errors import UserError
from spes_p2p.storage.files import TEMPORARY, mark_in_use

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
_HEADER = struct.Struct("<II")
KEPT_SPARES = {"update": 1, "download": 0, "archived": 0, "moments": 0, "temporary": 0}
"""Bounds the spare files and mappings, by kind: one update is written at a time; the others are not written every round."""
KEPT_SPARES_OF_OTHERS = 2
"""The same for all other kinds: the previous base is still served, so the next one overwrites its predecessor's file."""
SMALLEST_SPARE_BYTES = 2**20
"""Smaller files are not worth keeping as spares."""


class DirectoryStore:
    """A `Store` of files, for one process at a time. A `/` in a name makes a subdirectory."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        for leftover in path.rglob(f"*{TEMPORARY}"):
            _remove_unless_locked(leftover)
        self._log_sizes: dict[str, int] = {}
        self._draft_numbers = itertools.count()
        self._spares: dict[str, list[Path]] = {}
        """By kind, oldest first."""
        self._spares_lock = threading.Lock()
        self._free_scratch: dict[str, deque[mmap.mmap]] = {}
        """Mappings of scratch arrays that nothing refers to any more, by kind, oldest first."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Replace the blob durably. Raises UserError, or any error of `chunks`, and leaves the old blob in place."""
        draft, size = self.draft(name), 0
        try:
            for chunk in chunks:
                draft.write(size, chunk)
                size += memoryview(chunk).nbytes
            draft.publish()
        finally:
            draft.drop()

    def draft(self, name: str) -> FileDraft:
        """Start to write a blob in pieces. Several drafts of one blob may be open."""
        target = self._file(name)
        with _user_error_at(target):
            self._make_directory(target.parent)
            temporary = target.with_name(f"{target.name}.{next(self._draft_numbers)}{TEMPORARY}")
            self._reuse_spare(_kind(name), temporary)
            return FileDraft(target, temporary, lambda change: self._with_spare(_kind(name), target, change))

    def read(self, name: str) -> memoryview | None:
        """Return the blob, memory-mapped and read-only, or None. It stays valid when the blob is replaced or deleted."""
        try:
            with self._file(name).open("rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    return memoryview(b"")
                return _mapped(file.fileno())
        except FileNotFoundError:
            return None

    def append(self, name: str, record: bytes) -> None:
        """Append one record durably. Raises UserError and leaves the log as it was."""
        target = self._file(name)
        with _user_error_at(target):
            self._make_directory(target.parent)
            is_new = not target.exists()
            size = self._log_sizes.get(name)
            if size is None:
                size = _whole_bytes(self._log_content(name))
            with target.open("wb" if is_new else "r+b", buffering=0) as file:
                file.truncate(size)
                file.seek(size)
                try:
                    _write_all(file.fileno(), frame_record(record))
                    os.fsync(file.fileno())
                except OSError:
                    with suppress(OSError):
                        file.truncate(size)
                    raise
            if is_new:
                _sync_directory(target.parent)
            self._log_sizes[name] = size + _HEADER.size + len(record)

    def replace_log(self, name: str, records: Iterable[bytes]) -> None:
        """Replace all records of a log, durably and at once. Raises UserError (disk full) and leaves the log as it was."""
        self._log_sizes.pop(name, None)
        self.write(name, map(frame_record, records))

    def records(self, name: str) -> list[bytes]:
        """Return all whole records of a log, in order, up to the first damaged or torn one."""
        content = self._log_content(name)
        torn = len(content) - _whole_bytes(content)
        if torn:
            logger.warning(
                "%s: dropped %d bytes from a damaged or unfinished record on; other peers have what was dropped",
                self._file(name), torn,
            )
        return parse_records(content)

    def delete(self, name: str) -> None:
        """Delete the blob or log if it exists."""
        self._log_sizes.pop(name, None)
        target = self._file(name)
        with suppress(FileNotFoundError):
            self._with_spare(_kind(name), target, target.unlink)
            _sync_directory(target.parent)

    def names(self, prefix: str) -> list[str]:
        """Return the names of top-level blobs and logs with this prefix, sorted."""
        found = (path.name for path in self.path.iterdir() if path.is_file() and not path.name.endswith(TEMPORARY))
        return sorted(name for name in found if name.startswith(prefix))

    def scratch(self, name: str, elements: int) -> np.ndarray:
        """Return a writable float32 `[elements]` with undefined values in a mapped file that has no name.

        The mapping is kept for a later array of the same kind when nothing refers to this one any more: its pages are not
        faulted in anew.
        """
        check_name(name)
        size, kind = elements * np.dtype(np.float32).itemsize, _kind(name)
        if not size:
            return np.empty(0, np.float32)
        free, mapped = self._free_scratch.setdefault(kind, deque()), None
        with suppress(IndexError):
            while mapped is None or len(mapped) < size:
                mapped = None
                mapped = free.popleft()
        if mapped is None:
            with _user_error_at(self.path / name), tempfile.TemporaryFile(dir=self.path) as file:
                # A write to an unallocated page of a full disk kills the process; here it is an OSError.
                os.posix_fallocate(file.fileno(), 0, size)
                mapped = mmap.mmap(file.fileno(), size)
        whole = np.frombuffer(mapped, np.float32)
        weakref.finalize(whole, _keep, free, mapped, _kept_spares(kind)).atexit = False
        return whole[:elements]

    def _with_spare(self, kind: str, old: Path, change: Callable[[], None]) -> None:
        """Run `change`, which replaces or removes a file, and keep the old file as a spare."""
        spare = self.path / f"spare.{next(self._draft_numbers)}{TEMPORARY}"
        is_kept = False
        with suppress(OSError):
            if _kept_spares(kind) and old.stat().st_size >= SMALLEST_SPARE_BYTES:
                os.link(old, spare)
                is_kept = True
        try:
            change()
        except BaseException:
            with suppress(OSError):
                spare.unlink(missing_ok=True)
            raise
        if is_kept:
            self._keep_spare(kind, spare)

    def _keep_spare(self, kind: str, spare: Path) -> None:
        with self._spares_lock:
            spares = self._spares.setdefault(kind, [])
            spares.append(spare)
            while len(spares) > _kept_spares(kind):
                spares.pop(0).unlink(missing_ok=True)

    def _reuse_spare(self, kind: str, temporary: Path) -> None:
        """Rename the oldest unmapped spare of this kind, if any, to `temporary`."""
        with self._spares_lock:
            for spare in (spares := self._spares.get(kind, [])):
                with suppress(OSError), spare.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.rename(spare, temporary)
                    spares.remove(spare)
                    return

    def _file(self, name: str) -> Path:
        check_name(name)
        return self.path / name

    def _log_content(self, name: str) -> bytes:
        try:
            return self._file(name).read_bytes()
        except FileNotFoundError:
            return b""

    def _make_directory(self, directory: Path) -> None:
        if directory.is_dir():
            return
        self._make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)


class FileDraft:
    """A temporary file next to the one that it replaces when published."""

    def __init__(self, target: Path, temporary: Path, replacing: Callable[[Callable[[], None]], None]):
        """`temporary` may be a spare: bytes that are not overwritten are undefined. `replacing(change)` runs the rename."""
        self._target, self._temporary = target, temporary
        self._replacing = replacing
        self._is_published = False
        self._size, self._size_lock = 0, threading.Lock()
        self._descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT, 0o644)
        mark_in_use(self._descriptor)
        self._end = weakref.finalize(self, _discard, self._descriptor, temporary)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at an offset. Raises UserError (disk full)."""
        view = memoryview(data).cast("B")
        with self._size_lock:
            self._size = max(self._size, offset + len(view))
        with _user_error_at(self._target):
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written

    def read(self, offset: int, length: int) -> bytes:
        """Return what was written there."""
        return os.pread(self._descriptor, length, offset)

    def view(self) -> memoryview:
        """Return a mapping that stays valid after `publish` and `drop`."""
        os.ftruncate(self._descriptor, self._size)
        return _mapped(self._descriptor) if self._size else memoryview(b"")

    def publish(self) -> None:
        """Flush, then rename over the old blob, unless published before."""
        with _user_error_at(self._target):
            os.ftruncate(self._descriptor, self._size)
            os.fsync(self._descriptor)
            if not self._is_published:
                self._replacing(lambda: os.replace(self._temporary, self._target))
                self._is_published = True
                _sync_directory(self._target.parent)

    def drop(self) -> None:
        """Close the draft; delete it if it is not published."""
        self._end()


def frame_record(record: bytes) -> bytes:
    """Return length, crc (over length and record, so that zeros are not a valid record) and record."""
    length = len(record).to_bytes(4, "little")
    return length + zlib.crc32(record, zlib.crc32(length)).to_bytes(4, "little") + record


def parse_records(content: bytes) -> list[bytes]:
    """Return the whole records at the beginning of a log's bytes."""
    records, rest = [], memoryview(content)
    with suppress(ValueError):
        while rest:
            record, end = read_frame(rest)
            records.append(record)
            rest = rest[end:]
    return records


def _mapped(descriptor: int) -> memoryview:
    """Map the whole file read-only. The mapping duplicates the descriptor, so it holds the lock as long as it lives."""
    mark_in_use(descriptor)
    return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))


def _remove_unless_locked(leftover: Path) -> None:
    """Delete a dead process's temporary file; a living process (an export) keeps its own locked."""
    with suppress(OSError), leftover.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        leftover.unlink()


def _discard(descriptor: int, temporary: Path) -> None:
    os.close(descriptor)
    with suppress(OSError):
        temporary.unlink(missing_ok=True)


def read_frame(content: bytes | memoryview) -> tuple[bytes, int]:
    """Return the first record and the end of its frame. Raises ValueError when it is truncated or damaged."""
    if len(content) < _HEADER.size:
        raise ValueError("truncated record")
    length, crc = _HEADER.unpack_from(content)
    record = bytes(content[_HEADER.size : _HEADER.size + length])
    if len(record) < length or zlib.crc32(record, zlib.crc32(content[:4])) != crc:
        raise ValueError("truncated or damaged record")
    return record, _HEADER.size + length


def _whole_bytes(content: bytes) -> int:
    return sum(_HEADER.size + len(record) for record in parse_records(content))


def _kind(name: str) -> str:
    """Return the kind of a blob; blobs of one kind have similar sizes (`base`, `bodies-of-...`)."""
    return name.partition("-")[0]


def _keep(free: deque[mmap.mmap], mapped: mmap.mmap, most: int) -> None:
    free.append(mapped)
    with suppress(IndexError):  # the garbage collector calls it, in any thread
        while len(free) > most:
            free.popleft()


def _kept_spares(kind: str) -> int:
    return KEPT_SPARES.get(kind, KEPT_SPARES_OF_OTHERS)


def check_name(name: str) -> None:
    """Check a name of a blob or log. Raises ValueError."""
    if not _NAME.fullmatch(name) or name.endswith(TEMPORARY):
        raise ValueError(f"not a name for a blob: {name!r}")


@contextmanager
def _user_error_at(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written ({error.strerror}); make room and restart this peer with its run-dir: "
            "it continues from its last complete state"
        ) from None


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
