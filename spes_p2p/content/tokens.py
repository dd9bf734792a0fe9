"""Training text as content: the pieces of token files that this peer trains on.

Trainers are asked first, in random order, so that the bootstrap peer serves each piece only a few times. Trainers for which the
owner does not vouch come after the helpers, since anybody can register many. The URL of the token file, if the manifest names
one, is the last tier: its owner pays for egress.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spes_p2p.content.fetcher import Fetcher
from spes_p2p.content.pieces import BadPiece, Body, Content, Delivery, Donor, from_hex, listed, single
from spes_p2p.content.transfer import ContentServer
from spes_p2p.data.manifest import TokenFile
from spes_p2p.data.pieces import HASH_BYTES, PIECE_BYTES, piece_count
from spes_p2p.data.shelf import TokenShelf
from spes_p2p.data.url_donor import RANGE_S, UrlDonor, UrlFailed
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.messages.refusals import Code

logger = logging.getLogger(__name__)

TRAINERS_ASKED = 3
"""Bounds the trainers that are asked before the helpers, and after them. Trainers keep the text that they trained on."""
PATIENCE_S, RETRY_S = 120.0, 2.0
"""Fail after this long without a donor that has a piece; interval between tries."""
MAX_CONCURRENT_UPLOADS = 8
"""Bounds the peers that fetch text from this peer at a time."""
TURN_BYTES = 2.0**22
"""Who was sent more makes room for a peer that waits: text is read for ever."""


class TokenLibrary:
    """Serves the pieces on a peer's shelf and fetches missing ones."""

    def __init__(
        self,
        shelf: TokenShelf,
        fetcher: Fetcher,
        sources: Callable[[], tuple[Sequence[str], Sequence[str]]],
        run_blocking: Callable[..., Awaitable[Any]],
        rng: random.Random,
        urls: UrlDonor | None = None,
    ):
        """`sources()` returns the living trainers and helpers. `urls` gives pieces that no peer has."""
        self._shelf, self._fetcher, self._sources = shelf, fetcher, sources
        self._run, self._rng, self._urls = run_blocking, rng, urls or UrlDonor()

    async def serve(self, server: ContentServer) -> None:
        """Start to serve text."""
        await server.serve("token_hashes", self._hashes, MAX_CONCURRENT_UPLOADS, lambda: TURN_BYTES)
        await server.serve("tokens", self._piece, MAX_CONCURRENT_UPLOADS, lambda: TURN_BYTES)

    async def _hashes(self, root: str, index: int) -> Body | None:
        hashes: bytes | None = await self._run(self._shelf.hashes, root)
        if hashes is None:
            raise Refused(Code.NOT_HERE, "this peer lacks the token file")
        return hashes if index == 0 else None

    async def _piece(self, root: str, index: int) -> Body | None:
        if await self._run(self._shelf.hashes, root) is None:
            raise Refused(Code.NOT_HERE, "this peer lacks the token file")
        piece: bytes | None = await self._run(self._shelf.piece, root, index)
        return piece

    async def ensure(self, file: TokenFile, pieces: Sequence[int]) -> None:
        """Fetch the missing ones of these pieces. Raises UserError when no donor gives them for PATIENCE_S."""
        root, loop = file.pieces_sha256, asyncio.get_running_loop()
        deadline, waits = loop.time() + PATIENCE_S, False
        while True:
            missing = await self._missing(file, root, pieces)
            if missing:
                missing = await self._fetch(file, missing)
            if not missing:
                return
            if loop.time() > deadline:
                problem = self._urls.problem(file)
                raise UserError(f"{file.path}: no peer gives {len(missing)} pieces of this token file"
                                f"{f', and {problem}' if problem else ''}; "
                                "ask the campaign's owner to start a bootstrap peer that has it, or give --data-dir")
            if not waits:
                waits = True
                logger.warning("waiting for text: no peer gives %d pieces of %s; trying for %g s", len(missing), file.path,
                               PATIENCE_S)
            await asyncio.sleep(RETRY_S)

    async def _missing(self, file: TokenFile, root: str, pieces: Sequence[int]) -> list[int]:
        if await self._run(self._shelf.hashes, root) is None:
            await self._fetch_hashes(file, root)
        missing: list[int] = await self._run(self._shelf.missing, root, pieces)
        return missing

    async def _fetch_hashes(self, file: TokenFile, root: str) -> None:
        """Fetch the list of piece hashes, from helpers first: they have whole files."""
        content = single("token_hashes", root, from_hex(root), HASH_BYTES * piece_count(file.num_bytes))

        async def keep(index: int, body: Body) -> None:
            if not self._shelf.learn_hashes(root, bytes(body)):
                raise BadPiece(f"sent piece hashes that do not fit {file.path}")
            await self._run(self._shelf.keep_hashes, root)

        trainers, helpers, others = self._donors()
        await self._fetcher.fetch(content, [0], [helpers, trainers, others], keep)

    async def _fetch(self, file: TokenFile, missing: Sequence[int]) -> list[int]:
        """Try to download these pieces; return those that no donor gave."""
        root = file.pieces_sha256
        hashes = await self._run(self._shelf.hashes, root)
        if hashes is None:
            return list(missing)

        async def keep(index: int, body: Body) -> None:
            await self._run(self._shelf.put, root, index, bytes(body))

        content = listed("tokens", root, hashes, PIECE_BYTES)
        return await self._fetcher.fetch(content, missing, [*self._donors(), [_AtUrl(self._urls, file, self._run)]], keep)

    def _donors(self) -> tuple[list[Donor], list[Donor], list[Donor]]:
        """Return tiers of donors: a few random trainers for which the owner vouches, all helpers, and as many other trainers.

        Where the owner vouches for none the others come before the helpers.
        """
        trainers, helpers = (self._fetcher.peers(self._rng.sample(list(group), len(group))) for group in self._sources())
        vouched = [trainer for trainer in trainers if self._fetcher.is_trusted(trainer.name)]
        others = [trainer for trainer in trainers if not self._fetcher.is_trusted(trainer.name)]
        first, last = (vouched, others) if vouched else (others, vouched)
        return first[:TRAINERS_ASKED], helpers, last[:TRAINERS_ASKED]


@dataclass(frozen=True)
class _AtUrl:
    """The URL of a token file as a donor."""

    urls: UrlDonor
    file: TokenFile
    run: Callable[..., Awaitable[Any]]
    name: str = "URL"
    patience_s: float | None = RANGE_S
    """A range is delivered as a whole, without progress before."""

    async def give(self, content: Content, indices: Sequence[int], delivery: Delivery) -> None:
        """Read these pieces; give none while the URL backs off. Raises PeerUnreachable when a read fails."""
        read: dict[int, bytes] = {}

        def keep(index: int, body: bytes) -> bool:
            if content.matches(index, body):
                read[index] = body
            return index in read

        failure = None
        try:
            await self.run(self.urls.fetch, self.file, indices, keep)
        except UrlFailed as error:
            failure = error
        for index in indices:
            if index in read or failure is None:
                await delivery.put(index, read.get(index))
        if failure is not None:
            logger.warning("%s", failure)
            raise PeerUnreachable("a read failed")
