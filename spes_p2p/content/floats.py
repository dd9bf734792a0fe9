"""Pieces of a base on the wire: each byte of the float32 values apart, as a zstd frame.

The values of a group of weights have few exponents, so a trained base shrinks to some 85 %; one whose values are bfloat16, as
base 0 of most checkpoints, to 35 %. The receiver restores the exact bytes, which the digests are of.
"""

from __future__ import annotations

import numpy as np
import zstandard

from spes_p2p.content.pieces import Body
from spes_p2p.messages.codec import WireError

LEVEL = 1
"""Of zstd. Level 3 is a third slower and saves nothing."""
VALUE_BYTES = 4
FRAME_BYTES = 64
"""Bounds what the frame of a plane that zstd cannot compress adds to it."""


def packed_bytes(elements: int) -> int:
    """Return an upper bound for the bytes of a packed piece."""
    return VALUE_BYTES * (elements + FRAME_BYTES)


def pack_floats(values: np.ndarray) -> bytes:
    """Return float32 values `[elements]` packed: the frames of their lowest to their highest bytes."""
    planes = np.ascontiguousarray(values.astype("<f4", copy=False).view(np.uint8).reshape(-1, VALUE_BYTES).T)
    return b"".join(map(zstandard.ZstdCompressor(level=LEVEL).compress, planes))


def unpack_floats(packed: Body, most: int) -> bytes:
    """Return the bytes of the float32 values, little endian. Raises WireError, also for more than `most` values."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**20)
    try:
        with decompressor.stream_reader(packed, read_across_frames=True) as reader:
            planes = reader.read(VALUE_BYTES * most + 1)
    except zstandard.ZstdError as error:
        raise WireError(f"not packed values: {error}") from None
    if len(planes) % VALUE_BYTES or len(planes) > VALUE_BYTES * most:
        raise WireError(f"packed values of {len(planes)} bytes")
    return np.frombuffer(planes, np.uint8).reshape(VALUE_BYTES, -1).T.tobytes()
