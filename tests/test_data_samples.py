"""Samples cross documents but never files; an epoch's order is a permutation that all machines agree on."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.data.samples import SampleReader, epoch_order
from spes_p2p.data.slices import take
from spes_p2p.errors import UserError
from spes_p2p.messages.samples import Cursor, Interval


def reader_of_lengths(lengths: list[int], sequence_length: int = 4, piece_samples: int = 3, seed: int = 0) -> SampleReader:
    """Files whose ids tell where they are from: 1000 * file + place."""
    files = [np.arange(length, dtype=np.uint32) + 1000 * number for number, length in enumerate(lengths)]
    return SampleReader(files, sequence_length, seed, piece_samples=piece_samples)


lengths_with_samples = st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(lambda lengths: max(lengths) >= 4)


@given(lengths=lengths_with_samples)
def test_file_order_is_each_file_without_its_tail(lengths: list[int]) -> None:
    reader = reader_of_lengths(lengths)
    expected = [1000 * f + np.arange(4 * i, 4 * i + 4) for f, length in enumerate(lengths) for i in range(length // 4)]
    samples = reader.read_spread(reader.num_samples)
    assert samples.dtype == np.int64
    assert np.array_equal(samples, expected)


@given(lengths=lengths_with_samples, piece=st.integers(1, 20), seed=st.integers(), epoch=st.integers(0, 5))
def test_an_epoch_visits_every_sample_once(lengths: list[int], piece: int, seed: int, epoch: int) -> None:
    reader = reader_of_lengths(lengths, piece_samples=piece, seed=seed)
    visited = reader.read(Interval(epoch, 0, reader.num_samples))
    assert sorted(visited.tolist()) == reader.read_spread(reader.num_samples).tolist()


@given(num_samples=st.integers(1, 200), piece=st.integers(1, 20))
def test_an_epoch_keeps_pieces_together(num_samples: int, piece: int) -> None:
    reader = reader_of_lengths([4 * num_samples], piece_samples=piece)
    indices = reader.indices(Interval(0, 0, num_samples))
    jumps = indices[1:][np.diff(indices) != 1]
    assert not np.any(jumps % piece)


@pytest.mark.parametrize(("num_samples", "piece"), [(5, 1), (8191, 1), (8192, 2), (65_536, 16), (100_000, 16)])
def test_a_small_text_is_shuffled_sample_by_sample_and_a_large_one_in_pieces(num_samples: int, piece: int) -> None:
    indices = SampleReader([np.zeros(num_samples, np.uint8)], 1, seed=0).indices(Interval(0, 0, num_samples))
    run_starts = np.flatnonzero(np.diff(indices, prepend=-2) != 1)
    assert (indices[run_starts] % piece == 0).all()
    assert len(run_starts) >= num_samples // piece - 10


@given(counts=st.lists(st.integers(1, 30), max_size=10))
def test_slices_read_what_the_whole_epochs_hold(counts: list[int]) -> None:
    reader, cursor, read = reader_of_lengths([50, 3, 70]), Cursor(), []
    for count in counts:
        intervals, cursor = take(cursor, count, reader.num_samples)
        read += [reader.read(interval) for interval in intervals]
    epochs = [reader.read(Interval(epoch, 0, reader.num_samples)) for epoch in range(cursor.epoch + 1)]
    assert np.array_equal(np.concatenate([*read, np.empty((0, 4))]), np.concatenate(epochs)[: sum(counts)])


def test_the_order_is_the_same_on_every_machine() -> None:
    keys = np.frombuffer(hashlib.shake_256(b"spes-p2p epoch order/7/2/0").digest(8 * 5), "<u8")
    order = epoch_order(num_samples=14, piece_samples=3, seed=7, epoch=2)
    assert order.pieces.tolist() == sorted(range(5), key=lambda piece: int(keys[piece])) == [2, 0, 1, 4, 3]
    assert order.starts.tolist() == [0, 3, 6, 9, 11]


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(100, 1, seed, epoch).pieces) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_a_reader_shuffles_by_its_seed() -> None:
    epoch = Interval(1, 0, 100)
    for seed in (0, 1):
        indices = reader_of_lengths([400], piece_samples=1, seed=seed).indices(epoch)
        assert np.array_equal(indices, epoch_order(100, 1, seed, 1).pieces)


def test_many_pieces_are_shuffled_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_p2p.data.samples.BLOCK_KEYS", 8)
    pieces = epoch_order(100, 1, 0, 0).pieces
    assert sorted(pieces) == list(range(100))
    assert pieces[:8].max() > 50


def test_an_older_epoch_can_still_be_read() -> None:
    reader = reader_of_lengths([400], piece_samples=1)
    first = reader.read(Interval(0, 0, 100))
    for epoch in range(1, 5):
        reader.read(Interval(epoch, 0, 1))
    assert np.array_equal(reader.read(Interval(0, 0, 100)), first)


def test_a_spread_reaches_all_files_and_repeats_nothing() -> None:
    reader = reader_of_lengths([40, 40, 40])
    spread = reader.read_spread(6)
    assert sorted(spread[:, 0] // 1000) == [0, 0, 1, 1, 2, 2]
    assert np.array_equal(reader.read_spread(1000), reader.read_spread(30))


@pytest.mark.parametrize("interval", [Interval(0, -1, 2), Interval(0, 3, 2), Interval(0, 0, 11)])
def test_reading_beyond_the_epoch_is_an_error(interval: Interval) -> None:
    with pytest.raises(IndexError):
        reader_of_lengths([40]).read(interval)


@pytest.mark.parametrize("lengths", [[], [3, 3]])
def test_a_corpus_without_a_whole_sample_is_refused(lengths: list[int]) -> None:
    with pytest.raises(UserError, match="no complete sample"):
        reader_of_lengths(lengths)
