"""Does what leaves the members' pending come into the base? Recomputed from outside, after every round of a virtual swarm.

What a trainer has changed by training, less what is pending, was sent. Of a round in which all contributors are seen, before
and after, the base must have moved by the mean of what each of them sent, weighted by tokens. So an update that counts twice,
or not at all, is found though everybody has the same bits. Experts are not looked at: they change owners, and merge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from spes_p2p.model.layout import Layout

CHUNK = 64
"""Elements of one group that are in one part together."""
TOLERANCE = 5e-5
"""Root mean square of what codecs and float32 round off; one local step of the synthetic trainer changes 20 times as much."""
KEPT_ROUNDS = 4


@dataclass(frozen=True)
class Standing:
    """One trainer with its base in place, between two phases. float64, of the weights that everybody trains."""

    round: int
    base: np.ndarray
    sent: np.ndarray
    """All that it trained in this life, less what is pending."""


@dataclass
class Work:
    """Compares rounds with what their contributors sent."""

    layout: Layout
    _last: dict[str, Standing] = field(default_factory=dict)
    _sent: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    """By digest of the base that a round made, by peer; the last rounds."""

    def forget(self, peer: str) -> None:
        """Its life began, its base came from elsewhere, or it gave work up: its next round tells nothing."""
        self._last.pop(peer, None)

    def standing(self, round_number: int, base: np.ndarray, local: np.ndarray, trained: np.ndarray) -> Standing:
        """`base`: with outer momentum or without. `local`, `trained`: all weights of a trainer, and its changes to them."""
        everybodys = np.concatenate([np.arange(g.start, g.stop) for g in self.layout.groups if g.expert is None])
        values = base[everybodys].astype(np.float64)
        return Standing(round_number, values, trained[everybodys] - (local[everybodys] - values))

    def committed(self, peer: str, now: Standing, digest: str, tokens: Mapping[str, int]) -> float | None:
        """The peer stands on the base of a round. How far did it move from what was sent (root mean square, the worst chunk)?

        `tokens`: of the round's contributors. None as long as not all of them are seen, or when the error is a rounding error.
        """
        last, self._last[peer] = self._last.get(peer), now
        if last is None or last.round != now.round - 1:
            return None
        sent = self._sent.setdefault(digest, {})
        sent[peer] = now.sent - last.sent
        while len(self._sent) > KEPT_ROUNDS:
            del self._sent[next(iter(self._sent))]
        contributors = {name: count for name, count in tokens.items() if count}
        if peer not in contributors or not contributors.keys() <= sent.keys():
            return None
        moved, updates = now.base - last.base, {name: sent[name] for name in contributors}
        worst = max(_error(moved[chunk], {name: each[chunk] for name, each in updates.items()}, contributors)
                    for chunk in _chunks(self.layout))
        return worst if worst > TOLERANCE else None


def _chunks(layout: Layout) -> Iterator[slice]:
    """Of what everybody trains: places whose values are all of one part."""
    end = 0
    for group in layout.groups:
        if group.expert is None:
            begin, end = end, end + group.size
            yield from (slice(start, min(start + CHUNK, end)) for start in range(begin, end, CHUNK))


def _error(moved: np.ndarray, sent: Mapping[str, np.ndarray], tokens: Mapping[str, int]) -> float:
    """Whose update is zero was left out, or had nothing pending but counts: where a round dropped the shared weights and took
    the router, the member's tokens weigh in both the next time. Nothing is lost or doubled by that."""
    weighted = sum((sent[peer] * tokens[peer] for peer in sent), np.zeros(moved.size))
    totals = {sum(tokens[peer] for peer in sent if _rms(sent[peer]) > TOLERANCE), sum(tokens[peer] for peer in sent)}
    return min(_rms(moved - weighted / total) if total else _rms(moved) for total in totals)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))
