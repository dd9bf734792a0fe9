"""What a peer's line carries upwards, learnt from what it sends anyway.

Time is cut into windows. A transfer that fills the line fills whole windows, so the fullest of its stretches says what the line
carried: of STRETCH windows, since senders' buffers take megabytes at once from a thin line's peer, or of as many as it has. The
first and the last window are partly idle; shorter transfers say nothing, nor does a trickle of small messages.

That holds for lines. On faster ones the processors are what limits, and who has more to send measures more, gets more to send,
and so on: those count as alike.
"""

from __future__ import annotations

WINDOW_S = 0.5
STRETCH = 4
UNKNOWN_BYTES_PER_S = 12.5e6
"""Assumed of a line that nothing is known of: 100 Mbit/s."""
WEIGHT_OF_NEWS = 0.5
SLOWEST_BYTES_PER_S = 62.5e3
"""0.5 Mbit/s: what is slower is no line that is full."""
FASTEST_BYTES_PER_S = 25e6
"""200 Mbit/s: no line counts as faster."""


class Throughput:
    """An estimate that follows the fullest stretches of the latest transfers."""

    def __init__(self, known_limit_bytes_per_s: float | None = None):
        limit = float("inf") if known_limit_bytes_per_s is None else known_limit_bytes_per_s
        self._estimate = min(UNKNOWN_BYTES_PER_S, limit)
        self._is_measured = False
        self._window, self._run = 0, [0]
        """The latest window with traffic, and the bytes of those before it without a gap, as many as matter."""
        self._fullest = 0.0
        """Bytes a window."""

    def count(self, size: int, now_s: float) -> None:
        """Bytes that were handed to the line now."""
        window = int(now_s / WINDOW_S)
        if window == self._window + 1:
            self._run = [*self._run[-1 - STRETCH :], 0]
            if len(self._inner) == STRETCH:
                self._take()
        elif window != self._window:
            self._take()
            self._run = [0]
        self._window = window
        self._run[-1] += size

    def bytes_per_s(self) -> float:
        """The estimate, after taking in what was sent since it was asked for last."""
        self._take()
        if self._fullest:
            news = WEIGHT_OF_NEWS if self._is_measured else 1.0
            self._estimate += news * (self._fullest / WINDOW_S - self._estimate)
            self._is_measured, self._fullest, self._run = True, 0.0, [0]
        return min(self._estimate, FASTEST_BYTES_PER_S)

    @property
    def _inner(self) -> list[int]:
        """Windows that lie between two others with traffic."""
        return self._run[1:-1]

    def _take(self) -> None:
        if self._inner and (mean := sum(self._inner) / len(self._inner)) >= SLOWEST_BYTES_PER_S * WINDOW_S:
            self._fullest = max(self._fullest, mean)
