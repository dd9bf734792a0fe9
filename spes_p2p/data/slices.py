"""Assigning samples: plans hand out intervals of positions in an epoch's shuffled order (`samples.py`).

The cursor advances as plans hand out intervals; samples that a peer reports untrained are returned and handed out again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import nlargest

from spes_p2p.messages.fields import MAX_INTERVALS
from spes_p2p.messages.samples import Cursor, Interval

MAX_RETURNED = MAX_INTERVALS // 5
"""Intervals that a cursor keeps. A peer that leaves returns four assignments at most (`claims.outstanding`, with overlap), each
with these and a few more."""


def take(cursor: Cursor, count: int, num_samples: int) -> tuple[tuple[Interval, ...], Cursor]:
    """Hand out `count` samples: returned ones first, then from the cursor on, continuing in the next epoch.

    `num_samples` is the size of one epoch. The intervals are disjoint and contain exactly `count` positions.
    Raises ValueError for a negative count, an empty epoch, or a cursor outside the epoch (it belongs to another corpus).
    """
    if count < 0 or num_samples <= 0 or not 0 <= cursor.position <= num_samples:
        raise ValueError(f"cannot take {count} samples at position {cursor.position} of an epoch of {num_samples}")
    taken: list[Interval] = []
    returned, used_up = cursor.returned, 0
    while count > 0 and used_up < len(returned):
        first = returned[used_up]
        cut = min(first.stop, first.start + count)
        taken.append(Interval(first.epoch, first.start, cut))
        count -= cut - first.start
        used_up += 1
    rest = [Interval(first.epoch, cut, first.stop)] if used_up and cut < first.stop else []
    epoch, position = cursor.epoch, cursor.position
    while count > 0:
        if position == num_samples:
            epoch, position = epoch + 1, 0
        used = min(count, num_samples - position)
        taken.append(Interval(epoch, position, position + used))
        position += used
        count -= used
    return tuple(taken), Cursor(epoch, position, (*rest, *returned[used_up:]))


def give_back(cursor: Cursor, intervals: tuple[Interval, ...]) -> Cursor:
    """Return the cursor with untrained intervals returned to it: of more than MAX_RETURNED the longest.

    Idempotent: a position returned twice is handed out once. Positions that were never handed out are ignored.
    """
    handed_out = (_before(interval, cursor) for interval in intervals)
    returned = union((*cursor.returned, *handed_out))
    if len(returned) > MAX_RETURNED:
        returned = tuple(sorted(nlargest(MAX_RETURNED, returned, key=len)))
    return Cursor(cursor.epoch, cursor.position, returned)


def end_of(assigned: Sequence[Interval], covered: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return the longest end of an assignment that lies in `covered`, a `union`. Trainers train in order, and return an end."""
    end: list[Interval] = []
    for each in reversed(assigned):
        place = bisect_left(covered, Interval(each.epoch, each.stop, 0)) - 1
        around = covered[place] if place >= 0 else None
        if around is None or around.epoch != each.epoch or around.stop < each.stop:
            break
        end.append(Interval(each.epoch, max(each.start, around.start), each.stop))
        if around.start > each.start:
            break
    return tuple(reversed(end))


def union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the same positions as sorted, disjoint, non-adjacent, non-empty intervals."""
    found: list[Interval] = []
    for interval in sorted(i for i in intervals if len(i) > 0):
        last = found[-1] if found else None
        if last is not None and last.epoch == interval.epoch and interval.start <= last.stop:
            found[-1] = Interval(last.epoch, last.start, max(last.stop, interval.stop))
        else:
            found.append(interval)
    return tuple(found)


def _before(interval: Interval, cursor: Cursor) -> Interval:
    """Return the part of an interval before the cursor, possibly empty."""
    if interval.epoch > cursor.epoch or interval.epoch < 0:
        return Interval(interval.epoch, 0, 0)
    stop = min(interval.stop, cursor.position) if interval.epoch == cursor.epoch else interval.stop
    return Interval(interval.epoch, max(0, interval.start), stop)

