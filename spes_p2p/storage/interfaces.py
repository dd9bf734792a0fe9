"""The interface of durable storage: named blobs and logs, written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


class Draft(Protocol):
    """A blob being written, in any order. It replaces the old blob when published, and leaves no trace otherwise."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at an offset, in any thread. Raises UserError (disk full)."""

    def read(self, offset: int, length: int) -> bytes:
        """Return what was written there."""

    def view(self) -> memoryview:
        """Return all of it, read-only (memory-mapped if it is a file). Later writes within it are visible."""

    def publish(self) -> None:
        """Make the draft the blob, durably. May be called again, to make later writes durable."""


class Store(Protocol):
    """Named blobs and logs that survive a crash. A write happens whole or not at all."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Replace the blob durably. Raises UserError (disk full) and leaves the old blob in place."""

    def draft(self, name: str) -> Draft:
        """Start to write a blob in pieces."""

    def read(self, name: str) -> memoryview | None:
        """Return the blob (memory-mapped if it is a file), or None. It stays valid when the blob is replaced or deleted."""

    def append(self, name: str, record: bytes) -> None:
        """Append one record to a log durably. Raises UserError (disk full) and leaves the log as it was."""

    def replace_log(self, name: str, records: Iterable[bytes]) -> None:
        """Replace all records of a log, durably and at once. Raises UserError (disk full) and leaves the log as it was."""

    def records(self, name: str) -> list[bytes]:
        """Return all whole records of a log, in order; a torn tail is dropped."""

    def delete(self, name: str) -> None:
        """Delete the blob or log if it exists."""

    def names(self, prefix: str) -> list[str]:
        """Return the names of blobs and logs with this prefix, sorted."""

    def scratch(self, name: str, elements: int) -> np.ndarray:
        """Return a writable float32 `[elements]` with undefined values, for this process only.

        It is a mapped file where blobs are files, so the kernel can page it out. Raises UserError (disk full).
        """
