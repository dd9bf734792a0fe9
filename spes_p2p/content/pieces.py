"""The types of the content service: content in hashed pieces, sources that serve it, and donors that give it.

| kind | name | pieces | hash | where the hash comes from |
|---|---|---|---|---|
| file | sha256 of the file | the file | sha256 | the campaign |
| base_hashes | commit | the list of piece digests | BLAKE3 | the base digest, which the next commit certifies |
| base | commit | 2^16 float32 values each, packed (`floats.py`) | BLAKE3 of the values | base_hashes |
| token_hashes | root | the list of piece hashes | sha256 | the manifest |
| tokens | root | 256 KiB of ids each | sha256 | token_hashes |
| plan | plan | the proposal | sha256 | the commit |
| manifests | plan | one for each revision and reducer | sha256 | the commit |
| parts | plan | the encoded result of each part | BLAKE3 | manifests |
| record | sha256 of its first piece | 4 KiB each, behind the hash of the next | sha256 | the coordinator's message |
| updates | plan | the encoded update of each part and contributor | BLAKE3 | the contributors' signed records |
| proof | id of the proof | the proof | sha256 | the coordinator's proposal |
| moments | root | the list of the other pieces' hashes, then 256 KiB each | BLAKE3 | the member's announcement; that list |
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from spes_p2p.messages.codec import WireError
from spes_p2p.messages.content import ContentKind
from spes_p2p.rounds.digest import content_digest

Body = bytes | memoryview
_BLAKE3: Collection[ContentKind] = ("base_hashes", "base", "parts", "updates", "moments")


@dataclass(frozen=True)
class Piece:
    """What is known about a piece before it is downloaded."""

    digest: bytes
    max_bytes: int
    """The size of what travels, or an upper bound where only the hash is known."""


@dataclass(frozen=True)
class Content:
    """One content and the hashes of its pieces."""

    kind: ContentKind
    name: str
    piece: Callable[[int], Piece]
    """Return the expected piece of an index."""
    unpacked: Callable[[Body], Body] = lambda body: body
    """Return a piece, to be verified, from what travels. Raises WireError."""
    is_chained: bool = False
    """Whether a piece can only be verified after all before it, so that donors are asked for no other one."""

    def matches(self, index: int, body: Body) -> bool:
        """Return whether the body has the hash of this piece."""
        digest = content_digest(body) if self.kind in _BLAKE3 else hashlib.sha256(body).digest()
        return digest == self.piece(index).digest


def from_hex(digest: str) -> bytes:
    """Parse a digest of 32 bytes. Raises WireError."""
    if re.fullmatch("[0-9a-f]{64}", digest) is None:
        raise WireError(f"{digest[:64]!r} is not a digest")
    return bytes.fromhex(digest)


def single(kind: ContentKind, name: str, digest: bytes, max_bytes: int) -> Content:
    """Return content of one piece."""
    piece = Piece(digest, max_bytes)
    return Content(kind, name, lambda index: piece)


def listed(kind: ContentKind, name: str, digests: bytes, piece_bytes: int) -> Content:
    """Return content of several pieces. `digests`: 32 bytes a piece, concatenated; `piece_bytes`: bounds each piece."""
    return Content(kind, name, lambda index: Piece(digests[32 * index : 32 * index + 32], piece_bytes))


class BadPiece(Exception):
    """A donor gave a piece with the wrong hash, or one that cannot be used."""


Source = Callable[[str, int], Awaitable[Body | None]]
"""`await source(name, index)` returns a piece to serve; None: this peer lacks it. Raises Refused when it lacks the content."""

Keep = Callable[[int, Body], Awaitable[None]]
"""`await keep(index, body)` stores a verified piece; it may be called twice for one. Raises BadPiece for an unusable one."""


class Delivery(Protocol):
    """Receives what a donor gives."""

    def count(self, size: int) -> None:
        """Record the arrival of `size` bytes."""

    async def put(self, index: int, body: Body | None) -> None:
        """Take a piece; None: the donor lacks it. Raises BadPiece."""


class Donor(Protocol):
    """A possible source of pieces: a peer, or the URL of a token file."""

    @property
    def name(self) -> str:
        """The donor's name, unique within a download."""

    @property
    def patience_s(self) -> float | None:
        """Drop the donor after this long without a byte; None: as for a peer."""

    async def give(self, content: Content, indices: Sequence[int], delivery: Delivery) -> None:
        """Deliver each of these pieces once, in this order. Raises PeerUnreachable, Refused, WireError."""
