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

    def __init__(self, kind: MeanKind, out: np.ndarray):
        """`out`: float32 `[rows(kind), size]` of any content; the mean is made there."""
        out[:] = 0
        self._sum: np.ndarray = out[0]
        self._magnitudes: np.ndarray | None = out[1] if kind == "magnitude" else None

    @staticmethod
    def rows(kind: MeanKind) -> int:
        """How many arrays of the updates' size one mean needs."""
        return 2 if kind == "magnitude" else 1

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
        mean = self._sum
        if self._magnitudes is not None:
            mean = np.divide(mean, self._magnitudes, out=np.zeros_like(mean), where=self._magnitudes > 0)
        elif arrived != 1:
            mean = mean * np.float32(1 / arrived)
        return mean
