"""How long a round waits for stragglers, given the delays in earlier rounds."""

from __future__ import annotations

from collections.abc import Sequence

from spes_p2p.observe.outliers import outlier_bound

ENOUGH_ARRIVALS, KEPT_ARRIVALS = 8, 64
"""Least delays for an estimate; bounds the delays that are kept."""
MIN_PATIENCE, MAX_PATIENCE = 0.1, 0.5
"""Bounds the wait, as a fraction of the quorum's time; the maximum also holds without an estimate."""
MIN_PATIENCE_S = 2.0
"""Bounds the wait from below, where phases are short."""


def straggler_delay(arrival_s: float, quorum_s: float) -> float:
    """Return how much later than the quorum a member announced, as a fraction of `quorum_s`; 0 for the quorum's members.

    Both arguments are in seconds since the phase began.
    """
    return max(0.0, arrival_s - quorum_s) / quorum_s if quorum_s > 0 else 0.0


def patience_s(history: Sequence[float], quorum_s: float) -> float:
    """Return the seconds to wait after a quorum announced, `quorum_s` into the phase.

    The wait is `quorum_s` times the median + K * 1.4826 * MAD of earlier straggler delays (`history`), within bounds.
    """
    share = MAX_PATIENCE
    if len(history) >= ENOUGH_ARRIVALS:
        share = min(max(outlier_bound(history), MIN_PATIENCE), MAX_PATIENCE)
    return max(MIN_PATIENCE_S, share * quorum_s)
