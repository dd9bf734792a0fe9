"""The batches of a phase: its slices are split, read ahead of training, and filtered."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from spes_p2p.config.campaign import TrainingConfig
from spes_p2p.messages.samples import Interval
from spes_p2p.storage.threads import ahead
from spes_p2p.training.filter import is_repetitive

Samples = npt.NDArray[np.int64]

READ_AHEAD = 2
"""Batches read while one is trained on."""


class Reader(Protocol):
    """Source of samples `[n, sequence_length]` (int64)."""

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch."""

    def read(self, interval: Interval) -> Samples:
        """Return the samples at positions of an epoch's shuffled order."""

    def read_spread(self, count: int) -> Samples:
        """Return up to `count` samples spread over the files; deterministic."""


def split_samples(slices: Sequence[Interval], count: int) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """Split the slices after the first `count` positions, or at their end if they have fewer."""
    first: list[Interval] = []
    rest: list[Interval] = []
    for interval in slices:
        cut = min(interval.stop, interval.start + count)
        count -= cut - interval.start
        first.append(Interval(interval.epoch, interval.start, cut))
        rest.append(Interval(interval.epoch, cut, interval.stop))
    return tuple(i for i in first if len(i) > 0), tuple(i for i in rest if len(i) > 0)


def batches_of(
    reader: Reader, slices: Sequence[Interval], count: int, training: TrainingConfig
) -> Generator[Samples, None, None]:
    """Yield this many batches of the slices, which a thread reads ahead. Close it."""
    return ahead(partial(_read, reader, training.instance_filter), _split(slices, count, training.batch_size), 1, READ_AHEAD)


def _split(slices: Sequence[Interval], count: int, batch_size: int) -> Iterator[tuple[Interval, ...]]:
    for _ in range(count):
        batch, slices = split_samples(slices, batch_size)
        yield batch


def _read(reader: Reader, is_filtered: bool, slices: tuple[Interval, ...]) -> Samples:
    samples = np.concatenate([reader.read(interval) for interval in slices])
    return samples[~is_repetitive(samples)] if is_filtered else samples
