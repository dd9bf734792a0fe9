"""Eviction order of a size-limited cache: least recently used first, except pieces that a reader holds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

Piece = tuple[str, int]
"""(Root of a token file, index of the piece)."""


class CacheOrder:
    """The pieces of a cache in the order of their last use. Thread-safe."""

    def __init__(self, limit_bytes: int | None):
        """`limit_bytes`: None means no limit."""
        self._limit_bytes = limit_bytes
        self._sizes: OrderedDict[Piece, int] = OrderedDict()
        self._held: dict[str, frozenset[Piece]] = {}
        self._total_bytes = 0
        self._lock = threading.Lock()

    def hold(self, holder: str, pieces: Iterable[Piece]) -> None:
        """Mark these pieces as used, in this order, and exempt them from eviction until the holder's next call."""
        ordered = tuple(pieces)
        with self._lock:
            self._held[holder] = frozenset(ordered)
            for piece in ordered:
                if piece in self._sizes:
                    self._sizes.move_to_end(piece)

    def add(self, piece: Piece, size: int) -> list[Piece]:
        """Add a piece as the most recently used; return the pieces to evict."""
        with self._lock:
            self._total_bytes += size - self._sizes.pop(piece, 0)
            self._sizes[piece] = size
            return self._evict(piece)

    def _evict(self, newest: Piece) -> list[Piece]:
        if self._limit_bytes is None:
            return []
        kept, evicted = {newest}.union(*self._held.values()), []
        for piece in [piece for piece in self._sizes if piece not in kept]:
            if self._total_bytes <= self._limit_bytes:
                break
            self._total_bytes -= self._sizes.pop(piece)
            evicted.append(piece)
        return evicted
