"""Handlers of the signals that end a peer."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

logger = logging.getLogger(__name__)


def leave_on_signals(leave: Callable[[], None]) -> None:
    """Call `leave` on the first SIGINT or SIGTERM; the second ends the process."""
    loop = asyncio.get_running_loop()
    asked = False

    def handle() -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        logger.info("leaving after the current step; interrupt again to stop at once")
        leave()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle)
