"""Samples, as positions in a shuffled pass over the corpus. `data/slices.py` computes with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import MaxLen

from spes_p2p.messages.fields import MAX_INTERVALS, Count, Position


@dataclass(frozen=True, order=True)
class Interval:
    """Positions `[start, stop)` of one epoch."""

    epoch: Count
    start: Position
    stop: Position

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


@dataclass(frozen=True)
class Cursor:
    """The samples handed out so far: all before (epoch, position), except the returned ones.

    `returned` is sorted, disjoint and coalesced, so equal sets are equal cursors.
    """

    epoch: Count = 0
    position: Position = 0
    returned: Annotated[tuple[Interval, ...], MaxLen(MAX_INTERVALS)] = ()
