"""Client drift: the cosine and lengths of a peer's update and of the round's mean.

N updates of equal length with pairwise cosine c have a mean of sqrt(1/N + (1 - 1/N) c) times their length, and the same number
is each one's cosine with the mean: 1 for equal updates, 1/sqrt(N) for independent ones.
"""

from __future__ import annotations

import numpy as np

from spes_p2p.observe.events import Drift


class DriftSums:
    """Sums of inner products of the sent updates and the base's steps, by kind of weights."""

    def __init__(self) -> None:
        self._by_kind: dict[str, np.ndarray] = {}

    def add(self, kind: str, sent: np.ndarray, step: np.ndarray) -> None:
        """Add one part: the update that this peer sent, and the base's step."""
        found = np.array([sent @ sent, step @ step, sent @ step], np.float64)
        self._by_kind[kind] = self._by_kind.get(kind, 0.0) + found

    def by_kind(self) -> dict[str, Drift]:
        """Return the drift of each kind that has parts."""
        return {kind: _drift(*found.tolist()) for kind, found in self._by_kind.items()}


def _drift(sent: float, step: float, product: float) -> Drift:
    lengths = sent**0.5 * step**0.5
    return Drift(sent**0.5, step**0.5, product / lengths if lengths else 0.0)
