"""Parse quantities from the command line: 24GiB, 24GB, 100mbit, 1gbit, 30d."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from spes_p2p.errors import UserError

_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
DAY_MINUTES = 24 * 60
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True)
class Hours:
    """A part of the day, in minutes since midnight; it may include midnight."""

    start: int
    stop: int

    def __str__(self) -> str:
        return "-".join(f"{minute // 60}:{minute % 60:02}" for minute in (self.start, self.stop))


@dataclass(frozen=True)
class Spare:
    """Memory of a device to leave free: a share of all, or bytes."""

    share: float
    num_bytes: int

    def of(self, total: int) -> int:
        """Return the bytes, of a device with this much memory."""
        return self.num_bytes + round(self.share * total)


def parse_spare(text: str, option: str) -> Spare:
    """Return what 20% or 2GiB leaves free. Raises UserError naming the option."""
    if not text.strip().endswith("%"):
        return Spare(0.0, round(_parse(text, option, _BYTES, "a share such as 20% or a size such as 2GiB")))
    match = re.fullmatch(r"\s*([0-9]{1,2}(?:\.[0-9]+)?)\s*%\s*", text)
    if match is None or float(match[1]) == 0:
        raise UserError(f"{option} {text!r}: must be a share below 100% such as 20%, or a size such as 2GiB")
    return Spare(float(match[1]) / 100, 0)


def parse_bytes(text: str, option: str) -> int:
    """Return bytes. Units are decimal (GB) or binary (GiB), case-insensitive. Raises UserError naming the option."""
    return round(_parse(text, option, _BYTES, "a size such as 24GiB or 24GB"))


def parse_bits_per_second(text: str, option: str) -> float:
    """Return bits per second. Units are decimal, case-insensitive. Raises UserError naming the option."""
    return _parse(text, option, _BITS, "a rate such as 100mbit or 1gbit", "(?:/s|ps)?")


def parse_seconds(text: str, option: str) -> int:
    """Return whole seconds. Units are minutes, hours and days. Raises UserError naming the option."""
    return max(1, round(_parse(text, option, _SECONDS, "a time such as 90m, 12h or 30d")))


def parse_bytes_per_day(text: str, option: str) -> int:
    """Return bytes per day, of 20GB/day. Raises UserError naming the option."""
    return max(1, round(_parse(text, option, _BYTES, "a size per day such as 20GB/day", r"\s*/\s*day")))


def parse_hours(text: str, option: str) -> Hours:
    """Return a part of the day, of 22-8 or 22:30-7:15. Raises UserError naming the option."""
    match = re.fullmatch(r"([0-9]{1,2})(?::([0-5][0-9]))?-([0-9]{1,2})(?::([0-5][0-9]))?", text.replace(" ", ""))
    start, stop = (60 * int(match[hour]) + int(match[hour + 1] or 0) for hour in (1, 3)) if match else (0, 0)
    if start % DAY_MINUTES == stop % DAY_MINUTES or max(start, stop) > DAY_MINUTES:
        raise UserError(f"{option} {text!r}: must be hours of the day such as 22-8 or 22:30-7:15")
    return Hours(start % DAY_MINUTES, stop % DAY_MINUTES)


def _parse(text: str, option: str, units: dict[str, int], example: str, ending: str = "") -> float:
    match = re.fullmatch(rf"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+?){ending}\s*", text.lower())
    number = float(match[1]) * units[match[2]] if match and match[2] in units else 0.0
    if not 0 < number < math.inf:
        raise UserError(f"{option} {text!r}: must be {example}")
    return number
