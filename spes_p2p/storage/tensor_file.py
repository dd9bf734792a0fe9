"""Named arrays in the safetensors format, written in pieces and read as views of the file.

The safetensors library needs the whole file in memory in addition to the arrays: gigabytes for an optimizer's moments.
The format: 8 bytes of header length (little-endian), a JSON header with type, shape and byte range of each array, the arrays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

METADATA = "__metadata__"
LENGTH_BYTES = ALIGNMENT = 8
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "|u1", "I8": "|i1"}
"""numpy has no bfloat16: its bits are uint16."""
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Source:
    """An array to write."""

    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[np.ndarray]]
    """Yields the elements in C order, in contiguous arrays of any size."""

    @property
    def nbytes(self) -> int:
        """Size of the whole array."""
        return self.dtype.itemsize * math.prod(self.shape)


def whole(array: np.ndarray) -> Source:
    """Return an array in memory as a source of one piece."""
    return Source(array.dtype, array.shape, lambda: (np.ascontiguousarray(array),))


def tensor_chunks(sources: Mapping[str, Source], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the file's content. Raises KeyError for a type that is not in DTYPES."""
    yield tensor_header(sources, metadata)
    for name in _in_order(sources):
        for piece in sources[name].pieces():
            yield piece.reshape(-1).view(np.uint8).data


def tensor_header(sources: Mapping[str, Source], metadata: Mapping[str, str]) -> bytes:
    """Return the header; its length depends only on the lengths of the metadata. Raises KeyError as `tensor_chunks`."""
    entries: dict[str, object] = {METADATA: dict(metadata)}
    offset = 0
    for name in _in_order(sources):
        source = sources[name]
        stop = offset + source.nbytes
        entries[name] = {"dtype": _NAMES[source.dtype], "shape": source.shape, "data_offsets": (offset, stop)}
        offset = stop
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def _in_order(sources: Mapping[str, Source]) -> list[str]:
    """Return the names in file order: larger types first, so that all arrays are aligned."""
    return sorted(sources, key=lambda name: (-sources[name].dtype.itemsize, name))


def read_tensors(content: bytes | memoryview) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return read-only views of a file's arrays, and its metadata. Raises ValueError for another format.

    The values are not verified: the caller keeps a checksum in the metadata.
    """
    view = memoryview(content)
    begin = LENGTH_BYTES + int.from_bytes(view[:LENGTH_BYTES], "little")
    try:
        entries = json.loads(bytes(view[LENGTH_BYTES:begin]))
        metadata = {str(key): str(value) for key, value in entries.pop(METADATA, {}).items()}
        arrays = {}
        for name, entry in entries.items():
            start, stop = (begin + offset for offset in entry["data_offsets"])
            arrays[name] = np.frombuffer(view[start:stop], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"invalid header: {error}") from None
    if sum(array.nbytes for array in arrays.values()) > len(view):
        raise ValueError("invalid header: arrays overlap")
    return arrays, metadata
