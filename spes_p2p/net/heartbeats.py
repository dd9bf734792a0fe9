"""Heartbeats of a stream: this end's go out, and silence of the other end is noticed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from spes_p2p.errors import PeerUnreachable
from spes_p2p.net.detector import CLOCK_ERROR_S, SilenceDetector

Send = Callable[[], Coroutine[Any, Any, None]]
OnSilence = Callable[[PeerUnreachable], None]


class Heartbeats:
    """Tells the other end that this one lives, and watches whether the other one does."""

    def __init__(self, remote: str, detector: SilenceDetector, send: Send, on_silence: OnSilence):
        """`send` sends one heartbeat; `on_silence` is called once, when the other end has been silent for too long."""
        self._remote, self._detector = remote, detector
        self._loop = asyncio.get_running_loop()
        # Only timers and task hold the callbacks: an attribute would keep an ended stream and its messages in a ring.
        self._sending: asyncio.TimerHandle | asyncio.Task[None]
        """The task that sends heartbeats, or the timer that begins to: most streams end before the first heartbeat."""
        self._sending = self._loop.call_later(detector.heartbeat_s, self._begin, send, on_silence)
        self._silence: asyncio.TimerHandle | None = None
        self.may_send = True
        """Until this end has finished."""
        self._expects_more = True
        self._heard_at = self._frame_at = self._loop.time()
        self._is_reading = True
        self._beats = 0

    def heard(self) -> None:
        """Note that bytes have arrived."""
        self._heard_at = self._loop.time()
        self._detector.heard(self._remote, self._heard_at)

    def frame(self, is_heartbeat: bool) -> None:
        """Note that a frame has arrived: the time between two heartbeats in a row says how late those can be."""
        self._beats = self._beats + 1 if is_heartbeat else 0
        if self._beats > 1:
            self._detector.saw_gap(self._remote, self._loop.time() - self._frame_at)
        self._frame_at = self._loop.time()

    def not_reading(self) -> Heartbeats:
        """While this end does not read, the other end does not count as silent: a context manager."""
        return self

    def __enter__(self) -> None:
        self._is_reading = False

    def __exit__(self, *error: object) -> None:
        self._is_reading, self._heard_at = True, self._loop.time()

    def expect_no_more(self) -> None:
        """The other end has finished: its silence says nothing from now on."""
        self._expects_more = False
        if self._silence is not None:
            self._silence.cancel()

    def close(self) -> None:
        """End both."""
        self._sending.cancel()
        self.expect_no_more()

    def _begin(self, send: Send, on_silence: OnSilence) -> None:
        """Send heartbeats from now on. Silence can be too long only after several of them."""
        self._sending = asyncio.create_task(self._keep_sending(send))
        if self._expects_more:
            self._check_silence(on_silence)

    async def _keep_sending(self, send: Send) -> None:
        with contextlib.suppress(PeerUnreachable, asyncio.CancelledError):  # only `close` cancels it
            while self.may_send:
                await send()
                await asyncio.sleep(self._detector.heartbeat_s)

    def _check_silence(self, on_silence: OnSilence) -> None:
        now = self._loop.time()
        heard_at = self._heard_at if self._is_reading else now
        left_s = self._detector.dead_at(self._remote, heard_at) - now
        if left_s > CLOCK_ERROR_S:
            self._silence = self._loop.call_later(left_s, self._check_silence, on_silence)
            return
        self._detector.lost(self._remote, now)
        on_silence(PeerUnreachable(f"{self._remote[-6:]} is silent in this stream for {now - heard_at:.3g} s"))
