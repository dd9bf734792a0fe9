"""Work on the pieces of something large, in several threads.

numpy, BLAKE3 and reads and writes leave the interpreter to other threads.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import get_native_id
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

MAX_THREADS = 8
"""Bounds the threads of one piece of work, since each has its own buffers; memory and disk are busy with fewer."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**25
"""Bounds the freed memory at the end of each heap that glibc keeps, and the blocks that it takes from a heap at all: the most
to which it raises the latter by itself."""


def keep_freed_memory() -> None:
    """Make the C library keep memory that is freed, up to KEPT_BYTES a heap, in this process.

    By default glibc gives it back so early that in a round half of all page faults were for arrays of a few hundred KB.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every C library
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def keep_loaded_objects() -> None:
    """Leave what this process has loaded by now, libraries above all, out of later collections of garbage.

    A full collection over the 400,000 objects of torch and transformers holds the event loop up for 0.4 s.
    """
    gc.collect()
    gc.freeze()


def threads_here() -> int:
    """Return the threads that this process may use: its cores, or fewer where OMP_NUM_THREADS, which torch obeys, says so."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, MAX_THREADS, int(wanted) if wanted.isdecimal() else cores))


def nice_executor(niceness: int) -> ThreadPoolExecutor:
    """Return an executor whose threads, and those that they start, have at least this niceness; as many as asyncio's own."""

    def give_way() -> None:
        thread = get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))

    return ThreadPoolExecutor(min(32, (os.cpu_count() or 1) + 4), "work", give_way)


def in_threads(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Yield `map(work, items)`, in order, computed by this many threads and a few items ahead. The caller's thread for 1."""
    if threads <= 1:
        yield from map(work, items)
        return
    yield from ahead(work, items, threads, 2 * threads)


def ahead(work: Callable[[T], R], items: Iterable[T], threads: int, depth: int) -> Generator[R, None, None]:
    """Yield `map(work, items)`, in order, computed in other threads up to `depth` results ahead. Errors are raised here."""
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="pieces") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > depth:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def spans(count: int, size: int) -> Iterator[range]:
    """Yield `range(count)` in runs of `size`, the last one shorter."""
    return (range(start, min(start + size, count)) for start in range(0, count, size))
