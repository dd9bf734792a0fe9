"""A store in memory whose process can be crashed at named points. For simulations and tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import numpy as np

from spes_p2p.storage.store import check_name


class MemoryStore:
    """The contract of `DirectoryStore`, with crashes: what survives one is in the store that `reopen` returns.

    `fault(point, name)` is called at the named points `write:draft`, `write:rename`, `write:done`, `append`, `append:done` and
    `delete`; when it raises there, the state is what a disk would hold at that instant.
    """

    def __init__(self, fault: Callable[[str, str], None] | None = None):
        self.fault = fault
        self._blobs: dict[str, bytes] = {}
        self._logs: dict[str, list[bytes]] = {}
        self._crashed = False

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Replace the blob; whole or not at all."""
        self._at("write:draft", name)
        content = b"".join(chunks)
        self._at("write:rename", name)
        self._blobs[name] = content
        self._at("write:done", name)

    def draft(self, name: str) -> MemoryDraft:
        """Begin to write a blob piece by piece."""
        self._check(name)
        return MemoryDraft(self, name)

    def read(self, name: str) -> memoryview | None:
        """The blob, or None."""
        self._check(name)
        content = self._blobs.get(name)
        return None if content is None else memoryview(content)

    def append(self, name: str, record: bytes) -> None:
        """Append one record; whole or not at all."""
        self._at("append", name)
        self._logs.setdefault(name, []).append(bytes(record))
        self._at("append:done", name)

    def records(self, name: str) -> list[bytes]:
        """All records of a log, in order."""
        self._check(name)
        return list(self._logs.get(name, ()))

    def delete(self, name: str) -> None:
        """Remove the blob or log if it is there."""
        self._at("delete", name)
        self._blobs.pop(name, None)
        self._logs.pop(name, None)

    def names(self, prefix: str) -> list[str]:
        """Names of the blobs and logs that begin so, sorted."""
        return sorted(name for name in (*self._blobs, *self._logs) if name.startswith(prefix))

    def scratch(self, name: str, elements: int) -> np.ndarray:
        """Of any content: it is full of NaN."""
        self._check(name)
        return np.full(elements, np.nan, np.float32)

    def crash(self) -> None:
        """From now on every call raises CancelledError: a dead process neither reads nor writes."""
        self._crashed = True

    def reopen(self) -> MemoryStore:
        """The store that the next process finds on this disk; this one counts as crashed."""
        self.crash()
        successor = MemoryStore(self.fault)
        successor._blobs, successor._logs = self._blobs, self._logs
        return successor

    def _at(self, point: str, name: str) -> None:
        self._check(name)
        if self.fault is not None:
            self.fault(point, name)
        self._check(name)

    def _check(self, name: str) -> None:
        if self._crashed:
            raise asyncio.CancelledError("the process that used this store is dead")
        check_name(name)


class MemoryDraft:
    """Bytes that become a blob of a `MemoryStore`."""

    def __init__(self, store: MemoryStore, name: str):
        self._store, self._name = store, name
        self._content = bytearray()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes there."""
        view = memoryview(data).cast("B")
        if offset + len(view) > len(self._content):
            self._content.extend(bytes(offset + len(view) - len(self._content)))
        self._content[offset : offset + len(view)] = view

    def read(self, offset: int, length: int) -> bytes:
        """What was written there."""
        return bytes(self._content[offset : offset + length])

    def view(self) -> memoryview:
        """What is written into it later shows; it cannot grow any more."""
        return memoryview(self._content).toreadonly()

    def publish(self) -> None:
        """Replace the blob."""
        self._store.write(self._name, [bytes(self._content)])
