"""A campaign's token files on this machine: complete local files, and a cache of pieces of the others.

The cache has no index: a piece is present if its bytes match its hash, which is checked once per process. A crash during a
write therefore costs at most that piece and never yields wrong tokens. An evicted piece becomes a hole in its sparse file.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from spes_p2p.data.cache_order import CacheOrder
from spes_p2p.data.manifest import TokenFile
from spes_p2p.data.pieces import HASH_BYTES, PIECE_BYTES, PieceHasher, is_piece, piece_count, root_of
from spes_p2p.data.token_files import SCAN_BYTES, TokenArray, open_tokens
from spes_p2p.errors import UserError
from spes_p2p.storage.files import write_whole

logger = logging.getLogger(__name__)

KEEP_SIZE, PUNCH_HOLE = 1, 2
"""Flags of Linux's fallocate(2)."""


WARN_EVERY_S = 600.0
"""Repeat a warning about the same file after this long."""


class TokenShelf:
    """Token files by the root of their piece hashes. Thread-safe: a piece is written to its own range only."""

    def __init__(
        self,
        files: Sequence[TokenFile],
        folder: Path,
        local: Mapping[TokenFile, Path],
        limit_bytes: int | None = None,
    ):
        """`folder`: the cache, of at most `limit_bytes`. `local`: paths of the files that are complete on this machine."""
        self._files = {file.pieces_sha256: file for file in files}
        self._folder, self._local = folder, dict(local)
        self._hashes: dict[str, bytes] = {}
        self._verified: set[tuple[str, int]] = set()
        self._arrays: dict[TokenFile, TokenArray] = {}
        self._order, self._changing = CacheOrder(limit_bytes), threading.RLock()
        self._can_punch = True
        self._warn_at: dict[TokenFile, float] = {}
        """Monotonic time of the next warning about each local file."""

    def is_local(self, file: TokenFile) -> bool:
        """Return whether the complete file is on this machine."""
        return file in self._local

    def array(self, file: TokenFile) -> TokenArray:
        """Return the ids `[tokens]`, read-only. For a file that is not local, only pieces that were `put` may be read.

        Raises UserError if the cache file cannot be created.
        """
        if file not in self._arrays:
            path = self._local.get(file)
            self._arrays[file] = open_tokens(path, file.dtype) if path is not None else self._map_cache(file)
        return self._arrays[file]

    def hold(self, holder: str, root: str, pieces: Sequence[int]) -> None:
        """Keep these pieces in the cache until the holder's next call."""
        self._order.hold(holder, ((root, index) for index in pieces))

    def hashes(self, root: str) -> bytes | None:
        """Return a file's piece hashes, HASH_BYTES each, from memory, from disk, or computed from the local file."""
        if root not in self._hashes and root in self._files:
            found = self._saved_hashes(root) or self._computed_hashes(self._files[root])
            if found is not None:
                self.learn_hashes(root, found)
        return self._hashes.get(root)

    def learn_hashes(self, root: str, hashes: bytes) -> bool:
        """Accept a list of piece hashes if it matches the root; return whether it does."""
        file = self._files.get(root)
        if file is None or len(hashes) != HASH_BYTES * piece_count(file.num_bytes) or root_of(hashes) != root:
            return False
        self._hashes[root] = hashes
        return True

    def keep_hashes(self, root: str) -> None:
        """Write a learned list to disk for the next process."""
        write_whole(self._folder / f"{root}.hashes", self._hashes[root])

    def piece(self, root: str, index: int) -> bytes | None:
        """Return a verified piece; None if it is not on this machine."""
        hashes, file = self.hashes(root), self._files.get(root)
        if hashes is None or file is None or not 0 <= index < len(hashes) // HASH_BYTES:
            return None
        if self.is_local(file):
            return self._local_piece(file, hashes, index)
        if not self._cache_path(file).exists():
            return None
        with self._changing:
            content = self._bytes(file)[index * PIECE_BYTES : (index + 1) * PIECE_BYTES].tobytes()
            if (root, index) not in self._verified:
                if not is_piece(content, hashes, index):
                    return None
                self._verified.add((root, index))
        return content

    def check_a_piece(self, rng: random.Random) -> None:
        """Read a random piece of a local file and warn if it is damaged."""
        sizes = [piece_count(file.num_bytes) for file in self._local]
        if any(sizes):
            [file] = rng.choices(list(self._local), sizes)
            self.piece(file.pieces_sha256, rng.randrange(piece_count(file.num_bytes)))

    def _local_piece(self, file: TokenFile, hashes: bytes, index: int) -> bytes | None:
        """Read a piece from the owner's file, which may be moved or overwritten at any time: it is verified every time."""
        path = self._local[file]
        try:
            content = _read(path, path.stat().st_size - file.num_bytes + index * PIECE_BYTES)
        except OSError as error:
            problem = f"cannot be read any more ({error.strerror})"
        else:
            if is_piece(content, hashes, index):
                return content
            problem = "differs from the campaign's token file"
        self._warn(file, f"{path}: {problem}; copy it again")
        return None

    def _warn(self, file: TokenFile, problem: str) -> None:
        if time.monotonic() >= self._warn_at.get(file, 0.0):
            self._warn_at[file] = time.monotonic() + WARN_EVERY_S
            logger.warning("not served to other peers: %s", problem)

    def missing(self, root: str, pieces: Sequence[int]) -> list[int]:
        """Return those of the pieces that are not on this machine."""
        return [index for index in pieces if (root, index) not in self._verified and self.piece(root, index) is None]

    def put(self, root: str, index: int, content: bytes) -> bool:
        """Store a piece; return False if it does not match its hash."""
        file, hashes = self._files[root], self.hashes(root)
        if hashes is None or not is_piece(content, hashes, index):
            return False
        self.array(file)
        with self._cache_path(file).open("r+b") as cache:
            os.pwrite(cache.fileno(), content, index * PIECE_BYTES)
        with self._changing:
            self._verified.add((root, index))
            self._add(root, index, len(content))
        return True

    def _add(self, root: str, index: int, size: int) -> None:
        """Account for a cached piece and evict what exceeds the limit."""
        for old_root, old_index in self._order.add((root, index), size):
            self._verified.discard((old_root, old_index))
            self._punch(self._cache_path(self._files[old_root]), old_index)

    def _punch(self, path: Path, index: int) -> None:
        """Free the piece's disk space."""
        if not self._can_punch:
            return
        with path.open("r+b") as cache:
            offset, length = (ctypes.c_int64(index * PIECE_BYTES), ctypes.c_int64(PIECE_BYTES))
            if ctypes.CDLL(None, use_errno=True).fallocate(cache.fileno(), PUNCH_HOLE | KEEP_SIZE, offset, length):
                self._can_punch = False
                why = os.strerror(ctypes.get_errno())
                logger.warning("%s: this file system cannot free parts of files (%s), so the cache may grow", path, why)

    def _bytes(self, file: TokenFile) -> np.ndarray:
        return self.array(file).view(np.uint8)

    def _cache_path(self, file: TokenFile) -> Path:
        return self._folder / f"{file.pieces_sha256}.tokens"

    def _map_cache(self, file: TokenFile) -> TokenArray:
        """Map a sparse file of full length, which takes only as much disk as its pieces."""
        path = self._cache_path(file)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as cache:
                os.truncate(cache.fileno(), file.num_bytes)
        except OSError as error:
            raise UserError(f"{path}: cannot store token pieces there ({error.strerror}); choose another --run-dir") from None
        with self._changing:
            for index in list(_pieces_on_disk(path)):
                self._add(file.pieces_sha256, index, PIECE_BYTES)
        return np.memmap(path, np.dtype(file.dtype).newbyteorder("<"), "r")

    def _saved_hashes(self, root: str) -> bytes | None:
        path = self._folder / f"{root}.hashes"
        saved = path.read_bytes() if path.exists() else b""
        return saved if root_of(saved) == root else None

    def _computed_hashes(self, file: TokenFile) -> bytes | None:
        if not self.is_local(file):
            return None
        try:
            content = self._bytes(file)
        except UserError as error:
            self._warn(file, str(error))
            return None
        hasher = PieceHasher()
        for start in range(0, len(content), SCAN_BYTES):
            hasher.update(content[start : start + SCAN_BYTES].tobytes())
        return hasher.hashes()


def _read(path: Path, offset: int) -> bytes:
    """Read a piece. A map of a file that was cut short would end the process."""
    with path.open("rb") as file:
        return os.pread(file.fileno(), PIECE_BYTES, offset)


def _pieces_on_disk(path: Path) -> Iterator[int]:
    """Yield the indices of the pieces for which a sparse file has data."""
    end, size = 0, path.stat().st_size
    with path.open("rb") as cache:
        while end < size:
            try:
                start = os.lseek(cache.fileno(), end, os.SEEK_DATA)
            except OSError:  # only a hole follows
                return
            end = os.lseek(cache.fileno(), start, os.SEEK_HOLE)
            yield from range(start // PIECE_BYTES, piece_count(end))
