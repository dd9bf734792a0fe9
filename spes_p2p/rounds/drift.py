"""How a peer's updates stand to what a round made of everybody's: the cheapest sign of peers that drift apart.

N updates of equal length whose pairs have cosine c give a mean of sqrt(1/N + (1 - 1/N) c) times their length, and each has that
same number as its cosine with the mean: 1 for peers that agree, 1/sqrt(N) for independent ones.
"""

from __future__ import annotations

import numpy as np

from spes_p2p.observe.events import Drift


class DriftSums:
    """Inner products of what was sent with what the base moved by, part by part."""

    def __init__(self) -> None:
        self._by_kind: dict[str, np.ndarray] = {}

    def add(self, kind: str, sent: np.ndarray, step: np.ndarray) -> None:
        """One part of this kind of weights: my update, and the base's step."""
        found = np.array([sent @ sent, step @ step, sent @ step], np.float64)
        self._by_kind[kind] = self._by_kind.get(kind, 0.0) + found

    def by_kind(self) -> dict[str, Drift]:
        """Kinds of which nothing was added are left out."""
        return {kind: _drift(*found.tolist()) for kind, found in self._by_kind.items()}


def _drift(sent: float, step: float, product: float) -> Drift:
    lengths = sent**0.5 * step**0.5
    return Drift(sent**0.5, step**0.5, product / lengths if lengths else 0.0)
