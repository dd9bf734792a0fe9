"""Which samples a peer trains on: intervals of a shuffled epoch, handed out by the plan.

A corpus of `num_samples` samples (sequence-length chunks of its token files) is cut into contiguous pieces. Each epoch visits
the pieces in an order shuffled by a hash of (seed, epoch); position p of the epoch is the p-th sample in that order
(`samples.py`). The cursor moves on as plans hand out intervals of positions; what a peer declares untrained comes back.
"""

from __future__ import annotations

from collections.abc import Iterable

from spes_p2p.messages.samples import Cursor, Interval


def take(cursor: Cursor, count: int, num_samples: int) -> tuple[tuple[Interval, ...], Cursor]:
    """Hand out `count` samples: returned ones first, then onwards from the cursor, into the next epoch where this one ends.

    `num_samples` is the size of one epoch. The intervals are disjoint and hold exactly `count` positions.
    Raises ValueError for a negative count, no samples, or a cursor beyond the epoch (it belongs to another corpus).
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
    """The cursor after some of what it had handed out came back untrained.

    A set operation: giving the same positions back twice is giving them back once, and positions that were not handed out yet
    are left where they are, for they will be handed out anyway.
    """
    handed_out = (_before(interval, cursor) for interval in intervals)
    return Cursor(cursor.epoch, cursor.position, _union((*cursor.returned, *handed_out)))


def _before(interval: Interval, cursor: Cursor) -> Interval:
    """The part of an interval that lies before the cursor, possibly empty."""
    if interval.epoch > cursor.epoch or interval.epoch < 0:
        return Interval(interval.epoch, 0, 0)
    stop = min(interval.stop, cursor.position) if interval.epoch == cursor.epoch else interval.stop
    return Interval(interval.epoch, max(0, interval.start), stop)


def _union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """The same positions as sorted, disjoint, non-touching, non-empty intervals."""
    union: list[Interval] = []
    for interval in sorted(i for i in intervals if len(i) > 0):
        last = union[-1] if union else None
        if last is not None and last.epoch == interval.epoch and interval.start <= last.stop:
            union[-1] = Interval(last.epoch, last.start, max(last.stop, interval.stop))
        else:
            union.append(interval)
    return tuple(union)
