"""Large records on the wire: compressed with a proposal that the receiver has as zstd's dictionary.

Consecutive proposals of a swarm share the members' ids and public keys, which are most of them, and a commit and its evidence
repeat what is in their proposal. What is left are signatures, roots and numbers. The receiver restores the bytes exactly, so
what is hashed, signed, checked and stored does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import zstandard
from annotated_types import MaxLen

from spes_p2p.messages.codec import WireError
from spes_p2p.messages.fields import Digest, FrameKind
from spes_p2p.messages.framing import MAX_FRAME_BYTES

COMPACT_BYTES = 2**13
"""Send shorter records as they are: a swarm of a few members saves little."""
LEVEL = 5
"""Of zstd. Higher ones save less than one percent."""


@dataclass(frozen=True)
class Compact:
    """In place of a longer record: what it adds to a proposal."""

    kind: FrameKind
    """Kind of the frame that this one replaces."""
    known: Digest
    """Id of the proposal whose bytes are the dictionary; empty: none. Who lacks it asks members for it (`plan`)."""
    body: Annotated[bytes, MaxLen(MAX_FRAME_BYTES)]
    """A zstd frame that states its size."""


def compressed(record: bytes, known: bytes) -> bytes:
    """Return a record's bytes compressed with these as the dictionary."""
    sizes = zstandard.ZstdCompressionParameters.from_level(LEVEL, source_size=len(record), dict_size=len(known))
    body = zstandard.ZstdCompressor(compression_params=sizes, dict_data=_dictionary(known)).compress(record)
    return bytes(memoryview(body))  # a copy of its size: zstandard's own result occupies what the worst case would


def expanded(body: bytes, known: bytes) -> bytes:
    """Return the record's bytes. Raises WireError, also for one that no frame could hold."""
    try:
        if not 0 <= zstandard.frame_content_size(body) <= MAX_FRAME_BYTES:
            raise WireError("a compressed record without its size, or a longer one than a frame")
        return zstandard.ZstdDecompressor(dict_data=_dictionary(known)).decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"not a compressed record: {error}") from None


def _dictionary(known: bytes) -> zstandard.ZstdCompressionDict | None:
    return zstandard.ZstdCompressionDict(known, dict_type=zstandard.DICT_TYPE_RAWCONTENT) if known else None
