"""Slow a process down by stopping and continuing it in turn."""

from __future__ import annotations

import signal
import subprocess
import threading

CYCLE_S = 0.2
"""Well below the silence timeout."""


class Slowing(threading.Thread):
    """From `start` to `end`, the process runs for 1 / `factor` of the time."""

    def __init__(self, process: subprocess.Popen[bytes], factor: float):
        super().__init__(daemon=True)
        self._process, self._runs_s = process, CYCLE_S / max(1.0, factor)
        self._over = threading.Event()

    def run(self) -> None:
        """Stop and continue the process in turn."""
        while not self._over.wait(self._runs_s):
            self._process.send_signal(signal.SIGSTOP)
            self._over.wait(CYCLE_S - self._runs_s)
            self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Restore full speed; return when no more signals are sent."""
        self._over.set()
        self.join()
