"""The one framing of every stream: a frame is a kind (one byte), the length of its body (four bytes, big endian) and the body.

The kind says what the body is. A receiver that does not know a kind
- ignores the frame, if the kind is in the upper half (IGNORABLE and above): hints that a newer version may add;
- refuses with UNKNOWN_KIND and ends the stream, if it is in the lower half: nothing there may be lost unseen.
A known kind where another one belongs is malformed. The length is checked before the body is read.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct(">BI")
MAX_FRAME_BYTES = 8 * 2**20
"""The largest body: a part of an update (at most 1 MiB of values), a page of certificates, the manifest of 2^18 parts. Anything
longer breaks the stream before it is read into memory."""
IGNORABLE = 128


class Kind(IntEnum):
    """What a frame's body is."""

    FINISHED = 0
    """Empty: no more frames from this end."""
    HEARTBEAT = 1
    """Empty: this end lives."""
    REFUSAL = 2
    """A Refusal; nothing follows it."""
    MESSAGE = 3
    """The method's request, or its answer."""
    CONTENT = 4
    """Bytes of what was asked for: a piece, a chunk of a file, a list of digests. Empty for a piece that is not there."""
    PART = 5
    """A part of an update or of a result (`rounds.py`)."""
    MANIFEST = 6
    """What a reducer made of its parts."""
    END = 7
    """Empty: the sequence of CONTENT, PART or MANIFEST is over."""
    PLAN = 8
    """The plan of the round."""
    DECIDED = 9
    """The decided commit of the round, with its certificate."""
    PASSED = 10
    """A Passed: where the plan or commit is that belongs here."""
    REVISION = 11
    """Reducers were lost; the plan has another part table."""
    IN_FULL = 12
    """Empty: the coordinator asks for the report with all roots."""
    REPORT = 13
    """A Staged: what the member holds of the results."""


class Message(NamedTuple):
    """One frame as it is received."""

    body: bytes | bytearray
    kind: int = Kind.MESSAGE
