"""Connections of others to a peer are bounded: of one peer, of one network, and in all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from spes_p2p.messages.fields import MAX_MEMBERS
from spes_p2p.net import connections
from spes_p2p.net.connections import CONNECTIONS, CONNECTIONS_PER_PEER, PEERS_PER_NETWORK, Connection, Connections
from spes_p2p.net.libp2p import start_libp2p

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def of(daemon: list[Connection]) -> Connections:
    async def look() -> list[Connection]:
        return daemon

    async def close(peer: str) -> None:
        daemon[:] = [each for each in daemon if each[0] != peer]

    return Connections(look, close)


def connected(peer: str, network: int, host: int = 1) -> Connection:
    return peer, [f"/ip4/203.{network // 256}.{network % 256}.{host}/tcp/4001"]


def test_one_peer_has_few_connections() -> None:
    most = [connected("honest", 0)] * CONNECTIONS_PER_PEER
    assert of([]).too_many([*most, *[connected("greedy", 1)] * (CONNECTIONS_PER_PEER + 1)]) == ["greedy"]


def test_of_many_peers_in_one_network_the_first_stay_and_other_networks_do_not_suffer() -> None:
    guard = of([])
    first = [connected(f"first-{i}", 0, i) for i in range(PEERS_PER_NETWORK)]
    assert guard.too_many(first) == []
    late = [connected(f"late-{i}", 0, 200 + i) for i in range(9)]
    assert guard.too_many([*late, *first, connected("other", 1)]) == [peer for peer, _ in late]
    assert guard.too_many([*late, *first[1:]]) == [peer for peer, _ in late[1:]], "one has left: there is room for one"
    local = [(f"local-{i}", ["/ip4/127.0.0.1/tcp/4001"]) for i in range(2 * PEERS_PER_NETWORK)]
    assert of([]).too_many(local) == []


def test_all_connections_are_bounded_and_the_youngest_end() -> None:
    guard = of([])
    old = [connected(f"old-{i}", i) for i in range(CONNECTIONS - 1)]
    assert guard.too_many(old) == []
    young = [connected(f"young-{i}", CONNECTIONS + i) for i in range(3)]
    assert guard.too_many([*young, *old]) == ["young-1", "young-2"]


@pytest.mark.network
def test_a_peer_daemon_closes_what_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_EVERY_S", 0.2)

    async def main() -> None:
        victim = await start_libp2p(tmp_path / "victim.key", LOOPBACK)
        others = []
        try:
            address = victim.transport.addresses[0]
            for number in range(4):
                others.append(await start_libp2p(tmp_path / f"{number}.key", LOOPBACK, initial_peers=[address]))
            monkeypatch.setattr(connections, "CONNECTIONS", 2)
            deadline = asyncio.get_running_loop().time() + 30
            while len(found := await victim._daemon.connections()) > 2:
                assert asyncio.get_running_loop().time() < deadline, found
                await asyncio.sleep(0.1)
            assert {each.identity.peer_id for each in others[:2]} == found.keys(), "the oldest stay"
        finally:
            for each in (*others, victim):
                await each.close()

    asyncio.run(main())


@pytest.mark.network
def test_a_peer_daemon_keeps_a_connection_with_each_member_of_a_round(tmp_path: Path) -> None:
    async def main() -> None:
        peer = await start_libp2p(tmp_path / "peer.key", LOOPBACK)
        try:
            children = psutil.Process().children(recursive=True)
            arguments = {argument for child in children for argument in child.cmdline()}
            assert f"-connHi={CONNECTIONS}" in arguments
            assert MAX_MEMBERS <= CONNECTIONS // 2
        finally:
            await peer.close()

    asyncio.run(main())
