"""Eviction order of a cache of limited size: least recently used first, never a piece that a reader holds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

Piece = tuple[str, int]
"""(root of a token file, index of the piece)."""


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

    def hold(self, holder: str, pieces: Iterable[Piece]) -> None:
        """Mark these as used now, in this order, and keep them until the holder's next call, whatever the limit."""
        ordered = tuple(pieces)
        with self._lock:
            self._held[holder] = frozenset(ordered)
            for piece in ordered:
                if piece in self._sizes:
                    self._sizes.move_to_end(piece)

    def add(self, piece: Piece, size: int) -> list[Piece]:
        """Count a piece that was put into the cache as used last; returns the pieces to evict."""
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
