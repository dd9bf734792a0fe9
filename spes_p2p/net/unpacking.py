"""Reading large records beside the event loop, so that heartbeats and other streams go on."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from spes_p2p.messages.codec import Buffer, unpack

Record = TypeVar("Record")

LARGE_BYTES = 2**14
"""Reading less takes some 10 ms at most."""
_READER = ThreadPoolExecutor(1, "unpack")
"""One record at a time, which bounds the memory that reading takes: up to 150 times the bytes of the record."""


async def unpack_beside(cls: type[Record], data: Buffer) -> Record:
    """As `unpack`, in a worker thread where the record is large. Raises WireError."""
    if len(data) < LARGE_BYTES:
        return unpack(cls, data)
    return await asyncio.get_running_loop().run_in_executor(_READER, unpack, cls, data)
