"""Tasks that end for certain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import Any

CANCEL_EVERY_S = 0.5


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks until all have ended; what they raise is dropped.

    Once is not enough: before Python 3.12 `asyncio.wait_for` loses a cancellation that comes in the moment in which what it
    waits for is done (https://github.com/python/cpython/issues/86296), and a task that waits in a loop then goes on.
    """
    ending = list(tasks)
    for task in ending:
        if task.done():
            _drop(task)
        else:
            task.add_done_callback(_drop)
    while running := [task for task in ending if not task.done()]:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=CANCEL_EVERY_S)


@contextlib.asynccontextmanager
async def beside(*works: Awaitable[None]) -> AsyncIterator[None]:
    """Run work that has no end of its own as long as the block runs."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        await end_tasks(tasks)


def _drop(task: asyncio.Future[Any]) -> None:
    """Retrieve the task's exception, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
