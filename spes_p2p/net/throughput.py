"""What a peer's line carries upwards, learnt from what it sends anyway.

Time is cut into windows. A transfer that fills the line fills whole windows, so the fullest of its stretches says what the line
carried: of STRETCH windows, since senders' buffers take megabytes at once from a thin line's peer, or of as many as it has. The
first and the last window are partly idle; shorter transfers say nothing, nor does a trickle of small messages.

On a fast line the processors are the limit: a peer with more to send measures more, gets more to send, and so on. Fast lines
therefore count as equal.
"""

from __future__ import annotations

WINDOW_S = 0.5
STRETCH = 8
KEPT_WINDOWS = 2**12
UNKNOWN_BYTES_PER_S = 12.5e6
"""Assumed for an unmeasured line: 100 Mbit/s."""
WEIGHT_OF_NEWS = 0.5
SLOWEST_BYTES_PER_S = 62.5e3
"""0.5 Mbit/s: a slower transfer did not fill the line."""
FASTEST_BYTES_PER_S = 25e6
"""200 Mbit/s: faster lines count as this."""


class Throughput:
    """An estimate that follows the fullest stretches of the latest transfers."""

    def __init__(self, known_limit_bytes_per_s: float | None = None):
        limit = float("inf") if known_limit_bytes_per_s is None else known_limit_bytes_per_s
        self._estimate = min(UNKNOWN_BYTES_PER_S, limit)
        self._is_measured = False
        self._windows: dict[int, float] = {}
        """Bytes of each that has traffic, since the estimate was asked for last."""

    def count(self, size: int, begin_s: float, end_s: float) -> None:
        """Bytes that were handed to the line in this time: a part of a thin line's takes many windows."""
        first, last = int(begin_s / WINDOW_S), int(end_s / WINDOW_S)
        for window in range(max(first, last - KEPT_WINDOWS), last + 1):
            within_s = min(end_s, (window + 1) * WINDOW_S) - max(begin_s, window * WINDOW_S)
            share = within_s / (end_s - begin_s) if last > first else 1.0
            self._windows[window] = self._windows.get(window, 0.0) + share * size
        while len(self._windows) > KEPT_WINDOWS:
            del self._windows[min(self._windows)]

    def bytes_per_s(self) -> float:
        """The estimate, after taking in what was sent since it was asked for last."""
        found = self._fullest() / WINDOW_S
        if found >= SLOWEST_BYTES_PER_S:
            news = WEIGHT_OF_NEWS if self._is_measured else 1.0
            self._estimate += news * (found - self._estimate)
            self._is_measured = True
        self._windows.clear()
        return self.last_bytes_per_s

    @property
    def last_bytes_per_s(self) -> float:
        """The estimate when it was asked for last."""
        return min(self._estimate, FASTEST_BYTES_PER_S)

    def _fullest(self) -> float:
        """Mean bytes a window of the fullest stretch; 0 when there is none."""
        fullest, run = 0.0, list[float]()
        for window in sorted(self._windows):
            if window - 1 not in self._windows:
                run = []
            elif window + 1 in self._windows:
                run.append(self._windows[window])
            stretch = run[-STRETCH:]
            if len(stretch) == STRETCH or (stretch and window + 1 not in self._windows):
                fullest = max(fullest, sum(stretch) / len(stretch))
        return fullest
