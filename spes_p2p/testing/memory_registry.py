"""The registry of the in-memory network, and what the DHT would carry for it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from spes_p2p.net.contacts import is_shown
from spes_p2p.net.interfaces import MAX_RECORD_BYTES
from spes_p2p.testing.memory_nat import Nats
from spes_p2p.testing.memory_state import NetworkState
from spes_p2p.testing.virtual_loop import Unit

NODES_ASKED, HOLDERS = 20, 5
"""Nodes of the DHT that are asked in a search for a key, the nearest ones, and those of them that keep its records."""
RECORD_BYTES, NODE_BYTES = 770, 58
"""What a record has beside its value (key and signature), and what tells of a node."""
SEARCH_EVERY_S = 60.0
"""A peer searches the nodes that keep its records this often (`net/dht.py`)."""
EPOCH_S = 1_700_000_000.0
"""Wall time at virtual time 0."""


class MemoryRegistry:
    """The `Registry` of a MemoryNetwork: records expire in virtual time and become visible with a delay."""

    def __init__(self, network: NetworkState, nats: Nats, records: Records, unit: Unit):
        self.keepers: tuple[str, ...] = ()
        self.is_known: Callable[[str], bool] = lambda peer: False
        self._network, self._nats, self._records, self._unit = network, nats, records, unit
        self._searched_at = -math.inf
        self._found = 0

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Store a value under (key, peer id). Raises ValueError if it is too large, PeerUnreachable if the peer is cut off."""
        if len(value) > MAX_RECORD_BYTES:
            raise ValueError(f"a record of {len(value)} bytes under {key}; at most {MAX_RECORD_BYTES} are allowed")
        await self._round_trip()
        now = asyncio.get_running_loop().time()
        me = self._unit.peer
        is_searched = not self.keepers or me in self.keepers or is_shown(me, self._found, EPOCH_S + now)
        nearest = self._nearest_nodes(key) if is_searched else []
        holders = {*nearest[:HOLDERS], *self.keepers}
        self._moved([self._unit.peer], holders, len(value) + RECORD_BYTES)
        self._store_at(holders)
        if is_searched and now >= self._searched_at + SEARCH_EVERY_S:
            self._searched_at = now
            self._moved(nearest, [self._unit.peer], NODE_BYTES * len(nearest))
        history = self._records.by_key.setdefault(key, {}).setdefault(self._unit.peer, [])
        while history and history[0].expires_at <= now:
            del history[0]
        history.append(Record(bytes(value), now + self._network.registry_delay_s, now + ttl_s, is_searched))

    async def get(self, key: str) -> dict[str, bytes]:
        """Return the values under a key that have not expired, by writer; across a partition, those from before it."""
        await self._round_trip()
        now = asyncio.get_running_loop().time()
        seen = {}
        is_plain = not self._network.groups and not self._network.registry_delay_s
        for writer, history in sorted(self._records.by_key.get(key, {}).items()):
            record = history[-1] if is_plain else self._latest(writer, history, now)
            if record is not None and record.expires_at > now:
                seen[writer] = record
        nearest = self._nearest_nodes(key)
        self._moved(nearest, [self._unit.peer], NODE_BYTES * len(nearest))
        size = sum(len(record.value) + RECORD_BYTES for record in seen.values())
        held = sum(len(record.value) + RECORD_BYTES for record in seen.values() if record.is_at_nodes)
        self._moved(nearest[:HOLDERS], [self._unit.peer], held)
        self._moved(self.keepers[:1], [self._unit.peer], size)
        self._found = len(seen)
        return {writer: record.value for writer, record in seen.items()}

    def _latest(self, writer: str, history: list[Record], now: float) -> Record | None:
        network, me = self._network, self._unit.peer
        if writer == me:
            return history[-1]
        is_across = network.groups.get(writer, 0) != network.groups.get(me, 0)
        seen_by = network.cut_since_s if is_across else now
        return next((record for record in reversed(history) if record.visible_at <= seen_by), None)

    def _nearest_nodes(self, key: str) -> list[str]:
        """Return the living peers whose nodes were nearest to a key at the last search of any; peers behind NATs have none."""
        network, now = self._network, asyncio.get_running_loop().time()
        searched_at, found = self._records.nearest.get(key, (-math.inf, []))
        if now >= searched_at + SEARCH_EVERY_S or len(found) < NODES_ASKED:
            living = [peer for peer, unit in network.units.items() if unit.alive and self._nats.is_open(peer)]
            found = heapq.nsmallest(NODES_ASKED, living, key=lambda peer: zlib.crc32(f"{key} {peer}".encode()))
            self._records.nearest[key] = now, found
        return found

    def _moved(self, sources: Iterable[str], targets: Iterable[str], size: int) -> None:
        for source, target in itertools.product(sources, targets):
            if source != target:
                self._network.registry_sent[source] += size
                self._network.registry_received[target] += size

    def _store_at(self, holders: Iterable[str]) -> None:
        network, unit, now = self._network, self._unit, asyncio.get_running_loop().time()
        for at in [network.units[holder] for holder in holders if holder in network.units and holder != unit.peer]:
            self._nats.dialled(unit, at)
            for one, other in ((unit, at), (at, unit)):
                stored = network.stored_at.setdefault(one.peer, {})
                stored.pop(other.peer, None)
                stored[other.peer] = now
                network.count_connections(one)

    async def _round_trip(self) -> None:
        network, me = self._network, self._unit.peer
        self._unit.check_alive()
        await network.until(lambda: me not in network.paused, "the registry")
        await asyncio.sleep(2 * network.lines.latency_s)
        self._unit.check_alive()


@dataclass(frozen=True)
class Record:
    """A value that a peer stored."""

    value: bytes
    visible_at: float
    expires_at: float
    is_at_nodes: bool
    """Not only at keepers."""


@dataclass
class Records:
    """What the registry holds."""

    by_key: dict[str, dict[str, list[Record]]] = field(default_factory=dict)
    """By key and writer, the latest last."""
    nearest: dict[str, tuple[float, list[str]]] = field(default_factory=dict)
    """By key: when the nodes nearest to it were searched last, and these."""
