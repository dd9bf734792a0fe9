"""A phase of one trainer, on text whose every sample is known."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np

from spes_p2p.messages.samples import Interval
from spes_p2p.training.interface import Phase, PhaseReport, Trainer


class CountingText:
    """Samples that count upwards from the position, modulo 60: easy to learn, and each known by its first token."""

    num_samples = 1000

    def __init__(self, repeated: Callable[[int], bool] = lambda position: False, length: int = 16):
        self.repeated, self.length = repeated, length
        self.threads: set[int] = set()

    def read(self, interval: Interval) -> np.ndarray:
        self.threads.add(threading.get_ident())
        positions = np.arange(interval.start, interval.stop)
        samples = (positions[:, None] + np.arange(self.length)) % 60
        samples[[self.repeated(int(p)) for p in positions]] = 7
        return samples

    def read_spread(self, count: int) -> np.ndarray:
        return self.read(Interval(0, 0, count))


def phase_of(steps: int, first_step: int = 0, slices: tuple[Interval, ...] | None = None) -> Phase:
    return Phase(0, first_step, 10, steps, slices or (Interval(0, 0, 4 * steps),))


def train(trainer: Trainer, phase: Phase, stop_after: float = math.inf) -> PhaseReport:
    done: list[int] = []
    report = trainer.train(phase, lambda: len(done) >= stop_after, lambda steps, speed: done.append(steps))
    assert done == list(range(1, report.steps + 1))
    return report


def bits(values: np.ndarray) -> bytes:
    return values.astype(np.float32).tobytes()
