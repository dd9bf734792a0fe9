"""Rate limits of a peer's line: every message waits until the line may carry it; heartbeats never wait.

What is counted are messages; encryption, multiplexing and TCP/IP headers add 3 to 4 % on the line, so the messages' rate is set
that much lower, and a limit holds for what the line carries.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

LINE_OVERHEAD = 1.035
BURST_S = 0.1
"""Unused time that an idle line may catch up on."""


class Pacer:
    """A token bucket: lets bytes pass at a rate, in the order in which they came."""

    def __init__(self, bits_per_s: float):
        """`bits_per_s`: on the line."""
        self.bytes_per_s = bits_per_s / 8 / LINE_OVERHEAD
        self._free_at = 0.0

    async def let_pass(self, size: int) -> None:
        """Return when the line has carried these bytes and those before them."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - BURST_S) + size / self.bytes_per_s
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


@dataclass(frozen=True)
class Line:
    """What a peer's line may carry, all streams together; None: no limit."""

    up: Pacer | None = None
    down: Pacer | None = None


UNLIMITED = Line()


def limited_line(upload_bits_per_s: float | None, download_bits_per_s: float | None) -> Line:
    """A line with these limits; None: no limit in that direction."""
    return Line(
        None if upload_bits_per_s is None else Pacer(upload_bits_per_s),
        None if download_bits_per_s is None else Pacer(download_bits_per_s),
    )
