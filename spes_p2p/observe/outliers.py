"""A robust bound for outliers, based on the median absolute deviation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

DEVIATIONS = 6.0
NORMAL_DEVIATION = 1.4826
"""Scales the median absolute deviation of normally distributed values to their standard deviation (Hampel 1974)."""


def outlier_bound(values: Sequence[float]) -> float:
    """Return median + 6 * 1.4826 * MAD, where MAD is the median absolute deviation. `values` must not be empty."""
    median = statistics.median(values)
    return median + DEVIATIONS * NORMAL_DEVIATION * statistics.median(abs(value - median) for value in values)
