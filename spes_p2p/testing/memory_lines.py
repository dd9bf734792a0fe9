"""Lines of the in-memory network: bandwidth that frames share, latency with jitter, and loss."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

MSS_BYTES = 1460
"""Payload of a TCP segment in an Ethernet frame (RFC 879)."""


@dataclass
class Line:
    """A peer's line, or one that a site shares: bytes per second each way, and when each way is free again."""

    up: float
    down: float
    up_free_at: float = 0.0
    down_free_at: float = 0.0

    def reserve_up(self, now: float, size: int) -> float:
        """Return when the frame has left."""
        self.up_free_at = max(now, self.up_free_at) + size / self.up
        return self.up_free_at

    def reserve_down(self, now: float, size: int) -> float:
        """Return when the frame has arrived."""
        self.down_free_at = max(now, self.down_free_at) + size / self.down
        return self.down_free_at


class Lines:
    """The lines of all peers and what lies between them."""

    def __init__(self, seed: int, latency_s: float, jitter: float, bandwidth_bytes_per_s: float):
        self.latency_s = latency_s
        """One way, between two peers for which no other is set."""
        self._jitter, self._bandwidth = jitter, bandwidth_bytes_per_s
        self._rng = random.Random(f"network/{seed}")
        self._lines: dict[str, Line] = {}
        self._sites: dict[str, Line] = {}
        """By peer: the line that it shares with the others at its site."""
        self._pair_latency: dict[frozenset[str], float] = {}
        self._peer_latency: dict[str, float] = {}
        self._loss: dict[str, float] = {}
        """By peer: the share of packets that its line loses; peers whose lines lose nothing are in no entry."""
        self._paced_until: dict[tuple[str, str], float] = {}
        """By (source, target): when TCP has sent what it was given."""

    def of(self, peer: str) -> Line:
        """Return a peer's line."""
        return self._lines.setdefault(peer, Line(self._bandwidth, self._bandwidth))

    def share(self, peers: Iterable[str], up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """Put peers at one site: what they exchange with others passes a line that they share, too."""
        self._sites.update(dict.fromkeys(peers, Line(up_bytes_per_s, down_bytes_per_s)))

    def set_latency(self, a: str, b: str, latency_s: float) -> None:
        """Set the one-way latency between two peers, in both directions."""
        self._pair_latency[frozenset((a, b))] = latency_s

    def set_peer_latency(self, peer: str, latency_s: float) -> None:
        """Set a peer's part in latencies: between two peers it is the mean of theirs."""
        self._peer_latency[peer] = latency_s

    def set_loss(self, peer: str, loss: float) -> None:
        """Let a peer's line lose this share of packets, each way; below 1."""
        if loss:
            self._loss[peer] = loss
        else:
            self._loss.pop(peer, None)

    def delay(self, source: str, target: str, size: int = 0) -> float:
        """Return how long a frame travels, with jitter and, where its packets are lost, their retransmission."""
        latency_s = self.latency_s
        if self._peer_latency or self._pair_latency:
            latency_s = self._latency(source, target)
        if self._jitter:
            latency_s *= 1.0 + self._jitter * self._rng.random()
        return latency_s + self._recovery_s(source, target, size) if self._loss else latency_s

    def leave(self, source: str, target: str, now: float, size: int) -> float:
        """Return when the frame has left its sender's line, and those of sites."""
        departs = self.of(source).reserve_up(now, size)
        here, there = self._sites.get(source), self._sites.get(target)
        if here is not there:
            departs = here.reserve_up(departs, size) if here is not None else departs
            departs = there.reserve_down(departs, size) if there is not None else departs
        return max(departs, self._paced(source, target, now, size)) if self._loss else departs

    def tcp_bytes_per_s(self, source: str, target: str) -> float:
        """Return what one TCP connection carries on a path that loses packets: MSS / RTT * sqrt(3 / (2 p)).

        Mathis, Semke, Mahdavi, Ott: The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm (1997), equation 3, with
        the constant for periodic loss and an acknowledgement of each segment. The round trip is that of the empty path.
        """
        loss, latency_s = self._path_loss(source, target), self._latency(source, target)
        return MSS_BYTES / (2 * latency_s) * math.sqrt(1.5 / loss) if loss and latency_s else math.inf

    def _latency(self, source: str, target: str) -> float:
        own = self._peer_latency
        between = (own.get(source, self.latency_s) + own.get(target, self.latency_s)) / 2 if own else self.latency_s
        return self._pair_latency.get(frozenset((source, target)), between) if self._pair_latency else between

    def _path_loss(self, source: str, target: str) -> float:
        here, there = self._loss.get(source, 0.0), self._loss.get(target, 0.0)
        return here + there - here * there

    def _paced(self, source: str, target: str, now: float, size: int) -> float:
        """Return when the TCP connection between two peers, which all their streams share, has sent the frame."""
        if not self._path_loss(source, target):
            return now
        until = max(now, self._paced_until.get((source, target), 0.0)) + size / self.tcp_bytes_per_s(source, target)
        self._paced_until[source, target] = until
        return until

    def _recovery_s(self, source: str, target: str, size: int) -> float:
        """Return how much later the frame is whole: a round trip if a packet is lost, another each time it is lost again."""
        loss = self._path_loss(source, target)
        if not loss or self._rng.random() < (1.0 - loss) ** max(1, math.ceil(size / MSS_BYTES)):
            return 0.0
        round_trips = 1
        while self._rng.random() < loss:
            round_trips += 1
        return round_trips * 2 * self._latency(source, target)
