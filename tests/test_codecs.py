"""A codec's bytes are as long as it says, and lose what it says and no more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spes_p2p.errors import UserError
from spes_p2p.sync.codecs import CODECS, codec_named

VECTORS = hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(-(2.0**17), 2.0**17, width=32))


@pytest.mark.parametrize("name", CODECS)
@given(values=VECTORS)
def test_encoding_has_the_promised_length_and_decodes_to_the_same_again(name: str, values: np.ndarray) -> None:
    codec = CODECS[name]
    encoded = codec.encode(values)
    assert len(encoded) == codec.encoded_bytes(values.size)
    decoded = codec.decode(encoded, values.size)
    assert decoded.dtype == np.float32
    assert codec.decode(codec.encode(decoded), values.size).tobytes() == decoded.tobytes()


@given(values=VECTORS)
def test_none_keeps_every_bit(values: np.ndarray) -> None:
    codec = codec_named("none")
    assert codec.decode(codec.encode(values), values.size).tobytes() == values.tobytes()


@given(values=VECTORS)
def test_float16_rounds_to_the_nearest_half_and_clips_what_is_out_of_range(values: np.ndarray) -> None:
    codec = codec_named("float16")
    decoded = codec.decode(codec.encode(values), values.size).astype(np.float64)
    clipped = np.clip(values.astype(np.float64), -65504.0, 65504.0)
    spacing = np.maximum(np.abs(clipped) * 2.0**-10, 2.0**-24)
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded - clipped) <= spacing / 2).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("length", [0, 39, 41, 80])
def test_bytes_of_another_length_are_not_decoded(name: str, length: int) -> None:
    codec = CODECS[name]
    if length != codec.encoded_bytes(10):
        with pytest.raises(ValueError, match="bytes where"):
            codec.decode(bytes(length), 10)


@pytest.mark.parametrize("name", CODECS)
@given(budget=st.integers(1024, 2**20))
def test_a_part_is_as_large_as_fits(name: str, budget: int) -> None:
    codec = CODECS[name]
    assert codec.encoded_bytes(codec.elements(budget)) <= budget < codec.encoded_bytes(codec.elements(budget) + 128 * 2)


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(UserError, match=r"sync.codec = 'zip': no such codec; known: none, float16"):
        codec_named("zip")
