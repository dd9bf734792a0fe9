"""What all codecs share: elements are encoded in chunks of one size."""

from __future__ import annotations

import numpy as np

LARGEST = float(np.finfo(np.float32).max)
"""The largest finite float32."""


class Chunked:
    """A codec whose encoded chunks are equally long. The last chunk is padded with zeros."""

    name: str
    chunk: int
    """Elements of a chunk."""
    chunk_bytes: int
    """Its encoded length."""

    def encoded_bytes(self, elements: int) -> int:
        """Return the bytes of all chunks."""
        return -(-elements // self.chunk) * self.chunk_bytes

    def elements(self, encoded_bytes: int) -> int:
        """Return a whole number of chunks, at least one."""
        return max(1, encoded_bytes // self.chunk_bytes) * self.chunk

    def check_length(self, data: bytes | memoryview, elements: int) -> None:
        """Raise ValueError unless the data are as long as so many encoded elements."""
        if len(data) != self.encoded_bytes(elements):
            raise ValueError(f"{len(data)} bytes where {elements} elements in {self.name} take {self.encoded_bytes(elements)}")

    def in_chunks(self, values: np.ndarray) -> np.ndarray:
        """Return float32 `[chunks, chunk]`; a copy only if zeros are missing."""
        missing = -values.size % self.chunk
        whole = np.concatenate([values, np.zeros(missing, np.float32)]) if missing else np.ascontiguousarray(values, np.float32)
        return whole.reshape(-1, self.chunk)
