"""A round's encoded results on disk as they arrive, each part at its own place, so that a round needs no memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from spes_p2p.rounds.parts import Part
from spes_p2p.storage.interfaces import Draft


class Spool:
    """Bodies of one plan's parts in a blob: part i begins where the encodings of the parts before it end."""

    def __init__(self, draft: Draft, parts: Sequence[Part]):
        self._draft = draft
        self._starts = places_of(parts)
        draft.write(self._starts[-1], b"\0")
        self._view = draft.view()

    def keep(self, index: int, encoded: bytes | memoryview) -> memoryview:
        """Write a part's result down; returns it as it lies there. Raises OSError."""
        start = self._starts[index]
        self._draft.write(start, encoded)
        return self._view[start : start + len(encoded)]

    def publish(self) -> None:
        """Make durable what was kept until now; may be called again after more was kept."""
        self._draft.publish()


def places_of(parts: Sequence[Part]) -> list[int]:
    """Where each part's body begins, and where the last one ends."""
    return [0, *accumulate(part.encoded_bytes for part in parts)]
