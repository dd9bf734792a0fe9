"""The types of the content service: content in pieces with the hashes that prove them, sources, and donors.

| kind | name | pieces | hash | what proves the hashes |
|---|---|---|---|---|
| file | sha256 of the file | the file | sha256 | the campaign |
| base_hashes | commit | the list of piece digests | BLAKE3 | the digest of the base: the next commit's certificate |
| base | commit | 2^16 float32 values each | BLAKE3 | base_hashes |
| token_hashes | root | the list of piece hashes | sha256 | the manifest |
| tokens | root | 256 KiB of ids each | sha256 | token_hashes |
| plan | plan | the plan | sha256 | the commit |
| manifests | plan | one for each revision and reducer | sha256 | the commit |
| parts | plan | the encoded result of each part | BLAKE3 | manifests |
| record | sha256 of the record | the record | sha256 | the coordinator's message |
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


_BLAKE3: Collection[ContentKind] = ("base_hashes", "base", "parts")


@dataclass(frozen=True)
class Piece:
    """What is known of a piece before it is here."""

    digest: bytes
    max_bytes: int
    """Its size, or a bound where only the hash is known."""


@dataclass(frozen=True)
class Content:
    """One content and what proves its pieces."""

    kind: ContentKind
    name: str
    piece: Callable[[int], Piece]
    """By index."""

    def proves(self, index: int, body: Body) -> bool:
        """Is this the piece of that index?"""
        digest = content_digest(body) if self.kind in _BLAKE3 else hashlib.sha256(body).digest()
        return digest == self.piece(index).digest


def from_hex(digest: str) -> bytes:
    """A digest of 32 bytes. Raises WireError when the text is none."""
    if re.fullmatch("[0-9a-f]{64}", digest) is None:
        raise WireError(f"{digest[:64]!r} is no digest")
    return bytes.fromhex(digest)


def single(kind: ContentKind, name: str, digest: bytes, max_bytes: int) -> Content:
    """Content of one piece."""
    piece = Piece(digest, max_bytes)
    return Content(kind, name, lambda index: piece)


def listed(kind: ContentKind, name: str, digests: bytes, piece_bytes: int) -> Content:
    """Content in pieces of at most this size, proven by a list of digests of 32 bytes each."""
    return Content(kind, name, lambda index: Piece(digests[32 * index : 32 * index + 32], piece_bytes))


class BadPiece(Exception):
    """A donor gave something else than the piece."""


Source = Callable[[str, int], Awaitable[Body | None]]
"""`await source(name, index)`: a piece as this peer serves it; None when it is not here. Raises Refused when none is."""

Keep = Callable[[int, Body], Awaitable[None]]
"""`await keep(index, body)`: store a piece that has its hash, maybe twice. Raises BadPiece for one that cannot be used."""


class Delivery(Protocol):
    """Where a donor puts what it gives."""

    def count(self, size: int) -> None:
        """So many bytes have arrived: the donor makes progress."""

    async def put(self, index: int, body: Body | None) -> None:
        """A piece; None: the donor does not have it. Raises BadPiece when it is not the right one."""


class Donor(Protocol):
    """Somebody who may have pieces: a peer, or a server of token files."""

    @property
    def name(self) -> str:
        """Unique among the donors of a download."""

    @property
    def patience_s(self) -> float | None:
        """Drop it when nothing comes for this long; None: as a peer."""

    async def give(self, content: Content, indices: Sequence[int], delivery: Delivery) -> None:
        """Put each of these pieces once, in this order. Raises PeerUnreachable, Refused, WireError."""
