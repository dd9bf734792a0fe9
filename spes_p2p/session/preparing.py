"""What the log says while a peer prepares, on a slow machine for minutes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from spes_p2p.net.tasks import beside
from spes_p2p.observe.console import HEARTBEAT_S

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def still(task: str, say: Callable[[str], None] = lambda task: None) -> AsyncIterator[None]:
    """Log once a minute that this task is still being done, as long as the block runs; `say` gets it at once."""
    say(task)
    async with beside(_repeat(task)):
        yield


async def _repeat(task: str) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        logger.info("still preparing: %s", task)
