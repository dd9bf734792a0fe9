"""Reading large records beside the event loop, so that heartbeats and other streams go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from spes_p2p.messages.codec import Buffer, unpack
from spes_p2p.messages.compact import expanded
from spes_p2p.messages.framing import MAX_FRAME_BYTES
from spes_p2p.messages.methods import PAGE

Record = TypeVar("Record")

LARGE_BYTES = 2**14
"""Reading less takes some 10 ms at most."""
_READER, _OUTSIDERS_READER = ThreadPoolExecutor(1, "unpack"), ThreadPoolExecutor(1, "unpack-outsiders")
"""Each reads one record at a time, which bounds the memory that reading takes (`messages/codec.py`). What outsiders send takes
up to a second to read, and nothing of a round waits behind it."""


async def unpack_beside(cls: type[Record], data: Buffer, is_known: bool = True) -> Record:
    """As `unpack`, in a worker thread where the record is large. `is_known`: its sender takes part in the rounds.

    Raises WireError.
    """
    return await beside(len(data), unpack, cls, data, is_known=is_known)


async def unpack_page(cls: type[Record], data: bytes, is_known: bool) -> Record:
    """As `unpack_beside`, of a compressed page, which is no longer than an uncompressed one may be."""
    longest = MAX_FRAME_BYTES if is_known else PAGE
    return await beside(LARGE_BYTES, lambda: unpack(cls, expanded(data, longest=longest)), is_known=is_known)


async def beside(size: int, read: Callable[..., Record], *args: Any, is_known: bool = True) -> Record:
    """Return `read(*args)`, which reads a record of `size` bytes: in a worker thread where that is large."""
    if size < LARGE_BYTES:
        return read(*args)
    reader = _READER if is_known else _OUTSIDERS_READER
    return await asyncio.get_running_loop().run_in_executor(reader, read, *args)
