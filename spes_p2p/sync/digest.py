"""Digests of the flat state: one of the whole, made of one for each piece, so that a download is verified piece by piece."""

from __future__ import annotations

import hashlib

import numpy as np

PIECE_ELEMENTS = 2**16
"""float32 elements in one piece: 256 KiB."""


def piece_digests(state: np.ndarray) -> bytes:
    """sha256 of each piece of a float32 vector (little-endian), 32 bytes each, concatenated."""
    return b"".join(piece_digest(state[a : a + PIECE_ELEMENTS]) for a in range(0, state.size, PIECE_ELEMENTS))


def piece_digest(piece: np.ndarray) -> bytes:
    """sha256 of one piece, 32 bytes."""
    return hashlib.sha256(np.ascontiguousarray(piece, dtype="<f4").data).digest()


def root_digest(pieces: bytes) -> str:
    """Hex digest of the whole state, from its piece digests."""
    return hashlib.sha256(pieces).hexdigest()


def state_digest(state: np.ndarray) -> str:
    """Hex digest of a float32 vector: what all members of a commit must agree on."""
    return root_digest(piece_digests(state))
