"""Counts what a peer sends and receives, for a daily quota: all of p2pd's connections, those of the DHT and of relays included,
and text that comes from URLs.

p2pd reads and writes what it exchanges with other machines, and what it exchanges with this process. The kernel counts
both; what this process exchanged is known and subtracted.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from spes_p2p.data.url_donor import UrlDonor
from spes_p2p.net.byte_stream import ByteStream
from spes_p2p.observe.events import BaseRestored, Event, RoundCommitted
from spes_p2p.observe.json_values import to_json
from spes_p2p.session.pause_rules import Traffic
from spes_p2p.storage.files import write_whole

logger = logging.getLogger(__name__)

TRAFFIC_FILE = "traffic.json"
HEADERS = 1.05
"""What headers of TCP and IP, and packets that only acknowledge, add."""
KEPT_ROUNDS = 8
SAVE_EVERY_S = 30.0
"""What a crash may leave uncounted."""

_TRAFFIC = TypeAdapter(Traffic)


class TrafficMeter:
    """Counts the traffic of a day, across restarts."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / TRAFFIC_FILE
        self._traffic = Traffic("", 0)
        try:
            self._traffic = replace(_TRAFFIC.validate_json(self._path.read_bytes()), round_began_bytes=None, joined_bytes=0)
        except FileNotFoundError:
            pass
        except (OSError, ValueError):
            logger.warning("%s: damaged; what was sent and received today before now does not count", self._path)
        self._rounds = deque([self._traffic.round_bytes], maxlen=KEPT_ROUNDS)
        self._daemon: psutil.Process | None = None
        self._counted = 0
        """Bytes of the running daemon that are counted already."""
        self._exchanged_before = 0
        """What this process had exchanged with p2pd when that daemon was started."""
        self._fetched_before = 0
        """What it had read from URLs then."""
        self._at_commit: list[tuple[float, int]] = []
        """Time and count at the first and the last commit since the daemon was started."""
        self._saved_s = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Traffic since the first commit; 0: unknown."""
        if len(self._at_commit) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._at_commit
        return (last - first) / max(last_s - first_s, 1e-9)

    def follow(self, daemon_pid: int) -> None:
        """Count the traffic of this daemon, and text from URLs, from now on."""
        self._daemon, self._counted, self._at_commit = psutil.Process(daemon_pid), 0, []
        self._exchanged_before, self._fetched_before = ByteStream.exchanged_bytes, UrlDonor.fetched_bytes

    def stop(self) -> None:
        """The daemon has ended, and with it the round."""
        self._daemon, self._traffic = None, replace(self._traffic, round_began_bytes=None)

    def expect(self, round_bytes: int, join_bytes: int) -> None:
        """Reckon with rounds of this size until one was measured, and with so much until the base is here."""
        self._traffic = replace(self._traffic, joined_bytes=self._traffic.used_bytes + join_bytes)
        if not max(self._rounds):
            self._rounds = deque([round_bytes], maxlen=KEPT_ROUNDS)

    def read(self, now: datetime) -> Traffic:
        """Return the traffic of the day of `now`."""
        self._traffic = today = self._traffic.on(now)
        if self._daemon is None:
            return today
        with suppress(psutil.Error):
            moved = self._daemon.io_counters()
            local = ByteStream.exchanged_bytes - self._exchanged_before
            fetched = UrlDonor.fetched_bytes - self._fetched_before
            counted = max(self._counted, round(HEADERS * (moved.read_chars + moved.write_chars - local + fetched)))
            self._traffic = replace(today, used_bytes=today.used_bytes + counted - self._counted, round_bytes=max(self._rounds))
            self._counted = counted
        if abs(now.timestamp() - self._saved_s) >= SAVE_EVERY_S:
            self.save(now)
        return self._traffic

    def see(self, event: Event, now: datetime) -> None:
        """Note how much a round took, and that the next one begins."""
        if isinstance(event, RoundCommitted | BaseRestored) and self._daemon is not None:
            self.read(now)
            if isinstance(event, RoundCommitted):
                if self._at_commit:
                    self._rounds.append(self._counted - self._at_commit[-1][1])
                self._at_commit = [*self._at_commit[:1], (now.timestamp(), self._counted)]
            self._traffic = replace(
                self._traffic, round_began_bytes=self._traffic.used_bytes, round_bytes=max(self._rounds), joined_bytes=0)

    def save(self, now: datetime) -> None:
        """Write the count, if there is a run-dir yet."""
        if self._path.parent.is_dir():
            write_whole(self._path, json.dumps(to_json(self._traffic)).encode())
            self._saved_s = now.timestamp()
