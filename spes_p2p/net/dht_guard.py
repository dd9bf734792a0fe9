"""What this peer's DHT node takes from other peers.

hivemind's node stores whatever is signed: any key, until any year, for anybody, and it keeps every node id that it is told.
Here a peer stores its own record only, under a key that this peer uses itself, for MAX_TTL_S at most; its node id follows from
its peer id. So an attacker needs one connected identity for each record, and MAX_RECORDS and RECORDS_PER_PREFIX bound those: a
record counts for the network that it came from until it expires, whether or not its owner is still connected.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import msgpack
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht import DHTNode
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID, get_dht_time
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS

from spes_p2p.config.addresses import is_loopback
from spes_p2p.net.identity import RSAIdentity, Visitor, is_usual, peer_id_of_public_key
from spes_p2p.net.interfaces import MAX_RECORD_BYTES
from spes_p2p.net.limits import Allowance, Allowances

MAX_SIGNED_RECORD_BYTES = 2 * MAX_RECORD_BYTES
MAX_REQUEST_BYTES = 2**13
"""Fits a record with its key, or a question for one."""
MAX_KEYS = 1
"""Keys of one request."""
MAX_TTL_S = 60.0
"""Three times the life of a contact."""
MAX_RECORDS = 2**11
"""Records under one key: twice the members of a round."""
RECORDS_PER_PREFIX = 64
"""Records under one key from one network, an IPv4 /24 or IPv6 /48. Loopback is exempt."""
RECORDS_RELAYED = 2**8
"""Records under one key from all peers whose connection does not show a network. A relayed peer is connected to its relay, and
dials others that have a public address, directly: only peers that cannot be dialled either see it without one."""
LOOPBACK, RELAYED = "loopback", "relayed"
"""In place of a network."""
REQUESTS_PER_S, REQUESTS_BURST = 10.0, 100.0
"""Requests of one peer. A peer stores and looks up its campaign's contacts every few seconds."""
ANSWERED_PER_S, ANSWERED_BURST = 3 * 2**13, 2**22
"""Bytes of answers to one peer; the last one may go beyond. Of 240 peers or more, each may take 16 kB a second: every N/8 s a
kilobyte for each of N peers, by a search and, from a keeper, once more."""
ANSWERED_STRANGERS_PER_S, ANSWERED_STRANGERS_BURST = 2**17, 2**24
"""The same of all strangers together: a tenth of a line of 10 Mbit/s; at once, what 80 joiners among 100 peers take."""
STORED_PER_S, STORED_BURST = 2.0, 20.0
"""Records that one peer sends to store. A peer renews one every few seconds."""
STORED_PER_NETWORK_S, STORED_PER_NETWORK_BURST = 64.0, 256.0
"""The same for all from one network, or relayed: 256 renew theirs every few seconds."""
CHECKS_PER_S, CHECKS_BURST = 400.0, 4096.0
"""New signatures that are checked, at 0.2 ms each: in what all store here, and in the answers of each node to look-ups."""
LIARS = 2
"""New signatures of all nodes' answers together, in allowances of one."""
KEPT_CHECKS = 2**12
LOOK_EVERY_S = 0.5
"""Ask the peer daemon at most this often who is connected from where; senders that are not known yet wait for it."""

_FLAT = {"max_array_len": 0, "max_map_len": 0}
"""Lets msgpack unpack neither lists nor maps."""
_SUBKEY = re.compile(rb"\[owner:(ssh-rsa [A-Za-z0-9+/=]+)\]")


class OwnedRecords(RSASignatureValidator):  # type: ignore[misc]
    """Takes only small records of admitted keys whose subkey names an RSA key that signed them, and that expire soon."""

    def __init__(self, identity: RSAIdentity | Visitor):
        if isinstance(identity, RSAIdentity):  # a visitor stores nothing
            super().__init__(_hivemind_key(identity.private_key))
        self._admitted: set[bytes] = set()
        self._checked: OrderedDict[tuple[bytes, bytes, bytes, float], bool] = OrderedDict()
        self._checks = Allowance(CHECKS_PER_S, CHECKS_BURST)

    def admit(self, key: str) -> bytes:
        """Take records under this key from now on; return its id in the DHT."""
        encoded: bytes = DHTID.generate(source=key).to_bytes()
        self._admitted.add(encoded)
        return encoded

    def may_store(self, key: bytes, expires_at: float) -> bool:
        """Return whether a record of this key may be stored until then."""
        return key in self._admitted and expires_at <= get_dht_time() + MAX_TTL_S + MAX_DHT_TIME_DISCREPANCY_SECONDS

    def validate(self, record: DHTRecord, *checks: Allowance) -> bool:
        """Is it admitted, small, signed by its owner, and will it expire? Twice the tolerance of `may_store`, for clocks.

        `checks`: the allowances of whoever sent it; by default that of all who store records here.
        """
        if record.subkey is None or self.PUBLIC_KEY_FORMAT[:7] not in record.subkey or record.key not in self._admitted:
            return False
        if len(record.value) > MAX_SIGNED_RECORD_BYTES or len(record.subkey) > MAX_SIGNED_RECORD_BYTES:
            return False
        if not record.expiration_time <= get_dht_time() + MAX_TTL_S + 3 * MAX_DHT_TIME_DISCREPANCY_SECONDS:
            return False
        known = (record.key, record.subkey, record.value, record.expiration_time)
        if known not in self._checked:
            if not all(each.take() for each in checks or (self._checks,)):
                return False
            self._checked[known] = self._is_signed(record)
            while len(self._checked) > KEPT_CHECKS:
                self._checked.popitem(last=False)
        return self._checked[known]

    def _is_signed(self, record: DHTRecord) -> bool:
        try:
            # Of anything else Hivemind's search for the key raises, or logs a line for each unknown type in it.
            packed = (self.strip_value(record), record.subkey)
            value, subkey = map(msgpack.unpackb, packed)
            return isinstance(value, bytes) and owner_of_subkey(subkey) is not None and bool(super().validate(record))
        except (ValueError, UnsupportedAlgorithm):
            return False


class DHTGuard:
    """Decides about every request to this peer's DHT node before the node sees it."""

    def __init__(self, records: OwnedRecords, addresses: Callable[[], Awaitable[dict[str, list[str]]]]):
        """`addresses()`: the multiaddrs of the open connections, by peer."""
        self._records, self._addresses = records, addresses
        self._requests = Allowances(REQUESTS_PER_S, REQUESTS_BURST, 2 * MAX_RECORDS)
        self._answered = Allowances(ANSWERED_PER_S, ANSWERED_BURST, 2 * MAX_RECORDS)
        self._answered_strangers = Allowance(ANSWERED_STRANGERS_PER_S, ANSWERED_STRANGERS_BURST)
        self.is_stranger: Callable[[str], bool] = lambda peer: True
        """Whether a peer's answers count among those to all strangers."""
        self._stored = Allowances(STORED_PER_S, STORED_BURST, 2 * MAX_RECORDS)
        self._stored_of_networks = Allowances(STORED_PER_NETWORK_S, STORED_PER_NETWORK_BURST, 2 * MAX_RECORDS)
        self._networks: dict[str, str] = {}
        """Of the peers that were connected at the last look."""
        self._looked_at = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._sources: dict[bytes, dict[bytes, str]] = {}
        """By key and subkey: the network that a record was taken from."""
        self.node: DHTNode | None = None

    async def check(self, sender: str, request: Any) -> None:
        """Raises ValueError for a request that this program would not send."""
        if request.HasField("peer") and request.peer.node_id not in (b"", node_id_of(sender).to_bytes()):
            raise ValueError("a node id that is not of this peer")
        if isinstance(request, dht_pb2.FindRequest):
            if len(request.keys) > MAX_KEYS:
                raise ValueError("too many keys")
            if not all(allowance.take(0) for allowance in self._answer_allowances(sender)):
                raise ValueError("too many bytes of answers a second")
        if isinstance(request, dht_pb2.StoreRequest):
            rows = (request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache)
            if len({len(row) for row in rows}) != 1 or len(request.keys) > MAX_KEYS or any(request.in_cache):
                raise ValueError("a malformed request to store")
            network = await self._network(sender)  # before anything is counted: no other request comes in between
            if not self._stored.take(sender, len(request.keys)):
                raise ValueError("too many records a second")
            if network != LOOPBACK and not self._stored_of_networks.take(network, len(request.keys)):
                raise ValueError("too many records a second from one network")
            for key, subkey, expires_at in zip(request.keys, request.subkeys, request.expiration_time, strict=True):
                self._check_record(sender, network, key, subkey, expires_at)

    def is_too_fast(self, sender: str) -> bool:
        """Count a request; return whether the peer sends too many."""
        return not self._requests.take(sender)

    def count_answer(self, sender: str, size: int) -> None:
        """Count an answer's bytes."""
        for allowance in self._answer_allowances(sender):
            allowance.owe(size)

    def _answer_allowances(self, sender: str) -> list[Allowance]:
        return [self._answered.of(sender), *([self._answered_strangers] if self.is_stranger(sender) else ())]

    def _check_record(self, sender: str, network: str, key: bytes, packed_subkey: bytes, expires_at: float) -> None:
        subkey = msgpack.unpackb(packed_subkey) if packed_subkey else None
        if not isinstance(subkey, bytes) or owner_of_subkey(subkey) != sender:
            raise ValueError("a record of another peer")
        if not self._records.may_store(key, expires_at):
            raise ValueError("a record that is not kept here: its key is not used here, or it lives too long")
        stored = self.node.protocol.storage.get(DHTID.from_bytes(key)) if self.node is not None else None
        living = stored.value if stored is not None and isinstance(stored.value, DictionaryDHTValue) else {}
        if subkey not in living:
            self._take_room(network, key, subkey, [each for each, _ in living.items()])

    def _take_room(self, network: str, key: bytes, subkey: bytes, living: Sequence[bytes]) -> None:
        if len(living) >= MAX_RECORDS:
            raise ValueError("too many records")
        known = self._sources.get(key, {})
        self._sources[key] = sources = {each: known[each] for each in living if each in known}
        most = RECORDS_RELAYED if network == RELAYED else RECORDS_PER_PREFIX
        if network != LOOPBACK and Counter(sources.values())[network] >= most:
            raise ValueError("too many records from one network")
        sources[subkey] = network

    async def _network(self, sender: str) -> str:
        """Return the network from which a peer is connected. Raises ValueError when it is not, or not any more."""
        if sender not in self._networks:
            if self._looking is None:
                self._looking = asyncio.get_running_loop().create_task(self._look())
            await asyncio.shield(self._looking)
        if sender not in self._networks:
            raise ValueError("its sender is not connected")
        return self._networks[sender]

    async def _look(self) -> None:
        """Learn who is connected from where, for all that wait for it."""
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._looked_at + LOOK_EVERY_S - clock())
        self._looking = None  # one that comes from now on may be connected too late for this look
        self._looked_at = clock()
        self._networks = {peer: _source_of(seen) for peer, seen in (await self._addresses()).items()}


def node_id_of(peer: str) -> DHTID:
    """Return the id of this peer's node in the DHT, which it cannot choose."""
    return DHTID.generate(source=peer)


def keep_own_records_only(node: DHTNode) -> None:
    """Stop the node from handing records over to nodes that it meets, and from taking nodes under ids of their choice.

    Each peer stores its own records everywhere. Without this, every request from an unknown node goes through all records.
    """
    protocol = node.protocol

    async def update_routing_table(node_id: DHTID | None, peer_id: Any, responded: bool = True) -> None:
        node_id = node_id if node_id is not None else protocol.routing_table.get(peer_id=peer_id)
        if node_id is None or node_id != node_id_of(str(peer_id)):
            return
        if responded:
            doubtful = protocol.routing_table.add_or_update_node(node_id, peer_id)
            if doubtful is not None:
                asyncio.get_running_loop().create_task(protocol.call_ping(doubtful[1]))
        elif node_id in protocol.routing_table:
            del protocol.routing_table[node_id]

    protocol.update_routing_table = update_routing_table


class FewRecords(MSGPackSerializer):  # type: ignore[misc]
    """Unpacks what this program stores, within bounds: a node may answer a look-up with millions of tiny records, or lists."""

    @classmethod
    def loads(cls, buf: bytes) -> Any:
        """Return a scalar, bytes or text, or up to MAX_RECORDS records. Raises ValueError for anything else."""
        found = msgpack.unpackb(buf, **_FLAT)
        if not isinstance(found, msgpack.ExtType):
            return found
        if found.code != cls._ext_types[DictionaryDHTValue]:
            raise ValueError("neither a value nor records")
        reader = msgpack.Unpacker(max_ext_len=0, **_FLAT)
        reader.feed(found.data)
        if reader.read_array_header() != 3:
            raise ValueError("malformed records")
        reader.skip()  # bounds and expiry as its sender sees them
        reader.skip()
        if (count := reader.read_array_header()) > MAX_RECORDS:
            raise ValueError(f"{count} records")
        with DictionaryDHTValue().freeze() as records:
            for _ in range(count):
                if reader.read_array_header() != 3:
                    raise ValueError("a malformed record")
                records.store(reader.unpack(), reader.unpack(), float(reader.unpack()))
        return records


def check_answers_apart(
    node: DHTNode, records: OwnedRecords, keepers: Callable[[], Collection[str]] = tuple, refused: set[str] | None = None
) -> None:
    """Give each node its own allowance of signatures in its answers to look-ups, and drop wrong records one by one.

    Also drop nodes that it names under ids of its choice: twenty of them next to a key would have all of its records.

    An answer that names more nodes than this one would, or has more results than keys were asked for, is dropped unread: each
    costs time. A node that refuses has nothing to show; without an answer it would count as dead. For the same reason `refused`
    gets the keepers that refuse to store a record.

    hivemind drops an answer whole, and a node may answer with any records: with one allowance for all, a liar's new signatures
    use it up, and honest answers are dropped. Many liars have one together, which the answers of `keepers` do not need.
    """
    refused = set() if refused is None else refused
    protocol, call_find, get_any_stub = node.protocol, node.protocol.call_find, node.protocol.get_stub
    protocol.serializer = FewRecords
    checks = Allowances(CHECKS_PER_S, CHECKS_BURST, 2 * MAX_RECORDS)
    checks_of_all = Allowance(LIARS * CHECKS_PER_S, LIARS * CHECKS_BURST)
    sender = ContextVar("sender", default="")

    def get_stub(peer: PeerID) -> SimpleNamespace:
        stub = get_any_stub(peer)

        async def rpc_find(request: Any, **options: Any) -> Any:
            try:
                answer = await stub.rpc_find(request, **options)
            except P2PHandlerError:
                return dht_pb2.FindResponse(results=[dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)] * len(request.keys))
            results, most = answer.results, protocol.bucket_size
            if len(results) != len(request.keys) or any(len(result.nearest_peer_ids) > most for result in results):
                raise ValueError("too many results or nodes")
            return answer

        async def rpc_store(request: Any, **options: Any) -> Any:
            try:
                return await stub.rpc_store(request, **options)
            except P2PHandlerError:
                if str(peer) in keepers():
                    refused.add(str(peer))
                raise  # the record goes to another node

        return SimpleNamespace(rpc_ping=stub.rpc_ping, rpc_store=rpc_store, rpc_find=rpc_find)

    async def call_find_of(peer: PeerID, keys: Collection[DHTID]) -> Any:
        sender.set(str(peer))
        found = await call_find(peer, keys)
        return found and {
            key: (value, {node_id: each for node_id, each in nearest.items() if node_id == node_id_of(str(each))})
            for key, (value, nearest) in found.items()
        }

    def keep_right_ones(key: bytes, found: DictionaryDHTValue) -> bool:
        allowances = (checks.of(sender.get()), *(() if sender.get() in keepers() else (checks_of_all,)))
        for subkey, (value, expires_at) in list(found.items()):
            record = DHTRecord(key, protocol.serializer.dumps(subkey), value, expires_at)
            if not records.validate(record, *allowances):
                del found[subkey]
        return True

    protocol.get_stub, protocol.call_find, protocol._validate_dictionary = get_stub, call_find_of, keep_right_ones


@lru_cache(maxsize=4096)
def owner_of_subkey(subkey: object) -> str | None:
    """The peer id of the key that a subkey consists of; None when it is anything else, also a key that is slow to check."""
    match = _SUBKEY.fullmatch(subkey) if isinstance(subkey, bytes) else None
    if match is None:
        return None
    try:
        key = serialization.load_ssh_public_key(match[1])
    except (ValueError, UnsupportedAlgorithm):
        return None
    return peer_id_of_public_key(key) if is_usual(key) else None


def network_of(addresses: Iterable[str]) -> str:
    """Return the network from which a peer is connected; "" when it is this machine's, a relay's, or unknown."""
    for address in addresses:
        parts = address.split("/")
        try:
            host = ipaddress.ip_address(parts[2]) if "p2p-circuit" not in parts else None
        except (IndexError, ValueError):
            continue
        if host is not None and not host.is_loopback:
            return str(ipaddress.ip_network((host, 24 if host.version == 4 else 48), strict=False))
    return ""


def _source_of(addresses: Sequence[str]) -> str:
    direct = [address for address in addresses if "/p2p-circuit" not in address]
    return network_of(direct) or (LOOPBACK if any(map(is_loopback, direct)) else RELAYED)


def _hivemind_key(key: rsa.RSAPrivateKey) -> RSAPrivateKey:
    """The same key in hivemind's wrapper, which by itself would generate a new one."""
    wrapped = RSAPrivateKey.__new__(RSAPrivateKey)
    wrapped._private_key = key
    return wrapped
