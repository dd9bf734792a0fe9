"""Measures how others use this machine, without this process and those that it started."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping, Set
from dataclasses import dataclass

import psutil

from spes_p2p.session.pause_rules import Use

FIRST_SPAN_S = 1.0
DRIVER_TIMEOUT_S = 10.0
"""A driver that hangs longer is not asked."""


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of all cores since the machine started."""

    total_s: float
    idle_s: float
    own_s: Mapping[int, float]
    """By process, of this one and those that it started."""


def cpu_of_others(before: CpuTimes, after: CpuTimes) -> float:
    """Return the share of all cores that others used in between, 0 to 1."""
    total_s = after.total_s - before.total_s
    own_s = sum(spent_s - before.own_s.get(process, 0.0) for process, spent_s in after.own_s.items())
    busy_s = total_s - (after.idle_s - before.idle_s) - own_s
    return min(1.0, max(0.0, busy_s / total_s)) if total_s > 0 else 0.0


def gpu_of_others(listing: str, own: Set[int]) -> float:
    """Return the share of the busiest GPU that others use, 0 to 1, of what `nvidia-smi pmon -c 1 -s u` prints."""
    columns: list[str] = []
    used: dict[str, float] = {}
    for line in listing.splitlines():
        words = line.removeprefix("#").split()
        if "sm" in words and "pid" in words:
            columns = words
        elif columns and not line.startswith("#") and len(words) >= len(columns) and words[columns.index("pid")].isdigit():
            gpu, process, share = (words[columns.index(name)] for name in ("gpu", "pid", "sm"))
            if int(process) not in own and share.isdigit():
                used[gpu] = used.get(gpu, 0.0) + int(share) / 100
    return min(1.0, max(used.values(), default=0.0))


class MachineUse:
    """Measures what was used since the measurement before."""

    def __init__(self) -> None:
        self._before: CpuTimes | None = None

    def measure(self) -> Use:
        """Return the use by others. Blocks for about a second."""
        if self._before is None:
            self._before = _cpu_times()
            time.sleep(FIRST_SPAN_S)
        now = _cpu_times()
        cpu, self._before = cpu_of_others(self._before, now), now
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        return Use(cpu, gpu_of_others(_gpu_listing(), now.own_s.keys()), battery is not None and battery.power_plugged is False)


def _cpu_times() -> CpuTimes:
    times, own = psutil.cpu_times(), dict[int, float]()
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            spent = process.cpu_times()
        except psutil.Error:
            continue
        own[process.pid] = spent.user + spent.system
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted as user, too
    return CpuTimes(sum(times) - guests, times.idle + getattr(times, "iowait", 0.0), own)


def _gpu_listing() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        command = ["nvidia-smi", "pmon", "-c", "1", "-s", "u"]
        return subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
