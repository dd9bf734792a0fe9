"""How an update is encoded on the wire. Decoding is elementwise and gives the same bits on every machine."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from spes_p2p.config.campaign import CodecConfig
from spes_p2p.model.layout import Group, Layout
from spes_p2p.rounds.blockwise import Blockwise

FP16_MAX = np.float32(65504.0)


class Codec(Protocol):
    """Encodes float32 vectors; what it drops stays with the caller (error feedback)."""

    name: str
    is_lossy: bool
    """May decoding give other values than were encoded?"""

    def encoded_bytes(self, elements: int) -> int:
        """Exact length of an encoded vector of so many elements."""

    def elements(self, encoded_bytes: int) -> int:
        """Most elements whose encoding fits into so many bytes."""

    def encode(self, values: np.ndarray) -> bytes:
        """Encode float32 `[n]`."""

    def decode(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """float32 `[elements]`, not to be written to. Raises ValueError for a length other than `encoded_bytes(elements)`."""

    def is_finite(self, data: bytes | memoryview, elements: int) -> bool:
        """Would decoding give finite values only? Raises ValueError as `decode`."""


class Uncompressed:
    """float32, little-endian."""

    name = "none"
    is_lossy = False

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
        return np.frombuffer(data, dtype="<f4")

    def is_finite(self, data: bytes | memoryview, elements: int) -> bool:
        """Looks at all of them."""
        return bool(np.isfinite(self.decode(data, elements)).all())


class HalfPrecision:
    """IEEE half precision, rounded to nearest even; values beyond its range are clipped."""

    name = "fp16"
    is_lossy = True

    def encoded_bytes(self, elements: int) -> int:
        """Two bytes an element."""
        return 2 * elements

    def elements(self, encoded_bytes: int) -> int:
        """Two bytes an element."""
        return encoded_bytes // 2

    def encode(self, values: np.ndarray) -> bytes:
        """Clip to +-65504, then round. torch does it more than ten times as fast as numpy, to the same bits."""
        halves: np.ndarray = _as_tensor(np.clip(values, -FP16_MAX, FP16_MAX)).half().numpy()
        return halves.astype("<f2", copy=False).tobytes()

    def decode(self, data: bytes | memoryview, elements: int) -> np.ndarray:
        """Exact: every half-precision number is a float32."""
        _check_length(self, data, elements)
        halves = np.frombuffer(data, dtype="<f2").astype(np.float16)
        values: np.ndarray = _as_tensor(halves).float().numpy()
        return values

    def is_finite(self, data: bytes | memoryview, elements: int) -> bool:
        """Looks at all of them."""
        return bool(np.isfinite(self.decode(data, elements)).all())


def _as_tensor(values: np.ndarray) -> Any:
    """As torch's; the command line knows codecs by name, and does not wait for torch to be imported."""
    return import_module("torch").from_numpy(values)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (Uncompressed(), HalfPrecision(), Blockwise("int8", bits=8), Blockwise("int4", bits=4))
}
"""By the names that a campaign file uses."""


@dataclass(frozen=True)
class GroupCodecs:
    """Which codec encodes the updates of which groups."""

    router: Codec
    shared: Codec
    experts: Codec

    def of(self, group: Group) -> Codec:
        """The codec of one group's parts."""
        return {"router": self.router, "shared": self.shared, "expert": self.experts}[group.kind]

    def encoded_bytes(self, layout: Layout) -> int:
        """An update of the whole state, encoded."""
        return sum(self.of(group).encoded_bytes(group.size) for group in layout.groups)


def group_codecs(config: CodecConfig) -> GroupCodecs:
    """The codecs that a campaign names."""
    return GroupCodecs(CODECS[config.router], CODECS[config.shared], CODECS[config.experts])


def _check_length(codec: Codec, data: bytes | memoryview, elements: int) -> None:
    if len(data) != codec.encoded_bytes(elements):
        raise ValueError(f"{len(data)} bytes where {elements} elements in {codec.name} take {codec.encoded_bytes(elements)}")
