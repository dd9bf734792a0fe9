"""A peer's access to the campaign's text: local files, pieces to serve, and readers that fetch missing pieces."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from spes_p2p.campaign.files import CampaignFiles
from spes_p2p.content.tokens import TokenLibrary
from spes_p2p.data.local_files import find_hashes, find_local, locate_file
from spes_p2p.data.manifest import HASHES, TokenFile
from spes_p2p.data.mix import MixedReader
from spes_p2p.data.pieces import pieces_of_samples
from spes_p2p.data.samples import SampleReader
from spes_p2p.data.shelf import TokenShelf
from spes_p2p.data.url_donor import UrlDonor
from spes_p2p.errors import UserError
from spes_p2p.peer.leaving import LeaveRequest
from spes_p2p.peer.node import Node

logger = logging.getLogger(__name__)

VERIFIED_FILE, TOKENS_FOLDER = "verified_files.json", "tokens"
CHECK_EVERY_S = 60.0
"""Interval between two pieces that a bootstrap peer verifies: little reading, and files that are gone are noticed in time."""


def open_text(files: CampaignFiles, run_dir: Path, cache_bytes: int | None) -> TokenShelf:
    """Return the shelf with verified local files; other text is fetched on demand. Raises UserError."""
    local = {
        file: path
        for manifest in files.manifests
        for file, path in find_local(manifest, files.folders, run_dir / VERIFIED_FILE).items()
    }
    return _with_hash_lists(TokenShelf(files.token_files, run_dir / TOKENS_FOLDER, local, cache_bytes), files)


def text_to_serve(files: CampaignFiles, run_dir: Path, is_owner: bool) -> TokenShelf:
    """Like `open_text`, for helpers, without a limit. Raises UserError also when the owner lacks a file that has no URL."""
    shelf = open_text(files, run_dir, None)
    for file in files.token_files:
        if not shelf.is_local(file):
            _check_missing(file, files, shelf, is_owner)
    return shelf


def _check_missing(file: TokenFile, files: CampaignFiles, shelf: TokenShelf, is_owner: bool) -> None:
    """Say how volunteers get a file that is not on this machine. Raises UserError when only the owner could give it."""
    if file.url is None:
        try:
            locate_file(file, files.folders)
        except UserError as error:
            if is_owner:
                raise
            logger.warning("not served to volunteers: %s", error)
    elif shelf.hashes(file.pieces_sha256) is None:
        logger.warning("%s: missing or wrong, so no piece can be verified; copy it next to the manifest", file.path + HASHES)
    else:
        logger.info("%s is not on this machine: volunteers read it from %s", file.path, file.url)


async def serve_text(node: Node, shelf: TokenShelf, private_urls: bool = False) -> TokenLibrary:
    """Serve the shelf's pieces; return the library that fetches missing ones, with `private_urls` also from a local network."""
    library = TokenLibrary(
        shelf, node.fetcher, lambda: (node.others("trainer"), node.others("helper")), node.world.run_blocking, node.world.rng,
        UrlDonor(allows_private=private_urls),
    )
    await library.serve(node.content)
    return library


async def keep_checking(shelf: TokenShelf, run_blocking: Callable[..., Awaitable[None]], rng: random.Random) -> None:
    """Verify a piece of the local text now and then, so that damage is reported before a volunteer needs it. Never returns."""
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        await run_blocking(shelf.check_a_piece, rng)


def make_readers(
    files: CampaignFiles, shelf: TokenShelf, library: TokenLibrary, leave: LeaveRequest
) -> tuple[SampleReader | MixedReader, SampleReader | None]:
    """Return readers of training and held-out text for worker threads; this event loop fetches missing pieces.

    They raise UserError when no donor gives a piece, and when the peer is asked to leave before it is there.
    """
    training = files.campaign.config.training
    loop = asyncio.get_running_loop()

    def reader(token_files: Sequence[TokenFile], holder: str) -> SampleReader:
        def fetch(number: int, samples: npt.NDArray[np.int64]) -> None:
            file = token_files[number]
            if not shelf.is_local(file):
                pieces = pieces_of_samples(samples, training.sequence_length * np.dtype(file.dtype).itemsize)
                shelf.hold(holder, file.pieces_sha256, pieces)
                asyncio.run_coroutine_threadsafe(leave.unless_made(library.ensure(file, pieces)), loop).result()
                if leave.is_made:
                    raise UserError("asked to leave before the text was read")

        arrays = [shelf.array(file) for file in token_files]
        return SampleReader(arrays, training.sequence_length, training.seed, fetch)

    text, held_out = files.training_manifest, files.held_out_manifest
    sources = [
        reader([text.files[index] for index in indices], f"training/{source.name}")
        for source, indices in zip(text.sources, text.files_of_sources(), strict=True)
    ]
    weights = [source.weight for source in text.sources]
    training_reader = MixedReader(sources, weights) if sources else reader(text.files, "training")
    return training_reader, None if held_out is None else reader(held_out.files, "held-out")


def missing_held_out(files: CampaignFiles, shelf: TokenShelf) -> list[tuple[TokenFile, Sequence[int]]]:
    """Return the pieces of the evaluation's samples that the shelf lacks, by file. Raises UserError without held-out text."""
    missing: list[tuple[TokenFile, Sequence[int]]] = []

    def note(file: TokenFile, pieces: Sequence[int]) -> None:
        if lacking := shelf.missing(file.pieces_sha256, pieces):
            missing.append((file, lacking))

    held_out_samples(files, shelf, note)
    return missing


def held_out_samples(
    files: CampaignFiles, shelf: TokenShelf, need: Callable[[TokenFile, Sequence[int]], None]
) -> npt.NDArray[np.int64]:
    """Return the samples `[n, sequence_length]` on which trainers evaluate; `need` is called with the pieces before each read.

    Raises UserError without held-out text.
    """
    if files.held_out_manifest is None:
        raise UserError("the campaign has no held-out text")
    token_files, config = files.held_out_manifest.files, files.campaign.config
    length = config.training.sequence_length

    def before(number: int, samples: npt.NDArray[np.int64]) -> None:
        file = token_files[number]
        need(file, pieces_of_samples(samples, length * np.dtype(file.dtype).itemsize))

    reader = SampleReader([shelf.array(file) for file in token_files], length, config.training.seed, before)
    return reader.read_spread(config.evaluation.max_samples)


def _with_hash_lists(shelf: TokenShelf, files: CampaignFiles) -> TokenShelf:
    """Add the local lists of piece hashes to the shelf."""
    for file in files.token_files:
        if (hashes := find_hashes(file, files.folders)) is not None:
            shelf.learn_hashes(file.pieces_sha256, hashes)
    return shelf
