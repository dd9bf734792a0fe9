"""Which samples: positions in a shuffled pass over the corpus. What is computed on them: `data/slices.py`."""

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
    """What of the data has been handed out: everything before (epoch, position), less what was returned.

    `returned` is sorted, disjoint and without touching neighbours, so equal sets are equal cursors.
    """

    epoch: Count = 0
    position: Position = 0
    returned: Annotated[tuple[Interval, ...], MaxLen(MAX_INTERVALS)] = ()
