"""The registry in the Hivemind DHT: small records, each writable only by the owner of the key that its peer id is made from."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from hivemind.dht import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID, get_dht_time
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS, ValueWithExpiration

from spes_p2p.config.addresses import peer_of
from spes_p2p.errors import PeerUnreachable, UserError
from spes_p2p.net.contacts import is_shown
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
SEARCH_BESIDE_S = 5.0
"""Wait at most this long for a search once a keeper has answered: a contact is renewed every few seconds, between look-ups."""
KEEPER_PAUSE_S = 30.0
"""Leave out a keeper for this long after it did not answer, which takes three seconds."""
SEARCH_EVERY_S = 60.0
"""Search the nodes that take a peer's record this often; records are renewed every few seconds."""

_EXPIRY = struct.Struct(">d")
_EXPIRY_STEP_S = 0.001


class DHTRegistry:
    """Small records in the Hivemind DHT (`interfaces.Registry`), each under a subkey that only its writer's key can sign.

    The DHT keeps the value with the latest expiry, so a record carries its own expiry, and the DHT's grows with every write.

    A search asks nodes that anybody may have: five whose ids are ground to be the nearest ones hide all records, and one that
    names nodes which do not exist makes it last. So records are also kept at, and read from, `keepers`.

    Among many peers most store only at keepers (`contacts.is_shown`), as long as the first one, which is that of all peers of a
    campaign, takes it.
    """

    def __init__(self, node: DHTNode, records: OwnedRecords, keepers: tuple[str, ...]):
        self.node = node
        self.keepers = keepers
        self.is_known: Callable[[str], bool] = lambda peer: False
        self.refused = set[str]()
        """Keepers that refused the last record: they are there."""
        self._records = records
        self._tasks = set[asyncio.Task[Any]]()
        self._last_expiry: dict[str, float] = {}
        self._found = 0
        """How many peers had a record at the last look-up."""
        self._silent_until: dict[str, float] = {}
        """Loop time until which a keeper that did not answer is left out."""
        self._nearest = _store_without_reading(node, lambda: self.keepers)

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
        await self._learn_last_expiry(key)
        if not await self._store(key, value, ttl_s):
            raise PeerUnreachable(f"no peer of the DHT took the record {key}")

    async def get(self, key: str) -> dict[str, bytes]:
        """All living values under key, by the peer that wrote them.

        Raises PeerUnreachable after REGISTRY_TIMEOUT_S, or if keepers do not even show this peer's own record: they refuse.
        """
        self._records.admit(key)
        found, now = {}, get_dht_time()
        for subkey, entry in (await self._entries(key)).items():
            owner = owner_of_subkey(subkey)
            content = entry.value
            if owner is None or not isinstance(content, bytes) or not _EXPIRY.size <= len(content) <= MAX_SIGNED_RECORD_BYTES:
                continue
            if _EXPIRY.unpack_from(content)[0] > now:
                found[owner] = content[_EXPIRY.size :]
        self._found = len(found)
        return found

    async def _store(self, key: str, value: bytes, ttl_s: float) -> bool:
        expires_at = get_dht_time() + ttl_s
        dht_expiry = max(expires_at, self._last_expiry.get(key, 0.0) + _EXPIRY_STEP_S)
        self._last_expiry[key] = dht_expiry
        content = _EXPIRY.pack(expires_at) + value
        is_keeper = str(self.node.peer_id) in self.keepers
        keeping = self._begin(self._store_at_keepers(key, content, dht_expiry))
        is_spared = not is_keeper and not is_shown(str(self.node.peer_id), self._found, get_dht_time())
        if is_spared and set(self.keepers[:1]) & await keeping:
            return True
        storing = self.node.store(key, content, dht_expiry, subkey=self.subkey, exclude_self=is_keeper)
        searching = self._begin(self._search(storing))
        await asyncio.wait([searching, keeping], timeout=SEARCH_BESIDE_S)
        if not searching.done() or searching.exception() is not None:  # it may end later, for what it is worth
            return bool(await keeping) or await searching
        if not searching.result():
            self._nearest.clear()
        return searching.result() or is_keeper

    async def _store_at_keepers(self, key: str, content: bytes, dht_expiry: float) -> set[str]:
        """Return the keepers that took it."""
        protocol, dht_key = self.node.protocol, DHTID.generate(source=key)
        packed, subkey = protocol.serializer.dumps(content), protocol.serializer.dumps(self.subkey)
        signed = self._records.sign_value(DHTRecord(dht_key.to_bytes(), subkey, packed, dht_expiry))

        async def store_at(keeper: PeerID) -> bool:
            if keeper == self.node.peer_id:
                return bool(protocol.storage.store(dht_key, signed, dht_expiry, subkey=self.subkey))
            self.refused.discard(str(keeper))
            taken = await protocol.call_store(keeper, [dht_key], [signed], dht_expiry, [self.subkey])
            self._heard(str(keeper), taken is not None or str(keeper) in self.refused)
            return any(taken or ())

        awake = self._awake_keepers()
        taken = await asyncio.gather(*map(store_at, awake))
        return {str(keeper) for keeper, is_taken in zip(awake, taken, strict=True) if is_taken}

    async def _learn_last_expiry(self, key: str) -> None:
        """A former life under this identity may have left a record that expires later than ours."""
        mine = (await self._entries(key)).get(self.subkey)
        if mine is not None:
            self._last_expiry[key] = max(self._last_expiry[key], float(mine.expiration_time))

    async def _entries(self, key: str) -> dict[Any, Any]:
        """Return what the search and a keeper find, by subkey; of two records the one that expires later."""
        searching = self._begin(self._search(self.node.get(key, latest=True)))
        kept = await self._read_at_keepers(key)
        await asyncio.wait([searching], timeout=None if kept is None else SEARCH_BESIDE_S)
        entries = dict(kept or {})
        if kept is None or (searching.done() and searching.exception() is None):
            found = searching.result()
            for subkey, entry in found.value.items() if found is not None and isinstance(found.value, dict) else ():
                if subkey not in entries or entry.expiration_time > entries[subkey].expiration_time:
                    entries[subkey] = entry
        searching.cancel()
        if kept == {} and len(entries) < 2 and self._last_expiry.get(key, 0.0) > get_dht_time():
            raise PeerUnreachable(f"the DHT does not show the records {key} at the moment")
        return entries

    async def _read_at_keepers(self, key: str) -> dict[Any, Any] | None:
        """Return what the first keeper has that shows any; None when none answers."""
        protocol, dht_key, kept = self.node.protocol, DHTID.generate(source=key), None
        for keeper in self._awake_keepers():
            if keeper == self.node.peer_id:
                stored = protocol.storage.get(dht_key)
            else:
                answer = await protocol.call_find(keeper, [dht_key])
                self._heard(str(keeper), bool(answer))
                if not answer:
                    continue
                stored = answer[dht_key][0]
            records = stored.value.items() if stored is not None and isinstance(stored.value, DictionaryDHTValue) else ()
            kept = {subkey: self._unsigned(dht_key, subkey, *each) for subkey, each in records}
            if kept:
                break
        return kept

    def _awake_keepers(self) -> list[PeerID]:
        now = asyncio.get_running_loop().time()
        return [PeerID.from_base58(keeper) for keeper in self.keepers if self._silent_until.get(keeper, now) <= now]

    def _heard(self, keeper: str, answered: bool) -> None:
        self._silent_until[keeper] = asyncio.get_running_loop().time() + (0.0 if answered else KEEPER_PAUSE_S)

    def _unsigned(self, dht_key: DHTID, subkey: Any, value: bytes, expires_at: float) -> ValueWithExpiration[Any]:
        serializer = self.node.protocol.serializer
        signed = DHTRecord(dht_key.to_bytes(), serializer.dumps(subkey), value, expires_at)
        return ValueWithExpiration(serializer.loads(self._records.strip_value(signed)), expires_at)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something whose result nobody may wait for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    @staticmethod
    async def _search(call: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.wait_for(call, REGISTRY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise PeerUnreachable(f"the DHT did not answer for {REGISTRY_TIMEOUT_S:g} s") from None


async def join_dht(
    daemon: Daemon,
    identity: RSAIdentity | Visitor,
    initial_peers: Sequence[str],
    timeout_s: float,
    *,
    client_mode: bool,
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
        registry = DHTRegistry(node, records, tuple(map(peer_of, initial_peers)))
        keep_own_records_only(node)
        check_answers_apart(node, records, lambda: registry.keepers, registry.refused)
        guard.is_stranger = lambda peer: not registry.is_known(peer)
        return node, registry
    except (RuntimeError, P2PDaemonError, asyncio.TimeoutError):
        if initial_peers:
            raise nobody_answers(initial_peers) from None
        raise
    except ValidationError as error:
        raise UserError(_not_admitted(initial_peers, str(error))) from None


def _store_without_reading(
    node: DHTNode, keepers: Callable[[], Collection[str]]
) -> dict[DHTID, tuple[float, dict[DHTID, PeerID]]]:
    """Let the node search where to store rarely, and without reading; return when it did last, and what it found, by key.

    Keepers are no such place: they have the record anyway.

    hivemind searches at every write, and each node that holds the key answers with all records under it. Here it searches for
    the key next to it, under which nobody stores, and to which the same nodes are nearest.
    """
    search, known = node.find_nearest_nodes, dict[DHTID, tuple[float, dict[DHTID, PeerID]]]()

    async def find_nearest_nodes(queries: Collection[DHTID], *args: Any, found_callback: Any = None, **options: Any) -> Any:
        if found_callback is None:
            return await search(queries, *args, **options)
        (key,), peers, now_s = queries, options["node_to_peer_id"], asyncio.get_running_loop().time()

        def without_keepers(nodes: Collection[DHTID]) -> list[DHTID]:
            return [each for each in nodes if str(peers[each]) not in keepers()]

        searched_s, nearest = known.get(key, (-math.inf, {}))
        if now_s < searched_s + SEARCH_EVERY_S and len(nearest) >= node.num_replicas:
            peers.update(nearest)
            return await found_callback(key, without_keepers(nearest), set())

        async def found(_: DHTID, nodes: list[DHTID], visited: set[DHTID]) -> None:
            known[key] = now_s, {each: peers[each] for each in nodes}
            await found_callback(key, without_keepers(nodes), visited)

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

