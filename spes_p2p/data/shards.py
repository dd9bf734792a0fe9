"""Writing token files: documents go to numbered shards, which get their final names once all are complete."""

from __future__ import annotations

import glob
import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from spes_p2p.data.manifest import HASHES, TokenFile
from spes_p2p.data.pieces import PieceHasher, root_of
from spes_p2p.data.token_files import Dtype
from spes_p2p.errors import UserError

PARTIAL = ".partial"


class ShardWriter:
    """Writes `{prefix}000_{shard:06d}.npy` into a folder, as raw ids, each with its list of piece hashes.

    A context manager: on exit, unpublished files are removed, and so is a folder that it created. A shard ends before the
    document that would make it longer than `shard_tokens`; documents are not split.
    """

    def __init__(self, folder: Path, prefix: str, shard_tokens: int, dtype: Dtype):
        if shard_tokens < 1:
            raise UserError(f"shard tokens = {shard_tokens}: must be at least 1")
        if "/" in prefix:
            raise UserError(f"prefix '{prefix}': a file name prefix cannot contain '/'; set the output folder instead")
        self.documents = self.tokens = 0
        self.files: list[TokenFile] = []
        self._folder, self._prefix, self._shard_tokens, self._dtype = folder, prefix, shard_tokens, dtype
        self._item = np.dtype(dtype).newbyteorder("<")
        self._file: BinaryIO | None = None
        self._digest, self._pieces, self._shard_size = hashlib.sha256(), PieceHasher(), 0
        self._made_folder = False

    def __enter__(self) -> ShardWriter:
        self._made_folder = not self._folder.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
        for left in self._folder.glob(f"{glob.escape(self._prefix)}000_*.npy*{PARTIAL}"):
            left.unlink()
        if self._made_folder and not any(self._folder.iterdir()):
            self._folder.rmdir()

    def add(self, document: npt.NDArray[np.uint32]) -> None:
        """Append one document's ids, including its end token."""
        if self._shard_size and self._shard_size + len(document) > self._shard_tokens:
            self._close_shard()
        if self._file is None:
            self._file = (self._folder / (self._name() + PARTIAL)).open("wb")
        content = document.astype(self._item).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._pieces.update(content)
        self._shard_size += len(document)
        self.tokens += len(document)
        self.documents += 1

    def publish(self) -> None:
        """Close the last shard and give all shards their final names."""
        self._close_shard()
        for file in self.files:
            (self._folder / (file.path + PARTIAL)).replace(self._folder / file.path)
            (self._folder / (file.path + HASHES + PARTIAL)).replace(self._folder / (file.path + HASHES))

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        hashes = self._pieces.hashes()
        (self._folder / (self._name() + HASHES + PARTIAL)).write_bytes(hashes)
        self.files.append(TokenFile(self._name(), self._digest.hexdigest(), self._shard_size, self._dtype, root_of(hashes)))
        self._file, self._digest, self._pieces, self._shard_size = None, hashlib.sha256(), PieceHasher(), 0

    def _name(self) -> str:
        return f"{self._prefix}000_{len(self.files):06d}.npy"
