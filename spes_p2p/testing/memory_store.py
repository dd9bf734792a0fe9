"""A store in memory that can crash at named points, for simulations and tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np

from spes_p2p.storage.store import check_name


@lru_cache(64)
def shared(content: bytes) -> bytes:
    """Return the first equal blob of the last ones: peers of one process write the same bases and results."""
    return content


class MemoryStore:
    """A `Store` with crashes; `reopen` returns a store with what survives one.

    `fault(point, name)` is called at the named points `write:draft`, `write:rename`, `write:done`, `append`, `append:done` and
    `delete`; if it raises, the state is what a disk would hold at that instant.
    """

    def __init__(self, fault: Callable[[str, str], None] | None = None):
        self.fault = fault
        self._blobs: dict[str, bytes] = {}
        self._logs: dict[str, list[bytes]] = {}
        self._crashed = False

    def write(self, name: str, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        """See Store."""
        self._at("write:draft", name)
        content = shared(b"".join(chunks))
        self._at("write:rename", name)
        self._blobs[name] = content
        self._at("write:done", name)

    def draft(self, name: str) -> MemoryDraft:
        """See Store."""
        self._check(name)
        return MemoryDraft(self, name)

    def read(self, name: str) -> memoryview | None:
        """See Store."""
        self._check(name)
        content = self._blobs.get(name)
        return None if content is None else memoryview(content)

    def append(self, name: str, record: bytes) -> None:
        """See Store."""
        self._at("append", name)
        self._logs.setdefault(name, []).append(bytes(record))
        self._at("append:done", name)

    def replace_log(self, name: str, records: Iterable[bytes]) -> None:
        """See Store."""
        self._at("write:rename", name)
        self._logs[name] = list(records)
        self._at("write:done", name)

    def records(self, name: str) -> list[bytes]:
        """See Store."""
        self._check(name)
        return list(self._logs.get(name, ()))

    def delete(self, name: str) -> None:
        """See Store."""
        self._at("delete", name)
        self._blobs.pop(name, None)
        self._logs.pop(name, None)

    def names(self, prefix: str) -> list[str]:
        """See Store."""
        return sorted(name for name in (*self._blobs, *self._logs) if name.startswith(prefix))

    def scratch(self, name: str, elements: int) -> np.ndarray:
        """See Store. The undefined values are NaN here."""
        self._check(name)
        return np.full(elements, np.nan, np.float32)

    def crash(self) -> None:
        """Make every later call raise CancelledError: a dead process neither reads nor writes."""
        self._crashed = True

    def reopen(self) -> MemoryStore:
        """Crash, and return the store that the next process finds on the same disk."""
        self.crash()
        successor = MemoryStore(self.fault)
        successor._blobs, successor._logs = self._blobs, self._logs
        return successor

    def copied(self) -> MemoryStore:
        """Return a copy of what the store holds now, as a backup has it."""
        copy = MemoryStore(self.fault)
        copy._blobs, copy._logs = dict(self._blobs), {name: list(records) for name, records in self._logs.items()}
        return copy

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
    """A blob of a `MemoryStore` that is being written."""

    def __init__(self, store: MemoryStore, name: str):
        self._store, self._name = store, name
        self._content, self._rest = bytearray(), bytearray()
        """What has been viewed, which cannot grow, and what was written after it."""
        self._is_viewed = False

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """See Draft. Not across the end of what has been viewed."""
        view, into = memoryview(data).cast("B"), self._content
        if self._is_viewed and offset >= len(self._content):
            into, offset = self._rest, offset - len(self._content)
        if offset + len(view) > len(into):
            into.extend(bytes(offset + len(view) - len(into)))
        into[offset : offset + len(view)] = view

    def read(self, offset: int, length: int) -> bytes:
        """See Draft."""
        return bytes((self._content + self._rest)[offset : offset + length])

    def view(self) -> memoryview:
        """See Draft. Later writes beyond it are not in later views."""
        self._is_viewed = True
        return memoryview(self._content).toreadonly()

    def publish(self) -> None:
        """See Draft."""
        self._store.write(self._name, [self._content, self._rest])
