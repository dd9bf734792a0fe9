"""Named arrays in the safetensors format, written from where they lie and read as views of the file.

The library needs the whole file in memory beside the arrays, to write and to read it: gigabytes, for a peer's moments.
The format: 8 bytes of header length (little-endian), a JSON header with type, shape and byte range of each array, the arrays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import numpy as np

METADATA = "__metadata__"
LENGTH_BYTES = ALIGNMENT = 8
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "|u1", "I8": "|i1"}
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def tensor_chunks(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The file's content, piece by piece. Raises KeyError for a type that is not in DTYPES."""
    entries: dict[str, object] = {METADATA: dict(metadata)}
    names, offset = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name)), 0
    for name in names:
        array = arrays[name]
        stop = offset + array.nbytes
        entries[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": (offset, stop)}
        offset = stop
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    yield len(header).to_bytes(LENGTH_BYTES, "little") + header
    for name in names:
        yield np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data


def read_tensors(content: bytes | memoryview) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read-only views of a file's arrays, and its metadata. Raises ValueError when it is not such a file.

    Whether the values are those that were written, a checksum among the metadata must tell.
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
        raise ValueError(f"a header that makes no sense: {error}") from None
    return arrays, metadata
