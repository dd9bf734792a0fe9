"""What commands share: the event loop, the log, and what a terminal shows while they work."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from spes_p2p.observe.log import json_line
from spes_p2p.storage.threads import keep_freed_memory

END_SPINNER = "\r\x1b[K\x1b[?25h"
"""Clears the line of a spinner, and shows the cursor, which it hides."""
PEERS_COLLECT_AFTER = (700, 10, 10)
"""The usual default of Python: garbage may hold the bytes of a round, so it is collected often."""

SAY_EVERY_S = 60.0
"""Without a terminal: time between two lines of progress."""


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run in a new event loop until it returns."""
    import uvloop

    uvloop.install()
    return asyncio.run(work)


def run_peer(work: Coroutine[Any, Any, None]) -> None:
    """As `run`, for a peer: Ctrl-C before it takes part, when nothing can be lost, ends the process at once.

    asyncio would wait for the threads that import libraries, verify text or make base 0.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_now)
    keep_freed_memory()
    gc.set_threshold(*PEERS_COLLECT_AFTER)
    run(work)


def _end_now(number: int, frame: object) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(END_SPINNER)
        sys.stderr.flush()
    os._exit(128 + number)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM, and SIGHUP of a closed terminal raise at once, so that temporary files and processes are removed.

    asyncio would only cancel its task at Ctrl-C, which waits while that imports torch.
    """
    defaults = {
        signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL
    }
    ends = {number: default for number, default in defaults.items() if signal.getsignal(number) is default}
    for number in ends:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, default in ends.items():
            signal.signal(number, default)


def _raise(number: int, frame: object) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


class ProgressBar:
    """Show a progress bar on a terminal, a line a minute elsewhere; yields `update(done, total)`.

    `before`: what is done until the first update. `unit`: what is counted, to show the numbers, too.
    """

    def __init__(self, what: str, before: str = "", unit: str = ""):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        percent = TaskProgressColumn("{task.percentage:>3.0f} %")
        columns = (TextColumn("{task.description}"), BarColumn(), percent, TimeRemainingColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._what, self._unit, self._said_s = what, unit, time.monotonic()
        self._task = self._progress.add_task(before or what, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.start()
        return self._update

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def _update(self, done: int, total: int) -> None:
        what = f"{self._what}, {done} of {total} {self._unit}" if self._unit else self._what
        self._progress.update(self._task, description=what, completed=done, total=total)
        if self._progress.disable and time.monotonic() - self._said_s >= SAY_EVERY_S:
            self._said_s = time.monotonic()
            say_waiting(f"{what}: {100 * done // max(1, total)} %")


@contextlib.contextmanager
def waiting(for_what: str) -> Iterator[Callable[[], None]]:
    """Show a spinner on a terminal, a line on one without a cursor, nothing elsewhere; yields a function that ends it early."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_dumb_terminal:
        console.print(for_what)
    with console.status(for_what) as status:
        yield status.stop


def say_waiting(for_what: str) -> None:
    """Say in a line on stderr what a command waits for; on a terminal `waiting` shows that it does."""
    if not sys.stderr.isatty():
        print(for_what, file=sys.stderr, flush=True)


def say(text: str, as_json: bool) -> None:
    """Print a line for a person, or the JSON line of it."""
    print(json_line(text) if as_json else text, flush=True)
