"""Splitting a phase's slices."""

from __future__ import annotations

from collections.abc import Sequence

from spes_p2p.messages.samples import Interval


def split_samples(slices: Sequence[Interval], count: int) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """Split the slices after the first `count` positions, or at their end if they have fewer."""
    first: list[Interval] = []
    rest: list[Interval] = []
    for interval in slices:
        cut = min(interval.stop, interval.start + count)
        count -= cut - interval.start
        first.append(Interval(interval.epoch, interval.start, cut))
        rest.append(Interval(interval.epoch, cut, interval.stop))
    return tuple(i for i in first if len(i) > 0), tuple(i for i in rest if len(i) > 0)
