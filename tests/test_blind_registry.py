"""Who hides the contacts of all peers in the registry keeps nobody out: helpers and vouched peers are known without it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from hivemind.dht import DHTNode

from spes_p2p.errors import PeerUnreachable
from spes_p2p.net import dht
from spes_p2p.net.contacts import MANY_CONTACTS, SHOWN_CONTACTS, SHOWN_S, is_shown, registry_key
from spes_p2p.net.libp2p import Libp2p, start_libp2p
from spes_p2p.peer.node import CONTACT_EVERY_S
from spes_p2p.testing.memory_registry import MemoryRegistry
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign

SOON_S = 60.0


@pytest.fixture
def blinded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Once this holds something, look-ups show nobody but oneself."""
    blinded, get = list[bool](), MemoryRegistry.get

    async def get_own(self: MemoryRegistry, key: str) -> dict[str, bytes]:
        found = await get(self, key)
        return {peer: value for peer, value in found.items() if not blinded or peer == self._unit.peer}

    monkeypatch.setattr(MemoryRegistry, "get", get_own)
    return blinded


@pytest.mark.parametrize("gone", ["", "CD"], ids=["all are there", "its log names dead peers"])
@pytest.mark.long
async def test_a_vouched_elector_that_was_cut_off_comes_back_while_look_ups_show_nobody(blinded: list[bool], gone: str) -> None:
    swarm = VirtualSwarm(campaign(10**6, admission="open", sync={"min_peers": 2, "silence_s": 5.0}))
    swarm.invitations = {name: swarm.invitation(name, ("trainer", "elector")) for name in "ABCD"}
    swarm.start_all("ABCD")
    await swarm.until_round(3)
    blinded.append(True)
    swarm.network.partition("B", [name for name in "WACD" if name not in gone], *gone)
    log = swarm.nodes["W"].log
    cut_off = log.round
    await swarm.until(lambda: log.round >= cut_off + 12, 600.0)
    swarm.network.partition([name for name in "WABCD" if name not in gone], *gone)  # the others are silent
    began = asyncio.get_running_loop().time()
    await swarm.until(lambda: "B" in log.last.members and log.last.members.index("B") in log.last.heard, SOON_S)
    assert asyncio.get_running_loop().time() - began < SOON_S


@pytest.mark.long
async def test_a_joiner_takes_part_while_look_ups_show_nobody(blinded: list[bool]) -> None:
    swarm = VirtualSwarm(campaign(10**6, sync={"min_peers": 1}))
    swarm.start_all("AB")
    await swarm.until_round(3)
    blinded.append(True)
    swarm.start("J")
    await swarm.until(lambda: "J" in swarm.nodes["W"].log.last.members, SOON_S)


@pytest.mark.long
async def test_a_peer_asks_the_one_that_it_joined_by(blinded: list[bool]) -> None:
    """Which need not be a helper, and nobody the owner vouches for."""
    swarm = VirtualSwarm(campaign(10**6, admission="open", sync={"min_peers": 0}))
    swarm.start_all("AB")
    await swarm.until_round(1)
    node = swarm.nodes["A"]
    blinded.append(True)
    await node.refresh_contacts()
    assert node.sources() == ["W"]
    node.world.registry.keepers = (*node.world.registry.keepers, "B")
    assert sorted(node.sources()) == ["B", "W"]
    node.endpoint.detector.lost("B", asyncio.get_running_loop().time() + 1000.0)
    assert node.sources() == ["W"]


async def test_a_peer_that_cannot_look_up_the_others_at_its_start_stores_its_contact(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = VirtualSwarm(campaign(10**6))
    swarm.start_all("ABC")
    await swarm.until_round(1)
    monkeypatch.setattr(MemoryRegistry, "get", answers_nobody)
    swarm.start("J")
    node = swarm.nodes["J"]
    records = cast(MemoryRegistry, node.world.registry)._records.by_key[registry_key(node.campaign_hash)]
    await swarm.until(lambda: "J" in records, CONTACT_EVERY_S / 2)


async def answers_nobody(*_: Any, **__: Any) -> dict[str, bytes]:
    raise PeerUnreachable("no answer")


async def finds_nobody(*_: Any, **__: Any) -> None:
    """As where the nodes nearest to a key are liars."""


async def takes_all(*_: Any, **__: Any) -> bool:
    return True


async def lasts(*_: Any, **__: Any) -> None:
    """As where a node names many that do not exist."""
    await asyncio.sleep(1000.0)


async def fails(*_: Any, **__: Any) -> None:
    raise AssertionError("traverse_dht did not finish")


@pytest.mark.parametrize(("store", "get"), [(takes_all, finds_nobody), (lasts, lasts), (fails, fails)])
@pytest.mark.network
def test_peers_find_each_other_whatever_a_search_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Any, get: Any
) -> None:
    monkeypatch.setattr(dht, "SEARCH_BESIDE_S", 1.0)

    async def start(name: str, *initial_peers: str) -> Libp2p:
        peer = await start_libp2p(tmp_path / name, ["/ip4/127.0.0.1/tcp/0"], initial_peers=initial_peers)
        monkeypatch.setattr(DHTNode, "store", store)
        monkeypatch.setattr(DHTNode, "get", get)
        return peer

    async def main() -> None:
        host = await start("host")
        host.registry.keepers = (host.identity.peer_id,)
        peers = [host, *[await start(name, host.transport.addresses[0]) for name in ("a", "b")]]
        try:
            for peer in peers:
                await asyncio.wait_for(peer.registry.put("peers", peer.identity.peer_id.encode(), 60), 3.0)
            for peer in peers:
                found = await asyncio.wait_for(peer.registry.get("peers"), 3.0)
                assert found == {each.identity.peer_id: each.identity.peer_id.encode() for each in peers}
        finally:
            for peer in peers:
                await peer.close()

    uvloop.run(asyncio.wait_for(main(), 120))


@pytest.mark.network
def test_who_is_refused_room_by_a_keeper_reads_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is full is not silent."""

    async def main() -> None:
        host = await start_libp2p(tmp_path / "host", ["/ip4/127.0.0.1/tcp/0"])
        host.registry.keepers = (host.identity.peer_id,)
        peers = [
            await start_libp2p(tmp_path / name, ["/ip4/127.0.0.1/tcp/0"], initial_peers=[host.transport.addresses[0]])
            for name in "ab"
        ]
        monkeypatch.setattr(DHTNode, "store", takes_all)
        monkeypatch.setattr(DHTNode, "get", finds_nobody)
        try:
            await host.registry.put("peers", b"host", 60)
            await peers[0].registry.put("peers", b"a", 60)
            monkeypatch.setattr("spes_p2p.net.dht_guard.MAX_RECORDS", 2)
            await peers[1].registry.put("peers", b"b", 60)
            found = await peers[1].registry.get("peers")
            assert sorted(found.values()) == [b"a", b"host"]
        finally:
            for peer in (*peers, host):
                await peer.close()

    uvloop.run(asyncio.wait_for(main(), 120))


def test_among_many_peers_nodes_have_the_contacts_of_a_few_that_change() -> None:
    names = [f"peer-{number}" for number in range(1000)]
    assert all(is_shown(name, MANY_CONTACTS, 0.0) for name in names)
    assert not any(is_shown(name, 0, 0.0) for name in names), "those that start at the same moment have found nobody"
    shown = [{name for name in names if is_shown(name, len(names), minute * SHOWN_S)} for minute in range(50)]
    assert 0.8 * SHOWN_CONTACTS < sum(map(len, shown)) / len(shown) < 1.2 * SHOWN_CONTACTS
    assert len(set().union(*shown)) > 20 * SHOWN_CONTACTS
