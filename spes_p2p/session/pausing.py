"""Pausing: a trainer leaves the swarm while its user, or a rule that the user gave, wants the machine back.

It leaves as at Ctrl-C, so that its experts and samples go to others in the same round, and ends its network, its trainer and
its other processes; only this process stays. To go on it joins again on its run-dir, and catches up as after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spes_p2p.config.campaign import PeerConfig
from spes_p2p.observe.events import Paused
from spes_p2p.observe.metrics import Metrics
from spes_p2p.peer.leaving import LeaveRequest
from spes_p2p.session.own_state import OwnState, StateFile, is_pause_ordered

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Pause:
    """Why a trainer pauses now."""

    reason: str
    """One of `events.PAUSE_REASONS`."""
    detail: str
    """For people."""


class Pauses:
    """Decides when this trainer pauses, and says so in its run-dir and on its terminal."""

    def __init__(
        self,
        settings: PeerConfig,
        addresses: Sequence[str],
        on_paused: Callable[[], None] = lambda: None,
        wall_time: Callable[[], float] = time.time,
    ):
        self.ending = LeaveRequest()
        """Whether the process was asked to end: no pause follows."""
        self.pause: Pause | None = None
        """Why the trainer is to pause; None: it may train."""
        self._settings, self._addresses, self._on_paused, self._wall_time = settings, tuple(addresses), on_paused, wall_time
        self._file = StateFile(settings.run_dir)

    @property
    def follows(self) -> bool:
        """Whether the trainer left to come back."""
        return self.pause is not None and not self.ending.is_made

    def joined(self) -> None:
        """Say that the trainer runs. Raises UserError if another one uses the run-dir."""
        self._say("running")

    async def watch(self, leave: Callable[[], None]) -> None:
        """Call `leave` when the trainer is to pause. Never returns."""
        while (pause := self._look()) is None:
            await asyncio.sleep(LOOK_EVERY_S)
        self.pause = pause
        logger.info("pausing after the current step: %s", pause.detail)
        self._say("pausing")
        leave()
        await asyncio.Event().wait()

    async def over(self) -> bool:
        """Return True as soon as the trainer may train, False if the process is asked to end before."""
        self.pause, shown = self._look(), None
        if self.pause is None:
            return True
        self._on_paused()
        _free_memory()
        settings, metrics = self._settings, Metrics()
        with contextlib.ExitStack() as stack:
            if settings.metrics_port is not None:
                stack.callback(metrics.serve(settings.metrics_port, settings.metrics_host).close)
            call_on_signals(self.ending.make, "ending")
            while self.pause is not None and not self.ending.is_made:
                if self.pause != shown:
                    shown = self.pause
                    logger.info("paused: %s", shown.detail)
                    metrics.update(Paused(shown.reason))
                    self._say("paused")
                await self.ending.wait(LOOK_EVERY_S)
                self.pause = self._look()
        if not self.ending.is_made:
            logger.info("no reason to pause any more: joining")
            for number in SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)  # as before the first join
        return not self.ending.is_made

    def close(self) -> None:
        """Give the run-dir up."""
        self._file.close()

    def _look(self) -> Pause | None:
        """Return why the trainer is to pause now, if it is."""
        if is_pause_ordered(self._settings.run_dir):
            return Pause("user", f"until you type: spes-p2p resume {self._settings.run_dir}")
        return None

    def _say(self, state: str) -> None:
        why = self.pause or Pause("", "")
        self._file.write(OwnState(state, self._wall_time(), self._addresses, why.reason, why.detail))


def call_on_signals(handle: Callable[[], None], what: str) -> None:
    """Call `handle` on the first SIGINT or SIGTERM; the second ends the process. `what` follows the first, for people."""
    loop = asyncio.get_running_loop()
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        logger.info("%s; interrupt again to stop at once", what)
        handle()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)


def _free_memory() -> None:
    """Give back what the trainer left behind, on the GPU too."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
