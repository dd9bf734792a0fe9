"""Token files as SPES and OLMo write them are read right, and what is wrong with one is said with its name."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from spes_p2p.data.token_files import Scan, detect_dtype, open_tokens, scan, smallest_dtype
from spes_p2p.errors import UserError

VOCAB = 50280


def spes_file(path: Path, ids: np.ndarray, dtype: str) -> Path:
    """The way SPES's tokenizer script writes: a memmap of bare ids."""
    mapped = np.memmap(path, dtype, "w+", shape=ids.shape)
    mapped[:] = ids
    mapped.flush()
    return path


@pytest.fixture
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, 1001)


@pytest.mark.parametrize("count", [1001, 1000])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_the_dtype_of_a_raw_file_is_detected(tmp_path: Path, ids: np.ndarray, dtype: str, count: int) -> None:
    path = spes_file(tmp_path / "part-000_000000.npy", ids[:count], dtype)
    assert detect_dtype(path, VOCAB) == dtype
    assert np.array_equal(open_tokens(path, dtype), ids[:count])


def test_ids_beyond_16_bits_are_detected_as_uint32(tmp_path: Path) -> None:
    path = spes_file(tmp_path / "big.npy", np.random.default_rng(0).integers(0, 150_000, 1000), "uint32")
    assert detect_dtype(path, 150_000) == "uint32"


def test_uint32_ids_declared_as_uint16_are_refused(tmp_path: Path, ids: np.ndarray) -> None:
    path = spes_file(tmp_path / "wide.npy", ids, "uint32")
    with pytest.raises(UserError, match=r"wide\.npy.*uint32"):
        scan(path, "uint16", VOCAB)


def test_uint16_ids_declared_as_uint32_are_refused(tmp_path: Path, ids: np.ndarray) -> None:
    path = spes_file(tmp_path / "narrow.npy", ids[:1000], "uint16")
    with pytest.raises(UserError, match=r"narrow\.npy.*not uint32"):
        scan(path, "uint32", VOCAB)


def test_an_end_token_with_id_0_in_every_second_place_of_a_short_text_is_no_uint32(tmp_path: Path) -> None:
    path = spes_file(tmp_path / "short.npy", np.array([9, 0] * 8), "uint16")
    assert scan(path, "uint16", 512).tokens == 16


def test_the_largest_id_is_checked_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: np.ndarray) -> None:
    monkeypatch.setattr("spes_p2p.data.token_files.SCAN_BYTES", 64)
    ids[700] = VOCAB
    path = spes_file(tmp_path / "foreign.npy", ids, "uint16")
    with pytest.raises(UserError, match=rf"foreign\.npy: has id {VOCAB}, the vocabulary ends at {VOCAB - 1}"):
        scan(path, "uint16", VOCAB)
    scan(path, "uint16", VOCAB + 1)


def test_a_real_npy_file_is_read_as_what_it_says(tmp_path: Path, ids: np.ndarray) -> None:
    path = tmp_path / "real.npy"
    np.save(path, ids.astype("uint16"))
    assert detect_dtype(path, VOCAB) == "uint16"
    assert np.array_equal(open_tokens(path, "uint16"), ids)
    hashes = hashlib.sha256(ids.astype("<u2").tobytes()).digest()
    assert scan(path, "uint16", VOCAB) == Scan(hashlib.sha256(path.read_bytes()).hexdigest(), len(ids), hashes)
    with pytest.raises(UserError, match=r"real\.npy.*uint16"):
        open_tokens(path, "uint32")


def test_other_npy_files_are_refused(tmp_path: Path) -> None:
    for name, array in {"float": np.ones(3), "table": np.ones((2, 3), "uint16")}.items():
        np.save(tmp_path / name, array)
        with pytest.raises(UserError, match=rf"{name}\.npy"):
            open_tokens(tmp_path / f"{name}.npy", "uint16")
    with pytest.raises(UserError, match="float64"):
        detect_dtype(tmp_path / "float.npy", VOCAB)


def test_a_damaged_npy_file_is_refused(tmp_path: Path, ids: np.ndarray) -> None:
    path = tmp_path / "cut.npy"
    np.save(path, ids.astype("uint16"))
    path.write_bytes(path.read_bytes()[:500])
    for read in (lambda: open_tokens(path, "uint16"), lambda: detect_dtype(path, VOCAB)):
        with pytest.raises(UserError, match=r"cut\.npy"):
            read()


def test_missing_empty_and_cut_files_are_refused(tmp_path: Path, ids: np.ndarray) -> None:
    (tmp_path / "empty.npy").touch()
    spes_file(tmp_path / "cut.npy", ids, "uint32").write_bytes(b"\1\0\0\0\1\0")
    for name in ("missing", "empty", "cut"):
        with pytest.raises(UserError, match=rf"{name}\.npy"):
            open_tokens(tmp_path / f"{name}.npy", "uint32")


def test_a_file_of_no_dtype_that_fits_is_refused(tmp_path: Path) -> None:
    path = spes_file(tmp_path / "noise.npy", np.full(100, 65535), "uint16")
    with pytest.raises(UserError, match=r"noise\.npy.*vocabulary of 512"):
        detect_dtype(path, 512)


def test_a_file_of_an_odd_length_is_cut(tmp_path: Path) -> None:
    (tmp_path / "cut.npy").write_bytes(bytes(301))
    with pytest.raises(UserError, match=r"cut\.npy: 301 bytes are no whole number of ids; it is truncated"):
        detect_dtype(tmp_path / "cut.npy", 512)


def test_a_file_of_zeros_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zeros.npy").write_bytes(bytes(300))
    with pytest.raises(UserError, match=r"zeros\.npy: contains nothing but zeros"):
        scan(tmp_path / "zeros.npy", detect_dtype(tmp_path / "zeros.npy", 512), 512)


def test_the_narrowest_dtype_holds_every_id() -> None:
    assert [smallest_dtype(size) for size in (512, 65536, 65537)] == ["uint16", "uint16", "uint32"]
