"""How long a peer may be silent before it counts as dead: learnt from the heartbeats of this swarm, not guessed by a user.

While a stream is open each end sends a heartbeat every HEARTBEAT_S. The bound is median + K * 1.4826 * MAD of the gaps that
were seen between them (this peer's if there are enough, else all peers'), never below a floor that covers a lost packet's
resending, never above the campaign's `silence_s`. MAD is the median absolute deviation; 1.4826 scales it to a standard
deviation of normal gaps (Hampel 1974).

On a thin line heartbeats wait behind megabytes of other streams. Any bytes from a peer, in any stream, therefore
show that it is alive. Where many connections share a line, some get nothing for seconds; so while this peer exchanges much, the
bound is the ceiling.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from spes_p2p.observe.outliers import outlier_bound

HEARTBEAT_S = 1.0
"""Seconds between heartbeats; a quarter of the ceiling where that is less."""
FLOOR_HEARTBEATS = 5.0
"""Heartbeats that may be missing however regular they were."""
CLOCK_ERROR_S = 1e-3
"""Timers may fire this much early."""
KEPT_GAPS, ENOUGH_GAPS = 64, 16
MAX_PEERS = 4096
"""Peers of which something is remembered. Anybody can come under ever new names; those not heard for longest are forgotten."""
MUCH_BYTES = 2**14
"""A message of this length is much."""
ELSEWHERE_CEILINGS = 3.0
"""Give up a silent stream after this many ceilings even if its peer is heard in other streams: the peer may have come back over
another connection."""


def silence_bound(gaps: Sequence[float], floor_s: float, ceiling_s: float) -> float:
    """Seconds of silence that mean death, from heartbeat gaps in seconds; the ceiling while there are too few of them."""
    if len(gaps) < ENOUGH_GAPS:
        return ceiling_s
    return min(max(outlier_bound(gaps), floor_s), ceiling_s)


class SilenceDetector:
    """The bound of each peer, from what it and the whole swarm showed."""

    def __init__(self, ceiling_s: float):
        """`ceiling_s`: the campaign's `silence_s`, the same on all peers."""
        self.ceiling_s = ceiling_s
        self.heartbeat_s = min(HEARTBEAT_S, ceiling_s / 4)
        self._all: deque[float] = deque(maxlen=KEPT_GAPS)
        self._of: dict[str, deque[float]] = {}
        self._shared_bound: float | None = None
        """From all peers' gaps; None when there is a new one."""
        self._bounds: dict[str, float] = {}
        """Of peers with enough gaps of their own, until the next one."""
        self._exchanged_at = -math.inf
        """When much was last sent or received."""
        self._heard_at: dict[str, float] = {}
        """By peer of which anything is remembered; the last heard is last."""
        self._lost_at: dict[str, float] = {}

    def saw_gap(self, peer: str, gap_s: float) -> None:
        """Record the gap between two heartbeats of a peer."""
        self._remember(peer)
        self._of.setdefault(peer, deque(maxlen=KEPT_GAPS)).append(gap_s)
        self._all.append(gap_s)
        self._shared_bound = None
        self._bounds.pop(peer, None)

    def moved(self, size: int, now_s: float) -> None:
        """A message of this many bytes was sent or received."""
        if size >= MUCH_BYTES:
            self._exchanged_at = now_s

    def heard(self, peer: str, now_s: float) -> None:
        """Something came from this peer."""
        self._remember(peer, now_s)
        self._lost_at.pop(peer, None)

    def dead_at(self, peer: str, heard_s: float) -> float:
        """Return when to give up a stream with this peer that last received something at `heard_s`."""
        bound_s = self.ceiling_s if self._exchanged_at >= heard_s - self.ceiling_s else self.bound(peer)
        elsewhere_s = min(self._heard_at.get(peer, heard_s) + bound_s, heard_s + ELSEWHERE_CEILINGS * self.ceiling_s)
        return max(heard_s + bound_s, elsewhere_s)

    def lost(self, peer: str, now_s: float) -> None:
        """A stream with this peer, or one that was to be opened, was silent for too long; nothing if it is heard elsewhere."""
        if now_s + CLOCK_ERROR_S >= self._heard_at.get(peer, -math.inf) + self.bound(peer):
            self._remember(peer)
            self._lost_at[peer] = now_s

    def is_lost(self, peer: str, now_s: float) -> bool:
        """Return whether the peer was found silent recently and not heard since, so that no caller waits for it again."""
        return peer in self._lost_at and now_s - self._lost_at[peer] < self.bound(peer)

    def forget_losses(self) -> None:
        """Forget which peers were silent, so that callers wait for them again."""
        self._lost_at.clear()

    def _remember(self, peer: str, heard_s: float | None = None) -> None:
        before_s = self._heard_at.pop(peer, -math.inf)
        self._heard_at[peer] = before_s if heard_s is None else heard_s
        if len(self._heard_at) > MAX_PEERS:
            oldest = next(iter(self._heard_at))
            for known in (self._heard_at, self._lost_at, self._of, self._bounds):
                known.pop(oldest, None)

    def bound(self, peer: str) -> float:
        """Seconds of silence after which this peer counts as dead."""
        own = self._of.get(peer, ())
        if len(own) < ENOUGH_GAPS:
            if self._shared_bound is None:
                self._shared_bound = self._bound_of(self._all)
            return self._shared_bound
        if peer not in self._bounds:
            self._bounds[peer] = self._bound_of(own)
        return self._bounds[peer]

    def _bound_of(self, gaps: Iterable[float]) -> float:
        return silence_bound(tuple(gaps), FLOOR_HEARTBEATS * self.heartbeat_s, self.ceiling_s)
