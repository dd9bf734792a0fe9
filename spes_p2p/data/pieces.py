"""Verifiable pieces of token files: the manifest's root verifies a file's list of piece hashes, the list verifies each piece.

A peer can therefore fetch any piece from any donor. Pieces cover the raw little-endian ids, without a numpy header.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 2**18
"""Piece size; a multiple of every item size."""
HASH_BYTES = 32


class PieceHasher:
    """Hashes a stream of ids piece by piece."""

    def __init__(self) -> None:
        self._whole: list[bytes] = []
        self._current, self._size = hashlib.sha256(), 0

    def update(self, block: bytes | memoryview) -> None:
        """Hash the next bytes of the file."""
        view = memoryview(block)
        while len(view):
            taken = view[: PIECE_BYTES - self._size]
            self._current.update(taken)
            self._size += len(taken)
            view = view[len(taken) :]
            if self._size == PIECE_BYTES:
                self._whole.append(self._current.digest())
                self._current, self._size = hashlib.sha256(), 0

    def hashes(self) -> bytes:
        """Return the hashes of the pieces so far, HASH_BYTES each; the last piece may be short."""
        last = [self._current.digest()] if self._size else []
        return b"".join([*self._whole, *last])


def root_of(hashes: bytes) -> str:
    """Return the hex digest of a list of piece hashes, as in a manifest."""
    return hashlib.sha256(hashes).hexdigest()


def piece_count(num_bytes: int) -> int:
    """Return the number of pieces in `num_bytes` bytes of ids."""
    return -(-num_bytes // PIECE_BYTES)


def is_piece(content: bytes | memoryview, hashes: bytes, index: int) -> bool:
    """Return whether the hash of `content` is that of piece `index`."""
    return hashlib.sha256(content).digest() == hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]


def pieces_of_samples(samples: npt.NDArray[np.int64], sample_bytes: int) -> list[int]:
    """Return the pieces that contain these samples (indices within a file), ascending."""
    touched: set[int] = set()
    for start in (samples * sample_bytes).tolist():
        touched.update(range(start // PIECE_BYTES, piece_count(start + sample_bytes)))
    return sorted(touched)
