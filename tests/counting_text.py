"""Text whose every sample is known."""

from __future__ import annotations

import numpy as np

from spes_p2p.messages.samples import Interval
from spes_p2p.testing.simulate.swarm import NUM_SAMPLES


class CountingText:
    """Samples that count upwards from the position, modulo 40."""

    num_samples = NUM_SAMPLES

    def read(self, interval: Interval) -> np.ndarray:
        return (np.arange(interval.start, interval.stop)[:, None] + np.arange(16)) % 40

    def read_spread(self, count: int) -> np.ndarray:
        return self.read(Interval(0, 0, count))
