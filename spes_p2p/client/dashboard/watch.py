"""Keeps looking at a swarm and publishes what it sees; a swarm that is not there is looked for again and again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spes_p2p.client.dashboard.view import TIMELINE_ROUNDS, series, swarm_view
from spes_p2p.client.visitor import Visit, visiting
from spes_p2p.errors import UserError
from spes_p2p.messages.consensus import Control
from spes_p2p.messages.presence import HistoryPage, PeerStatus, RoundRecord
from spes_p2p.observe.plain import plain
from spes_p2p.observe.rounds import Rounds, totals_of
from spes_p2p.observe.status import swarm_status

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""In a swarm of PEERS_A_SECOND or fewer; a bigger one is looked at less often."""
PEERS_A_SECOND = 16
RETRY_S = 3.0
LOST_AFTER = 5
"""When nobody answered so many times, the swarm is entered anew: its addresses may lead elsewhere by now."""


@dataclass
class Live:
    """The latest view, and a way to wait for the next."""

    state: str = "searching"
    """searching: no peer was found yet; live; silent: peers were there, and none answers now."""
    message: str = ""
    since: float = 0.0
    """Unix time at which this state began."""
    updated: float = 0.0
    """Unix time of the last answer; 0 before there is one."""
    join: str = ""
    """The line that a volunteer copies."""
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
        """Wake everybody who waits for news."""
        self.version += 1
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self, version: int) -> None:
        """Wait until there is a newer version."""
        while self.version == version:
            await self._news.wait()


@dataclass
class Memory:
    """What was told of the rounds so far."""

    rounds: Rounds = field(default_factory=lambda: Rounds(""))
    """Times in them are by our clock."""
    traffic: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    by_peer: dict[str, tuple[RoundRecord, ...]] = field(default_factory=dict)
    """The last rounds of each peer, as it told them itself."""
    control: Control | None = None
    """The newest of the owner's orders that anybody shows."""
    asked_at: dict[str, int] = field(default_factory=dict)
    """For each peer, the round in its status when it was last asked."""

    def hear(self, page: HistoryPage, now: float) -> tuple[RoundRecord, ...]:
        """Add what a peer told at `now` (unix time); returns its records by our clock."""
        ahead_s = page.now - now
        records = tuple(replace(record, time=record.time - ahead_s) for record in page.records)
        for record in records:
            self.rounds.hear(record)
            self.traffic.setdefault(record.round, {})[record.teller] = (record.sent_bytes, record.received_bytes)
        return records


async def watch(addresses: Sequence[str], live: Live) -> None:
    """Look at the swarm until cancelled."""
    tries = 0
    memory = Memory()
    while True:
        try:
            async with visiting(addresses) as visit:
                tries = 0
                await _look(visit, addresses, memory, live)
        except UserError as error:
            tries += 1
            live.be("silent" if live.view else "searching", f"{error}; tried {tries} times, trying again")
        await asyncio.sleep(RETRY_S)


async def _look(visit: Visit, addresses: Sequence[str], memory: Memory, live: Live) -> None:
    """Publish what there is to see until nobody answers any more."""
    nobody = 0
    while nobody < LOST_AFTER:
        statuses = await visit.ask_all()
        if statuses:
            nobody = 0
            await _learn_rounds(visit, statuses, memory)
            memory.control = await visit.newest_order(memory.control)
            live.join = await _join_line(visit, addresses)
            _publish(statuses, visit, memory, live)
        else:
            nobody += 1
            live.be("silent" if live.view else "searching", "no peer of the campaign answers; trying again")
        await asyncio.sleep(max(LOOK_EVERY_S, len(statuses) / PEERS_A_SECOND))


def _publish(statuses: Sequence[PeerStatus], visit: Visit, memory: Memory, live: Live) -> None:
    now = time.time()
    records = memory.rounds.records
    live.view = swarm_view(statuses, memory.by_peer, totals_of(records), now)
    live.status = swarm_status(statuses)
    curves = series(records, memory.traffic, visit.files.campaign.config, memory.control)
    if curves != live.curves:
        live.curves = curves
        live.curves_version += 1
    live.updated = now
    live.be("live", "")


async def _join_line(visit: Visit, addresses: Sequence[str]) -> str:
    """By the first helper's address, which is what its owner announced; by the one that I was given when there is none."""
    helpers = [contact for contact in (await visit.contacts()).values() if contact.role == "helper" and contact.addresses]
    return f"spes-p2p join {helpers[0].addresses[0] if helpers else addresses[0]}"


async def _learn_rounds(visit: Visit, statuses: Sequence[PeerStatus], memory: Memory) -> None:
    """Ask those that have committed since; the first to know of the beginning is asked for all of it."""
    if not memory.rounds.records:
        await _learn_past(visit, statuses, memory)
    news = [status for status in statuses if memory.asked_at.get(status.peer_id) != status.round]
    await asyncio.gather(*(_learn_newest(visit, status, memory) for status in news))


async def _learn_past(visit: Visit, statuses: Sequence[PeerStatus], memory: Memory) -> None:
    for status in sorted(statuses, key=lambda status: -status.uptime_s):
        async for page in visit.history(status.peer_id, -1):
            memory.hear(page, time.time())
        if not memory.rounds.missing([0]):
            return


async def _learn_newest(visit: Visit, status: PeerStatus, memory: Memory) -> None:
    page = await anext(visit.history(status.peer_id, max(-1, status.round - TIMELINE_ROUNDS - 1)), None)
    if page is None:
        return
    memory.asked_at[status.peer_id] = status.round
    records = memory.hear(page, time.time())
    memory.by_peer[status.peer_id] = tuple(record for record in records if record.teller == status.peer_id)


def json_of(live: Live) -> dict[str, Any]:
    """Everything but the curves."""
    document: dict[str, Any] = plain({**live.header(), "swarm": live.view})
    return document
