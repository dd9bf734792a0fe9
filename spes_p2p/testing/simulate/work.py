"""Check after each round of a virtual swarm that the base moved by what the members sent.

What a trainer changed by training, minus what is pending, was sent. In a round whose contributors are all observed before and
after, the base must move by the mean of what they sent, weighted by the tokens behind it: those trained since a round last took
the member's update of that part. This finds an update that counts twice, not at all, or with a wrong weight, although all peers
have the same bits. Experts are not checked: they change owners, and merge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from spes_p2p.model.layout import Layout

CHUNK = 64
"""Elements of one group that are in the same part."""
TOLERANCE = 5e-5
"""Root mean square of rounding by codecs and float32; a local step of the synthetic trainer changes 20 times as much."""
ROUNDING = {"int4": 0.25}
"""By codec: maximum rounding of the reducers' encoding in two rounds, as a fraction of the rounds' largest change."""
KEPT_ROUNDS = 4


@dataclass(frozen=True)
class WorkState:
    """State of a trainer between two phases: float64, of the weights that all peers train."""

    round: int
    base: np.ndarray
    sent: np.ndarray
    """Sum of what it trained in this life, minus what is pending."""
    pending: np.ndarray
    tokens: int
    """Trained in this life."""


@dataclass
class Work:
    """Compares rounds with what their contributors sent."""

    layout: Layout
    overlap: bool
    """Whether a round carries what was trained before the last phase."""
    rounding: float = 0.0
    """The campaign codec's entry in ROUNDING."""
    _largest: dict[str, float] = field(default_factory=dict)
    """By peer: largest change of the base in its last round."""
    _last: dict[str, WorkState] = field(default_factory=dict)
    _taken: dict[str, np.ndarray] = field(default_factory=dict)
    """By peer, for each chunk: tokens trained in this life when a round last took it; -1: unknown."""
    _sent: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)
    """By digest of a round's base, by peer: what it sent, and the tokens behind each chunk. The last rounds only."""

    def forget(self, peer: str) -> None:
        """Skip the peer's next round: it restarted, its base was replaced, or it discarded work."""
        self._last.pop(peer, None)
        self._taken.pop(peer, None)

    def state(
        self, round_number: int, base: np.ndarray, local: np.ndarray, trained: np.ndarray, tokens: int
    ) -> WorkState:
        """Return a trainer's state. `base`: with or without momentum. `local`, `trained`: weights, and changes by training."""
        everyones = np.concatenate([np.arange(g.start, g.stop) for g in self.layout.groups if g.expert is None])
        values = base[everyones].astype(np.float64)
        pending = local[everyones] - values
        return WorkState(round_number, values, trained[everyones] - pending, pending, tokens)

    def committed(self, peer: str, now: WorkState, digest: str, contributors: Mapping[str, int]) -> float | None:
        """Return the error of a round that the peer applied: root mean square over the worst chunk.

        None until all of the round's contributors were observed, or if the error is rounding. `contributors`: with their tokens
        in the plan, which bound the weight of each update.
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
        if peer not in contributors or not contributors.keys() <= sent.keys():
            return None
        updates = [(sent[name][0], np.minimum(sent[name][1], planned)) for name, planned in sorted(contributors.items())]
        errors = (
            _error(moved[chunk], [(values[chunk], tokens[place]) for values, tokens in updates])
            for place, chunk in enumerate(chunks)
        )
        worst = max(errors)
        return worst if worst > allowed else None


def _chunks(layout: Layout) -> Iterator[slice]:
    """Yield ranges of the weights that all peers train; each is within one part."""
    end = 0
    for group in layout.groups:
        if group.expert is None:
            begin, end = end, end + group.size
            yield from (slice(start, min(start + CHUNK, end)) for start in range(begin, end, CHUNK))


def _error(moved: np.ndarray, sent: Sequence[tuple[np.ndarray, float]]) -> float:
    """Return a chunk's error, 0 if any tokens are unknown. `sent`: updates with their tokens; zero updates were left out."""
    taken = [(update, tokens) for update, tokens in sent if _rms(update) > TOLERANCE]
    total = sum(tokens for _, tokens in taken)
    if math.isnan(total):
        return 0.0
    weighted = sum((update * tokens for update, tokens in taken), np.zeros(moved.size))
    return _rms(moved - weighted / total) if total else _rms(moved)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))
