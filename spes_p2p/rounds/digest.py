"""BLAKE3 digests of states and results. A state's digest is the digest of its piece digests, so pieces can be verified singly.

BLAKE3 is as strong as sha256, and several times faster (twice on a processor with sha256 instructions).
"""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from spes_p2p.storage.mapped import released
from spes_p2p.storage.threads import in_threads, spans

DIGEST_BYTES = 32
PIECE_ELEMENTS = 2**16
"""float32 elements in a piece: 256 KiB."""
PIECES_PER_BATCH = 16
"""Pieces that a thread works on in one go: 4 MiB, so that handing them over costs nothing."""


def content_digest(content: bytes | memoryview) -> bytes:
    """Return the BLAKE3 digest: 32 bytes."""
    return blake3(content).digest()


def piece_digests(state: np.ndarray, threads: int = 1) -> bytes:
    """Return the digests of the pieces of a float32 vector (hashed as little-endian): 32 bytes each, concatenated."""

    def digests(numbers: range) -> bytes:
        pieces = (state[n * PIECE_ELEMENTS : (n + 1) * PIECE_ELEMENTS] for n in numbers)
        return b"".join(map(piece_digest, released(pieces)))

    return b"".join(in_threads(digests, spans(num_pieces(state.size), PIECES_PER_BATCH), threads))


def num_pieces(elements: int) -> int:
    """Return the number of pieces of a vector."""
    return -(-elements // PIECE_ELEMENTS)


def piece_digest(piece: np.ndarray) -> bytes:
    """Return the digest of one piece: 32 bytes."""
    return content_digest(np.ascontiguousarray(piece, dtype="<f4").data.cast("B"))


def root_digest(pieces: bytes) -> str:
    """Return a state's hex digest, given its piece digests."""
    return content_digest(pieces).hex()


def state_digest(state: np.ndarray) -> str:
    """Return a state's hex digest: the members of a commit must agree on it."""
    return root_digest(piece_digests(state))
