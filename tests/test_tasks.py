"""Tasks that are ended have ended, whatever they do with a cancellation."""

from __future__ import annotations

import asyncio
import contextlib

from spes_p2p.net.tasks import CANCEL_EVERY_S, end_tasks


async def test_a_loop_that_loses_a_cancellation_is_cancelled_again() -> None:
    """As `asyncio.wait_for` does before Python 3.12 when what it waits for is done in the same moment."""
    async def loses(count: int) -> None:
        while True:
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                count -= 1
                if count < 0:
                    raise

    tasks = [asyncio.ensure_future(loses(count)) for count in (0, 1, 3)]
    await asyncio.sleep(0)
    await end_tasks(tasks)
    assert all(task.done() for task in tasks)
    assert asyncio.get_running_loop().time() == 3 * CANCEL_EVERY_S


async def test_a_wait_that_is_over_as_it_is_cancelled_does_not_go_on() -> None:
    news, waits = asyncio.Event(), 0

    async def loop() -> None:
        nonlocal waits
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(news.wait(), 1.0)
            news.clear()
            waits += 1

    task = asyncio.ensure_future(loop())
    await asyncio.sleep(0.5)
    news.set()
    await asyncio.sleep(0)
    await end_tasks([task])
    assert task.done()


async def test_what_an_ended_task_raised_is_dropped() -> None:
    async def fails() -> None:
        raise ValueError

    task = asyncio.ensure_future(fails())
    await asyncio.sleep(0)
    await end_tasks([task])
