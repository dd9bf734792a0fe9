"""How a reducer makes one update of several peers' updates. Nobody else computes it: it need not give the same bits elsewhere.

The mean by tokens is SPES's and DiLoCo's. Where updates are mostly noise, or where a coordinate moved at one peer only (the
embedding of a rare token), that mean is shorter than each update, by up to the number of peers. The mean by magnitude restores
the length, element by element: sum w |u| u / sum w |u|. Updates that agree give themselves; one that is alone counts in full;
independent noise of N peers keeps about the length that one peer's has.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

MeanKind = Literal["tokens", "magnitude"]


class RunningMean:
    """The mean of updates (float32 `[size]`) that arrive one by one, each with its share of the expected weight."""

    def __init__(self, kind: MeanKind, size: int):
        self._by_magnitude = kind == "magnitude"
        self._sum = np.zeros(size, np.float32)
        self._magnitudes = np.zeros(size, np.float32) if self._by_magnitude else None

    def add(self, update: np.ndarray, share: float) -> None:
        """One peer's update; the shares of all that are expected sum to 1."""
        scaled = update * np.float32(share)
        if self._magnitudes is not None:
            np.abs(scaled, out=scaled)
            self._magnitudes += scaled
            scaled *= update
        self._sum += scaled

    def result(self, arrived: float) -> np.ndarray:
        """The mean of what came, whose shares sum to `arrived`."""
        if self._magnitudes is not None:
            return np.divide(self._sum, self._magnitudes, out=np.zeros_like(self._sum), where=self._magnitudes > 0)
        return self._sum if arrived == 1 else self._sum * np.float32(1 / arrived)
