"""Named blobs and logs that survive a crash: in a directory, or in memory with the same contract.

A blob is written aside, flushed to the disk and renamed: at any instant there is the old one or the new one, whole. Files of
blobs that are replaced or deleted are used again for later blobs of their kind, that is whose names begin alike (a page that is
there already is written several times faster than a new one), but only when nobody maps them any more: a mapping holds a shared
lock on its file, in whichever process. A log is a sequence of (length, crc, record); what follows the last whole record is a
torn write and is dropped.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import mmap
import os
import re
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from spes_p2p.errors import UserError

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
_ASIDE = ".aside"
_HEADER = struct.Struct("<II")
KEPT_SPARES = {"update": 1, "download": 0, "archived": 0, "aside": 0}
"""By kind. Of updates there is one at a time, unless something failed; the others do not come every round."""
KEPT_SPARES_OF_OTHERS = 2
"""The base before the current one is still served: the next base goes into the file of the one before that."""
SMALLEST_SPARE_BYTES = 2**20


class DirectoryStore:
    """A directory of files; one process may use it at a time. A `/` in a name makes a subdirectory.

    When the disk is full or broken, UserError says so and the old content stays: the peer stops, and goes on from there.
    """

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        for leftover in path.rglob(f"*{_ASIDE}"):
            _remove_unless_locked(leftover)
        self._log_sizes: dict[str, int] = {}
        self._draft_numbers = itertools.count()
        self._spares: dict[str, list[Path]] = {}
        """By kind, the oldest first."""
        self._spares_lock = threading.Lock()

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Replace the blob durably. Raises UserError, or whatever `chunks` raises, with the old blob in place."""
        draft, size = self.draft(name), 0
        try:
            for chunk in chunks:
                draft.write(size, chunk)
                size += memoryview(chunk).nbytes
            draft.publish()
        finally:
            draft.drop()

    def draft(self, name: str) -> FileDraft:
        """Begin to write a blob piece by piece. Several drafts of one blob may be open."""
        target = self._file(name)
        with _said_in_one_line(target):
            self._make_directory(target.parent)
            aside = target.with_name(f"{target.name}.{next(self._draft_numbers)}{_ASIDE}")
            self._reuse_spare(_kind(name), aside)
            return FileDraft(target, aside, lambda change: self._with_spare(_kind(name), target, change))

    def read(self, name: str) -> memoryview | None:
        """The blob, memory-mapped read-only, or None. It stays valid when the blob is replaced or deleted."""
        try:
            with self._file(name).open("rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    return memoryview(b"")
                return _mapped(file.fileno())
        except FileNotFoundError:
            return None

    def append(self, name: str, record: bytes) -> None:
        """Append one record durably. Raises UserError with the log as it was."""
        target = self._file(name)
        with _said_in_one_line(target):
            self._make_directory(target.parent)
            is_new = not target.exists()
            size = self._log_sizes.get(name)
            if size is None:
                size = _whole_bytes(self._log_content(name))
            with target.open("r+b" if not is_new else "wb", buffering=0) as file:
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

    def records(self, name: str) -> list[bytes]:
        """All whole records of a log, in order; a torn tail is dropped."""
        content = self._log_content(name)
        torn = len(content) - _whole_bytes(content)
        if torn:
            log.warning("%s: dropped %d bytes of an unfinished record at the end", self._file(name), torn)
        return parse_records(content)

    def delete(self, name: str) -> None:
        """Remove the blob or log if it is there."""
        self._log_sizes.pop(name, None)
        target = self._file(name)
        with suppress(FileNotFoundError):
            self._with_spare(_kind(name), target, target.unlink)
            _sync_directory(target.parent)

    def names(self, prefix: str) -> list[str]:
        """Names of the blobs and logs at the top that begin so, sorted."""
        found = (path.name for path in self.path.iterdir() if path.is_file() and not path.name.endswith(_ASIDE))
        return sorted(name for name in found if name.startswith(prefix))

    def scratch(self, name: str, elements: int) -> np.ndarray:
        """Float32 `[elements]` in a file: one that had this name, and to which nobody refers any more, or a new one."""
        check_name(name)
        size = elements * np.dtype(np.float32).itemsize
        if not size:
            return np.empty(0, np.float32)
        file = self.path / f"{name}.{next(self._draft_numbers)}{_ASIDE}"
        with _said_in_one_line(self.path / name):
            self._reuse_spare(_kind(name), file)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _lock(descriptor)
                os.ftruncate(descriptor, size)
                # What a mapping finds no room for ends the process; here it is one line.
                os.posix_fallocate(descriptor, 0, size)
                mapped = mmap.mmap(descriptor, size)
            except BaseException:
                file.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        self._keep_spare(_kind(name), file)
        return np.frombuffer(mapped, np.float32)

    def _with_spare(self, kind: str, old: Path, change: Callable[[], None]) -> None:
        """Replace or remove a file, and keep its pages for a later draft, under another name: one that is not used before."""
        spare = self.path / f"spare.{next(self._draft_numbers)}{_ASIDE}"
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

    def _reuse_spare(self, kind: str, aside: Path) -> None:
        """Let a draft begin as the oldest spare file of its kind that nobody maps, if there is one."""
        with self._spares_lock:
            for spare in (spares := self._spares.get(kind, [])):
                with suppress(OSError), spare.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.rename(spare, aside)
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
    """A file beside the one that it will replace."""

    def __init__(self, target: Path, aside: Path, replacing: Callable[[Callable[[], None]], None]):
        """`aside` may hold anything; what is not overwritten of it is undefined. `replacing` is given what replaces it."""
        self._target, self._aside = target, aside
        self._replacing = replacing
        self._is_committed = False
        self._size = 0
        self._descriptor = os.open(aside, os.O_RDWR | os.O_CREAT, 0o644)
        _lock(self._descriptor)
        self._end = weakref.finalize(self, _discard, self._descriptor, aside)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes there. Raises UserError when that is impossible."""
        view = memoryview(data).cast("B")
        self._size = max(self._size, offset + len(view))
        with _said_in_one_line(self._target):
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                view, offset = view[written:], offset + written

    def read(self, offset: int, length: int) -> bytes:
        """What was written there."""
        return os.pread(self._descriptor, length, offset)

    def view(self) -> memoryview:
        """Memory-mapped; it stays valid when the draft is committed or forgotten."""
        os.ftruncate(self._descriptor, self._size)
        return _mapped(self._descriptor) if self._size else memoryview(b"")

    def publish(self) -> None:
        """Flush to the disk, then take the place of the old blob, unless that was done before."""
        with _said_in_one_line(self._target):
            os.ftruncate(self._descriptor, self._size)
            os.fsync(self._descriptor)
            if not self._is_committed:
                self._replacing(lambda: os.replace(self._aside, self._target))
                self._is_committed = True
                _sync_directory(self._target.parent)

    def drop(self) -> None:
        """Nothing more will be written; what was not committed is removed."""
        self._end()


def frame_record(record: bytes) -> bytes:
    """Length and crc (over length and record, so that a run of zeros is no record), then the record."""
    length = len(record).to_bytes(4, "little")
    return length + zlib.crc32(record, zlib.crc32(length)).to_bytes(4, "little") + record


def parse_records(content: bytes) -> list[bytes]:
    """The whole records at the beginning of a log's bytes."""
    records, rest = [], memoryview(content)
    with suppress(ValueError):
        while rest:
            record, end = read_frame(rest)
            records.append(record)
            rest = rest[end:]
    return records


def _mapped(descriptor: int) -> memoryview:
    """The whole file, read-only. The mapping duplicates the descriptor, and so keeps the lock as long as it lives."""
    _lock(descriptor)
    return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))


def _lock(descriptor: int) -> None:
    """Say that this file is in use, as long as the descriptor or a copy of it is open."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _remove_unless_locked(leftover: Path) -> None:
    """What a dead process left; a living one may be looked at (an export from its run-dir)."""
    with suppress(OSError), leftover.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        leftover.unlink()


def _discard(descriptor: int, aside: Path) -> None:
    os.close(descriptor)
    with suppress(OSError):
        aside.unlink(missing_ok=True)


def read_frame(content: bytes | memoryview) -> tuple[bytes, int]:
    """The record framed at the beginning, and where its frame ends. Raises ValueError when it is cut short or damaged."""
    if len(content) < _HEADER.size:
        raise ValueError("a record that is cut short")
    length, crc = _HEADER.unpack_from(content)
    record = bytes(content[_HEADER.size : _HEADER.size + length])
    if len(record) < length or zlib.crc32(record, zlib.crc32(content[:4])) != crc:
        raise ValueError("a record that is cut short or damaged")
    return record, _HEADER.size + length


def _whole_bytes(content: bytes) -> int:
    return sum(_HEADER.size + len(record) for record in parse_records(content))


def _kind(name: str) -> str:
    """Blobs of one kind are about as large: `base`, `bodies-of-...`, `checkpoint-...`."""
    return name.partition("-")[0]


def _kept_spares(kind: str) -> int:
    return KEPT_SPARES.get(kind, KEPT_SPARES_OF_OTHERS)


def check_name(name: str) -> None:
    """Raises ValueError for what is no name of a blob or log."""
    if not _NAME.fullmatch(name) or name.endswith(_ASIDE):
        raise ValueError(f"not a name for a blob: {name!r}")


@contextmanager
def _said_in_one_line(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written ({error.strerror}); make room and start this peer again on its run-dir: "
            "it goes on from its last whole state"
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
