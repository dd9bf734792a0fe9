"""The one framing of every stream: a frame is a kind (one byte), the length of its body (four bytes, big endian) and the body.

The kind says what the body is. A receiver that does not know a kind
- ignores the frame if the kind is IGNORABLE or above: a newer version may add hints there;
- refuses with UNKNOWN_KIND and ends the stream otherwise, since it must not lose such a frame silently.
A known kind in the wrong place is malformed. The length is checked before the body is read.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct(">BI")
MAX_FRAME_BYTES = 8 * 2**20
"""The largest body: fits a part (512 KiB in the part table), a page of certified commits, or a manifest of 2^17 parts.
A longer one breaks the stream before it is read into memory."""
IGNORABLE = 128


class Kind(IntEnum):
    """What a frame's body is."""

    FINISHED = 0
    """Empty: the sender sends no more frames."""
    HEARTBEAT = 1
    """Empty: the sender is alive."""
    REFUSAL = 2
    """A Refusal, the last frame."""
    MESSAGE = 3
    """The method's request, or its answer."""
    CONTENT = 4
    """Requested bytes: a piece, a chunk of a file, a list of digests. Empty for a missing piece."""
    PART = 5
    """A part of an update or of a result (`rounds.py`)."""
    MANIFEST = 6
    """What a reducer made of its parts."""
    END = 7
    """Empty: end of a sequence of CONTENT, PART or MANIFEST."""
    PROPOSAL = 8
    """The coordinator's proposal, from which the plan of the round follows."""
    DECIDED = 9
    """The decided commit of the round, with its certificate."""
    PASSED = 10
    """A Passed: where to fetch the proposal or commit that belongs here."""
    REVISION = 11
    """A Revision: reducers were lost, and the plan has a new part table."""
    IN_FULL = 12
    """Empty: the coordinator asks for a report with all roots, or for an announcement that it cannot restore from a Brief."""
    REPORT = 13
    """A Report: the results that the member holds."""
    STALLED = 14
    """A Stalled: the member complains about a reducer."""
    PUSHED = 15
    """A Signed with a Pushed: the contributor's signature under the updates before it."""
    COMPACT = 16
    """A Compact: a proposal, a commit or a request for votes, compressed with a proposal that the receiver has."""
    BRIEF = 17
    """A Brief: a member's announcement or report, compressed with what the coordinator has of that member."""


class Message(NamedTuple):
    """A received frame."""

    body: bytes | bytearray
    kind: int = Kind.MESSAGE
