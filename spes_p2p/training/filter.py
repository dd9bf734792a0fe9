"""Detection of repetitive samples: OLMo's instance filter, which SPES uses."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MAX_PERIOD, MIN_COUNT = 13, 32
"""OLMo's published values: longest pattern, in tokens, and consecutive repetitions that make a sample repetitive."""


def is_repetitive(
    samples: npt.NDArray[np.int64], max_period: int = MAX_PERIOD, min_count: int = MIN_COUNT
) -> npt.NDArray[np.bool_]:
    """Return for samples `[n, S]` whether each has `min_count` or more consecutive repetitions of 1 to `max_period` tokens.

    A run of r tokens that each equal the token p positions before counts as (r + p) // p repetitions. As in OLMo, fewer than
    three repetitions never count.
    """
    flagged = np.zeros(len(samples), np.bool_)
    for period in range(1, max_period + 1):
        run = (max(min_count, 3) - 1) * period
        if run > samples.shape[1] - period:
            break
        repeats = np.zeros((len(samples), samples.shape[1] - period + 1), np.int32)
        np.cumsum(samples[:, period:] == samples[:, :-period], axis=1, out=repeats[:, 1:])
        flagged |= (repeats[:, run:] - repeats[:, :-run] == run).any(axis=1)
    return flagged
