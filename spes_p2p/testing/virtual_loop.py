"""An event loop with virtual time, and the units, each one life of a peer, whose tasks run on it.

Time advances only when nothing is left to do at the current instant.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from spes_p2p.net.interfaces import Handler
from spes_p2p.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")

T = TypeVar("T")

CLOCK_RESOLUTION_S = 1e-9
"""Timers that are due within this time run together."""
MAX_CANCELLED = 1000
"""Drop cancelled timers once there are more of them, and more than of others."""


class DeadlockError(RuntimeError):
    """Every task waits and no timer is set, so nothing can ever happen."""


def _nothing() -> None:
    """Stand in for a cancelled callback, so that what it holds is free."""


class _Callback(asyncio.Handle):
    """A handle without asyncio's debug mode, which costs more than the rest of it."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: Sequence[Any], loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ):
        self._context = contextvars.copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None

    def cancel(self) -> None:
        """See Handle."""
        self._cancelled, self._callback, self._args = True, _nothing, ()


class _Timer(asyncio.TimerHandle):
    """The same with a time."""

    __slots__ = ()

    def __init__(
        self, when: float, callback: Callable[..., object], args: Sequence[Any], loop: VirtualLoop,
        context: contextvars.Context | None,
    ):
        self._context = contextvars.copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None
        self._when, self._scheduled = when, True

    def cancel(self) -> None:
        """See TimerHandle."""
        if not self._cancelled:
            self._loop._timer_handle_cancelled(self)
            self._cancelled, self._callback, self._args = True, _nothing, ()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` starts at 0 and jumps to the next timer when nothing is ready. Without sockets.

    Most of a simulation's time goes into callbacks and timers, so it has its own loop over them: without a selector, without
    debug mode, and with timers that compare as tuples. Timers of the same time run in the order in which they were set.
    """

    _ready: deque[Any]
    """Handles."""
    _stopping: bool
    get_debug = bool
    """Returns False. Futures, tasks and timers ask each time that they are made: a function would cost a percent of a run."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_set = self._timers_cancelled = 0
        self.stopped_units: dict[Unit | None, list[asyncio.Handle]] = {}
        """Stopped units, with the callbacks that wait until they continue."""

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._now

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: Unpack[Ts], context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """See AbstractEventLoop. Callbacks of a stopped unit wait until it continues."""
        handle = _Callback(callback, args, self, context)
        if self.stopped_units:
            held = self.stopped_units.get((contextvars.copy_context() if context is None else context).get(CURRENT_UNIT))
            if held is not None:
                held.append(handle)
                return handle
        self._ready.append(handle)
        return handle

    def create_task(
        self, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], *, name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        """See AbstractEventLoop."""
        options: dict[str, Any] = {} if context is None else {"context": context}
        return create_task_of_unit(self, coro, **options)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: Unpack[Ts],
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """See AbstractEventLoop."""
        handle = _Timer(when, callback, args, self, context)
        self._timers_set += 1
        heapq.heappush(self._timers, (when, self._timers_set, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._timers_cancelled += 1
        if self._timers_cancelled > MAX_CANCELLED and 2 * self._timers_cancelled > len(self._timers):
            self._timers = [timer for timer in self._timers if not timer[2]._cancelled]
            heapq.heapify(self._timers)
            self._timers_cancelled = 0

    def _run_once(self) -> None:
        """Run what is ready; advance the time where the loop would sleep. Raises DeadlockError."""
        ready, timers = self._ready, self._timers
        if not ready:
            while timers and timers[0][2]._cancelled:
                heapq.heappop(timers)
                self._timers_cancelled -= 1
            if timers:
                self._now = max(self._now, timers[0][0])
            elif not self._stopping:
                raise self._deadlock()
        due = self._now + CLOCK_RESOLUTION_S
        while timers and timers[0][0] <= due:
            handle = heapq.heappop(timers)[2]
            if handle._cancelled:
                self._timers_cancelled -= 1
            else:
                ready.append(handle)
        for _ in range(len(ready)):
            each = ready.popleft()
            if not each._cancelled:
                try:
                    each._context.run(each._callback, *each._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"{each._callback} failed", "exception": error, "handle": each})

    def _deadlock(self) -> DeadlockError:
        waiting = ", ".join(sorted(_where(task) for task in asyncio.all_tasks(self)))
        return DeadlockError(f"nothing is ready and no timer is set at {self._now:.3f} s; waiting: {waiting or 'no task'}")

    def continue_unit(self, unit: Unit) -> None:
        """Continue a stopped unit: schedule its waiting callbacks."""
        for handle in self.stopped_units.pop(unit, ()):
            if not handle.cancelled():
                self.call_soon(handle._run)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: Unpack[Ts]
    ) -> asyncio.Future[T]:
        """Call `func` at once, since threads would make runs differ."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in virtual time, as `asyncio.run` does: remaining tasks are cancelled at the end. Raises DeadlockError."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        with suppress(DeadlockError):
            loop.run_until_complete(_cancel(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(eq=False)
class Unit:
    """One life of a peer: its handlers, channels, tasks and stores."""

    peer: str
    lives_before: int = 0
    alive: bool = True
    handlers: dict[str, tuple[Handler, contextvars.Context]] = field(default_factory=dict)
    channels: dict[Any, None] = field(default_factory=dict)
    """Open channels of the network."""
    remotes: Counter[str] = field(default_factory=Counter)
    """Open channels to each other peer."""
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    """All running tasks, and some that are done."""
    stores: list[MemoryStore] = field(default_factory=list)
    _tidy_at: int = 64

    def check_alive(self) -> None:
        """Cancel the caller if the peer is dead."""
        if not self.alive:
            raise asyncio.CancelledError(f"{self.peer} is dead")

    def opened(self, channel: Any) -> None:
        """Count a channel."""
        self.channels[channel] = None
        self.remotes[channel.remote] += 1

    def closed(self, channel: Any) -> None:
        """Count a channel no longer."""
        if channel in self.channels:
            del self.channels[channel]
            self.remotes[channel.remote] -= 1
            if not self.remotes[channel.remote]:
                del self.remotes[channel.remote]

    def start(self, main: Coroutine[Any, Any, None]) -> None:
        """Run a task of this life."""
        CURRENT_UNIT.set(self)
        self.adopt(asyncio.get_running_loop().create_task(main))

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """End this task with this life."""
        self.tasks.append(task)
        if len(self.tasks) >= self._tidy_at:
            self.tasks = [task for task in self.tasks if not task.done()]
            self._tidy_at = 2 * len(self.tasks) + 64


CURRENT_UNIT: contextvars.ContextVar[Unit | None] = contextvars.ContextVar("unit", default=None)


def running_peer() -> str | None:
    """Return the peer whose task or callback is running; None outside of peers."""
    unit = CURRENT_UNIT.get()
    return None if unit is None else unit.peer


def create_task_of_unit(
    loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, T] | Generator[Any, None, T], **options: Any
) -> asyncio.Task[T]:
    """Create a task that belongs to the current unit."""
    task = asyncio.Task(main, loop=loop, **options)
    unit = CURRENT_UNIT.get()
    if unit is not None:
        unit.adopt(task)
    return task


def _where(task: asyncio.Task[Any]) -> str:
    frames = task.get_stack()
    place = f"{frames[-1].f_code.co_name}:{frames[-1].f_lineno}" if frames else "its start"
    return f"{task.get_name()} in {place}"
