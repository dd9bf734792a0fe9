"""The registry takes a peer's own record only, under a key in use, for a short time, and not too many from one network."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgpack
import pytest
import uvloop
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID, get_dht_time
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.errors import PeerUnreachable
from spes_p2p.net import dht_guard
from spes_p2p.net.dht_guard import (
    MAX_RECORDS,
    MAX_REQUEST_BYTES,
    MAX_TTL_S,
    REQUESTS_BURST,
    DHTGuard,
    FewRecords,
    OwnedRecords,
    check_answers_apart,
    keep_own_records_only,
    node_id_of,
    owner_of_subkey,
)
from spes_p2p.net.identity import RSAIdentity
from spes_p2p.net.libp2p import Libp2p, start_libp2p
from spes_p2p.net.limits import Allowance

T = TypeVar("T")


class Node:
    """A guard with a storage, and identities that ask it to store."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.me = RSAIdentity(folder / "me")
        self.records = OwnedRecords(self.me)
        self.connected: dict[str, list[str]] = {}
        self.looks = 0
        self.guard = DHTGuard(self.records, self._addresses)
        self.storage = DHTLocalStorage()
        self.guard.node = SimpleNamespace(protocol=SimpleNamespace(storage=self.storage))
        self.key = self.records.admit("peers")

    async def _addresses(self) -> dict[str, list[str]]:
        self.looks += 1
        return {peer: list(addresses) for peer, addresses in self.connected.items()}

    def identity(self, name: str, address: str) -> RSAIdentity:
        """A peer that is connected from this address."""
        identity = RSAIdentity(self._folder / name)
        self.connected[identity.peer_id] = [address]
        return identity

    async def store(
        self, identity: RSAIdentity, *, owner: RSAIdentity | None = None, key: bytes = b"", ttl_s: float = 20.0
    ) -> None:
        """Raises ValueError when the guard refuses."""
        subkey = OwnedRecords(owner or identity).local_public_key
        request = dht_pb2.StoreRequest(
            keys=[key or self.key], subkeys=[MSGPackSerializer.dumps(subkey)], values=[b"x"],
            expiration_time=[get_dht_time() + ttl_s], in_cache=[False],
        )
        await self.guard.check(identity.peer_id, request)
        self.storage.store_subkey(DHTID.from_bytes(key or self.key), subkey, b"x", get_dht_time() + ttl_s)


def run(main: Coroutine[Any, Any, T]) -> T:
    return uvloop.run(asyncio.wait_for(main, 120))


def test_a_peer_stores_its_own_record_and_no_other(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        a, b = node.identity("a", "/ip4/127.0.0.1/tcp/1"), node.identity("b", "/ip4/127.0.0.1/tcp/2")
        await node.store(a)
        for wrong in ({"owner": b}, {"key": DHTID.generate(source="other").to_bytes()}, {"ttl_s": MAX_TTL_S + 10}):
            with pytest.raises(ValueError, match="record"):
                await node.store(a, **wrong)

    run(main())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caps that few identities reach."""
    for name, value in {"RECORDS_PER_PREFIX": 2, "RECORDS_RELAYED": 1, "MAX_RECORDS": 5, "LOOK_EVERY_S": 0.1}.items():
        monkeypatch.setattr(dht_guard, name, value)


@pytest.mark.parametrize("stays", [True, False], ids=["connected", "gone"])
@pytest.mark.usefixtures("small")
def test_records_of_one_network_are_capped_and_those_in_all(tmp_path: Path, stays: bool) -> None:
    """Also of peers that come between two looks at the connections, and of such that have left when the next one comes."""

    async def main() -> None:
        node = Node(tmp_path)

        async def come(name: str, address: str) -> RSAIdentity:
            identity = node.identity(name, address)
            try:
                await node.store(identity)
            finally:
                if not stays:
                    del node.connected[identity.peer_id]
            return identity

        first = await come("near0", "/ip4/198.51.100.0/tcp/1")
        await come("near1", "/ip4/198.51.100.1/tcp/1")
        for name in ("near2", "near3"):
            with pytest.raises(ValueError, match="one network"):
                await come(name, "/ip4/198.51.100.2/tcp/1")
        node.connected[first.peer_id] = ["/ip4/198.51.100.0/tcp/1"]
        await node.store(first)
        relay = "/ip4/192.0.2.1/tcp/1/p2p/R/p2p-circuit"
        await come("relayed0", relay)
        with pytest.raises(ValueError, match="one network"):
            await come("relayed1", relay)
        for i in range(2):
            await come(f"far{i}", f"/ip4/203.0.{i}.1/tcp/1")
        with pytest.raises(ValueError, match="too many records"):
            await come("far2", "/ip4/203.0.2.1/tcp/1")

    run(main())


@pytest.mark.usefixtures("small")
def test_peers_that_come_at_once_find_room_for_as_many_as_one_after_the_other(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        near = [node.identity(f"near{i}", f"/ip4/198.51.100.{i}/tcp/1") for i in range(4)]
        answers = await asyncio.gather(*map(node.store, near), return_exceptions=True)
        assert sum(answer is None for answer in answers) == 2
        assert node.looks == 1

    run(main())


def test_a_sender_that_has_left_stores_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        a = node.identity("a", "/ip4/198.51.100.1/tcp/1")
        node.connected.clear()
        with pytest.raises(ValueError, match="not connected"):
            await node.store(a)

    run(main())


def test_peers_of_one_network_leave_time_for_the_records_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the node can check in a second, and the next minute."""
    monkeypatch.setattr(dht_guard, "STORED_BURST", 5.0)
    monkeypatch.setattr(dht_guard, "STORED_PER_NETWORK_BURST", 8.0)

    async def main() -> None:
        node = Node(tmp_path)
        near = [node.identity(f"near{i}", f"/ip4/198.51.100.{i}/tcp/1") for i in range(2)]
        honest = node.identity("far", "/ip4/203.0.113.1/tcp/1")
        passed = Counter[int]()
        for _ in range(40):
            for number, identity in enumerate(near):
                with contextlib.suppress(ValueError):
                    await node.store(identity)
                    passed[number] += 1
        assert passed[0] < 8
        assert passed[0] + passed[1] < 16
        await node.store(honest)

    run(main())


def test_a_record_that_is_found_must_expire_soon_and_be_of_an_admitted_key(tmp_path: Path) -> None:
    async def main() -> None:
        node, now = Node(tmp_path), get_dht_time()
        subkey = MSGPackSerializer.dumps(node.records.local_public_key)

        def record(key: bytes, ttl_s: float, value: bytes = msgpack.packb(b"x")) -> DHTRecord:
            bare = DHTRecord(key, subkey, value, now + ttl_s)
            return DHTRecord(key, subkey, node.records.sign_value(bare), now + ttl_s)

        assert node.records.validate(record(node.key, 20))
        for wrong in (b"\xc1", b"", msgpack.packb("text"), msgpack.packb([msgpack.ExtType(7, b"")] * 500)):
            assert not node.records.validate(record(node.key, 20, wrong))
        assert not node.records.validate(record(node.key, 10**9))
        assert not node.records.validate(record(DHTID.generate(source="other").to_bytes(), 20))

    run(main())


def test_a_node_that_answers_with_records_of_its_invention_hides_no_honest_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by many signatures to check, and each of its own wrong ones is dropped alone."""
    monkeypatch.setattr(dht_guard, "CHECKS_BURST", 8.0)
    monkeypatch.setattr(dht_guard, "CHECKS_PER_S", 1.0)

    async def main() -> None:
        node, now = Node(tmp_path), get_dht_time()
        signers = [OwnedRecords(RSAIdentity(tmp_path / f"peer{i}")) for i in range(3)]
        answers = dict[str, DictionaryDHTValue]()

        def answer(peer: PeerID, number: int) -> None:
            answers[str(peer)] = found = DictionaryDHTValue()
            for signer in signers:
                subkey, value = MSGPackSerializer.dumps(signer.local_public_key), MSGPackSerializer.dumps(b"x%d" % number)
                signed = signer.sign_value(DHTRecord(node.key, subkey, value, now + 20 + number))
                found.store(signer.local_public_key, signed, now + 20 + number)

        async def call_find(peer: PeerID, keys: Collection[DHTID]) -> dict[DHTID, Any]:
            found = answers[str(peer)]
            return {DHTID.from_bytes(node.key): (found if protocol._validate_dictionary(node.key, found) else None, {})}

        async def ask(peer: PeerID) -> list[bytes]:
            (found, _), = (await protocol.call_find(peer, [])).values()
            return [subkey for subkey, _ in found.items()]

        protocol: Any = SimpleNamespace(call_find=call_find, get_stub=None)
        check_answers_apart(cast(DHTNode, SimpleNamespace(protocol=protocol)), node.records)
        liar, honest = (PeerID.from_base58(RSAIdentity(tmp_path / name).peer_id) for name in ("liar", "honest"))
        for number in range(5):
            answer(liar, number)
            found = await ask(liar)
            assert number or len(found) == 3
        assert not found
        answer(honest, 5)
        answers[str(honest)].store(signers[0].local_public_key, b"not signed", now + 30)
        assert set(await ask(honest)) == {signer.local_public_key for signer in signers[1:]}

    run(main())


def test_signatures_of_many_nodes_together_are_bounded_and_those_that_a_keeper_shows_are_checked_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dht_guard, "CHECKS_BURST", 2.0)
    monkeypatch.setattr(dht_guard, "CHECKS_PER_S", 0.01)

    async def main() -> None:
        node, signer = Node(tmp_path), OwnedRecords(RSAIdentity(tmp_path / "signer"))
        liars = [PeerID.from_base58(RSAIdentity(tmp_path / f"liar{number}").peer_id) for number in range(3)]
        keeper, subkey = PeerID.from_base58(node.me.peer_id), MSGPackSerializer.dumps(signer.local_public_key)

        async def call_find(peer: PeerID, keys: Collection[DHTID]) -> dict[DHTID, Any]:
            expires_at, found = get_dht_time() + 20, DictionaryDHTValue()
            signed = signer.sign_value(DHTRecord(node.key, subkey, msgpack.packb(b"x"), expires_at))
            found.store(signer.local_public_key, signed, expires_at)
            protocol._validate_dictionary(node.key, found)
            return {DHTID.from_bytes(node.key): (found, {})}

        protocol: Any = SimpleNamespace(call_find=call_find, get_stub=None)
        check_answers_apart(cast(DHTNode, SimpleNamespace(protocol=protocol)), node.records, lambda: [node.me.peer_id])

        async def records_of(peer: PeerID) -> int:
            ((found, _),) = (await protocol.call_find(peer, [])).values()
            return len(found)

        assert [await records_of(liar) for liar in (*liars, *liars)] == [1, 1, 1, 1, 0, 0]
        assert await records_of(keeper) == 1

    run(main())


def test_an_answer_of_more_records_than_are_kept_or_of_lists_in_them_is_not_unpacked() -> None:
    """Each of its records costs microseconds on the event loop: 240,000 that fit into an answer took two seconds."""
    soon, kept = get_dht_time() + 60, DictionaryDHTValue()
    for number in range(MAX_RECORDS):
        kept.store(b"%d" % number, b"value", soon + number)
    assert dict(FewRecords.loads(FewRecords.dumps(kept)).items()) == dict(kept.items())
    kept.store(b"one more", b"value", soon)
    with pytest.raises(ValueError, match="2049 records"):
        FewRecords.loads(FewRecords.dumps(kept))
    lists: list[list[int]] = [[]] * 10**5
    for found in (lists, {"key": 1}, (1, 2)):
        with pytest.raises(ValueError, match=r"exceeds|malformed|neither|Unexpected"):
            FewRecords.loads(FewRecords.dumps(found))
        for records in ([None, soon, [[b"key", found, soon]]], [None, soon, [[b"key", b"value", soon, found]]], found):
            with pytest.raises(ValueError, match=r"exceeds|malformed|neither|Unexpected"):
                FewRecords.loads(msgpack.packb(msgpack.ExtType(0x50, FewRecords.dumps(records))))


@pytest.mark.network
def test_an_answer_with_more_records_or_nodes_than_a_node_has_counts_as_none(tmp_path: Path) -> None:
    async def main() -> None:
        liar = await start_libp2p(tmp_path / "liar", ["/ip4/127.0.0.1/tcp/0"])
        asker = await start_libp2p(tmp_path / "asker", ["/ip4/127.0.0.1/tcp/0"], initial_peers=liar.transport.addresses)
        try:
            await liar.registry.put("peers", b"liar", 60)
            protocol, peer = asker.registry.node.protocol, PeerID.from_base58(liar.identity.peer_id)
            key, theirs = DHTID.generate(source="peers"), liar.registry.node.protocol
            assert await asker.registry.get("peers") == {liar.identity.peer_id: b"liar"}
            nearest = theirs.routing_table.get_nearest_neighbors
            theirs.routing_table.get_nearest_neighbors = lambda *_, **__: [(key, peer)] * 21
            assert await protocol.call_find(peer, [key]) is None
            theirs.routing_table.get_nearest_neighbors = nearest
            assert await protocol.call_find(peer, [key]) is not None
            for number in range(MAX_RECORDS):
                theirs.storage.store_subkey(key, b"%d" % number, b"", get_dht_time() + 60)
            assert await protocol.call_find(peer, [key]) is None
        finally:
            await asker.close()
            await liar.close()

    run(main())


def test_a_node_is_known_under_its_own_id_only_whoever_names_it(tmp_path: Path) -> None:
    """Under ids of its choice next to a key, it would be asked to store all records, and for them."""

    async def main() -> None:
        node, key = Node(tmp_path), DHTID.generate(source="peers")
        liar, honest = (PeerID.from_base58(RSAIdentity(tmp_path / name).peer_id) for name in ("liar", "honest"))
        named = {DHTID(key ^ number): liar for number in range(20)} | {node_id_of(str(honest)): honest}
        known = dict[DHTID, PeerID]()

        async def call_find(peer: PeerID, keys: Collection[DHTID]) -> dict[DHTID, Any] | None:
            return {key: (None, named)} if keys else None

        table: Any = SimpleNamespace(add_or_update_node=lambda node_id, peer: known.update({node_id: peer}))
        protocol: Any = SimpleNamespace(call_find=call_find, routing_table=table, get_stub=None)
        stub = cast(DHTNode, SimpleNamespace(protocol=protocol))
        check_answers_apart(stub, node.records)
        keep_own_records_only(stub)
        assert await protocol.call_find(liar, [key]) == {key: (None, {node_id_of(str(honest)): honest})}
        assert await protocol.call_find(liar, []) is None, "it did not answer"
        for node_id, peer in named.items():
            await protocol.update_routing_table(node_id, peer)
        assert known == {node_id_of(str(honest)): honest}

    run(main())


def test_a_key_that_is_slow_to_check_owns_nothing(tmp_path: Path) -> None:
    numbers = RSAIdentity(tmp_path / "key").private_key.public_key().public_numbers()
    usual, slow = (
        rsa.RSAPublicNumbers(e, numbers.n).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        for e in (numbers.e, numbers.n - 2)
    )
    assert owner_of_subkey(b"[owner:" + usual + b"]") is not None
    assert owner_of_subkey(b"[owner:" + slow + b"]") is None


def test_requests_of_one_peer_have_a_rate_and_node_ids_are_not_chosen(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        a = node.identity("a", "/ip4/127.0.0.1/tcp/1").peer_id
        passed = sum(not node.guard.is_too_fast(a) for _ in range(10_000))
        assert passed < REQUESTS_BURST + 50
        assert not node.guard.is_too_fast("another")
        own = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=node_id_of(a).to_bytes()))
        await node.guard.check(a, own)
        with pytest.raises(ValueError, match="node id"):
            await node.guard.check(a, dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=DHTID.generate().to_bytes())))

    run(main())


def test_answers_to_look_ups_have_a_pace_for_each_peer_and_for_all_strangers(tmp_path: Path) -> None:
    async def main() -> None:
        node, size = Node(tmp_path), 2**20
        node.guard.is_stranger = lambda peer: peer != "member"
        find = dht_pb2.FindRequest(keys=[node.key])

        async def answers_to(peer: str) -> int:
            for number in range(100):
                try:
                    await node.guard.check(peer, find)
                except ValueError:
                    return number
                node.guard.count_answer(peer, size)
            return 100

        alone = await answers_to("stranger 0")
        assert 4 <= alone <= 5, "two look-ups among 1,000 peers, at a search's node that is a keeper"
        crowd = [await answers_to(f"stranger {number}") for number in range(1, 9)]
        assert 16 <= alone + sum(crowd) <= 17
        assert crowd[-1] == 0
        assert await answers_to("member") == alone
        await node.guard.check("stranger 8", dht_pb2.PingRequest())
        for keys in ([node.key] * 2, [node.key, b"other"]):
            with pytest.raises(ValueError, match="too many keys"):
                await node.guard.check("another member", dht_pb2.FindRequest(keys=keys))

    run(main())


def test_a_node_that_refuses_shows_nothing_and_one_with_more_results_than_keys_is_not_read(tmp_path: Path) -> None:
    async def main() -> None:
        results, node = [dht_pb2.FindResult(nearest_peer_ids=[b"peer"])], Node(tmp_path)

        async def rpc_find(request: dht_pb2.FindRequest, timeout: float) -> dht_pb2.FindResponse:
            if not results:
                raise P2PHandlerError("ValueError('refused')")
            return dht_pb2.FindResponse(results=results)

        stub = SimpleNamespace(rpc_find=rpc_find, rpc_ping=None, rpc_store=None)
        protocol: Any = SimpleNamespace(call_find=None, get_stub=lambda peer: stub, bucket_size=20)
        check_answers_apart(cast(DHTNode, SimpleNamespace(protocol=protocol)), node.records)
        find, request = protocol.get_stub(None).rpc_find, dht_pb2.FindRequest(keys=[node.key])
        assert list((await find(request, timeout=1.0)).results) == results
        results.append(dht_pb2.FindResult())
        with pytest.raises(ValueError, match="results"):
            await find(request, timeout=1.0)
        results.clear()
        (shown,) = (await find(request, timeout=1.0)).results
        assert shown.type == dht_pb2.NOT_FOUND

    run(main())


@pytest.mark.network
def test_a_keeper_that_has_answered_strangers_enough_answers_members_and_keeps_the_records_of_both(tmp_path: Path) -> None:
    async def main() -> None:
        host = await start_libp2p(tmp_path / "host", ["/ip4/127.0.0.1/tcp/0"])
        names = ("stranger", "member")
        stranger, member = peers = [
            await start_libp2p(tmp_path / name, ["/ip4/127.0.0.1/tcp/0"], initial_peers=host.transport.addresses)
            for name in names
        ]
        try:
            host.registry.is_known = lambda peer: peer == member.identity.peer_id
            host.registry._records.admit("peers")
            for peer in peers:  # neither asks the other
                table = peer.registry.node.protocol.routing_table
                table.get_nearest_neighbors = lambda *args, **options: []
                await peer.registry.put("peers", b"record", 60)
            guard = host._daemon.guard
            assert guard is not None
            guard._answered_strangers = Allowance(1.0, 500.0)
            assert len(await stranger.registry.get("peers")) == 2
            with pytest.raises(PeerUnreachable, match="does not show the records"):
                await stranger.registry.get("peers")
            assert len(await member.registry.get("peers")) == 2
            await stranger.registry.put("peers", b"renewed", 60)
            assert (await member.registry.get("peers"))[stranger.identity.peer_id] == b"renewed"
            guard._answered_strangers = Allowance(1e6, 1e6)
            assert len(await stranger.registry.get("peers")) == 2
        finally:
            for peer in (*peers, host):
                await peer.close()

    run(main())


# Any bytes --------------------------------------------------------------------------------------------------------------

MSGPACK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=3) | st.binary(max_size=3), items, max_size=3),
).map(msgpack.packb)
GARBAGE = MSGPACK | st.binary(max_size=60) | st.sampled_from([b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 600, b"\xd7\xff" * 9])


@st.composite
def changed(draw: st.DrawFn, *honest: bytes | float) -> list[Any]:
    """These fields of a record or a request, of which one may be any other."""
    other = draw(st.integers(0, len(honest)))
    return [draw(other_than(field)) if place == other else field for place, field in enumerate(honest)]


@st.composite
def other_than(draw: st.DrawFn, honest: bytes | float) -> bytes | float:
    """Anything, or these bytes with a few of them replaced."""
    if isinstance(honest, float):
        return draw(st.floats() | st.floats(-200, 200).map(honest.__add__))
    at = draw(st.integers(0, len(honest)))
    return draw(GARBAGE | st.just(honest[:at] + draw(GARBAGE) + honest[at + draw(st.integers(0, 9)) :]))


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Node:
    return Node(tmp_path_factory.mktemp("lasting"))


@given(data=st.data())
def test_whatever_a_record_is_only_what_its_owner_signed_for_here_is_taken(lasting: Node, data: st.DataObject) -> None:
    signing, subkey = lasting.records, MSGPackSerializer.dumps(lasting.records.local_public_key)
    bare = DHTRecord(*data.draw(changed(lasting.key, subkey, msgpack.packb(b"x"), get_dht_time() + 20)))
    (value,) = data.draw(changed(signing.sign_value(bare)))
    found = replace(bare, value=value, subkey=data.draw(st.sampled_from([bare.subkey] * 9 + [None])))

    async def main() -> None:
        if signing.validate(found):
            assert (found.key, found.subkey, signing.strip_value(found)) == (lasting.key, subkey, bare.value)
            assert isinstance(msgpack.unpackb(bare.value), bytes)
            assert found.expiration_time <= get_dht_time() + MAX_TTL_S + 10

    run(main())


@given(data=st.data())
def test_whatever_a_request_is_it_is_refused_or_has_only_its_sender_s_records(lasting: Node, data: st.DataObject) -> None:
    sender, subkey = lasting.me.peer_id, MSGPackSerializer.dumps(lasting.records.local_public_key)
    lasting.connected[sender] = ["/ip4/198.51.100.1/tcp/1"]
    guard = DHTGuard(lasting.records, lasting._addresses)
    guard.node = lasting.guard.node
    honest = lasting.key, subkey, b"x", get_dht_time() + 20
    rows = data.draw(st.lists(changed(*honest), min_size=1, max_size=2))
    keys, subkeys, values, expires = zip(*rows, strict=True)
    asker = data.draw(st.none() | changed(node_id_of(sender).to_bytes()).map(lambda drawn: drawn[0]))
    peer = None if asker is None else dht_pb2.NodeInfo(node_id=asker)
    request = dht_pb2.StoreRequest(
        keys=keys, subkeys=subkeys[data.draw(st.sampled_from([0] * 9 + [1])) :], values=values, expiration_time=expires,
        in_cache=[data.draw(st.sampled_from([False] * 9 + [True]))] * len(rows), peer=peer,
    )
    for each in (request, dht_pb2.FindRequest(keys=keys, peer=peer), dht_pb2.PingRequest(peer=peer)):
        with contextlib.suppress(ValueError):
            run(guard.check(sender, each))
            assert asker in (None, b"", node_id_of(sender).to_bytes())
            if each is request:
                assert {*keys} <= {lasting.key}
                assert {*subkeys} <= {subkey}
                assert all(expires_at <= get_dht_time() + MAX_TTL_S + 10 for expires_at in expires)


@pytest.mark.network
def test_a_node_refuses_over_the_wire_and_keeps_nothing(tmp_path: Path) -> None:
    """A hundred records each of other keys, other owners and a century, and requests that are too long."""

    async def main() -> None:
        host = await start_libp2p(tmp_path / "host", ["/ip4/127.0.0.1/tcp/0"])
        guest = await start_libp2p(tmp_path / "guest", ["/ip4/127.0.0.1/tcp/0"], initial_peers=host.transport.addresses)
        try:
            await host.registry.put("peers", b"host", 60)
            await guest.registry.put("peers", b"guest", 60)
            await flood(guest, host)
            storage = host.registry.node.protocol.storage
            assert len(storage) == 1
            assert set(await host.registry.get("peers")) == {host.identity.peer_id, guest.identity.peer_id}
        finally:
            await guest.close()
            await host.close()

    run(main())


async def flood(guest: Libp2p, host: Libp2p) -> None:
    """Ask to store what nobody should keep."""
    protocol, peer = guest.registry.node.protocol, PeerID.from_base58(host.identity.peer_id)
    century, owned = get_dht_time() + 3e9, guest.registry.subkey
    others = [DHTID.generate(source=f"{i}") for i in range(3)]
    peers = DHTID.generate(source="peers")
    foreign = OwnedRecords(host.identity).local_public_key
    for keys, subkey, size, expires_at in (
        (others, owned, 100, get_dht_time() + 20), ([peers], foreign, 100, get_dht_time() + 20), ([peers], owned, 100, century),
        ([peers], owned, MAX_REQUEST_BYTES, get_dht_time() + 20),
    ):
        await protocol.call_store(peer, keys, [bytes(size)] * len(keys), expires_at, [subkey] * len(keys))
