"""Posts alerts to a URL: once when one begins and once when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from spes_p2p.client.alerts import Alert
from spes_p2p.client.dashboard.poll import Published

logger = logging.getLogger(__name__)

HOLD_S = 60.0
"""An alert begins or ends for the webhook after this long without a change: a peer that restarts is not worth a message."""
LOOK_EVERY_S = 1.0
TIMEOUT_S = 10.0
RETRY_S = 300.0
MAX_WAITING = 100
"""Bounds the notices that wait for a URL that does not answer; the oldest are dropped."""


@dataclass(frozen=True)
class Notice:
    """An alert that began or ended."""

    event: str
    """begin, end."""
    alert: Alert
    since: float
    """Unix time at which the alert began."""


class Notices:
    """Turns what is wrong now into what began and what ended. Without I/O."""

    def __init__(self, hold_s: float = HOLD_S):
        self._hold_s = hold_s
        self._begun: dict[str, Notice] = {}
        self._changed_at: dict[str, float] = {}
        """By kind: since when what is wrong differs from what was told."""

    def update(self, alerts: Iterable[Alert], now: float) -> list[Notice]:
        """Return what to tell. `now`: Unix time."""
        present = {alert.kind: alert for alert in alerts}
        told = []
        for kind in present.keys() | self._begun.keys():
            if (kind in present) == (kind in self._begun):
                self._changed_at.pop(kind, None)
            elif now - self._changed_at.setdefault(kind, now) >= self._hold_s:
                since = self._changed_at.pop(kind)
                if kind in present:
                    self._begun[kind] = Notice("begin", present[kind], since)
                    told.append(self._begun[kind])
                else:
                    begun = self._begun.pop(kind)
                    told.append(Notice("end", begun.alert, begun.since))
        for kind in self._changed_at.keys() - present.keys() - self._begun.keys():
            del self._changed_at[kind]
        return sorted(told, key=lambda notice: notice.alert.kind)


async def post_alerts(url: str, published: Published, notices: Notices | None = None, retry_s: float = RETRY_S) -> None:
    """Post until cancelled. What the URL does not take is kept and posted again after `retry_s`; the log says so once."""
    notices, waiting = notices or Notices(), deque[dict[str, Any]](maxlen=MAX_WAITING)
    post_at, failing = 0.0, False
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        while True:
            waiting.extend(_document(each, published, time.time()) for each in notices.update(published.alerts, time.time()))
            while waiting and time.monotonic() >= post_at:
                problem = await _post(session, url, waiting[0])
                if problem is None:
                    waiting.popleft()
                    if failing:
                        logger.warning("--webhook %s: takes alerts again", urlsplit(url).hostname)
                    failing = False
                    continue
                if not failing:
                    # A URL often holds a secret in its path.
                    logger.warning("--webhook %s: %s; retrying every %.0f s", urlsplit(url).hostname, problem, retry_s)
                post_at, failing = time.monotonic() + retry_s, True
                published.webhook_refusals += 1
            published.webhook_waiting = len(waiting)
            await asyncio.sleep(min(LOOK_EVERY_S, retry_s))


def _document(notice: Notice, published: Published, now: float) -> dict[str, Any]:
    swarm = published.view or {}
    return {
        "event": notice.event, "kind": notice.alert.kind, "severity": notice.alert.severity, "text": notice.alert.text,
        "campaign": swarm.get("campaign", ""), "campaign_hash": swarm.get("campaign_hash", ""), "round": swarm.get("round"),
        "since": notice.since, "time": now,
    }


async def _post(session: aiohttp.ClientSession, url: str, document: dict[str, Any]) -> str | None:
    """Return None, or why the URL did not take it."""
    try:
        async with session.post(url, json=document, allow_redirects=False) as answer:
            return None if answer.status < 300 else f"answers {answer.status}"
    except asyncio.TimeoutError:
        return f"no answer within {TIMEOUT_S:.0f} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return type(error).__name__
