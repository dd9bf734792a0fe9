"""When a trainer pauses by itself: outside its hours, while others use the machine, and when the day's traffic is used up.

Rules are pure: time, and what was measured, are arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, time, timedelta

from spes_p2p.config.quantities import Hours
from spes_p2p.observe.events import QuotaForecast
from spes_p2p.observe.units import human_bytes, human_count

OTHERS_CPU, OTHERS_GPU = 0.2, 0.1
"""Shares of the machine's cores, and of a GPU, above which it is in use by others: a browser that plays a film stays below."""
BUSY_S, IDLE_S = 10.0, 300.0
"""For this long it must be in use, or not, before the trainer pauses, or goes on: a program that starts is no reason to leave,
and who reads a page comes back to it."""


@dataclass(frozen=True)
class Pause:
    """Why a trainer pauses now."""

    reason: str
    """One of `events.PAUSE_REASONS`."""
    detail: str
    """For people."""


@dataclass(frozen=True)
class Use:
    """How others use this machine."""

    cpu: float
    """Share of all cores, 0 to 1."""
    gpu: float = 0.0
    """Share of the busiest GPU, 0 to 1."""
    on_battery: bool = False

    @property
    def is_busy(self) -> bool:
        """Return whether somebody else needs the machine."""
        return self.cpu > OTHERS_CPU or self.gpu > OTHERS_GPU


def outside_hours(hours: Hours, now: datetime) -> Pause | None:
    """Return the pause outside these hours of the day; `now` is local time."""
    start, stop, minute = hours.start, hours.stop, 60 * now.hour + now.minute
    is_inside = start <= minute < stop if start < stop else minute >= start or minute < stop
    return None if is_inside else Pause("hours", f"until {start // 60}:{start % 60:02} (--hours {hours})")


class IdleRule:
    """Pauses while others use the machine, or it runs on battery."""

    def __init__(self) -> None:
        self._pauses = False
        self._use = Use(0.0)
        self._changed_s = -math.inf
        """Since when the use has not been what it was when the trainer last paused or went on."""

    def see(self, use: Use, now_s: float) -> None:
        """Take a measurement. `now_s`: of a clock that does not jump."""
        self._use = use
        if use.is_busy == self._pauses:
            self._changed_s = math.inf
        elif self._changed_s == math.inf:
            self._changed_s = now_s
        if now_s - self._changed_s >= (IDLE_S if self._pauses else BUSY_S):
            self._pauses, self._changed_s = use.is_busy, math.inf

    def pause(self) -> Pause | None:
        """Return the pause that follows from what was seen."""
        if self._use.on_battery:
            return Pause("battery", "until this machine is plugged in (--only-when-idle)")
        if self._pauses:
            uses = [("all cores", OTHERS_CPU, self._use.cpu), ("a GPU", OTHERS_GPU, self._use.gpu)][: 2 if self._use.gpu else 1]
            idle = [f"{100 * most:.0f} % of {what} (now {100 * now:.0f} %)" for what, most, now in uses]
            return Pause("busy", f"until others use at most {' and '.join(idle)} for {IDLE_S / 60:g} min (--only-when-idle)")
        return None


@dataclass(frozen=True)
class Traffic:
    """What this peer sent and received."""

    day: str
    """Local date, as 2026-01-31."""
    used_bytes: int
    """On that day."""
    round_bytes: int = 0
    """The most that one of the last rounds took; before the first, what the plan of a round says."""
    round_began_bytes: int | None = None
    """What was used on that day when the round under way began; None before the base is here."""
    joined_bytes: int = 0
    """About what will be used on that day when base, text and the rounds missed are here; 0 once they are."""

    @property
    def joining_bytes(self) -> int:
        """About what they still take."""
        return max(0, self.joined_bytes - self.used_bytes)

    def on(self, now: datetime) -> Traffic:
        """Return the traffic of the day of `now`."""
        day = now.date().isoformat()
        began = None if self.round_began_bytes is None else 0
        return self if day == self.day else Traffic(day, 0, self.round_bytes, began, self.joining_bytes)


def over_quota(quota_bytes: int, traffic: Traffic, now: datetime) -> Pause | None:
    """Return the pause when the day's quota does not suffice for another round, or for joining and a round.

    What has begun is ended within the quota.
    """
    today = traffic.on(now)
    at_join = today.used_bytes + today.joining_bytes
    before = at_join if today.round_began_bytes is None else today.round_began_bytes
    if before + today.round_bytes < quota_bytes and today.used_bytes < quota_bytes:
        return None
    used = f"{human_bytes(today.used_bytes)} of {human_bytes(quota_bytes)}"
    coming = _joining(today) or f"a round takes {human_bytes(today.round_bytes)}"
    return Pause("quota", f"until midnight: {used} used today, {coming} (--quota)")


def _joining(today: Traffic) -> str:
    return f"joining takes about {human_bytes(today.joining_bytes)}" if today.joining_bytes else ""


def quota_forecast(quota_bytes: int, traffic: Traffic, bytes_per_s: float, now: datetime) -> QuotaForecast:
    """Say when the quota will end the day's training at this rate; 0: unknown."""
    today = traffic.on(now)
    used = f"{human_bytes(today.used_bytes)} of {human_bytes(quota_bytes)} used today"
    if bytes_per_s <= 0:
        left = quota_bytes - today.used_bytes - today.joining_bytes
        rounds = left // today.round_bytes if today.round_bytes else 0
        plural = "" if rounds == 1 else "s"
        each = f"of at most {human_bytes(today.round_bytes)}"
        enough = f"the rest lasts for {human_count(rounds)} or more round{plural} {each}" if rounds > 0 else ""
        line = "; ".join(filter(None, (used, _joining(today), enough)))
        return QuotaForecast(quota_bytes, today.used_bytes, math.nan, line)
    left_s = (quota_bytes - today.round_bytes - today.used_bytes) / bytes_per_s
    midnight = datetime.combine(now.date() + timedelta(days=1), time(), now.tzinfo)
    if left_s >= (midnight - now).total_seconds():
        return QuotaForecast(quota_bytes, today.used_bytes, math.inf, f"{used}; that lasts for the day")
    pauses_at = now + timedelta(seconds=left_s)
    line = f"{used}; pauses about {pauses_at:%H:%M}, at the mean rate so far"
    return QuotaForecast(quota_bytes, today.used_bytes, pauses_at.timestamp(), line)
