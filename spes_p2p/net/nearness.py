"""Which peers are near: those behind no slower line than this peer's own.

The updates that a peer sends in a round compete, and on a full line some starve for long, to any peer. So one transfer counts
with all that were under way: a slow line between sites leaves the last ones alone when all others have long arrived. The best
of the latest few counts. Transfers are forgotten after many rounds, so that a line between sites, which few cross, is measured
again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from spes_p2p.net.throughput import CONFIRMED_BYTES, FASTEST_BYTES_PER_S

NEAR_RATIO = 3.0
"""A peer is far if, during a transfer to it, the transfers to all together are slower than they once were, by this factor."""
LONG_S = 1.0
"""Nobody is far to whom a transfer takes less: no slow line is worth a detour."""
KEPT_TRANSFERS, KEPT_ROUNDS = 4, 128


@dataclass(frozen=True)
class _Transfer:
    peer: str
    size: int
    began_s: float
    ended_s: float
    is_confirmed: bool

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s

    def bytes_during(self, other: _Transfer) -> float:
        """Return how many of these bytes moved during another transfer."""
        shared_s = min(self.ended_s, other.ended_s) - max(self.began_s, other.began_s)
        return self.size * max(0.0, shared_s) / self.seconds


@dataclass(frozen=True, order=True)
class _Rate:
    """Bytes per second to all peers, during a transfer. A better one is greater."""

    is_confirmed: bool
    sent: float
    """Of all transfers that were under way."""
    arrived: float
    """Of those that had arrived at its end: what this peer's line carried at least."""
    seconds: float
    round: int


class Nearness:
    """The rates during the latest transfers to each peer."""

    def __init__(self) -> None:
        self._rates: dict[str, deque[_Rate]] = defaultdict(lambda: deque(maxlen=KEPT_TRANSFERS))
        self._noted: list[_Transfer] = []
        """Since `near` was last asked."""
        self._round = 0
        """How often it was asked."""

    def note(self, peer: str, size: int, began_s: float, ended_s: float, is_confirmed: bool) -> None:
        """Note that these bytes went to a peer. Without its confirmation they may only have reached a buffer."""
        seconds = ended_s - began_s
        if size >= CONFIRMED_BYTES and seconds > 0 and (is_confirmed or seconds >= LONG_S):
            self._noted.append(_Transfer(peer, size, began_s, ended_s, is_confirmed))

    def near(self, peers: Iterable[str]) -> frozenset[str]:
        """Return which of these peers are near; none if nobody is far, nor those to whom it sent nothing. Ask once a round."""
        for each in self._noted:
            sent = sum(other.bytes_during(each) for other in self._noted)
            arrived = sum(
                other.bytes_during(each) for other in self._noted if other.is_confirmed and other.ended_s <= each.ended_s
            )
            sent_per_s, arrived_per_s = (min(size / each.seconds, FASTEST_BYTES_PER_S) for size in (sent, arrived))
            rate = _Rate(each.is_confirmed, sent_per_s, arrived_per_s, each.seconds, self._round)
            self._rates[each.peer].append(rate)
        self._noted.clear()
        self._round += 1
        for peer, rates_of in list(self._rates.items()):
            if rates_of[-1].round < self._round - KEPT_ROUNDS:
                del self._rates[peer]
        known = {peer: self._rates[peer] for peer in peers if peer in self._rates}
        least = max((each.arrived for rates_of in known.values() for each in rates_of), default=0.0) / NEAR_RATIO
        best = {peer: max(rates_of) for peer, rates_of in known.items()}
        near = frozenset(peer for peer, each in best.items() if each.sent >= least or each.seconds < LONG_S)
        return near if len(near) < len(best) else frozenset()
