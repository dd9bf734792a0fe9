"""What a peer's line carries upwards, learnt from what it sends anyway.

Time is cut into windows. A transfer that fills the line fills whole windows, so the fullest window that lies between two others
with traffic says what the line carried. The first and the last window are partly idle; shorter transfers say nothing.

That holds for lines. On faster ones the processors are what limits, and who has more to send measures more, gets more to send,
and so on: those count as alike.
"""

from __future__ import annotations

WINDOW_S = 0.5
UNKNOWN_BYTES_PER_S = 12.5e6
"""Assumed of a line that nothing is known of: 100 Mbit/s."""
WEIGHT_OF_NEWS = 0.5
FASTEST_BYTES_PER_S = 25e6
"""200 Mbit/s: no line counts as faster."""


class Throughput:
    """An estimate that follows the fullest windows of the latest transfers."""

    def __init__(self, known_limit_bytes_per_s: float | None = None):
        limit = float("inf") if known_limit_bytes_per_s is None else known_limit_bytes_per_s
        self._estimate = min(UNKNOWN_BYTES_PER_S, limit)
        self._is_measured = False
        self._window, self._run = -1, [0]
        self._fullest = 0

    def count(self, size: int, now_s: float) -> None:
        """Bytes that were handed to the line now."""
        window = int(now_s / WINDOW_S)
        if window != self._window:
            self._run = [*self._run[-2:], 0] if window == self._window + 1 else [0]
            self._window = window
            if len(self._run) == 3:
                self._fullest = max(self._fullest, self._run[1])
        self._run[-1] += size

    def bytes_per_s(self) -> float:
        """The estimate, after taking in what was sent since it was asked for last."""
        if self._fullest:
            found = self._fullest / WINDOW_S
            news = WEIGHT_OF_NEWS if self._is_measured else 1.0
            self._estimate += news * (found - self._estimate)
            self._is_measured, self._fullest = True, 0
        return min(self._estimate, FASTEST_BYTES_PER_S)
