"""A codec's bytes are as long as it says, and lose what it says and no more."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spes_p2p.config.campaign import CodecConfig
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.rounds.blockwise import BLOCK
from spes_p2p.rounds.chunked import LARGEST
from spes_p2p.rounds.codecs import CODECS, group_codecs
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Member
from spes_p2p.rounds.sparse import CHUNK
from spes_p2p.rounds.sums import LARGEST_UPDATE, encode_mean, is_far, make_mean, may_be_summed, to_residual

SPARSE = {"sparse16": 16, "sparse": 32, "sparse64": 64}
"""By codec: values of which one is sent."""
LAYOUT = Layout([
    TensorSpec("embed", (1280,), "shared"), TensorSpec("gate", (1280,), "router"), TensorSpec("e", (1280,), "expert", 0, 0),
])
VECTORS = hnp.arrays(np.float32, st.integers(0, 300), elements=st.floats(-(2.0**17), 2.0**17, width=32))


@pytest.mark.parametrize("name", CODECS)
@given(values=VECTORS)
def test_encoding_has_the_promised_length_and_decodes_to_the_same_again(name: str, values: np.ndarray) -> None:
    codec = CODECS[name]
    encoded = codec.encode(values)
    assert len(encoded) == codec.encoded_bytes(values.size)
    decoded = codec.decode(encoded, values.size)
    assert (decoded.dtype, decoded.size) == (np.float32, values.size)


@pytest.mark.parametrize("name", ["none", "fp16"])
@given(values=VECTORS)
def test_what_was_rounded_is_not_rounded_again(name: str, values: np.ndarray) -> None:
    codec = CODECS[name]
    decoded = codec.decode(codec.encode(values), values.size)
    assert codec.decode(codec.encode(decoded), values.size).tobytes() == decoded.tobytes()


@pytest.mark.parametrize("name", CODECS)
@given(values=VECTORS)
def test_a_value_of_0_stays_0(name: str, values: np.ndarray) -> None:
    """So what no peer changes keeps its value, whatever is rounded beside it."""
    codec = CODECS[name]
    assert not codec.decode(codec.encode(values), values.size)[values == 0].any()


@given(values=VECTORS)
def test_none_keeps_every_bit(values: np.ndarray) -> None:
    codec = CODECS["none"]
    assert codec.decode(codec.encode(values), values.size).tobytes() == values.tobytes()


@given(values=VECTORS)
def test_fp16_rounds_to_the_nearest_half_and_clips_what_is_out_of_range(values: np.ndarray) -> None:
    codec = CODECS["fp16"]
    decoded = codec.decode(codec.encode(values), values.size).astype(np.float64)
    clipped = np.clip(values.astype(np.float64), -65504.0, 65504.0)
    spacing = np.maximum(np.abs(clipped) * 2.0**-10, 2.0**-24)
    assert np.isfinite(decoded).all()
    assert (np.abs(decoded - clipped) <= spacing / 2).all()


def test_fp16_gives_the_same_bits_with_torch_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, codec = pytest.importorskip("torch"), CODECS["fp16"]
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    encoded = halves[~np.isnan(halves)].tobytes()
    anything = np.random.default_rng(0).integers(0, 2**32, 2**18, np.uint64).astype(np.uint32).view(np.float32)
    found = []
    for library in (torch, None):
        monkeypatch.setattr("spes_p2p.rounds.codecs._torch", lambda library=library: library)
        decoded = codec.decode(encoded, len(encoded) // 2)
        found.append((decoded.tobytes(), codec.encode(decoded), codec.encode(anything[~np.isnan(anything)])))
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "levels"), [("int8", 127), ("int4", 7)])
@given(values=VECTORS)
def test_a_block_is_rounded_to_multiples_of_its_largest_value(name: str, levels: int, values: np.ndarray) -> None:
    codec = CODECS[name]
    decoded = codec.decode(codec.encode(values), values.size).astype(np.float64)
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK].astype(np.float64)
        step = np.abs(block).max() / levels
        assert np.abs(decoded[start : start + BLOCK] - block).max() <= step * 0.5001 + 2e-36


@given(seed=st.integers(0, 2**32), size=st.integers(0, 2000), untouched=st.floats(0, 1), tail=st.integers(1, 3))
def test_ternary_sends_the_values_above_the_cut_as_their_mean(seed: int, size: int, untouched: float, tail: int) -> None:
    rng, codec = np.random.default_rng(seed), CODECS["ternary"]
    values = (rng.standard_normal(size) ** (2 * tail - 1) * 10.0 ** rng.integers(-12, 8)).astype(np.float32)
    values[rng.random(size) < untouched] = 0
    decoded = codec.decode(codec.encode(values), values.size)
    for start in range(0, values.size, BLOCK):
        sizes = np.zeros(BLOCK)
        sizes[: min(BLOCK, values.size - start)] = np.abs(values[start : start + BLOCK].astype(np.float64))
        sent = np.abs(decoded[start : start + BLOCK])
        cut = 0.75 * sizes.mean()
        clear = np.abs(sizes - cut)[: sent.size] > 1e-5 * sizes.max()  # not so near the cut that float32 decides
        np.testing.assert_array_equal((sent > 0)[clear], (sizes[: sent.size] > cut)[clear])
        assert np.allclose(sent[sent > 0], sizes[: sent.size][sent > 0].sum() / max(1, (sent > 0).sum()), rtol=1e-5)
    assert ((decoded == 0) | (np.sign(decoded) == np.sign(values))).all()
    assert (np.abs(decoded - values) <= 0.5001 * codec.rounding(values)).all()


@pytest.mark.parametrize("name", CODECS)
@given(seed=st.integers(0, 2**32), tail=st.integers(1, 3), shrink=st.floats(0.1, 1.0))
def test_a_reducer_loses_nothing_and_is_never_proven_wrong(name: str, seed: int, tail: int, shrink: float) -> None:
    part = Part(0, LAYOUT.group("shared"), 0, 1280, (0,), 0, CODECS[name])
    rng, residual = np.random.default_rng(seed), np.zeros(part.size, np.float32)
    means, sent = np.zeros(part.size), np.zeros(part.size)
    for number in range(6):
        mean = (rng.standard_normal(part.size) ** (2 * tail - 1) * shrink**number).astype(np.float32)
        encoded, decoded = encode_mean(part, mean, residual)
        assert decoded.tobytes() == part.codec.decode(encoded, part.size).tobytes()
        assert not is_far(part, mean, decoded)
        included = mean * (decoded != 0) if part.codec.leaves_out else mean
        means, sent = means + included, sent + decoded
        to_residual(part, mean, residual, decoded)
        residual = mean
    np.testing.assert_allclose(sent + residual, means, atol=1e-5 * np.abs(means).max())


@pytest.mark.parametrize("name", CODECS)
@given(exponent=st.floats(-44, 37))
@example(exponent=-35.93)  # for int8 a block of zeros
def test_a_reducer_of_values_of_any_size_is_not_proven_wrong(name: str, exponent: float) -> None:
    part = Part(0, LAYOUT.group("shared"), 0, 1280, (0,), 0, CODECS[name])
    mean = np.full(part.size, 10.0**exponent, np.float32)
    assert not is_far(part, mean, encode_mean(part, mean, None)[1])


@pytest.mark.parametrize("name", CODECS)
@given(weights=st.tuples(st.integers(1, 2**24), st.integers(1, 2**24)))
def test_the_mean_of_the_largest_updates_that_may_be_summed_is_a_valid_result(name: str, weights: tuple[int, int]) -> None:
    part = Part(0, LAYOUT.group("shared"), 0, 1280, (0, 1), 0, CODECS[name])
    members = [Member(peer, tokens, (), 0.0) for peer, tokens in zip("AB", weights, strict=True)]
    for value in (most * share for most in (LARGEST, LARGEST_UPDATE) for share in (1, 127 / 128, 7 / 8, 1 / 2)):
        body = part.codec.encode(np.full(part.size, min(value, 65504) if name == "fp16" else value, np.float32))
        if name in ("int8", "int4"):  # the lowest code, which no honest update has
            codes = part.size if name == "int8" else part.size // 2
            body = (b"\x80" if name == "int8" else b"\0") * codes + body[codes:]
        if may_be_summed(part, 0, body):
            break
    mean = np.empty(part.size, np.float32)
    decoders = {i: (tokens, partial(part.codec.decode, body, part.size)) for i, tokens in enumerate(weights)}
    make_mean(part, members, decoders, mean, True)
    encoded, decoded = encode_mean(part, mean, None)
    assert part.codec.is_valid(encoded, part.size)
    assert not is_far(part, mean, decoded)


@pytest.mark.parametrize("name", SPARSE)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 3 * CHUNK), untouched=st.floats(0, 1), tail=st.integers(1, 4))
def test_sparse_sends_the_largest_value_of_each_group_to_a_quarter_octave(
    name: str, seed: int, size: int, untouched: float, tail: int
) -> None:
    rng, codec, group = np.random.default_rng(seed), CODECS[name], SPARSE[name]
    values = (rng.standard_normal(size) ** (2 * tail - 1) * 10.0 ** rng.integers(-12, 8)).astype(np.float32)
    values[rng.random(size) < untouched] = 0
    decoded = codec.decode(codec.encode(values), size)
    is_sent = decoded != 0
    assert (np.abs(decoded - values)[is_sent] <= 1.0001 * codec.rounding(values)[is_sent]).all()
    for start in range(0, size, CHUNK):
        padded = np.zeros((2, CHUNK), np.float32)
        padded[0, : min(CHUNK, size - start)] = np.abs(values[start : start + CHUNK])
        padded[1, : min(CHUNK, size - start)] = is_sent[start : start + CHUNK]
        sizes, sent = padded.reshape(2, group, CHUNK // group)
        assert (sent.sum(axis=0) <= 1).all()
        largest, sends = sizes.max(axis=0), sent.any(axis=0)
        np.testing.assert_allclose((sizes * sent).max(axis=0)[sends], largest[sends], rtol=group * 2.0**-22)
        assert (sends | (largest <= 2**-3.2 * largest.max())).all()


@pytest.mark.parametrize("name", SPARSE)
@given(data=st.data())
def test_any_bytes_in_sparse_decode_or_are_not_valid(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    length = codec.encoded_bytes(CHUNK)
    found = data.draw(st.binary(min_size=length, max_size=length))
    with np.errstate(invalid="ignore", over="ignore"):
        decoded = codec.decode(found, CHUNK)
    assert codec.is_valid(found, CHUNK) <= np.isfinite(decoded).all()
    assert np.count_nonzero(decoded) <= CHUNK // SPARSE[name]


@pytest.mark.parametrize(
    ("name", "share"), [("ternary", 0.0578), ("sparse16", 0.0159), ("sparse", 0.0090), ("sparse64", 0.0051)]
)
def test_a_codec_takes_the_documented_share_of_float32(name: str, share: float) -> None:
    assert CODECS[name].encoded_bytes(2**20) / 2**22 == pytest.approx(share, abs=5e-5)


def test_each_kind_of_group_has_its_codec() -> None:
    codecs = group_codecs(CodecConfig(router="none", shared="int4", experts="int8"))
    assert [codecs.of(group).name for group in LAYOUT.groups] == ["int4", "none", "int8"]
    assert codecs.encoded_bytes(LAYOUT) == 10 * (64 + 4) + 4 * 1280 + 10 * (128 + 4)


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
