"""8- and 4-bit codecs: symmetric quantization in blocks that share a float32 scale.

Decoding is one multiplication an element, so it gives the same bits on every machine. Rounding is to nearest. Compression ratio
to float32: (bits / 8 + 4 / BLOCK) / 4.
"""

from __future__ import annotations

import numpy as np

from spes_p2p.rounds.chunked import LARGEST, Chunked

BLOCK = 128
"""Elements that share a scale."""


class Blockwise(Chunked):
    """Symmetric quantization of float32 vectors to `bits` bits: the codes of all blocks, then their scales."""

    def __init__(self, name: str, bits: int):
        """`bits`: 8 or 4."""
        self.name = name
        self.is_lossy, self.leaves_out = True, False
        self.chunk, self.chunk_bytes = BLOCK, BLOCK * bits // 8 + 4
        self._bits = bits
        self._levels = np.float32(2 ** (bits - 1) - 1)

    def encoded_bytes(self, elements: int) -> int:
        """Return the bytes of the codes, of which 8-bit ones are not padded, and of one float32 scale a block."""
        padding = -elements % BLOCK if self._bits == 8 else 0
        return super().encoded_bytes(elements) - padding

    def encode(self, values: np.ndarray) -> bytes:
        """Round each block to multiples of max|x| / levels. Values must be finite."""
        blocks = self.in_chunks(values)
        scaled = np.abs(blocks)
        scales = scaled.max(axis=1) / self._levels
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.where(scales > np.float32(1e-38), np.float32(1.0) / scales, np.float32(0.0)).astype(np.float32)
        np.multiply(blocks, inverse[:, None], out=scaled)
        np.rint(scaled, out=scaled)  # at most `levels`: three roundings of 2^-24 do not reach the next half
        codes = scaled.astype(np.int8)
        body: bytes = _pack(codes).tobytes() if self._bits == 4 else codes.tobytes()[: values.size]
        tail: bytes = scales.astype("<f4").tobytes()
        return body + tail

    def decode(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """Decode to float32 `[elements]`. Raises ValueError for a length other than `encoded_bytes(elements)`."""
        scales, blocks = self._scales(data, elements), -(-elements // BLOCK)
        if self._bits == 4:
            codes = _unpack(np.frombuffer(data, np.uint8, blocks * BLOCK // 2).reshape(blocks, BLOCK // 2))
        else:
            codes = np.zeros(blocks * BLOCK, np.int8)
            codes[:elements] = np.frombuffer(data, np.int8, elements)
            codes = codes.reshape(blocks, BLOCK)
        values = codes.astype(np.float32)
        values *= scales[:, None]
        return values.reshape(-1)[:elements]

    def is_valid(self, data: bytes | memoryview, elements: int, most: float = LARGEST) -> bool:
        """See Codec. The scales suffice, since codes are at most 2^(bits - 1)."""
        with np.errstate(over="ignore"):
            return bool((np.abs(self._scales(data, elements) * (self._levels + 1)) <= most).all())

    def rounding(self, values: np.ndarray) -> np.ndarray:
        """Half a step of each value's block."""
        half_steps = np.abs(self.in_chunks(values)).max(axis=1) / (2 * self._levels)
        return np.repeat(half_steps, BLOCK)[: values.size]

    def _scales(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        self.check_length(data, elements)
        blocks = -(-elements // BLOCK)
        return np.frombuffer(data, "<f4", blocks, len(data) - 4 * blocks).astype(np.float32)


def _pack(codes: np.ndarray) -> np.ndarray:
    """Pack int8 in -7..7 `[blocks, BLOCK]` to bytes `[blocks, BLOCK / 2]`; a block's first half goes to the low nibbles."""
    nibbles = (codes + np.int8(8)).view(np.uint8)
    return nibbles[:, : BLOCK // 2] | (nibbles[:, BLOCK // 2 :] << np.uint8(4))


def _unpack(packed: np.ndarray) -> np.ndarray:
    """Invert `_pack`."""
    codes = np.empty((packed.shape[0], BLOCK), np.uint8)
    np.bitwise_and(packed, np.uint8(15), out=codes[:, : BLOCK // 2])
    np.right_shift(packed, np.uint8(4), out=codes[:, BLOCK // 2 :])
    return codes.view(np.int8) - np.int8(8)
