"""Parse quantities from the command line: 24GiB, 24GB, 100mbit, 1gbit, 30d."""

from __future__ import annotations

import math
import re

from spes_p2p.errors import UserError

_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


def parse_bytes(text: str, option: str) -> int:
    """Return bytes. Units are decimal (GB) or binary (GiB), case-insensitive. Raises UserError naming the option."""
    return round(_parse(text, option, _BYTES, "a size such as 24GiB or 24GB"))


def parse_bits_per_second(text: str, option: str) -> float:
    """Return bits per second. Units are decimal, case-insensitive. Raises UserError naming the option."""
    return _parse(text, option, _BITS, "a rate such as 100mbit or 1gbit")


def parse_seconds(text: str, option: str) -> int:
    """Return whole seconds. Units are minutes, hours and days. Raises UserError naming the option."""
    return max(1, round(_parse(text, option, _SECONDS, "a time such as 90m, 12h or 30d")))


def _parse(text: str, option: str, units: dict[str, int], example: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)(?:/s|ps)?\s*", text.lower())
    number = float(match[1]) * units[match[2]] if match and match[2] in units else 0.0
    if not 0 < number < math.inf:
        raise UserError(f"{option} {text!r}: must be {example}")
    return number
