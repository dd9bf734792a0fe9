"""Splitting a phase's slices into batches and prefetching them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from spes_p2p.messages.samples import Interval

Item = TypeVar("Item")
Result = TypeVar("Result")


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


def read_ahead(read: Callable[[Item], Result], items: Iterable[Item], depth: int = 2) -> Generator[Result, None, None]:
    """Yield `map(read, items)`, read up to `depth` results ahead in another thread. Errors of `read` are raised here."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as reader:
        try:
            for item in items:
                waiting.append(reader.submit(read, item))
                if len(waiting) > depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
