"""Files of arrays are what the safetensors library writes and reads, and need no memory beside the arrays."""

from __future__ import annotations

import tracemalloc
from functools import partial

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from spes_p2p.storage.tensor_file import DTYPES, Source, read_tensors, tensor_chunks, tensor_header, whole

ARRAYS = {
    **{f"of {name}": np.arange(6).astype(dtype).reshape(2, 3) for name, dtype in DTYPES.items() if name != "BF16"},
    "scalar": np.array(3, np.float32), "empty": np.zeros((0, 4), np.int64), "transposed": np.arange(6.0).reshape(2, 3).T,
}
METADATA = {"commit": "abc", "owned": "1,2"}


def sources(arrays: dict[str, np.ndarray]) -> dict[str, Source]:
    return {name: whole(array) for name, array in arrays.items()}


CONTENT = b"".join(tensor_chunks(sources(ARRAYS), METADATA))


def assert_same(found: dict[str, np.ndarray]) -> None:
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)


def test_the_library_reads_what_is_written() -> None:
    assert_same(safetensors.numpy.load(CONTENT))


def test_bits_of_bfloat16_are_written_and_read_as_the_library_does() -> None:
    """numpy has no bfloat16, so the library's numpy side does not read it."""
    tensor = torch.tensor([1.0, -2.5, 3e38], dtype=torch.bfloat16)
    bits = tensor.view(torch.uint16).numpy()
    written = b"".join(tensor_chunks({"x": whole(bits)}, {}))
    assert torch.equal(safetensors.torch.load(written)["x"], tensor)
    np.testing.assert_array_equal(read_tensors(safetensors.torch.save({"x": tensor}))[0]["x"], bits)


def test_what_the_library_wrote_is_read() -> None:
    contiguous = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in ARRAYS.items()}
    arrays, metadata = read_tensors(safetensors.numpy.save(contiguous, METADATA))
    assert_same(arrays)
    assert metadata == METADATA


@pytest.mark.parametrize("damaged", [
    b"", CONTENT[:7], CONTENT[:20], CONTENT[:-1], b"\xff" * 8 + CONTENT[8:], CONTENT.replace(b'"F64"', b'"X64"'),
    CONTENT.replace(b'"shape"', b'"shale"'), CONTENT[:8] + b"[" + CONTENT[9:], b"\x02" + bytes(7) + b"[]",
], ids=["empty", "in the length", "in the header", "one byte", "length", "type", "key", "JSON", "no object"])
def test_a_damaged_file_is_named_as_one(damaged: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_tensors(damaged)


def test_neither_writing_nor_reading_copies_the_arrays() -> None:
    arrays = {str(number): np.zeros(2**18, np.float32) for number in range(8)}
    content = b"".join(tensor_chunks(sources(arrays), {}))
    tracemalloc.start()
    for chunk in tensor_chunks(sources(arrays), {}):
        assert len(chunk) > 0
    found, _ = read_tensors(memoryview(content))
    _, highest = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 8
    assert highest < 2**18


def test_an_array_may_come_in_pieces_and_metadata_later() -> None:
    pieces = {
        name: Source(array.dtype, array.shape, partial(np.array_split, array.reshape(-1), 3)) for name, array in ARRAYS.items()
    }
    content = b"".join(tensor_chunks(pieces, METADATA))
    assert content == CONTENT
    header = tensor_header(pieces, {**METADATA, "commit": "xyz"})
    arrays, metadata = read_tensors(header + content[len(header) :])
    assert_same(arrays)
    assert metadata["commit"] == "xyz"
