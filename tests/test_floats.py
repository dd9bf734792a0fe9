"""Pieces of a base as they travel: the exact bits come out, few bytes travel, and nothing that a donor sends does harm."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from spes_p2p.content.floats import pack_floats, packed_bytes, unpack_floats
from spes_p2p.messages.codec import WireError
from spes_p2p.rounds.digest import PIECE_ELEMENTS

MOST = 1000
WEIGHTS = np.random.default_rng(0).normal(0.0, 0.02, PIECE_ELEMENTS).astype(np.float32)


@given(arrays(np.uint32, st.integers(0, MOST)))
def test_every_value_comes_out_bit_for_bit(bits: np.ndarray) -> None:
    packed = pack_floats(bits.view(np.float32))
    assert bytes(unpack_floats(packed, MOST)) == bits.astype("<u4").tobytes()
    assert len(packed) <= packed_bytes(len(bits))


def test_bytes_that_cannot_be_compressed_stay_within_the_bound() -> None:
    noise = np.random.default_rng(0).integers(0, 2**32, PIECE_ELEMENTS, np.uint32)
    assert noise.nbytes < len(pack_floats(noise.view(np.float32))) <= packed_bytes(PIECE_ELEMENTS)


def test_weights_take_fewer_bytes_and_bfloat16_far_fewer() -> None:
    halves = (WEIGHTS.view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert len(pack_floats(WEIGHTS)) < 0.86 * WEIGHTS.nbytes
    assert len(pack_floats(halves)) < 0.36 * halves.nbytes


def test_more_values_than_there_can_be_are_refused_before_they_are_expanded() -> None:
    with pytest.raises(WireError, match="packed values of"):
        unpack_floats(pack_floats(np.zeros(MOST + 1, np.float32)), MOST)
    bomb = zstandard.ZstdCompressor().compress(bytes(2**30))
    with pytest.raises(WireError, match="not packed values"):  # a window of 1 GiB
        unpack_floats(bomb, MOST)


@given(st.binary(max_size=200), st.integers(0, 1000), st.integers(1, 255))
def test_what_is_damaged_raises_nothing_else(noise: bytes, at: int, flip: int) -> None:
    damaged = bytearray(pack_floats(WEIGHTS[:100]))
    damaged[at % len(damaged)] ^= flip
    for body in (noise, bytes(damaged), bytes(damaged[:at])):
        with contextlib.suppress(WireError):
            assert len(unpack_floats(body, MOST)) <= 4 * MOST
