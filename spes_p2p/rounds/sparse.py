"""Sparse codecs: of every 16, 32 or 64 values the one of largest magnitude, in 8 to 10 bits; the others are left out.

SparseLoCo (arXiv 2508.15706) sends the top 1 to 3 % of each chunk of an update and keeps the rest as error feedback. Here the
values of a group are spread over a chunk of 4,096, so that a row of large values sends many of them. Of the energy of Gaussian
or Laplacian values a group of 32 sends as much as the top 1/40 of whole chunks, which takes as many bytes and ten times as
long. A value is a sign and one of eight magnitudes: half octaves below the chunk's largest value, and 0. Bytes per value:
0.063, 0.036 or 0.021.
"""

from __future__ import annotations

import numpy as np

from spes_p2p.rounds.chunked import LARGEST, Chunked

CHUNK = 4096
"""Values that share a scale. With n groups in a chunk, value i of the chunk is in group i % n."""
MAGNITUDES = np.array([2.0 ** (-step / 2) for step in range(7)] + [0.0], np.float32)
LEVELS = np.concatenate([MAGNITUDES, -MAGNITUDES])
"""By code: the value, as a share of the chunk's largest."""
MIDDLES = np.array([2.0 ** (-step / 2 + 0.25) for step in range(7, 0, -1)], np.float32)
"""Between the magnitudes, in octaves, ascending."""
LARGEST_CHANGE = np.float32(2**0.25 - 1)
"""Bounds the rounding of a value that is not rounded to 0, as a share of it."""
SCALE_BYTES = 4
TINY = np.float32(1e-30)
"""Chunks whose largest value is below it are all zeros: above it no level is denormal."""


class Sparse(Chunked):
    """Top-1 of groups. A value that decodes to 0 was left out: it stays pending with its contributors."""

    is_lossy, leaves_out, chunk = True, True, CHUNK

    def __init__(self, name: str, group: int):
        """Send one of `group` values, a power of 2 of at most 256."""
        self.name = name
        self.groups = CHUNK // group
        self._place_bits = group.bit_length() - 1
        self._place_bytes = self._place_bits * self.groups // 8
        self.chunk_bytes = self._place_bytes + self.groups // 2 + SCALE_BYTES

    def encode(self, values: np.ndarray) -> bytes:
        """Round the largest value of each group to the nearest level, in octaves. Values must be finite."""
        chunks, half = self.in_chunks(values), self.groups // 2
        places = _largest(chunks.reshape(len(chunks), CHUNK // self.groups, self.groups))
        sent = chunks.reshape(-1)[_flat(places)]
        sizes = np.abs(sent)
        scales = sizes.max(axis=1, initial=0)
        scales[scales < TINY] = 0
        shares = sizes / np.where(scales, scales, np.float32(np.inf))[:, None]
        codes = 7 - np.searchsorted(MIDDLES, shares).astype(np.uint8)
        codes += (sent < 0).astype(np.uint8) << np.uint8(3)
        rows = np.empty((len(chunks), self.chunk_bytes), np.uint8)
        rows[:, : self._place_bytes] = _pack(places, self._place_bits)
        rows[:, self._place_bytes : -SCALE_BYTES] = codes[:, :half] | codes[:, half:] << np.uint8(4)
        rows[:, -SCALE_BYTES:] = scales.astype("<f4").view(np.uint8).reshape(len(chunks), SCALE_BYTES)
        return rows.tobytes()

    def decode(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """Decode to float32 `[elements]`. Raises ValueError for a length other than `encoded_bytes(elements)`."""
        rows = self._rows(data, elements)
        packed = rows[:, self._place_bytes : -SCALE_BYTES]
        codes = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)
        values = np.zeros(len(rows) * CHUNK, np.float32)
        places = _unpack(rows[:, : self._place_bytes], self._place_bits)
        values[_flat(places)] = LEVELS[codes] * _scales(rows)[:, None]
        return values[:elements]

    def is_valid(self, data: bytes | memoryview, elements: int, most: float = LARGEST) -> bool:
        """See Codec; any bytes decode."""
        return bool((np.abs(_scales(self._rows(data, elements))) <= most).all())

    def rounding(self, values: np.ndarray) -> np.ndarray:
        """Return the bound for a value that is not left out, which may be any."""
        bound: np.ndarray = np.abs(values) * LARGEST_CHANGE
        return bound

    def _rows(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        self.check_length(data, elements)
        return np.frombuffer(data, np.uint8).reshape(-1, self.chunk_bytes)


def _largest(chunks: np.ndarray) -> np.ndarray:
    """Return the place of each group's value of largest magnitude, but for its last bits.

    `[chunks, group, groups]` -> uint8 `[chunks, groups]`.
    """
    group = chunks.shape[1]
    keys = chunks.view(np.uint32) & np.uint32(0x7FFFFFFF & -group)  # in the order of the magnitudes
    keys |= np.arange(group, dtype=np.uint32)[:, None]
    largest: np.ndarray = keys.max(axis=1)
    return (largest & np.uint32(group - 1)).astype(np.uint8)


def _pack(places: np.ndarray, bits: int) -> np.ndarray:
    """Pack uint8 below 2**bits `[chunks, groups]` to bytes `[chunks, groups * bits / 8]`: eight at a time, the first lowest."""
    count, groups = places.shape
    eights = np.zeros((count, groups // 8), "<u8")
    for i in range(8):
        eights |= places[:, i::8].astype("<u8") << np.uint64(bits * i)
    return eights.view(np.uint8).reshape(count, groups // 8, 8)[:, :, :bits].reshape(count, bits * groups // 8)


def _unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Invert `_pack`."""
    count, eighths = len(packed), packed.shape[1] // bits
    eights = np.zeros((count, eighths, 8), np.uint8)
    eights[:, :, :bits] = packed.reshape(count, eighths, bits)
    shifts = bits * np.arange(8, dtype="<u8")
    places: np.ndarray = (eights.view("<u8") >> shifts & np.uint64(2**bits - 1)).astype(np.uint8)
    return places.reshape(count, 8 * eighths)


def _flat(places: np.ndarray) -> np.ndarray:
    """Return the index of each group's place in the flat chunks, int64 `[chunks, groups]`."""
    count, groups = places.shape
    starts = np.arange(count)[:, None] * CHUNK + np.arange(groups)
    return places * np.int64(groups) + starts


def _scales(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows[:, -SCALE_BYTES:]).view("<f4").astype(np.float32).reshape(-1)
