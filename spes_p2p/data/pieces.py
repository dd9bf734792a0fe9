"""Token files in pieces that prove themselves: a manifest names each file's root, the root proves the list of piece hashes, the
list proves each piece. So a peer can take any piece from anybody.

Pieces are of the ids alone, as raw little-endian bytes; a numpy header in front of them does not count.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 2**18
"""A multiple of every item size."""
HASH_BYTES = 32


class PieceHasher:
    """Hashes a stream of ids piece by piece."""

    def __init__(self) -> None:
        self._whole: list[bytes] = []
        self._current, self._size = hashlib.sha256(), 0

    def update(self, block: bytes | memoryview) -> None:
        """The next bytes of the file."""
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
        """HASH_BYTES for each piece so far, the last one as short as it is."""
        last = [self._current.digest()] if self._size else []
        return b"".join([*self._whole, *last])


def root_of(hashes: bytes) -> str:
    """What a manifest says of a file's list of piece hashes."""
    return hashlib.sha256(hashes).hexdigest()


def piece_count(num_bytes: int) -> int:
    """Pieces of a file of so many bytes of ids."""
    return -(-num_bytes // PIECE_BYTES)


def is_piece(content: bytes | memoryview, hashes: bytes, index: int) -> bool:
    """Is this the piece of that number?"""
    return hashlib.sha256(content).digest() == hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]


def pieces_of_samples(samples: npt.NDArray[np.int64], sample_bytes: int) -> list[int]:
    """Numbers of the pieces that these samples, counted along a file, lie in; ascending."""
    touched: set[int] = set()
    for start in (samples * sample_bytes).tolist():
        touched.update(range(start // PIECE_BYTES, piece_count(start + sample_bytes)))
    return sorted(touched)
