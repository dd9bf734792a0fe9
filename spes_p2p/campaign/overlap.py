"""Held-out documents that are training text too: the loss on them says nothing about text that the model has not seen."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from spes_p2p.data.documents import read_documents
from spes_p2p.errors import UserError

logger = logging.getLogger(__name__)


class HeldOutText:
    """Looks for documents of the held-out text among those of the training text."""

    def __init__(self, paths: Sequence[Path]):
        """Read the held-out text. Raises UserError for what is no text."""
        self._where: dict[bytes, str] = {}
        """A document's digest -> the file with it."""
        self._trained: set[bytes] = set()
        for path in paths:
            self._where.update((_digest(text), str(path)) for text, _ in read_documents(path))

    def look_at(self, text: str) -> None:
        """Take note of a document of the training text."""
        if self._where and (digest := _digest(text)) in self._where:
            self._trained.add(digest)

    def check(self) -> None:
        """Warn of documents that were found. Raises UserError if these are all."""
        if not self._trained:
            return
        if len(self._trained) == len(self._where):
            raise UserError("--held-out: every document of it is training text too; name text that is not trained on")
        of_all = f"{len(self._trained)} of {len(self._where)} documents"
        where = self._where[next(digest for digest in self._where if digest in self._trained)]
        logger.warning("--held-out: %s are training text too, one in %s: the held-out loss will be too low", of_all, where)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
