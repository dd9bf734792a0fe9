"""Which pieces a cache of limited size keeps: those used longest ago go first, never those that somebody is reading."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

Piece = tuple[str, int]
"""(root of a token file, number of the piece)."""


class CacheOrder:
    """The pieces of a cache in the order of their last use. Its methods may be called from several threads."""

    def __init__(self, limit_bytes: int | None):
        """`limit_bytes`: None for no limit."""
        self._limit_bytes = limit_bytes
        self._sizes: OrderedDict[Piece, int] = OrderedDict()
        self._held: dict[str, frozenset[Piece]] = {}
        self._total_bytes = 0
        self._lock = threading.Lock()

    @property
    def total_bytes(self) -> int:
        """Of all pieces in the cache."""
        return self._total_bytes

    def has_room(self, size: int) -> bool:
        """Would so many bytes more stay within the limit?"""
        return self._limit_bytes is None or self._total_bytes + size <= self._limit_bytes

    def hold(self, holder: str, pieces: Iterable[Piece]) -> None:
        """These are used now, and stay until the next call of the same holder, whatever the limit."""
        with self._lock:
            self._held[holder] = frozenset(pieces)
            for piece in self._held[holder] & self._sizes.keys():
                self._sizes.move_to_end(piece)

    def add(self, piece: Piece, size: int) -> list[Piece]:
        """A piece was put into the cache, as the one used last; returns those that must leave it now."""
        with self._lock:
            self._total_bytes += size - self._sizes.pop(piece, 0)
            self._sizes[piece] = size
            return self._leaving(piece)

    def _leaving(self, newest: Piece) -> list[Piece]:
        if self._limit_bytes is None:
            return []
        stay, leaving = {newest}.union(*self._held.values()), []
        for piece in [piece for piece in self._sizes if piece not in stay]:
            if self._total_bytes <= self._limit_bytes:
                break
            self._total_bytes -= self._sizes.pop(piece)
            leaving.append(piece)
        return leaving
