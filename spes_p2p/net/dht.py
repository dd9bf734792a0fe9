"""The registry in the Hivemind DHT: small records, each writable only by the owner of the key that its peer id is made from."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, TypeVar

from hivemind.dht import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID, get_dht_time
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS

from spes_p2p.errors import PeerUnreachable, UserError
from spes_p2p.net.daemon_process import nobody_answers
from spes_p2p.net.dht_guard import (
    MAX_SIGNED_RECORD_BYTES,
    DHTGuard,
    OwnedRecords,
    check_answers_apart,
    keep_own_records_only,
    node_id_of,
    owner_of_subkey,
)
from spes_p2p.net.identity import RSAIdentity, Visitor
from spes_p2p.net.interfaces import MAX_RECORD_BYTES
from spes_p2p.net.p2pd import Daemon

T = TypeVar("T")

REGISTRY_TIMEOUT_S = 15.0
SEARCH_EVERY_S = 60.0
"""Search the nodes that take a peer's record this often; records are renewed every few seconds."""

_EXPIRY = struct.Struct(">d")
_EXPIRY_STEP_S = 0.001


class DHTRegistry:
    """Small records in the Hivemind DHT (`interfaces.Registry`), each under a subkey that only its writer's key can sign.

    The DHT keeps the value with the latest expiry, so a record carries its own expiry, and the DHT's grows with every write.
    """

    def __init__(self, node: DHTNode, records: OwnedRecords):
        self.node = node
        self._records = records
        self._last_expiry: dict[str, float] = {}
        self._nearest = _store_without_reading(node)

    @property
    def subkey(self) -> bytes:
        """This peer's public key; a visitor has none."""
        key: bytes = self._records.local_public_key
        return key

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        """Store under (key, this peer's id). Raises ValueError if it is too large, PeerUnreachable if no peer stored it."""
        if len(value) > MAX_RECORD_BYTES:
            raise ValueError(f"a record of {len(value)} bytes under {key}; at most {MAX_RECORD_BYTES} are allowed")
        self._records.admit(key)
        if await self._store(key, value, ttl_s):
            return
        self._nearest.clear()
        await self._learn_last_expiry(key)
        if not await self._store(key, value, ttl_s):
            raise PeerUnreachable(f"no peer of the DHT took the record {key}")

    async def get(self, key: str) -> dict[str, bytes]:
        """All living values under key, by the peer that wrote them. Raises PeerUnreachable after REGISTRY_TIMEOUT_S."""
        self._records.admit(key)
        found, now = {}, get_dht_time()
        for subkey, entry in (await self._entries(key)).items():
            owner = owner_of_subkey(subkey)
            content = entry.value
            if owner is None or not isinstance(content, bytes) or not _EXPIRY.size <= len(content) <= MAX_SIGNED_RECORD_BYTES:
                continue
            if _EXPIRY.unpack_from(content)[0] > now:
                found[owner] = content[_EXPIRY.size :]
        return found

    async def _store(self, key: str, value: bytes, ttl_s: float) -> bool:
        expires_at = get_dht_time() + ttl_s
        dht_expiry = max(expires_at, self._last_expiry.get(key, 0.0) + _EXPIRY_STEP_S)
        self._last_expiry[key] = dht_expiry
        content = _EXPIRY.pack(expires_at) + value
        return bool(await _answer(self.node.store(key, content, dht_expiry, subkey=self.subkey)))

    async def _learn_last_expiry(self, key: str) -> None:
        """A former life under this identity may have left a record that expires later than ours."""
        mine = (await self._entries(key)).get(self.subkey)
        if mine is not None:
            self._last_expiry[key] = max(self._last_expiry[key], float(mine.expiration_time))

    async def _entries(self, key: str) -> dict[Any, Any]:
        found = await _answer(self.node.get(key, latest=True))
        return found.value if found is not None and isinstance(found.value, dict) else {}


async def join_dht(
    daemon: Daemon,
    identity: RSAIdentity | Visitor,
    initial_peers: Sequence[str],
    timeout_s: float,
    *,
    client_mode: bool = False,
) -> tuple[DHTNode, DHTRegistry]:
    """A node of the DHT that the initial peers are in; `client_mode`: it only asks. Raises UserError."""
    records = OwnedRecords(identity)
    daemon.guard = guard = DHTGuard(records, daemon.connections)
    joining = DHTNode.create(
        p2p=daemon,
        node_id=node_id_of(identity.peer_id),
        initial_peers=list(initial_peers) or None,
        record_validator=records,
        cache_locally=False,
        cache_on_store=False,
        cache_nearest=0,
        cache_refresh_before_expiry=0,
        client_mode=client_mode,
    )
    try:
        guard.node = node = await asyncio.wait_for(joining, timeout_s)
        keep_own_records_only(node)
        check_answers_apart(node, records)
        return node, DHTRegistry(node, records)
    except (RuntimeError, P2PDaemonError, asyncio.TimeoutError):
        if initial_peers:
            raise nobody_answers(initial_peers) from None
        raise
    except ValidationError as error:
        raise UserError(_not_admitted(initial_peers, str(error))) from None


def _store_without_reading(node: DHTNode) -> dict[DHTID, tuple[float, dict[DHTID, PeerID]]]:
    """Let the node search where to store rarely, and without reading; return when it did last, and what it found, by key.

    hivemind searches at every write, and each node that holds the key answers with all records under it. Here it searches for
    the key next to it, under which nobody stores, and to which the same nodes are nearest.
    """
    search, known = node.find_nearest_nodes, dict[DHTID, tuple[float, dict[DHTID, PeerID]]]()

    async def find_nearest_nodes(queries: Collection[DHTID], *args: Any, found_callback: Any = None, **options: Any) -> Any:
        if found_callback is None:
            return await search(queries, *args, **options)
        (key,), peers, now_s = queries, options["node_to_peer_id"], asyncio.get_running_loop().time()
        searched_s, nearest = known.get(key, (-math.inf, {}))
        if now_s < searched_s + SEARCH_EVERY_S and len(nearest) >= node.num_replicas:
            peers.update(nearest)
            return await found_callback(key, list(nearest), set())

        async def found(_: DHTID, nodes: list[DHTID], visited: set[DHTID]) -> None:
            known[key] = now_s, {each: peers[each] for each in nodes}
            await found_callback(key, nodes, visited)

        return await search({DHTID(key ^ 1)}, *args, found_callback=found, **options)

    node.find_nearest_nodes = find_nearest_nodes
    return known


def _not_admitted(initial_peers: Sequence[str], problem: str) -> str:
    if "local time" in problem:
        return (
            f"this machine's clock differs from that of {', '.join(initial_peers)} by more than "
            f"{MAX_DHT_TIME_DISCREPANCY_SECONDS:g} s; set the clock (timedatectl set-ntp true), or have the other one set"
        )
    return f"{', '.join(initial_peers)}: {problem}; see spes-p2p doctor"


async def _answer(call: Coroutine[Any, Any, T]) -> T:
    try:
        return await asyncio.wait_for(call, REGISTRY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise PeerUnreachable(f"the DHT did not answer for {REGISTRY_TIMEOUT_S:g} s") from None
