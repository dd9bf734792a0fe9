"""Does what leaves the members' pending come into the base? Recomputed from outside, after every round of a virtual swarm.

What a trainer has changed by training, less what is pending, was sent. Of a round in which all contributors are seen, before
and after, the base must have moved by the mean of what each of them sent, weighted by the tokens behind it: those that it
trained since a round took its update of that part the last time. So an update that counts twice, or not at all, or with a wrong
weight, is found though everybody has the same bits. Experts are not looked at: they change owners, and merge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from spes_p2p.model.layout import Layout

CHUNK = 64
"""Elements of one group that are in one part together."""
TOLERANCE = 5e-5
"""Root mean square of what codecs and float32 round off; one local step of the synthetic trainer changes 20 times as much."""
ROUNDING = {"int4": 0.25}
"""By codec: so much of a round's largest change may the reducers' encoding drop in it, with what was dropped in the round
before."""
KEPT_ROUNDS = 4


@dataclass(frozen=True)
class Standing:
    """One trainer with its base in place, between two phases. float64, of the weights that everybody trains."""

    round: int
    base: np.ndarray
    sent: np.ndarray
    """All that it trained in this life, less what is pending."""
    pending: np.ndarray
    tokens: int
    """Trained in this life."""


@dataclass
class Work:
    """Compares rounds with what their contributors sent."""

    layout: Layout
    overlap: bool
    """Does a round carry what was trained before the last phase?"""
    rounding: float = 0.0
    """Of the campaign's codec (ROUNDING)."""
    _largest: dict[str, float] = field(default_factory=dict)
    """By peer: the largest change of the base in its last round."""
    _last: dict[str, Standing] = field(default_factory=dict)
    _taken: dict[str, np.ndarray] = field(default_factory=dict)
    """By peer, chunk by chunk: tokens that it had trained in this life with what a round took last; -1: not known."""
    _sent: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)
    """By digest of the base that a round made, by peer: what it sent, and the tokens behind each chunk. The last rounds."""

    def forget(self, peer: str) -> None:
        """Its life began, its base came from elsewhere, or it gave work up: its next round tells nothing."""
        self._last.pop(peer, None)
        self._taken.pop(peer, None)

    def standing(
        self, round_number: int, base: np.ndarray, local: np.ndarray, trained: np.ndarray, tokens: int
    ) -> Standing:
        """`base`: with outer momentum or without. `local`, `trained`: all weights of a trainer, and its changes to them."""
        everybodys = np.concatenate([np.arange(g.start, g.stop) for g in self.layout.groups if g.expert is None])
        values = base[everybodys].astype(np.float64)
        pending = local[everybodys] - values
        return Standing(round_number, values, trained[everybodys] - pending, pending, tokens)

    def committed(self, peer: str, now: Standing, digest: str, contributors: Set[str]) -> float | None:
        """The peer stands on the base of a round. How far did it move from what was sent (root mean square, the worst chunk)?

        None as long as not all of the round's contributors are seen, or when the error is a rounding error.
        """
        last, self._last[peer] = self._last.get(peer), now
        chunks = list(_chunks(self.layout))
        taken = self._taken.setdefault(peer, np.full(len(chunks), -1))
        if last is None or last.round != now.round - 1:
            if not self.overlap:
                taken[[_rms(now.pending[chunk]) <= TOLERANCE for chunk in chunks]] = now.tokens
            return None
        moved = now.base - last.base
        before, self._largest[peer] = self._largest.get(peer, 0.0), float(np.max(np.abs(moved)))
        allowed = TOLERANCE + self.rounding * max(before, self._largest[peer])
        announced = last.tokens if self.overlap else now.tokens
        sent = self._sent.setdefault(digest, {})
        update = now.sent - last.sent
        sent[peer] = update, np.where(taken < 0, np.nan, announced - taken)
        taken[[_rms(update[chunk]) > TOLERANCE for chunk in chunks]] = announced
        while len(self._sent) > KEPT_ROUNDS:
            del self._sent[next(iter(self._sent))]
        if peer not in contributors or not contributors <= sent.keys():
            return None
        updates = [sent[name] for name in sorted(contributors)]
        errors = (
            _error(moved[chunk], [(values[chunk], tokens[place]) for values, tokens in updates])
            for place, chunk in enumerate(chunks)
        )
        worst = max(errors)
        return worst if worst > allowed else None


def _chunks(layout: Layout) -> Iterator[slice]:
    """Of what everybody trains: places whose values are all of one part."""
    end = 0
    for group in layout.groups:
        if group.expert is None:
            begin, end = end, end + group.size
            yield from (slice(start, min(start + CHUNK, end)) for start in range(begin, end, CHUNK))


def _error(moved: np.ndarray, sent: Sequence[tuple[np.ndarray, float]]) -> float:
    """`sent`: each contributor's update with its tokens. One of zero was left out; 0 where somebody's tokens are not known."""
    taken = [(update, tokens) for update, tokens in sent if _rms(update) > TOLERANCE]
    total = sum(tokens for _, tokens in taken)
    if math.isnan(total):
        return 0.0
    weighted = sum((update * tokens for update, tokens in taken), np.zeros(moved.size))
    return _rms(moved - weighted / total) if total else _rms(moved)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))
