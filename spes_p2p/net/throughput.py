"""Estimate a peer's upload bandwidth from its normal traffic.

Time is divided into windows. A transfer that saturates the line fills whole windows, so the fullest stretch measures the line.
A stretch is STRETCH windows, since send buffers absorb megabytes at once, or fewer for a shorter transfer. The first and the
last window of a transfer are partly idle, so they do not count; neither do small messages.

Buffers hide a thin line: those of the kernel, the muxer and p2pd take about half a megabyte of each stream at once, maybe a
whole round of a small model. So when receivers confirm transfers late, the line counts for no more than what was sent from the
beginning of a transfer to its confirmation. If one receiver confirmed much faster than the others, they are the reason.

Where the machine says what its interfaces have sent, that counts instead, if most of it came from here: behind them are only
the buffers of the network. Otherwise nothing is measured: it may be what buffers took before, or what other programs send. What
goes over the loopback to peers on the same machine measures its processor: plans count it, but no line without a limit is
called slow for it.

On a fast line the CPU is the limit: a peer with more to send measures a higher rate, gets more to send, and so on. Fast lines
therefore count as equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOW_S = 0.5
STRETCH = 8
KEPT_WINDOWS = 2**12
UNKNOWN_BYTES_PER_S = 12.5e6
"""Assumed for an unmeasured line: 100 Mbit/s."""
WEIGHT_OF_NEWS = 0.5
LEAST_BYTES_PER_S = 62.5e3
"""0.5 Mbit/s: a slower transfer did not saturate the line, so it measures nothing."""
FASTEST_BYTES_PER_S = 25e6
"""200 Mbit/s: upper bound of the estimate."""
LATE_S, CONFIRMED_BYTES = 1.0, 2**16
"""A confirmation after LATE_S is due to the line, not to latency. Smaller transfers say nothing."""
MUCH_FASTER = 2.0
BURST_BYTES = 3 * 2**17
"""Less that is confirmed promptly shows nothing: shapers let a burst pass at full speed."""
HIDDEN_BYTES_PER_S = 2**20
"""8 Mbit/s: a faster line carries more in a stretch than buffers take, and transfers have other reasons to pause."""
KEPT_CONFIRMATIONS = 2**10
IDLE = 0.125
"""An interface that sends less than this part of its fullest window has a pause."""
ELSEWHERE = 4.0
"""Where interfaces sent less than one part in so many of what was sent here, it went over the loopback."""
RELIABLE_AFTER = 3
"""Measurements. A single one may be due to one slow receiver or a busy processor."""


class Throughput:
    """An estimate that follows the fullest stretches of the latest transfers."""

    def __init__(self, known_limit_bytes_per_s: float | None = None):
        limit = float("inf") if known_limit_bytes_per_s is None else known_limit_bytes_per_s
        self._is_limited = known_limit_bytes_per_s is not None
        self._estimate = min(UNKNOWN_BYTES_PER_S, limit)
        self._measured = self._reliably = 0
        self._windows: dict[int, float] = {}
        """Bytes by window, since the last call of `bytes_per_s`."""
        self._sent: tuple[float, Mapping[str, int]] | None = None
        """When the interfaces were read, and the bytes that each had sent."""
        self._on_wire: dict[int, float] = {}
        """Bytes of the interface that sent most, by window, since the last call of `bytes_per_s`."""
        self._confirmed: deque[tuple[int, float, float]] = deque(maxlen=KEPT_CONFIRMATIONS)
        """Bytes, begin and time of confirmation, since then."""

    def count(self, size: int, begin_s: float, end_s: float) -> None:
        """Count bytes sent between two times, spread over the windows between them."""
        _spread(self._windows, size, begin_s, end_s)

    def see(self, sent: Mapping[str, int], now_s: float) -> None:
        """Take the bytes that each interface of this machine has sent so far. What a virtual one sends, another one does."""
        if self._sent is not None:
            begin_s, before = self._sent
            most = max((size - before.get(name, size) for name, size in sent.items()), default=0)
            _spread(self._on_wire, most, begin_s, now_s)
        self._sent = now_s, sent

    def confirm(self, size: int, begin_s: float, end_s: float) -> None:
        """Note that a receiver confirmed at `end_s` a transfer of these bytes, which were counted too."""
        if size >= CONFIRMED_BYTES:
            self._confirmed.append((size, begin_s, end_s))

    def bytes_per_s(self) -> float:
        """Update the estimate with the traffic since the last call, and return it."""
        found, on_wire = _fullest(self._windows) / WINDOW_S, self._wire_bytes_per_s()
        sustained, prompt = (None, 0.0) if on_wire else self._until_confirmed()
        if on_wire:
            is_own = 2 * sum(self._windows.values()) >= sum(self._on_wire.values())
            found = on_wire if is_own else 0.0
        elif sustained is not None:
            found = min(found, sustained) if found >= LEAST_BYTES_PER_S else sustained
        elif found < LEAST_BYTES_PER_S and prompt > self._estimate:
            found = prompt  # a line that counted as thin, for instance because the processor was busy, and is not
        if found >= LEAST_BYTES_PER_S:
            news = WEIGHT_OF_NEWS if self._measured else 1.0
            self._estimate += news * (found - self._estimate)
            self._measured += 1
            self._reliably += self._is_limited or self._sent is None or not self._is_elsewhere
        self._windows.clear()
        self._on_wire.clear()
        self._confirmed.clear()
        return self.last_bytes_per_s

    @property
    def last_bytes_per_s(self) -> float:
        """Estimate at the last call of `bytes_per_s`."""
        return min(self._estimate, FASTEST_BYTES_PER_S)

    @property
    def reliable_bytes_per_s(self) -> float:
        """That estimate, or 0 (unknown) while it rests on too few measurements of a line to call it slow."""
        return self.last_bytes_per_s if self._reliably >= RELIABLE_AFTER else 0.0

    @property
    def _is_elsewhere(self) -> bool:
        """Whether most went over no interface, but to peers on this machine."""
        return ELSEWHERE * sum(self._on_wire.values()) < sum(self._windows.values())

    def _wire_bytes_per_s(self) -> float:
        """Return the fullest stretch of an interface, in bytes a second; 0 without one, or where peers are on this machine."""
        if self._is_elsewhere:
            return 0.0
        least = IDLE * max(self._on_wire.values(), default=0.0)
        return _fullest({window: size for window, size in self._on_wire.items() if size > least}) / WINDOW_S

    def _until_confirmed(self) -> tuple[float | None, float]:
        """Return the bytes per second that were sent until a late confirmation, and the most of a prompt one.

        The first is None unless a thin line was the reason.
        """
        late = [(begin_s, end_s) for _, begin_s, end_s in self._confirmed if end_s - begin_s >= LATE_S]
        prompts = [(size, end_s - begin_s) for size, begin_s, end_s in self._confirmed if 0 < end_s - begin_s < LATE_S]
        is_burst = sum(size for size, _ in prompts) < BURST_BYTES
        prompt = 0.0 if is_burst else max(size / seconds for size, seconds in prompts)
        sustained = max((self._sent_between(*times) / (times[1] - times[0]) for times in late), default=HIDDEN_BYTES_PER_S)
        is_line = sustained < HIDDEN_BYTES_PER_S and prompt <= MUCH_FASTER * sustained
        return sustained if is_line else None, prompt

    def _sent_between(self, begin_s: float, end_s: float) -> float:
        return sum(self._windows.get(window, 0.0) for window in range(int(begin_s / WINDOW_S), int(end_s / WINDOW_S) + 1))


def _spread(windows: dict[int, float], size: float, begin_s: float, end_s: float) -> None:
    """Add bytes that were sent between two times to the windows between them."""
    first, last = int(begin_s / WINDOW_S), int(end_s / WINDOW_S)
    for window in range(max(first, last - KEPT_WINDOWS), last + 1):
        within_s = min(end_s, (window + 1) * WINDOW_S) - max(begin_s, window * WINDOW_S)
        share = within_s / (end_s - begin_s) if last > first else 1.0
        windows[window] = windows.get(window, 0.0) + share * size
    while len(windows) > KEPT_WINDOWS:
        del windows[min(windows)]


def _fullest(windows: Mapping[int, float]) -> float:
    """Return the mean bytes per window of the fullest stretch; 0 without one."""
    fullest, run = 0.0, list[float]()
    for window in sorted(windows):
        if window - 1 not in windows:
            run = []
        elif window + 1 in windows:
            run.append(windows[window])
        stretch = run[-STRETCH:]
        if len(stretch) == STRETCH or (stretch and window + 1 not in windows):
            fullest = max(fullest, sum(stretch) / len(stretch))
    return fullest
