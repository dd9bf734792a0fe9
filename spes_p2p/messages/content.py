"""Requests for the campaign and for pieces of its files, of bases, of text and of a round's results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import MaxLen

from spes_p2p.messages.admission import Invitation
from spes_p2p.messages.codec import Extensible
from spes_p2p.messages.consensus import Commit
from spes_p2p.messages.fields import Count, Digest, PieceIndex, Round, Version, Word

PIECES_PER_REQUEST = 16
"""Bounds what is lost when a donor fails."""

ContentKind = Literal[
    "file", "base_hashes", "base", "token_hashes", "tokens", "plan", "manifests", "parts", "record",
    "updates", "proof", "moments",
]
"""Kinds of content in pieces (`content/pieces.py`); also the methods by which they are asked for."""


@dataclass(frozen=True)
class CampaignRequest(Extensible):
    """Ask a peer for its campaign."""

    protocol: Version


@dataclass(frozen=True)
class CampaignRecord(Extensible):
    """The campaign as a bootstrap peer or any member serves it."""

    protocol: Version
    """The version that the serving peer speaks; a newer joiner decides whether it still does."""
    program: Word
    """The serving peer's version of spes_p2p."""
    campaign_json: Annotated[bytes, MaxLen(2**20)]
    genesis: Commit
    blobs: Annotated[tuple[tuple[Digest, Count], ...], MaxLen(2**6)] = field(default=())
    """sha256 and bytes of each file that can be fetched: tokenizer, manifests."""


@dataclass(frozen=True)
class PiecesRequest(Extensible):
    """Ask for pieces of one content, in this order."""

    name: Digest
    """Names the content among those of its kind."""
    pieces: Annotated[tuple[PieceIndex, ...], MaxLen(PIECES_PER_REQUEST)]


@dataclass(frozen=True)
class SnapshotRequest(Extensible):
    """Ask for the base of a commit; "": the newest one."""

    commit: Digest
    invitation: Invitation | None = None
    """Of a peer that the owner invited to vote or as a helper: it is served before strangers."""


@dataclass(frozen=True)
class SnapshotInfo(Extensible):
    """The base that a donor serves."""

    commit: Digest
    round: Round
    elements: Count
    digest: Digest
    """BLAKE3 of the list of piece digests."""
