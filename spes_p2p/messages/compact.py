"""Records on the wire: compressed with what the receiver has as zstd's dictionary. Of large records that is a proposal, of a
member's announcement and report what the coordinator has of that member.

Consecutive proposals of a swarm share the members' ids and public keys, which are most of them, and a commit and its evidence
repeat what is in their proposal. What is left are signatures, roots and numbers. The receiver restores the bytes exactly, so
what is hashed, signed, checked and stored does not change.

Nine tenths of a member's signature are the same each time, so a Brief is a sixth of an announcement or a report.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

import zstandard
from annotated_types import MaxLen

from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.fields import Digest, FrameKind
from spes_p2p.messages.framing import MAX_FRAME_BYTES, Kind, Message

COMPACT_BYTES = 2**13
"""Send shorter records as they are: a swarm of a few members saves little."""
BRIEF_BYTES = 2**14
"""Send longer announcements and reports as they are. So a Brief expands to what is read on the event loop
(`net/unpacking.py`)."""
KNOWN_BYTES = 8
"""A sender that makes two dictionaries with the same digest harms itself: its signature does not fit what is restored."""
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


@dataclass(frozen=True)
class Brief:
    """In place of an announcement or report: what it adds to what the coordinator has of its sender.

    The coordinator answers one that it cannot restore with IN_FULL; its sender then sends the record itself.
    """

    kind: FrameKind
    """Kind of the frame that this one replaces."""
    known: Annotated[bytes, MaxLen(KNOWN_BYTES)]
    """Begin of the dictionary's sha256. For an announcement, that is the sender's packed Signed in the last plan, the id of the
    last commit, and the digest of the base after it; for a report, the packed Signed that began the stream, and the id of the
    plan."""
    body: Annotated[bytes, MaxLen(BRIEF_BYTES)]
    """A zstd frame that states its size, at most 16 KiB."""


def shortened(kind: Kind, record: bytes, known: bytes) -> Message:
    """Return the frame for a record: a Brief if that is shorter. `known`: the dictionary; empty: there is none."""
    if not known or len(record) > BRIEF_BYTES:
        return Message(record, kind)
    brief = pack(Brief(kind, _digest(known), compressed(record, known)))
    return Message(brief, Kind.BRIEF) if len(brief) < len(record) else Message(record, kind)


def restored(message: Message, known: bytes) -> Message | None:
    """Return the frame that this one stands for; None for a Brief with another dictionary. Raises WireError."""
    if message.kind != Kind.BRIEF:
        return message
    brief = unpack(Brief, message.body)
    if not known or brief.known != _digest(known):
        return None
    return Message(expanded(brief.body, known, BRIEF_BYTES), brief.kind)


def _digest(known: bytes) -> bytes:
    return hashlib.sha256(known).digest()[:KNOWN_BYTES]


def compressed(record: bytes, known: bytes = b"") -> bytes:
    """Return a record's bytes as a zstd frame that states its size. `known`: the dictionary."""
    sizes = zstandard.ZstdCompressionParameters.from_level(LEVEL, source_size=len(record), dict_size=len(known))
    body = zstandard.ZstdCompressor(compression_params=sizes, dict_data=_dictionary(known)).compress(record)
    return bytes(memoryview(body))  # a copy of its size: zstandard's own result occupies what the worst case would


def expanded(body: bytes, known: bytes = b"", longest: int = MAX_FRAME_BYTES) -> bytes:
    """Return the record's bytes. Raises WireError, also for one of more than `longest` bytes."""
    try:
        if not 0 <= zstandard.frame_content_size(body) <= longest:
            raise WireError(f"a compressed record without its size, or of more than {longest} bytes")
        return zstandard.ZstdDecompressor(dict_data=_dictionary(known)).decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"not a compressed record: {error}") from None


def _dictionary(known: bytes) -> zstandard.ZstdCompressionDict | None:
    return zstandard.ZstdCompressionDict(known, dict_type=zstandard.DICT_TYPE_RAWCONTENT) if known else None
