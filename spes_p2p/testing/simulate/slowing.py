"""A process on a slower machine: it is stopped again and again, so that it computes for a part of the time only."""

from __future__ import annotations

import signal
import subprocess
import threading

CYCLE_S = 0.2
"""Well below the silence that counts as death."""


class Slowing(threading.Thread):
    """From `start` to `end` the process runs for 1 / `factor` of the time."""

    def __init__(self, process: subprocess.Popen[bytes], factor: float):
        super().__init__(daemon=True)
        self._process, self._runs_s = process, CYCLE_S / max(1.0, factor)
        self._over = threading.Event()

    def run(self) -> None:
        """Let it run and stop it in turn."""
        while not self._over.wait(self._runs_s):
            self._process.send_signal(signal.SIGSTOP)
            self._over.wait(CYCLE_S - self._runs_s)
            self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """At full speed again. Returns when the process is left alone."""
        self._over.set()
        self.join()
