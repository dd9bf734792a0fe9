"""Which peers are near: those to which this peer lately sent about as fast as to any other.

A transfer competes with the other transfers of a round, so a single one may be slow anywhere; the fastest of the latest few
counts. Transfers are forgotten after many rounds, so that a line between sites, which few transfers cross, is measured again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from spes_p2p.net.throughput import CONFIRMED_BYTES, FASTEST_BYTES_PER_S

NEAR_RATIO = 4.0
"""A peer is far if transfers to it move at less than the fastest rate divided by this."""
LONG_S = 1.0
"""Nobody is far to whom a transfer takes less: no slow line is worth a detour."""
KEPT_TRANSFERS, KEPT_ROUNDS = 4, 128


@dataclass(frozen=True, order=True)
class _Transfer:
    bytes_per_s: float
    seconds: float
    round: int


class Nearness:
    """The latest transfers to each peer."""

    def __init__(self) -> None:
        self._transfers: dict[str, deque[_Transfer]] = defaultdict(lambda: deque(maxlen=KEPT_TRANSFERS))
        self._round = 0
        """How often `near` was asked."""

    def note(self, peer: str, size: int, seconds: float, is_confirmed: bool) -> None:
        """Note that these bytes went to a peer. Without its confirmation they may only have reached a buffer."""
        if size >= CONFIRMED_BYTES and seconds > 0 and (is_confirmed or seconds >= LONG_S):
            rate = min(size / seconds, FASTEST_BYTES_PER_S)
            self._transfers[peer].append(_Transfer(rate, seconds, self._round))

    def near(self, peers: Iterable[str]) -> frozenset[str]:
        """Return which of these peers are near; none if nobody is far, nor those to whom it sent nothing. Ask once a round."""
        self._round += 1
        for peer, transfers in list(self._transfers.items()):
            if transfers[-1].round < self._round - KEPT_ROUNDS:
                del self._transfers[peer]
        fastest = {peer: max(self._transfers[peer]) for peer in peers if peer in self._transfers}
        least = max((each.bytes_per_s for each in fastest.values()), default=0.0) / NEAR_RATIO
        near = frozenset(peer for peer, each in fastest.items() if each.bytes_per_s >= least or each.seconds < LONG_S)
        return near if len(near) < len(fastest) else frozenset()
