"""Which trainers the others wait for, and whose lines are thin."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from spes_p2p.messages.presence import PeerStatus, RoundRecord
from spes_p2p.observe.json_values import to_json

WAIT = "announce"
"""The stage in which a member waits until all members have announced that they are ready."""


def lines(
    peers: Sequence[PeerStatus], rounds: Mapping[str, Sequence[RoundRecord]], slow: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return what each trainer's line and pace do to the rounds, by its id, as JSON values.

    `rounds`: each peer's own records. `slow`: the trainers whose lines hold rounds up.

    thin: rounds wait for its upload. download: bytes per second in the last exchange. waits_s: seconds per round in which it
    waited for others. delays_s: seconds by which a round would have begun earlier without it.
    """
    trainers = [peer for peer in peers if peer.role == "trainer"]
    waits, delays = _waits(trainers, rounds)
    return {
        peer.peer_id: to_json({
            "thin": peer.peer_id in slow,
            "download": _rate(peer.round_received_bytes, peer.round_seconds.get("exchange", 0.0)),
            "waits_s": _mean(waits.get(peer.peer_id, ())), "delays_s": _mean(delays.get(peer.peer_id, ())),
        })
        for peer in trainers
    }


def _waits(
    trainers: Sequence[PeerStatus], rounds: Mapping[str, Sequence[RoundRecord]]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return each trainer's waits and delays, one per round that at least two trainers recorded."""
    by_round: dict[int, dict[str, float]] = {}
    for peer in trainers:
        for record in rounds.get(peer.peer_id, ()):
            waited = dict(record.seconds).get(WAIT, math.nan)
            if record.round > 0 and math.isfinite(waited):
                by_round.setdefault(record.round, {})[peer.peer_id] = waited
    waits, delays = dict[str, list[float]](), dict[str, list[float]]()
    for waited_s in by_round.values():
        if len(waited_s) < 2:
            continue
        least, second = sorted(waited_s.values())[:2]
        last = min(waited_s, key=lambda peer: waited_s[peer])
        for peer_id, seconds in waited_s.items():
            waits.setdefault(peer_id, []).append(seconds)
            delays.setdefault(peer_id, []).append(second - least if peer_id == last else 0.0)
    return waits, delays


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 2) if values else math.nan


def _rate(size: int, seconds: float) -> float:
    rate = size / seconds if seconds > 0 else math.nan
    return round(rate) if math.isfinite(rate) else math.nan
