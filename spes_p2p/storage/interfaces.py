"""What a peer keeps over a crash: named blobs and logs, written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np


class Draft(Protocol):
    """A blob that is being written, in any order. It replaces the old one when committed, and leaves no trace otherwise."""

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes there."""

    def read(self, offset: int, length: int) -> bytes:
        """What was written there."""

    def view(self) -> memoryview:
        """All of it (memory-mapped where it is a file), read-only; valid as long as it is referred to.

        What is written inside it later shows in it.
        """

    def publish(self) -> None:
        """Make it the blob, durably. Called again: what was written since is durable too."""


class Store(Protocol):
    """Named blobs that survive a crash. A write is whole or did not happen (aside, fsync, rename)."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Replace the blob durably. Raises UserError when that is impossible; the old one is in place then."""

    def draft(self, name: str) -> Draft:
        """Begin to write a blob piece by piece."""

    def read(self, name: str) -> memoryview | None:
        """The blob (memory-mapped where it is a file), or None."""

    def append(self, name: str, record: bytes) -> None:
        """Append one record durably to a log; a torn last record is dropped by `records`. Raises UserError as `write` does."""

    def records(self, name: str) -> list[bytes]:
        """All whole records of a log, in order."""

    def delete(self, name: str) -> None:
        """Remove the blob if it is there."""

    def names(self, prefix: str) -> list[str]:
        """Names of the blobs that begin so, sorted."""

    def scratch(self, name: str, elements: int) -> np.ndarray:
        """Float32 `[elements]`, writable, of any content, for this process only.

        In a file, where blobs are files: the system may write it there and take its memory back. Raises UserError (disk full).
        """
