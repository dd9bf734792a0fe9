"""Assigning samples: plans hand out intervals of positions in an epoch's shuffled order (`samples.py`).

The cursor advances as plans hand out intervals; samples that a peer reports untrained are returned and handed out again.
"""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.messages.samples import Cursor, Interval


def take(cursor: Cursor, count: int, num_samples: int) -> tuple[tuple[Interval, ...], Cursor]:
    """Hand out `count` samples: returned ones first, then from the cursor on, continuing in the next epoch.

    `num_samples` is the size of one epoch. The intervals are disjoint and contain exactly `count` positions.
    Raises ValueError for a negative count, an empty epoch, or a cursor outside the epoch (it belongs to another corpus).
    """
    if count < 0 or num_samples <= 0 or not 0 <= cursor.position <= num_samples:
        raise ValueError(f"cannot take {count} samples at position {cursor.position} of an epoch of {num_samples}")
    taken: list[Interval] = []
    returned = list(cursor.returned)
    while count > 0 and returned:
        first = returned.pop(0)
        used = min(count, len(first))
        taken.append(Interval(first.epoch, first.start, first.start + used))
        if used < len(first):
            returned.insert(0, Interval(first.epoch, first.start + used, first.stop))
        count -= used
    epoch, position = cursor.epoch, cursor.position
    while count > 0:
        if position == num_samples:
            epoch, position = epoch + 1, 0
        used = min(count, num_samples - position)
        taken.append(Interval(epoch, position, position + used))
        position += used
        count -= used
    return tuple(taken), Cursor(epoch, position, tuple(returned))


def give_back(cursor: Cursor, intervals: tuple[Interval, ...]) -> Cursor:
    """Return the cursor with untrained intervals returned to it.

    Idempotent: a position returned twice is handed out once. Positions that were never handed out are ignored.
    """
    handed_out = (_before(interval, cursor) for interval in intervals)
    return Cursor(cursor.epoch, cursor.position, _union((*cursor.returned, *handed_out)))


def _before(interval: Interval, cursor: Cursor) -> Interval:
    """Return the part of an interval before the cursor, possibly empty."""
    if interval.epoch > cursor.epoch or interval.epoch < 0:
        return Interval(interval.epoch, 0, 0)
    stop = min(interval.stop, cursor.position) if interval.epoch == cursor.epoch else interval.stop
    return Interval(interval.epoch, max(0, interval.start), stop)


def _union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the same positions as sorted, disjoint, non-adjacent, non-empty intervals."""
    union: list[Interval] = []
    for interval in sorted(i for i in intervals if len(i) > 0):
        last = union[-1] if union else None
        if last is not None and last.epoch == interval.epoch and interval.start <= last.stop:
            union[-1] = Interval(last.epoch, last.start, max(last.stop, interval.stop))
        else:
            union.append(interval)
    return tuple(union)
