"""Codecs of updates: the interface, the simple ones, and the table CODECS of all of them.

To add one, implement `Codec`, enter it in CODECS, and add its name to `CodecName` (`config/types.py`); CONTRIBUTING.md has the
steps. Decoding is elementwise and must give the same bits on every machine: all members decode the same bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from spes_p2p.config.campaign import CodecConfig
from spes_p2p.model.layout import Group, Layout
from spes_p2p.rounds.blockwise import Blockwise
from spes_p2p.rounds.chunked import LARGEST, Chunked
from spes_p2p.rounds.sparse import Sparse
from spes_p2p.rounds.ternary import Ternary

FP16_MAX = np.float32(65504.0)
FP16_NORMAL = np.float32(2**-14)


class Codec(Protocol):
    """Encodes float32 vectors. The caller keeps the encoding error (error feedback)."""

    name: str
    is_lossy: bool
    """Whether decoding may give values that differ from the encoded ones."""
    leaves_out: bool
    """Whether a value that decodes to 0 was left out: of a mean, it then stays pending with the contributors."""

    def encoded_bytes(self, elements: int) -> int:
        """Return the exact length of an encoded vector."""

    def elements(self, encoded_bytes: int) -> int:
        """Return the largest number of elements whose encoding fits."""

    def encode(self, values: np.ndarray) -> bytes:
        """Encode float32 `[n]`."""

    def decode(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """Decode valid bytes to read-only float32 `[elements]`. Raises ValueError for another length."""

    def is_valid(self, data: bytes | memoryview, elements: int, most: float = LARGEST) -> bool:
        """Return whether `decode` gives values of at most this size, by default any finite ones.

        Raises ValueError for a length other than `encoded_bytes(elements)`.
        """

    def rounding(self, values: np.ndarray) -> np.ndarray:
        """Return a bound, float32 `[n]`, of what encoding these values changes each of them by, but for float32 rounding.

        A value that the codec leaves out is not bounded. Members hold reducers to the bound (`sums.py`): one that is too small
        has honest reducers excluded.
        """


class _Elementwise(Chunked, Codec):
    leaves_out, chunk = False, 1

    def is_valid(self, data: bytes | memoryview, elements: int, most: float = LARGEST) -> bool:
        return bool((np.abs(self.decode(data, elements)) <= most).all())


class Uncompressed(_Elementwise):
    """float32, little-endian."""

    name, is_lossy, chunk_bytes = "none", False, 4

    def encode(self, values: np.ndarray) -> bytes:
        """Return the values' bytes."""
        return np.ascontiguousarray(values, dtype="<f4").tobytes()

    def decode(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """Return a view of the bytes."""
        self.check_length(data, elements)
        return np.frombuffer(data, dtype="<f4")

    def rounding(self, values: np.ndarray) -> np.ndarray:
        """Nothing changes."""
        return np.zeros_like(values)


class HalfPrecision(_Elementwise):
    """IEEE half precision, rounded to nearest even; values beyond its range are clipped."""

    name, is_lossy, chunk_bytes = "fp16", True, 2

    def encode(self, values: np.ndarray) -> bytes:
        """Clip to +-65504, then round."""
        clipped, torch = np.clip(values, -FP16_MAX, FP16_MAX), _torch()
        halves: np.ndarray = clipped.astype(np.float16) if torch is None else torch.from_numpy(clipped).half().numpy()
        return halves.astype("<f2", copy=False).tobytes()

    def decode(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """Convert exactly: every half-precision number is a float32."""
        self.check_length(data, elements)
        halves = np.frombuffer(data, dtype="<f2").astype(np.float16)
        torch = _torch()
        values: np.ndarray = halves.astype(np.float32) if torch is None else torch.from_numpy(halves).float().numpy()
        return values

    def rounding(self, values: np.ndarray) -> np.ndarray:
        """Half a unit in the last place, or the distance from the range."""
        sizes = np.abs(values)
        bound: np.ndarray = np.maximum(sizes, FP16_NORMAL) * np.float32(2**-11)
        np.maximum(bound, sizes - FP16_MAX, out=bound)
        return bound


def _torch() -> Any:
    """Return torch in a process that has imported it, as trainers have; otherwise None.

    It converts numbers to the same bits as numpy and 5 to 20 times as fast, but takes 3 s and 200 MB to import.
    """
    return sys.modules.get("torch")


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Uncompressed(), HalfPrecision(), Blockwise("int8", bits=8), Blockwise("int4", bits=4), Ternary(),
        Sparse("sparse16", 16), Sparse("sparse", 32), Sparse("sparse64", 64),
    )
}
"""All codecs, by the names that a campaign file uses (`CodecName`)."""


MANY = 2**20
"""Elements for which a codec's bytes tell its bits a value."""


def is_coarse(codec: Codec) -> bool:
    """Return whether a codec sends less than 4 bits a value, and so leaves much of an update for later rounds."""
    return 2 * codec.encoded_bytes(MANY) < MANY


@dataclass(frozen=True)
class GroupCodecs:
    """The codec of each kind of group."""

    router: Codec
    shared: Codec
    experts: Codec

    def of(self, group: Group, is_last: bool = False) -> Codec:
        """Return the codec of a group's parts. After a campaign's last round there is no later one to leave anything for."""
        codec = {"router": self.router, "shared": self.shared, "expert": self.experts}[group.kind]
        return CODECS["int4"] if is_last and is_coarse(codec) else codec

    def encoded_bytes(self, layout: Layout, is_last: bool = False) -> int:
        """Return the encoded size of an update of the whole state."""
        return sum(self.of(group, is_last).encoded_bytes(group.size) for group in layout.groups)


def group_codecs(config: CodecConfig) -> GroupCodecs:
    """Return the codecs that a campaign names."""
    return GroupCodecs(CODECS[config.router], CODECS[config.shared], CODECS[config.experts])
