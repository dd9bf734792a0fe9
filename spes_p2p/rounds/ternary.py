"""The codec `ternary`: each value becomes -1, 0 or 1 times a scale that 128 values share, five values to a byte.

Values below a cut of 0.75 times a block's mean magnitude become 0, and the scale is the mean magnitude of the others: for
Gaussian values this is within 1 % of the least squared error (Ternary Weight Networks, arXiv 1605.04711), a fifth of their
energy. What is rounded away stays pending, as with the other rounding codecs. Bytes per value: 0.231.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from spes_p2p.rounds.chunked import LARGEST, Chunked

BLOCK = 128
"""Values that share a scale."""
DIGITS = 5
"""Values in a byte: 3^5 = 243. Byte i of a chunk has value i of each of its five blocks."""
CHUNK = DIGITS * BLOCK
PIECE_CHUNKS = 32
CUT = 0.75
POWERS = (3 ** np.arange(DIGITS)).astype(np.uint8)
SIGNS = (np.arange(256)[None, :] // POWERS[:, None] % 3 - 1).astype(np.float32)
"""`[digit, byte]` -> -1, 0 or 1. Bytes above 242, which no encoder writes, decode too."""


class Ternary(Chunked):
    """Three levels in blocks: the codes of all chunks, then their scales."""

    name, is_lossy, leaves_out = "ternary", True, False
    chunk, chunk_bytes = CHUNK, BLOCK + 4 * DIGITS

    def encode(self, values: np.ndarray) -> bytes:
        """Round each value to the nearest side of the cut. Values must be finite."""
        pieces = [_encoded(blocks) for blocks in _pieces(self._in_blocks(values))]
        codes, scales = [piece[0].tobytes() for piece in pieces], [piece[1].astype("<f4").tobytes() for piece in pieces]
        return b"".join(codes + scales)

    def decode(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """Decode to float32 `[elements]`. Raises ValueError for a length other than `encoded_bytes(elements)`."""
        scales = self._scales(data, elements)
        packed = np.frombuffer(data, np.uint8, len(scales) * BLOCK).reshape(-1, BLOCK)
        values = np.empty((len(scales), DIGITS, BLOCK), np.float32)
        for digit, signs in enumerate(SIGNS):
            np.multiply(np.take(signs, packed, mode="clip"), scales[:, digit, None], out=values[:, digit])
        return values.reshape(-1)[:elements]

    def is_valid(self, data: bytes | memoryview, elements: int, most: float = LARGEST) -> bool:
        """See Codec; any codes decode."""
        return bool((np.abs(self._scales(data, elements)) <= most).all())

    def rounding(self, values: np.ndarray) -> np.ndarray:
        """Twice the cut, or the distance of the cut or of a larger value from the scale.

        Once bounds it. A residual of as much as that, of several values, makes the scale larger: twice leaves room for it.
        """
        bounds = np.abs(self._in_blocks(values))
        for sizes in _pieces(bounds):
            cuts, scales = _cuts_and_scales(sizes)
            np.subtract(sizes, scales[..., None], out=sizes)
            np.maximum(sizes, np.maximum(cuts, scales - cuts)[..., None], out=sizes)
            sizes *= 2
        found: np.ndarray = bounds.reshape(-1)[: values.size]
        return found

    def _in_blocks(self, values: np.ndarray) -> np.ndarray:
        """Return float32 `[chunks, DIGITS, BLOCK]`."""
        return self.in_chunks(values).reshape(-1, DIGITS, BLOCK)

    def _scales(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """Return the scales, float32 `[chunks, DIGITS]`."""
        self.check_length(data, elements)
        chunks = -(-elements // CHUNK)
        return np.frombuffer(data, "<f4", DIGITS * chunks, BLOCK * chunks).astype(np.float32).reshape(chunks, DIGITS)


def _pieces(chunks: np.ndarray) -> Iterator[np.ndarray]:
    """Yield views of what a processor's cache holds."""
    return (chunks[start : start + PIECE_CHUNKS] for start in range(0, len(chunks), PIECE_CHUNKS))


def _encoded(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes, uint8 `[chunks, BLOCK]`, and scales, float32 `[chunks, DIGITS]`."""
    cuts, scales = _cuts_and_scales(np.abs(blocks))
    above, below = cuts[..., None], -cuts[..., None]
    codes = (blocks > above).view(np.uint8) + (blocks >= below).view(np.uint8)
    codes *= POWERS[:, None]
    return codes[:, 0] + codes[:, 1] + codes[:, 2] + codes[:, 3] + codes[:, 4], scales


def _cuts_and_scales(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each block's cut, and the mean of its magnitudes above it, float32 `[chunks, DIGITS]`.

    Summed in float64: rounded to float32, sums in another order are the same.
    """
    cuts = (sizes.sum(axis=2, dtype=np.float64) * (CUT / BLOCK)).astype(np.float32)
    above = sizes > cuts[..., None]
    counts = above.view(np.uint8).sum(axis=2, dtype=np.uint8)  # at most BLOCK
    return cuts, ((sizes * above).sum(axis=2, dtype=np.float64) / np.maximum(counts, 1)).astype(np.float32)
