"""Poll a swarm and publish its state; reconnect as long as it is unreachable."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spes_p2p.client.connection import SwarmConnection, connect
from spes_p2p.client.dashboard.view import TIMELINE_ROUNDS, series, swarm_view
from spes_p2p.errors import UserError
from spes_p2p.messages.consensus import Control
from spes_p2p.messages.presence import HistoryPage, PeerStatus, RoundRecord
from spes_p2p.observe.json_values import to_json
from spes_p2p.observe.rounds import Rounds, totals_of
from spes_p2p.observe.status import swarm_status

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Poll interval in a swarm of up to PEERS_A_SECOND peers; larger swarms are polled less often."""
PEERS_A_SECOND = 16
RETRY_S = 3.0
LOST_AFTER = 5
"""Reconnect after this many polls without an answer: the addresses may lead to other peers by now."""


@dataclass
class Live:
    """The latest view, and a way to wait for the next."""

    state: str = "searching"
    """searching: no peer found yet; live; silent: no peer answers any more."""
    message: str = ""
    since: float = 0.0
    """Unix time at which this state began."""
    updated: float = 0.0
    """Unix time of the last answer; 0 before there is one."""
    join: str = ""
    """The join command for volunteers."""
    view: dict[str, Any] | None = None
    status: dict[str, Any] | None = None
    """As `status --json` prints it."""
    curves: dict[str, Any] | None = None
    curves_version: int = 0
    version: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def header(self) -> dict[str, Any]:
        """State, message, times and the join line."""
        return {name: getattr(self, name) for name in ("state", "message", "since", "updated", "join")}

    def be(self, state: str, message: str) -> None:
        """Change the state and publish it."""
        if state != self.state or not self.since:
            self.since = time.time()
        self.state, self.message = state, message
        self.publish()

    def publish(self) -> None:
        """Wake all waiters."""
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self, version: int) -> None:
        """Wait until there is a newer version."""
        while self.version == version:
            await self._news.wait()


@dataclass
class Memory:
    """Records of the rounds so far."""

    rounds: Rounds = field(default_factory=lambda: Rounds(""))
    """Records with times by the local clock."""
    traffic: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    by_peer: dict[str, tuple[RoundRecord, ...]] = field(default_factory=dict)
    """Each peer's own records of the last rounds."""
    control: Control | None = None
    """The owner's newest control record."""
    asked_at: dict[str, int] = field(default_factory=dict)
    """By peer: the round in its status at the last history request."""

    def hear(self, page: HistoryPage, now: float) -> tuple[RoundRecord, ...]:
        """Add a page received at `now` (Unix time); return its records by the local clock."""
        ahead_s = page.now - now
        records = tuple(replace(record, time=record.time - ahead_s) for record in page.records)
        for record in records:
            self.rounds.hear(record)
            self.traffic.setdefault(record.round, {})[record.teller] = (record.sent_bytes, record.received_bytes)
        return records


async def watch(addresses: Sequence[str], live: Live) -> None:
    """Poll the swarm until cancelled."""
    tries = 0
    memory = Memory()
    while True:
        try:
            async with connect(addresses) as swarm:
                tries = 0
                await _look(swarm, addresses, memory, live)
        except UserError as error:
            tries += 1
            live.be("silent" if live.view else "searching", f"{error}; tried {tries} times, retrying")
        await asyncio.sleep(RETRY_S)


async def _look(swarm: SwarmConnection, addresses: Sequence[str], memory: Memory, live: Live) -> None:
    """Publish the state of the swarm until no peer answers any more."""
    nobody = 0
    while nobody < LOST_AFTER:
        statuses = await swarm.statuses()
        if statuses:
            nobody = 0
            await _learn_rounds(swarm, statuses, memory)
            memory.control = await swarm.newest_order(memory.control)
            live.join = await _join_line(swarm, addresses)
            _publish(statuses, swarm, memory, live)
        else:
            nobody += 1
            live.be("silent" if live.view else "searching", "no peer of the campaign answers; retrying")
        await asyncio.sleep(max(LOOK_EVERY_S, len(statuses) / PEERS_A_SECOND))


def _publish(statuses: Sequence[PeerStatus], swarm: SwarmConnection, memory: Memory, live: Live) -> None:
    now = time.time()
    records = memory.rounds.records
    live.view = swarm_view(statuses, memory.by_peer, totals_of(records), now)
    live.status = swarm_status(statuses)
    curves = series(records, memory.traffic, swarm.files.campaign.config, memory.control)
    if curves != live.curves:
        live.curves = curves
        live.curves_version += 1
    live.updated = now
    live.be("live", "")


async def _join_line(swarm: SwarmConnection, addresses: Sequence[str]) -> str:
    """Return the join command with a helper's announced address, or with the given address if there is no helper."""
    helpers = [contact for contact in (await swarm.contacts()).values() if contact.role == "helper" and contact.addresses]
    return f"spes-p2p join {helpers[0].addresses[0] if helpers else addresses[0]}"


async def _learn_rounds(swarm: SwarmConnection, statuses: Sequence[PeerStatus], memory: Memory) -> None:
    """Request new records from peers with a new commit, and at first the whole history from one peer."""
    if not memory.rounds.records:
        await _learn_past(swarm, statuses, memory)
    news = [status for status in statuses if memory.asked_at.get(status.peer_id) != status.round]
    await asyncio.gather(*(_learn_newest(swarm, status, memory) for status in news))


async def _learn_past(swarm: SwarmConnection, statuses: Sequence[PeerStatus], memory: Memory) -> None:
    for status in sorted(statuses, key=lambda status: -status.uptime_s):
        async for page in swarm.history(status.peer_id, -1):
            memory.hear(page, time.time())
        if not memory.rounds.missing([0]):
            return


async def _learn_newest(swarm: SwarmConnection, status: PeerStatus, memory: Memory) -> None:
    page = await anext(swarm.history(status.peer_id, max(-1, status.round - TIMELINE_ROUNDS - 1)), None)
    if page is None:
        return
    memory.asked_at[status.peer_id] = status.round
    records = memory.hear(page, time.time())
    memory.by_peer[status.peer_id] = tuple(record for record in records if record.teller == status.peer_id)


def json_of(live: Live) -> dict[str, Any]:
    """Return the header and the state of the swarm, without the curves."""
    document: dict[str, Any] = to_json({**live.header(), "swarm": live.view})
    return document
