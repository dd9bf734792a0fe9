"""Rate limits of a peer's line: every message waits until the line may carry it; heartbeats never wait.

What is counted are messages; encryption, multiplexing and TCP/IP headers add 3 to 4 % on the line, so the messages' rate is set
that much lower, and a limit holds for what the line carries.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LINE_OVERHEAD = 1.035
BURST_S = 0.1
"""Unused time that an idle line may catch up on."""


class Pacer:
    """A token bucket: lets bytes pass at a rate, in the order in which they came."""

    def __init__(self, bits_per_s: float, burst_s: float = BURST_S):
        """`bits_per_s`: on the line. `burst_s`: unused time that may be caught up on."""
        self.bytes_per_s = bits_per_s / 8 / LINE_OVERHEAD
        self._burst_s = burst_s
        self._free_at = -math.inf

    async def let_pass(self, size: int) -> None:
        """Return when the line has carried these bytes and those before them."""
        if (carried_in_s := self.take(size)) > 0:
            await asyncio.sleep(carried_in_s)

    def take(self, size: int) -> float:
        """Count these bytes; return the seconds until the line has carried them and those before them."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - self._burst_s) + size / self.bytes_per_s
        return self._free_at - now

    def taken_s(self) -> float:
        """Return the seconds of the line that were taken and are not made up for; 0 when nothing passed for long enough."""
        return max(0.0, self._free_at - asyncio.get_running_loop().time() + self._burst_s)


class Allowance:
    """A token bucket that says no instead of waiting."""

    def __init__(self, per_s: float, burst: float):
        self._per_s, self._burst = per_s, burst
        self._left = burst
        self._filled_at = -math.inf

    def take(self, amount: float = 1.0) -> bool:
        """Take this much if it is there."""
        self._fill()
        if self._left < amount:
            return False
        self._left -= amount
        return True

    def owe(self, amount: float) -> None:
        """Take this much also where less is there; until that has been made up for, nothing is."""
        self._fill()
        self._left -= amount

    def is_full(self) -> bool:
        """Return whether nothing was taken for long enough to be forgotten."""
        self._fill()
        return self._left >= self._burst

    def _fill(self) -> None:
        now = asyncio.get_running_loop().time()
        self._left = min(self._burst, self._left + self._per_s * (now - self._filled_at))
        self._filled_at = now


class Allowances:
    """An equal allowance for each of many, who are forgotten once theirs is full."""

    def __init__(self, per_s: float, burst: float, kept: int):
        """`kept`: forget some when there are more than this many."""
        self._per_s, self._burst, self._kept = per_s, burst, kept
        self._by_name: dict[str, Allowance] = {}

    def take(self, name: str, amount: float = 1.0) -> bool:
        """Take this much of this one's allowance if it is there."""
        return self.of(name).take(amount)

    def of(self, name: str) -> Allowance:
        """Return this one's allowance."""
        if len(self._by_name) > self._kept:
            self._by_name = {each: allowance for each, allowance in self._by_name.items() if not allowance.is_full()}
        return self._by_name.setdefault(name, Allowance(self._per_s, self._burst))


@dataclass(frozen=True)
class Line:
    """What a peer's line may carry, all streams together; None: no limit."""

    up: Pacer | None = None
    down: Pacer | None = None
    sent: Callable[[], Mapping[str, int]] | None = None
    """Returns the bytes that each interface of this machine has sent; None in virtual time."""


UNLIMITED = Line()


def limited_line(
    upload_bits_per_s: float | None, download_bits_per_s: float | None, sent: Callable[[], Mapping[str, int]] | None = None
) -> Line:
    """A line with these limits; None: no limit in that direction. `sent`: see `Line`."""
    return Line(
        None if upload_bits_per_s is None else Pacer(upload_bits_per_s),
        None if download_bits_per_s is None else Pacer(download_bits_per_s),
        sent,
    )
