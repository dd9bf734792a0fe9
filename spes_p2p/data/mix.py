"""Several sources of training text in one campaign, in fixed shares, without rewriting token files.

The published manifest lists the files of all sources and each source's weight. Positions of an epoch's order are divided among
the sources by a periodic schedule in which every prefix has each source's share, less than one sample too few or too many; a
source reads its own samples in its own shuffled order and starts over, shuffled anew, when it has been read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from spes_p2p.data.manifest import MAX_TOTAL_WEIGHT, Manifest, Source
from spes_p2p.data.samples import SampleReader, Samples
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval


@dataclass(frozen=True)
class WeightedManifest:
    """One source of a mix."""

    name: str
    weight: float
    manifest: Manifest
    where: str
    """The manifest's path, for errors."""


def mixed_manifest(sources: Sequence[WeightedManifest]) -> Manifest:
    """Return the manifest of a mix. Raises UserError if the sources do not go together."""
    first, found = sources[0].manifest, dict[str, str]()
    for source in sources:
        for file in source.manifest.files:
            if file.path in found:
                raise UserError(f"{source.where}: has a token file {file.path}, as {found[file.path]} does; name them apart "
                                "with `spes-p2p tokenize --prefix`")
            found[file.path] = source.where
        if source.manifest.eos_token_id != first.eos_token_id:
            raise UserError(f"{source.where}: ends documents with id {source.manifest.eos_token_id}, {sources[0].where} with "
                            f"{first.eos_token_id}; tokenize both with one --eos-token")
    weights = whole_weights([source.weight for source in sources])
    return replace(
        first,
        vocab_size=max(source.manifest.vocab_size for source in sources),
        tokens=sum(source.manifest.tokens for source in sources),
        files=tuple(file for source in sources for file in source.manifest.files),
        sources=tuple(
            Source(source.name, weight, len(source.manifest.files)) for source, weight in zip(sources, weights, strict=True)
        ),
    )


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the ratio of the weights as written. Raises UserError if their sum is too large."""
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    divisor = math.gcd(*whole)
    if sum(whole) // divisor > MAX_TOTAL_WEIGHT:
        raise UserError(f"data.train: the weights {', '.join(map(str, weights))} repeat only after {sum(whole) // divisor} "
                        f"samples, more than {MAX_TOTAL_WEIGHT}; write them with fewer digits")
    return tuple(weight // divisor for weight in whole)


class Interleave:
    """The source of each position, and which sample of the source it is.

    One period is as long as the sum W of the weights w. Sample j of a source has the window from floor(j W / w) to
    ceil((j + 1) W / w); each position takes, of the samples whose window has begun, the one whose window ends first. As on one
    processor with utilisation 1 (earliest deadline first), every sample finds a place in its window, so the first n positions
    hold between floor(n w / W) and ceil(n w / W) samples of the source.
    """

    def __init__(self, weights: Sequence[int]):
        self.weights = np.array(weights, np.int64)
        self.period = sum(weights)
        self._sources = np.empty(self.period, np.int64)
        self._ranks = np.empty(self.period, np.int64)
        used = [0] * len(weights)
        for position in range(self.period):
            _, chosen = min(
                (-(-(used[source] + 1) * self.period // weight), source)
                for source, weight in enumerate(weights)
                if used[source] * self.period // weight <= position
            )
            self._sources[position], self._ranks[position] = chosen, used[chosen]
            used[chosen] += 1

    def places(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return source and sample number within it, counted over all epochs, of positions counted over all epochs."""
        periods, within = np.divmod(positions, self.period)
        sources = self._sources[within]
        return sources, periods * self.weights[sources] + self._ranks[within]


class MixedReader:
    """Reads a mix; see the module docstring. An epoch has as many samples as all sources together."""

    def __init__(self, readers: Sequence[SampleReader], weights: Sequence[int]):
        self._readers = readers
        self._interleave = Interleave(weights)

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch."""
        return sum(reader.num_samples for reader in self._readers)

    def read(self, interval: Interval) -> Samples:
        """Return the samples at positions `[start, stop)` of an epoch. Raises IndexError for positions outside it."""
        if not 0 <= interval.start <= interval.stop <= self.num_samples:
            raise IndexError(f"samples [{interval.start}, {interval.stop}) of {self.num_samples}")
        positions = interval.epoch * self.num_samples + np.arange(interval.start, interval.stop)
        sources, numbers = self._interleave.places(positions)
        samples = np.empty((len(positions), self._readers[0].sequence_length), np.int64)
        for source, reader in enumerate(self._readers):
            here = sources == source
            samples[here] = _read_run(reader, numbers[here])
        return samples

    def read_spread(self, count: int) -> Samples:
        """Return up to `count` samples, from the start of the first epoch."""
        return self.read(Interval(0, 0, min(count, self.num_samples)))


def _read_run(reader: SampleReader, numbers: npt.NDArray[np.int64]) -> Samples:
    """Return a source's samples with these consecutive numbers, counted over its own epochs."""
    epochs = numbers // reader.num_samples
    parts = [
        reader.read(Interval(int(epoch), int(mine[0]), int(mine[-1]) + 1))
        for epoch in np.unique(epochs)
        for mine in (numbers[epochs == epoch] - epoch * reader.num_samples,)
    ]
    return np.concatenate([np.empty((0, reader.sequence_length), np.int64), *parts])
