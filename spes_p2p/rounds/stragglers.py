"""How long a round waits for stragglers, from how late its members came in the rounds before."""

from __future__ import annotations

from collections.abc import Sequence

from spes_p2p.observe.outliers import outlier_bound

ENOUGH_ARRIVALS, KEPT_ARRIVALS = 8, 64
MIN_PATIENCE, MAX_PATIENCE = 0.1, 0.5
"""Shares of the time that the quorum needed; the latter also while too little is known."""
MIN_PATIENCE_S = 2.0


def straggler_delay(arrival_s: float, quorum_s: float) -> float:
    """How much later than the quorum a member announced, as a share of the time until the quorum; 0 when it was in it.

    Both in seconds since the phase began.
    """
    return max(0.0, arrival_s - quorum_s) / quorum_s if quorum_s > 0 else 0.0


def patience(history: Sequence[float], quorum_s: float) -> float:
    """Seconds to wait after the quorum, which came `quorum_s` after the phase began: median + K * 1.4826 * MAD of the
    members' straggler_delay in earlier rounds (`history`), times `quorum_s`, within bounds."""
    share = MAX_PATIENCE
    if len(history) >= ENOUGH_ARRIVALS:
        share = min(max(outlier_bound(history), MIN_PATIENCE), MAX_PATIENCE)
    return max(MIN_PATIENCE_S, share * quorum_s)
