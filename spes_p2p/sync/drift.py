"""How a peer's updates stand to what a round made of everybody's: the cheapest sign of peers that drift apart.

N updates of equal length whose pairs have cosine c give a mean of sqrt(1/N + (1 - 1/N) c) times their length, and each has that
same number as its cosine with the mean: 1 for peers that agree, 1/sqrt(N) for independent ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from spes_p2p.observe.events import Drift
from spes_p2p.sync.parts import Part


def drift_by_kind(
    old: np.ndarray, new: np.ndarray, accepted: Iterable[tuple[Part, np.ndarray]]
) -> dict[str, Drift]:
    """Of accepted parts with the values sent, when the base went from `old` to `new`; kinds without any are left out."""
    sums: dict[str, np.ndarray] = {}
    for part, values in accepted:
        step = new[part.start : part.stop] - old[part.start : part.stop]
        found = np.array([values @ values, step @ step, values @ step], np.float64)
        sums[part.group.kind] = sums.get(part.group.kind, 0.0) + found
    return {kind: _drift(*found.tolist()) for kind, found in sums.items()}


def _drift(sent: float, step: float, product: float) -> Drift:
    lengths = sent**0.5 * step**0.5
    return Drift(sent**0.5, step**0.5, product / lengths if lengths else 0.0)
