"""The pace of rounds, by which the next one is expected."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from itertools import pairwise

PACE_ROUNDS = 8
"""The pace is the median duration of this many rounds."""


def pace_s(times: Iterable[float]) -> float:
    """Return the seconds that a round takes, by the times of the commits so far; NaN before the second."""
    last = [*times][-PACE_ROUNDS - 1 :]
    return statistics.median(b - a for a, b in pairwise(last)) if len(last) > 1 else math.nan
