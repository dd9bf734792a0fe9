"""The campaign's files (tokenizer, manifests) as content, named by their sha256."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.pieces import Body, from_hex, single
from spes_p2p.content.transfer import ContentServer
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.messages.codec import WireError
from spes_p2p.messages.refusals import Code

MAX_CONCURRENT_UPLOADS = 8
"""Bounds the peers that fetch files from this peer at a time."""


async def serve_files(server: ContentServer, files: Mapping[str, bytes]) -> None:
    """Start to serve these files, given by sha256."""

    async def source(sha256: str, index: int) -> Body | None:
        if sha256 not in files:
            raise Refused(Code.NOT_HERE, "this peer lacks the file")
        return files[sha256] if index == 0 else None

    await server.serve("file", source, MAX_CONCURRENT_UPLOADS, lambda: sum(map(len, files.values())))


async def fetch_file(fetcher: Fetcher, sha256: str, size: int, at_most: int, peers: Sequence[str]) -> bytes:
    """Download a file of `size` bytes from several of these peers. Raises UserError, also when it is larger than `at_most`."""
    if not 0 < size <= at_most:
        raise UserError(
            f"peer {peers[0]}: offers file {sha256[:12]} of {size} bytes (limit: {at_most}); ask the campaign's owner"
        )
    try:
        content = single("file", sha256, from_hex(sha256), size)
        return bytes(await fetcher.fetch_single(content, [fetcher.peers(peers)]))
    except (PeerUnreachable, WireError):
        raise UserError(f"file {sha256[:12]}: none of {len(peers)} peers gave it; try again") from None
