"""Training text from peer to peer: pieces of token files, each verified, from whoever has them; only those that are trained on.

Trainers are asked first, in random order, so that the bootstrap peer serves each piece few times. A piece that nobody has is
made from the text's source, where the manifest names one.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spes_p2p.data.manifest import TokenFile
from spes_p2p.data.pieces import HASH_BYTES, PIECE_BYTES, piece_count
from spes_p2p.data.shelf import TokenShelf, num_bytes
from spes_p2p.data.streaming import TextStreamer
from spes_p2p.errors import PeerUnreachable, Refused, UserError
from spes_p2p.swarm.rpc import Switchboard, Talk
from spes_p2p.swarm.wire import WireError, pack, unpack

logger = logging.getLogger(__name__)

TOKEN_HASHES, TOKEN_PIECES = "token_hashes", "token_pieces"
PIECES_A_REQUEST = 8
HASH_LIST_BYTES = 2**20
"""Of a list of hashes in one message."""
BATCHES_AT_ONCE, TRAINERS_ASKED = 4, 3
"""Batches under way, and trainers that are asked for one before the helpers are: a trainer has the text that it trained on."""
PATIENCE_S, RETRY_S = 120.0, 2.0
"""How long pieces that nobody has are looked for, and how often."""


@dataclass(frozen=True)
class HashesRequest:
    """The piece hashes of the token file with this root."""

    root: str


@dataclass(frozen=True)
class TokenPiecesRequest:
    """Pieces of the token file with this root, sent back in this order; an empty message for one that is not there."""

    root: str
    pieces: tuple[int, ...]


class TokenLibrary:
    """A peer's end: serves what its shelf holds, and fetches what it lacks."""

    def __init__(
        self,
        shelf: TokenShelf,
        board: Switchboard,
        sources: Callable[[], tuple[Sequence[str], Sequence[str]]],
        run_blocking: Callable[..., Awaitable[Any]],
        rng: random.Random,
        streamer: TextStreamer | None = None,
    ):
        """`sources`: the trainers and the helpers that live now. `streamer`: makes what none of them has."""
        self._shelf, self._board, self._sources = shelf, board, sources
        self._run, self._rng, self._streamer = run_blocking, rng, streamer

    async def serve(self) -> None:
        """Answer from now on."""
        await self._board.serve(TOKEN_HASHES, self._on_hashes)
        await self._board.serve(TOKEN_PIECES, self._on_pieces)

    async def _on_hashes(self, talk: Talk) -> None:
        root = unpack(HashesRequest, await talk.message()).root
        hashes = await talk.alive(self._run(self._shelf.hashes, root))
        if hashes is None:
            raise Refused("that token file is not here")
        for start in range(0, len(hashes), HASH_LIST_BYTES):
            await talk.send(hashes[start : start + HASH_LIST_BYTES])

    async def _on_pieces(self, talk: Talk) -> None:
        request = unpack(TokenPiecesRequest, await talk.message())
        for index in request.pieces[:PIECES_A_REQUEST]:
            await talk.send(await self._run(self._shelf.piece, request.root, index) or b"")

    async def ensure(self, file: TokenFile, pieces: Sequence[int]) -> None:
        """Have these pieces of a file here: from peers, else from the text's source where there is one.

        Raises UserError when nobody gives them for PATIENCE_S, or as `TextStreamer.make` does.
        """
        root, loop = str(file.pieces_sha256), asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE_S
        while True:
            missing = await self._missing(file, root, pieces)
            if not missing:
                return
            if loop.time() > deadline:
                raise UserError(f"{file.path}: no peer gives {len(missing)} pieces of this token file; "
                                "ask who runs the campaign to start a bootstrap peer that has it, or give --data-dir")
            await self._fetch_all(file, root, missing)
            if not (left := await self._missing(file, root, missing)):
                return
            if self._streamer is not None and self._streamer.can_make(file) and self._shelf.knows_hashes(root):
                await self._run(self._streamer.make, file, left)
                return
            await asyncio.sleep(RETRY_S)

    async def _missing(self, file: TokenFile, root: str, pieces: Sequence[int]) -> list[int]:
        if await self._run(self._shelf.hashes, root) is None and not await self._fetch_hashes(file, root):
            return list(pieces)
        missing: list[int] = await self._run(self._shelf.missing, root, pieces)
        return missing

    def _in_order(self) -> tuple[list[str], list[str]]:
        """Trainers and helpers, each in random order."""
        trainers, helpers = (self._rng.sample(list(group), len(group)) for group in self._sources())
        return trainers, helpers

    async def _fetch_hashes(self, file: TokenFile, root: str) -> bool:
        """Helpers first: they have the files."""
        wanted = HASH_BYTES * piece_count(num_bytes(file))
        trainers, helpers = self._in_order()
        for peer in (*helpers, *trainers):
            hashes = b""
            try:
                async with self._board.talk(peer, TOKEN_HASHES) as talk:
                    await talk.send(pack(HashesRequest(root)))
                    while len(hashes) < wanted and (message := await talk.prompt_message()):
                        hashes += message
            except (PeerUnreachable, Refused, WireError) as error:
                logger.debug("no piece hashes from %s: %s", peer[-6:], error)
                continue
            if self._shelf.learn_hashes(root, hashes):
                await self._run(self._shelf.keep_hashes, root)
                return True
            logger.warning("%s sent piece hashes that are not the campaign's", peer[-6:])
        return False

    async def _fetch_all(self, file: TokenFile, root: str, missing: Sequence[int]) -> None:
        """Ask for all of them once, batch by batch, several at the same time."""
        batches = [tuple(missing[a : a + PIECES_A_REQUEST]) for a in range(0, len(missing), PIECES_A_REQUEST)]
        at_once, useless = asyncio.Semaphore(BATCHES_AT_ONCE), set[str]()

        async def fetch(batch: tuple[int, ...]) -> None:
            async with at_once:
                trainers, helpers = self._in_order()
                for donor in (*trainers[:TRAINERS_ASKED], *helpers):
                    if batch and donor not in useless:
                        got = await self._fetch(donor, file, root, batch, useless)
                        batch = tuple(index for index in batch if index not in got)

        await asyncio.gather(*map(fetch, batches))

    async def _fetch(
        self, donor: str, file: TokenFile, root: str, batch: tuple[int, ...], useless: set[str]
    ) -> set[int]:
        """The pieces that a donor gave; one that lies or cannot be reached is `useless` from then on."""
        got: set[int] = set()
        try:
            async with self._board.talk(donor, TOKEN_PIECES) as talk:
                await talk.send(pack(TokenPiecesRequest(root, batch)))
                for index in batch:
                    content = bytes(await talk.prompt_message())
                    if not content:
                        continue
                    if len(content) > PIECE_BYTES or not await self._run(self._shelf.put, root, index, content):
                        raise WireError(f"a piece of {file.path} that is not the campaign's")
                    got.add(index)
        except WireError as error:
            useless.add(donor)
            logger.warning("%s sent %s", donor[-6:], error)
        except (PeerUnreachable, Refused) as error:
            useless.add(donor)
            logger.debug("no pieces from %s: %s", donor[-6:], error)
        return got
