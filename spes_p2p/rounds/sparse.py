"""The sparse codec: of every 32 values the one of largest magnitude, in 9 bits; the others are left out.

SparseLoCo (arXiv 2508.15706) sends the top 1 to 3 % of each chunk of an update and keeps the rest as error feedback. Here the
32 values are spread over a chunk of 4,096, so that a row of large values sends many of them. Of the energy of Gaussian or
Laplacian values this sends as much as the top 1/40 of whole chunks, which takes the same bytes and ten times as long.
A value is a sign and one of eight magnitudes: half octaves below the chunk's largest value, and 0. Bytes per value: 0.036.
"""

from __future__ import annotations

import numpy as np

GROUP, GROUPS = 32, 128
"""Values of which one is sent, and groups of a chunk: value i of the chunk is in group i % GROUPS."""
PLACE_BITS = 5
CHUNK = GROUP * GROUPS
MAGNITUDES = np.array([2.0 ** (-step / 2) for step in range(7)] + [0.0], np.float32)
LEVELS = np.concatenate([MAGNITUDES, -MAGNITUDES])
"""By code: the value, as a share of the chunk's largest."""
MIDDLES = np.array([2.0 ** (-step / 2 + 0.25) for step in range(7, 0, -1)], np.float32)
"""Between the magnitudes, in octaves, ascending."""
LARGEST_CHANGE = np.float32(2**0.25 - 1)
"""Bounds the rounding of a value that is not rounded to 0, as a share of it."""
PLACE_BYTES, CODE_BYTES, SCALE_BYTES = PLACE_BITS * GROUPS // 8, GROUPS // 2, 4
CHUNK_BYTES = PLACE_BYTES + CODE_BYTES + SCALE_BYTES
TINY = np.float32(1e-30)
"""Chunks whose largest value is below it are all zeros: above it no level is denormal."""


class Sparse:
    """Top-1 of groups. A value that decodes to 0 was left out: it stays pending with its contributors."""

    name, is_lossy, leaves_out = "sparse", True, True

    def encoded_bytes(self, elements: int) -> int:
        """Return the bytes of all chunks; the last one is padded with zeros."""
        return -(-elements // CHUNK) * CHUNK_BYTES

    def elements(self, encoded_bytes: int) -> int:
        """Return a whole number of chunks, at least one."""
        return max(1, encoded_bytes // CHUNK_BYTES) * CHUNK

    def encode(self, values: np.ndarray) -> bytes:
        """Round the largest value of each group to the nearest level, in octaves. Values must be finite."""
        chunks = _in_chunks(values)
        places = _largest(chunks)
        sent = chunks.reshape(-1)[_flat(places)]
        sizes = np.abs(sent)
        scales = sizes.max(axis=1, initial=0)
        scales[scales < TINY] = 0
        shares = sizes / np.where(scales, scales, np.float32(np.inf))[:, None]
        codes = 7 - np.searchsorted(MIDDLES, shares).astype(np.uint8)
        codes += (sent < 0).astype(np.uint8) << np.uint8(3)
        rows = np.empty((len(chunks), CHUNK_BYTES), np.uint8)
        rows[:, :PLACE_BYTES] = _pack(places)
        rows[:, PLACE_BYTES:-SCALE_BYTES] = codes[:, : GROUPS // 2] | codes[:, GROUPS // 2 :] << np.uint8(4)
        rows[:, -SCALE_BYTES:] = scales.astype("<f4").view(np.uint8).reshape(len(chunks), SCALE_BYTES)
        return rows.tobytes()

    def decode(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """Decode to float32 `[elements]`. Raises ValueError for a length other than `encoded_bytes(elements)`."""
        rows = self._rows(data, elements)
        packed = rows[:, PLACE_BYTES:-SCALE_BYTES]
        codes = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)
        values = np.zeros(len(rows) * CHUNK, np.float32)
        values[_flat(_unpack(rows[:, :PLACE_BYTES]))] = LEVELS[codes] * _scales(rows)[:, None]
        return values[:elements]

    def is_valid(self, data: bytes | memoryview, elements: int) -> bool:
        """Return whether all values are finite; any bytes decode. Raises ValueError as `decode`."""
        return bool(np.isfinite(_scales(self._rows(data, elements))).all())

    def rounding(self, values: np.ndarray) -> np.ndarray:
        """Return the bound for a value that is not left out, which may be any."""
        bound: np.ndarray = np.abs(values) * LARGEST_CHANGE
        return bound

    def _rows(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        if len(data) != self.encoded_bytes(elements):
            raise ValueError(f"{len(data)} bytes where {elements} elements in {self.name} take {self.encoded_bytes(elements)}")
        return np.frombuffer(data, np.uint8).reshape(-1, CHUNK_BYTES)


def _in_chunks(values: np.ndarray) -> np.ndarray:
    """Pad with zeros and reshape to `[chunks, CHUNK]`."""
    missing = -values.size % CHUNK
    whole = np.concatenate([values, np.zeros(missing, np.float32)]) if missing else np.ascontiguousarray(values, np.float32)
    return whole.reshape(-1, CHUNK)


def _largest(chunks: np.ndarray) -> np.ndarray:
    """Return the place of each group's value of largest magnitude, but for its last bits, uint8 `[chunks, GROUPS]`."""
    keys = chunks.view(np.uint32).reshape(-1, GROUP, GROUPS) & np.uint32(0x7FFFFFFF & -GROUP)  # in the order of the magnitudes
    keys |= np.arange(GROUP, dtype=np.uint32)[:, None]
    largest: np.ndarray = keys.max(axis=1)
    return (largest & np.uint32(GROUP - 1)).astype(np.uint8)


def _pack(places: np.ndarray) -> np.ndarray:
    """Pack uint8 below 32 `[chunks, GROUPS]` to bytes `[chunks, PLACE_BYTES]`: eight to five bytes, the first lowest."""
    eights = np.zeros((len(places), GROUPS // 8), "<u8")
    for i in range(8):
        eights |= places[:, i::8].astype("<u8") << np.uint64(PLACE_BITS * i)
    return eights.view(np.uint8).reshape(len(places), GROUPS // 8, 8)[:, :, :PLACE_BITS].reshape(len(places), PLACE_BYTES)


def _unpack(packed: np.ndarray) -> np.ndarray:
    """Invert `_pack`."""
    eights = np.zeros((len(packed), GROUPS // 8, 8), np.uint8)
    eights[:, :, :PLACE_BITS] = packed.reshape(len(packed), GROUPS // 8, PLACE_BITS)
    shifts = PLACE_BITS * np.arange(8, dtype="<u8")
    places: np.ndarray = (eights.view("<u8") >> shifts & np.uint64(GROUP - 1)).astype(np.uint8)
    return places.reshape(len(packed), GROUPS)


def _flat(places: np.ndarray) -> np.ndarray:
    """Return the index of each group's place in the flat chunks, int64 `[chunks, GROUPS]`."""
    starts = np.arange(len(places))[:, None] * CHUNK + np.arange(GROUPS)
    return places * np.int64(GROUPS) + starts


def _scales(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows[:, -SCALE_BYTES:]).view("<f4").astype(np.float32).reshape(-1)
