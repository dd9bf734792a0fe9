"""How an update is encoded on the wire. Decoding is elementwise and gives the same bits on every machine."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from spes_p2p.errors import UserError

FLOAT16_MAX = np.float32(65504.0)


class Codec(Protocol):
    """Encodes float32 vectors; what it drops stays with the caller (error feedback)."""

    name: str

    def encoded_bytes(self, elements: int) -> int:
        """Exact length of an encoded vector of so many elements."""

    def elements(self, encoded_bytes: int) -> int:
        """Most elements whose encoding fits into so many bytes."""

    def encode(self, values: np.ndarray) -> bytes:
        """Encode float32 `[n]`."""

    def decode(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """float32 `[elements]`, a new array. Raises ValueError for a length other than `encoded_bytes(elements)`."""


class Uncompressed:
    """float32, little-endian."""

    name = "none"

    def encoded_bytes(self, elements: int) -> int:
        """Four bytes an element."""
        return 4 * elements

    def elements(self, encoded_bytes: int) -> int:
        """Four bytes an element."""
        return encoded_bytes // 4

    def encode(self, values: np.ndarray) -> bytes:
        """The bytes as they are."""
        return np.ascontiguousarray(values, dtype="<f4").tobytes()

    def decode(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """The values as they were."""
        _check_length(self, data, elements)
        return np.frombuffer(data, dtype="<f4").astype(np.float32)


class Float16:
    """IEEE half precision, rounded to nearest even; values beyond its range are clipped."""

    name = "float16"

    def encoded_bytes(self, elements: int) -> int:
        """Two bytes an element."""
        return 2 * elements

    def elements(self, encoded_bytes: int) -> int:
        """Two bytes an element."""
        return encoded_bytes // 2

    def encode(self, values: np.ndarray) -> bytes:
        """Clip to +-65504, then round."""
        halves: np.ndarray = np.clip(values, -FLOAT16_MAX, FLOAT16_MAX).astype("<f2")
        return halves.tobytes()

    def decode(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """Exact: every half-precision number is a float32."""
        _check_length(self, data, elements)
        return np.frombuffer(data, dtype="<f2").astype(np.float32)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Uncompressed(), Float16())}


def codec_named(name: str) -> Codec:
    """The codec of that name. Raises UserError for any other."""
    if name not in CODECS:
        raise UserError(f"sync.codec = {name!r}: no such codec; known: {', '.join(CODECS)}")
    return CODECS[name]


def _check_length(codec: Codec, data: bytes | memoryview, elements: int) -> None:
    if len(data) != codec.encoded_bytes(elements):
        raise ValueError(f"{len(data)} bytes where {elements} elements in {codec.name} take {codec.encoded_bytes(elements)}")
