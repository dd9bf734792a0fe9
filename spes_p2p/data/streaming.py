"""Token pieces made on this machine: the raw text is streamed from its source, tokenized, verified and forgotten.

Where a token's text lies is not known before it is encoded, so a piece costs a pass over its shard from its start. What it
goes by is kept while the cache has room, and the pass stays open where it stopped: its next pieces cost what lies between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import BinaryIO

import numpy as np

from spes_p2p.data.documents import documents_in
from spes_p2p.data.encoding import Encoder
from spes_p2p.data.manifest import Source, TokenFile
from spes_p2p.data.pieces import PIECE_BYTES, piece_count
from spes_p2p.data.shelf import TokenShelf, num_bytes
from spes_p2p.data.sources import SourceError, open_source, text_name
from spes_p2p.errors import UserError

logger = logging.getLogger(__name__)

STREAMED_CHARACTERS = 2**18
"""Of a batch of documents: it is made beside the training."""
PASSES_OPEN = 4
"""Each holds a block of the source, a batch of documents and a piece."""
PROGRESS_EVERY_S = 10.0
ADVICE = "ask who runs the campaign, or give --data-dir"


@dataclass
class _Pass:
    """A way through a shard: the next piece that `pieces` gives."""

    pieces: Generator[bytes, None, None]
    next_index: int = 0


class TextStreamer:
    """Fills a shelf from the sources of its token files. Its methods may be called from several threads: they take turns."""

    def __init__(
        self,
        shelf: TokenShelf,
        encoders: Mapping[TokenFile, Encoder],
        open_text: Callable[[str], BinaryIO] = open_source,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`encoders`: what makes the tokens of each file that has a source."""
        self._shelf, self._encoders = shelf, dict(encoders)
        self._open_text, self._clock = open_text, clock
        self._passes: OrderedDict[TokenFile, _Pass] = OrderedDict()
        self._turn = threading.Lock()

    def can_make(self, file: TokenFile) -> bool:
        """Does this file have a source?"""
        return file in self._encoders

    def make(self, file: TokenFile, wanted: Sequence[int]) -> None:
        """Put these pieces onto the shelf, which knows the file's piece hashes. Reads the source no further than needed.

        Raises UserError: the source cannot be read, or it gives other tokens than the campaign's.
        """
        with self._turn:
            missing = self._shelf.missing(str(file.pieces_sha256), wanted)
            if not missing:
                return
            try:
                self._go(file, self._pass_to(file, missing[0]), missing)
            except SourceError as error:
                self._end(file)
                raise UserError(f"{file.path}: no peer has it, and its source {error}; {ADVICE}") from None
            except BaseException:
                self._end(file)
                raise
            if self._passes[file].next_index == piece_count(num_bytes(file)):
                self._end(file)

    def close(self) -> None:
        """Let go of all sources."""
        with self._turn:
            for file in list(self._passes):
                self._end(file)

    def _pass_to(self, file: TokenFile, index: int) -> _Pass:
        """The open pass when that piece still lies before it, else a new one."""
        if file in self._passes and self._passes[file].next_index > index:
            self._end(file)
        if file not in self._passes:
            source = _source(file)
            logger.info("%s: no peer has it here, streaming it from %s", file.path, source.url)
            self._passes[file] = _Pass(_pieces(file, source, self._encoders[file], self._open_text))
        self._passes.move_to_end(file)
        while len(self._passes) > PASSES_OPEN:
            self._end(next(iter(self._passes)))
        return self._passes[file]

    def _go(self, file: TokenFile, way: _Pass, missing: Sequence[int]) -> None:
        root, needed, last = str(file.pieces_sha256), set(missing), missing[-1]
        first, told = way.next_index, self._clock()
        while way.next_index <= last:
            index = way.next_index
            content = next(way.pieces)
            if not self._shelf.is_right(root, index, content):
                raise UserError(_other_tokens(file, f"differs in piece {index}"))
            if index in needed or self._shelf.has_room((1 + len(needed)) * PIECE_BYTES):
                self._shelf.put(root, index, content)
            needed.discard(index)
            way.next_index += 1
            if self._clock() - told >= PROGRESS_EVERY_S:
                told = self._clock()
                done = 100 * (index + 1 - first) // (last + 1 - first)
                logger.info("streaming %s from %s: %d %%", file.path, _source(file).url, done)

    def _end(self, file: TokenFile) -> None:
        way = self._passes.pop(file, None)
        if way is not None:
            way.pieces.close()


def _pieces(
    file: TokenFile, source: Source, encoder: Encoder, open_text: Callable[[str], BinaryIO]
) -> Generator[bytes, None, None]:
    """The pieces of a token file, made from its source; not verified. Raises UserError when they come to an end too soon."""
    left, buffer = num_bytes(file), bytearray()
    with open_text(source.url) as text:
        for block in _id_bytes(file, source, encoder, text):
            buffer += block
            while left and len(buffer) >= min(left, PIECE_BYTES):
                piece = bytes(buffer[: min(left, PIECE_BYTES)])
                del buffer[: len(piece)]
                left -= len(piece)
                yield piece
    raise UserError(_other_tokens(file, f"ends {left} bytes of tokens too soon"))


def _id_bytes(file: TokenFile, source: Source, encoder: Encoder, text: BinaryIO) -> Iterator[bytes]:
    item = np.dtype(file.dtype).newbyteorder("<")
    try:
        for documents, _ in encoder.encode(documents_in(text, text_name(source.url), source.text_field)):
            yield np.concatenate(documents).astype(item).tobytes()
    except UserError as error:
        raise UserError(_other_tokens(file, f"cannot be read: {error}")) from None


def _other_tokens(file: TokenFile, how: str) -> str:
    return (f"{file.path}: made from {_source(file).url} it is not the campaign's token file ({how}): the text was changed, "
            f"or tokenizers {version('tokenizers')} cuts it in another way; {ADVICE}")


def _source(file: TokenFile) -> Source:
    if file.source is None:
        raise ValueError(f"{file.path} has no source")
    return file.source
