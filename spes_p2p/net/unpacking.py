"""Reading large records beside the event loop, so that heartbeats and other streams go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from spes_p2p.messages.codec import Buffer, unpack

Record = TypeVar("Record")

LARGE_BYTES = 2**14
"""Reading less takes some 10 ms at most."""
_READER = ThreadPoolExecutor(1, "unpack")
"""One record at a time, which bounds the memory that reading takes: up to 150 times the bytes of the record."""


async def unpack_beside(cls: type[Record], data: Buffer) -> Record:
    """As `unpack`, in a worker thread where the record is large. Raises WireError."""
    return await beside(len(data), unpack, cls, data)


async def beside(size: int, read: Callable[..., Record], *args: Any) -> Record:
    """Return `read(*args)`, which reads a record of `size` bytes: in a worker thread where that is large."""
    if size < LARGE_BYTES:
        return read(*args)
    return await asyncio.get_running_loop().run_in_executor(_READER, read, *args)
