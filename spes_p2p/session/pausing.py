"""Pausing: a trainer leaves the swarm while its user, or a rule that the user gave, wants the machine back.

It leaves as at Ctrl-C, so that its experts and samples go to others in the same round, and ends its network, its trainer and
its other processes; only this process stays. To go on it joins again on its run-dir, and catches up as after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from spes_p2p.campaign.files import CAMPAIGN_FILE
from spes_p2p.config.campaign import PeerConfig
from spes_p2p.net.contacts import MAX_MET_ADDRESSES
from spes_p2p.observe.events import BaseRestored, Event, Observer, Paused, QuotaForecast, StateEntered
from spes_p2p.observe.metrics import Metrics
from spes_p2p.peer.leaving import LeaveRequest
from spes_p2p.session.machine_use import MachineUse
from spes_p2p.session.own_state import (
    DONE,
    OWNERS_PAUSE,
    PREPARING,
    STATE_FILE,
    OwnState,
    StateFile,
    is_pause_ordered,
    last_said,
)
from spes_p2p.session.pause_rules import IdleRule, Pause, outside_hours, over_quota, quota_forecast
from spes_p2p.session.traffic import TrafficMeter

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
MEASURE_EVERY_S = 5.0
TELL_EVERY_S = 30.0
"""Pause between two forecasts of the quota, for metrics."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
        self._said: OwnState | None = None
        self._waits_for, self._has_base, self._trains = "", False, False
        """What a trainer that does not train yet is busy with, or waits for; whether it has a base, and has trained."""
        self.met = last_said(settings.run_dir).met_addresses
        """Where the trainer met other peers, now or before it left the swarm, the last ones first."""
        self._own: tuple[str, ...] = ()
        self._meets: Callable[[], tuple[str, ...]] = tuple
        self._idle, self._use, self._measured_s = IdleRule(), MachineUse(), -math.inf
        self._meter = TrafficMeter(settings.run_dir) if settings.quota is not None else None

    @property
    def follows(self) -> bool:
        """Whether the trainer left to come back."""
        return self.pause is not None and not self.ending.is_made

    def begin(self) -> None:
        """Say that the trainer prepares, so that it can be paused, unless the run-dir may turn out to be another peer's."""
        self._has_base = self._trains = False
        run_dir = self._settings.run_dir
        if (run_dir / STATE_FILE).exists() or not (run_dir / CAMPAIGN_FILE).exists():
            self.prepares("looking for the campaign")

    def prepares(self, task: str) -> None:
        """Say that the trainer prepares, in its run-dir. Raises UserError if another one uses the run-dir."""
        self._waits_for = task
        self._say(PREPARING)

    def in_swarm(self, own: tuple[str, ...], meets: Callable[[], tuple[str, ...]]) -> None:
        """Say where others find the swarm: at the trainer's `own` addresses while it is there, and where `meets` says."""
        self._own, self._meets = own, meets

    def count(self, daemon_pid: int) -> None:
        """Count the traffic of this p2pd for the quota."""
        if self._meter is not None:
            self._meter.follow(daemon_pid)

    def expect(self, round_bytes: int, join_bytes: int) -> None:
        """Reckon with rounds of this size until one was measured, and with so much until the base is here."""
        if self._meter is not None:
            self._meter.expect(round_bytes, join_bytes)

    def observe(self, event: Event) -> None:
        """Observer: learns what the trainer does, and from rounds what the next one takes of the quota."""
        match event:
            case BaseRestored():
                self._has_base, self._waits_for = True, "for a round that gives it work"
            case StateEntered("paused"):
                self._trains, self._waits_for = False, OWNERS_PAUSE
            case StateEntered("training"):
                self._trains, self._waits_for = True, ""
        if self._meter is not None:
            self._meter.see(event, self._now())

    async def watch(self, leave: Callable[[], None], observer: Observer) -> None:
        """Call `leave` when the trainer is to pause; tell the observer what the quota leaves. Never returns."""
        told_s = -math.inf
        while (pause := await self._look()) is None:
            self._say("running" if self._has_base else PREPARING)
            forecast = self._forecast()
            if forecast is not None and time.monotonic() - told_s >= TELL_EVERY_S:
                told_s = time.monotonic()
                observer(forecast)
            await asyncio.sleep(LOOK_EVERY_S)
        self.pause = pause
        logger.info("pausing after the current step")
        self._say("pausing")
        leave()
        while True:
            self._count()
            await asyncio.sleep(LOOK_EVERY_S)

    async def is_due(self) -> bool:
        """Return whether the trainer, which does not train yet, is to pause instead."""
        self.pause = await self._look()
        return self.follows

    async def over(self) -> bool:
        """Return True as soon as the trainer may train, False if the process is asked to end before."""
        self._own, self._meets = (), tuple
        if self._meter is not None:
            self._meter.stop()
        self.pause, shown = await self._look(), None
        if self.pause is None:
            return True
        self._on_paused()
        _free_memory()
        self._save_count()
        settings, metrics = self._settings, Metrics()
        with contextlib.ExitStack() as stack:
            if settings.metrics_port is not None:
                stack.callback(metrics.serve(settings.metrics_port, settings.metrics_host).close)
            call_on_signals(self.ending.make, "ending")
            while self.pause is not None and not self.ending.is_made:
                self._say("paused")
                if shown is None or self.pause.reason != shown.reason:
                    shown = self.pause
                    logger.info("paused: %s", shown.detail)
                    metrics.update(Paused(shown.reason))
                await self.ending.wait(LOOK_EVERY_S)
                self.pause = await self._look()
        if not self.ending.is_made:
            logger.info("resuming: joining again")
            for number in SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(number)  # as before the first join
        return not self.ending.is_made

    def gives_up(self) -> None:
        """Leave the run-dir to another peer that has it."""
        self._file.discard()

    def campaign_ended(self) -> None:
        """Say so in the run-dir, for those who look after this process has ended; no pause follows."""
        self.ending.make()
        self._trains, self._waits_for, self.pause = False, "", None
        self._say(DONE)

    def close(self) -> None:
        """Give the run-dir up."""
        self._save_count()
        self._file.close()

    async def _look(self) -> Pause | None:
        """Return why the trainer is to pause now, if it is."""
        settings, now = self._settings, self._now()
        if is_pause_ordered(settings.run_dir):
            return Pause("user", f"until you type: spes-p2p resume {shlex.quote(str(settings.run_dir.resolve()))}")
        if settings.hours is not None and (pause := outside_hours(settings.hours, now)):
            return pause
        quota, meter = settings.quota, self._meter
        if quota is not None and meter is not None and (pause := over_quota(quota, meter.read(now), now)):
            return pause
        if settings.only_when_idle:
            if time.monotonic() - self._measured_s >= MEASURE_EVERY_S:
                self._idle.see(await asyncio.to_thread(self._use.measure), time.monotonic())
                self._measured_s = time.monotonic()
            return self._idle.pause()
        return None

    def _say(self, state: str) -> None:
        """Write the state to the run-dir when it changes."""
        if self.pause is not None:
            reason, detail = self.pause.reason, self.pause.detail
        else:
            forecast = self._forecast()
            reason, detail = "", self._waits_for or (forecast.line if forecast else "")
        self.met = tuple(dict.fromkeys((*self._meets(), *self.met)))[:MAX_MET_ADDRESSES]
        trains = self._trains and self.pause is None
        said = OwnState(state, 0.0, self._addresses, reason, detail, trains, self._own, self.met)
        if self._said != said:
            self._said = said
            self._file.write(replace(said, since=self._wall_time()))

    def _forecast(self) -> QuotaForecast | None:
        """Say when the quota ends the day's training; None without one."""
        if self._meter is None or self._settings.quota is None:
            return None
        now = self._now()
        return quota_forecast(self._settings.quota, self._meter.read(now), self._meter.bytes_per_s, now)

    def _count(self) -> None:
        if self._meter is not None:
            self._meter.read(self._now())

    def _save_count(self) -> None:
        self._count()
        if self._meter is not None:
            self._meter.save(self._now())

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._wall_time()).astimezone()


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
