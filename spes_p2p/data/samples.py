"""Samples of a corpus: consecutive sequences of fixed length, read in the shuffled order of an epoch.

Samples span documents but not files; the rest of a file that does not fill a sample is dropped (as in SPES and OLMo). An epoch
shuffles runs of contiguous samples, so that most reads are sequential.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from spes_p2p.data.token_files import TokenArray
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Interval

Samples = npt.NDArray[np.int64]

Fetch = Callable[[int, npt.NDArray[np.int64]], None]
"""Makes samples available: (index of a file, sample indices within it). May block; may raise UserError."""

MAX_PIECE_SAMPLES, MIN_EPOCH_PIECES = 16, 4096
"""An epoch shuffles runs of 16 contiguous samples, or shorter ones where a small corpus would have fewer than 4096 runs: each
batch should mix the whole corpus."""
BLOCK_KEYS = 2**20
"""Sort keys per hash stream; bounds the stream's memory."""
CACHED_EPOCHS = 2
"""The current epoch and the previous one, whose returned samples may still be trained."""


@dataclass(frozen=True)
class EpochOrder:
    """The order in which an epoch visits the pieces."""

    pieces: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    """First position of each visited piece; same shape."""


def epoch_order(num_samples: int, piece_samples: int, seed: int, epoch: int) -> EpochOrder:
    """Sort the pieces by 64-bit keys that SHAKE-256 derives from (seed, epoch): the same order on every machine."""
    count = -(-num_samples // piece_samples)
    pieces = np.argsort(_keys(seed, epoch, count), kind="stable").astype(np.int64)
    sizes = np.minimum(piece_samples, num_samples - pieces * piece_samples)
    return EpochOrder(pieces, np.cumsum(sizes) - sizes)


class SampleReader:
    """Reads samples `[n, sequence_length]` (int64) of a corpus, given as one array of ids per token file.

    Intervals contain positions in an epoch's shuffled order; indices count along the files. Both are below `num_samples`.
    Raises UserError if no file has a complete sample.
    """

    def __init__(
        self,
        files: Sequence[TokenArray],
        sequence_length: int,
        seed: int,
        fetch: Fetch | None = None,
        piece_samples: int | None = None,
    ):
        """`fetch` is called before samples are read from a file. `piece_samples`: samples per piece; default by corpus size."""
        self._fetch = fetch
        whole = [tokens[: len(tokens) // sequence_length * sequence_length] for tokens in files]
        self._files = [tokens.reshape(-1, sequence_length) for tokens in whole]
        self._stops = np.cumsum([len(chunks) for chunks in self._files], dtype=np.int64)
        self._sequence_length, self._seed = sequence_length, seed
        self._piece_samples = piece_samples or min(MAX_PIECE_SAMPLES, max(1, self.num_samples // MIN_EPOCH_PIECES))
        self._orders: dict[int, EpochOrder] = {}
        if self.num_samples == 0:
            longest = max((len(tokens) for tokens in files), default=0)
            raise UserError(f"the token files contain no complete sample: the longest has {longest} tokens, "
                            f"training.sequence_length is {sequence_length}; add text or shorten the sequence")

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch."""
        return int(self._stops[-1]) if len(self._stops) else 0

    @property
    def sequence_length(self) -> int:
        """Number of tokens in one sample."""
        return self._sequence_length

    def read(self, interval: Interval) -> Samples:
        """Return the samples at positions `[start, stop)` of an epoch. Raises IndexError for positions outside it."""
        if not 0 <= interval.start <= interval.stop <= self.num_samples:
            raise IndexError(f"samples [{interval.start}, {interval.stop}) of {self.num_samples}")
        return self._gather(self.indices(interval))

    def read_spread(self, count: int) -> Samples:
        """Return up to `count` samples spread evenly over the files: a representative choice of held-out text."""
        count = min(count, self.num_samples)
        return self._gather(np.arange(count) * self.num_samples // max(count, 1))

    def indices(self, interval: Interval) -> npt.NDArray[np.int64]:
        """Return the sample indices, along the files, at the positions of an interval."""
        order = self._order(interval.epoch)
        positions = np.arange(interval.start, interval.stop)
        visit = np.searchsorted(order.starts, positions, side="right") - 1
        return order.pieces[visit] * self._piece_samples + positions - order.starts[visit]

    def _order(self, epoch: int) -> EpochOrder:
        if epoch not in self._orders:
            while len(self._orders) >= CACHED_EPOCHS:
                del self._orders[min(self._orders)]
            self._orders[epoch] = epoch_order(self.num_samples, self._piece_samples, self._seed, epoch)
        return self._orders[epoch]

    def _gather(self, indices: npt.NDArray[np.int64]) -> Samples:
        samples = np.empty((len(indices), self._sequence_length), np.int64)
        file_of = np.searchsorted(self._stops, indices, side="right")
        for number in np.unique(file_of):
            here = file_of == number
            chunks = self._files[number]
            wanted = indices[here] - (self._stops[number] - len(chunks))
            if self._fetch is not None:
                self._fetch(int(number), wanted)
            samples[here] = chunks[wanted]
        return samples


def _keys(seed: int, epoch: int, count: int) -> npt.NDArray[np.uint64]:
    keys = np.empty(count, np.uint64)
    for block, first in enumerate(range(0, count, BLOCK_KEYS)):
        stream = hashlib.shake_256(f"spes-p2p epoch order/{seed}/{epoch}/{block}".encode())
        here = keys[first : first + BLOCK_KEYS]
        here[:] = np.frombuffer(stream.digest(8 * len(here)), "<u8")
    return keys
