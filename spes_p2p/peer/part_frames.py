"""Frames that carry an encoded update or result of one part, and when their transfer counts as stalled."""

from __future__ import annotations

import asyncio

from spes_p2p.messages.codec import WireError

INDEX_BYTES, WEIGHT_BYTES = 8, 8
"""A part's index and an update's tokens, little-endian; sized to keep the values behind them aligned."""


def numbered(index: int) -> bytes:
    """Return the bytes that precede a part in a frame."""
    return index.to_bytes(INDEX_BYTES, "little")


def weighted(tokens: int) -> bytes:
    """Return the bytes between the index and an update."""
    return tokens.to_bytes(WEIGHT_BYTES, "little")


def read_part(message: memoryview) -> tuple[int, memoryview]:
    """Return the part's index and what follows. Raises WireError."""
    if len(message) < INDEX_BYTES:
        raise WireError("a part without its index")
    return int.from_bytes(message[:INDEX_BYTES], "little"), message[INDEX_BYTES:]


def read_update(message: memoryview) -> tuple[int, int, memoryview]:
    """Return the part's index, the update's tokens, and the encoded update. Raises WireError."""
    index, rest = read_part(message)
    if len(rest) < WEIGHT_BYTES:
        raise WireError("an update without its tokens")
    return index, int.from_bytes(rest[:WEIGHT_BYTES], "little"), rest[WEIGHT_BYTES:]


class Deadline:
    """The loop time at which a transfer stalls. Bytes that move extend it by the time that a slow line needs for them."""

    def __init__(self, streams: int, bytes_per_s: float):
        """`streams`: how many share the line. `bytes_per_s`: of a line that is just not stalled."""
        self.at: float | None = None
        """None before `extend`."""
        self._s_per_byte = max(1, streams) / bytes_per_s

    def extend(self, size: int, patience_s: float) -> None:
        """Note that `size` bytes moved; nothing else may move for at most `patience_s`."""
        limit = asyncio.get_running_loop().time() + patience_s
        self.at = limit if self.at is None else min(limit, self.at + size * self._s_per_byte)
