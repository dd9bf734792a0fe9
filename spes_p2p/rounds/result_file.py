"""The file of a round's encoded results: each part has its own place, so results do not accumulate in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from spes_p2p.rounds.parts import Part
from spes_p2p.storage.interfaces import Draft


class ResultFile:
    """The encoded results of one plan in a blob, in the order of the parts, without gaps."""

    def __init__(self, draft: Draft, parts: Sequence[Part]):
        self.is_durable = False
        """Whether all results that were put are durable."""
        self._draft = draft
        self._starts = part_offsets(parts)
        draft.write(self._starts[-1], b"\0")
        self._view = draft.view()

    def put(self, index: int, encoded: bytes | memoryview) -> memoryview:
        """Write a part's result; return a view of it in the file. Raises UserError (disk full)."""
        start, self.is_durable = self._starts[index], False
        self._draft.write(start, encoded)
        return self._view[start : start + len(encoded)]

    def publish(self) -> None:
        """Make the results durable. May be called again after more results."""
        self.is_durable = True
        self._draft.publish()


def part_offsets(parts: Sequence[Part]) -> list[int]:
    """Return where each part's result begins, and where the last one ends."""
    return [0, *accumulate(part.encoded_bytes for part in parts)]
