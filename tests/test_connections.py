"""Connections of others to a peer are bounded: of one peer, of one network, and in all. A trainer keeps few unused ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from network_swarm import LOOPBACK as LISTEN
from network_swarm import LocalPeer, LocalPeers, write_variant

from spes_p2p.messages.fields import MAX_MEMBERS
from spes_p2p.net import connections, contacts, dht
from spes_p2p.net.connections import (
    CONNECTIONS,
    CONNECTIONS_PER_PEER,
    PEERS_PER_NETWORK,
    RELAYS_CONNECTIONS,
    TRAINERS_CONNECTIONS,
    UNUSED_S,
    Connection,
    Connections,
    Uses,
)
from spes_p2p.net.interfaces import Channel
from spes_p2p.net.libp2p import Libp2p, start_libp2p
from spes_p2p.net.tasks import end_tasks

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
KEEPS_ONE = """
from spes_p2p.cli import main
from spes_p2p.net import connections

connections.TRAINERS_CONNECTIONS, connections.UNUSED_S, connections.LOOK_EVERY_S = 1, 1.0, 0.2
main()
"""
RELAYED = "QmRQ353oFNqt8zfZ9X1HgRUszwv9RkEEwmMZZkbkYEsybn"


def of(daemon: list[Connection], uses: Uses | None = None) -> Connections:
    async def look() -> list[Connection]:
        return daemon

    async def close(peer: str) -> None:
        daemon[:] = [each for each in daemon if each[0] != peer]

    return Connections(look, close, uses or Uses())


def of_trainer(uses: Uses, needed: frozenset[str] = frozenset()) -> Connections:
    connections = of([], uses)
    connections.keep_few(needed, lambda peers: "relayed" in peers)
    return connections


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


def test_a_trainer_closes_those_unused_for_longest_beyond_its_bound() -> None:
    trainer = of_trainer(Uses())
    first = [connected(f"first-{i}", i) for i in range(9)]
    later = [connected(f"later-{i}", 9 + i) for i in range(TRAINERS_CONNECTIONS)]
    assert trainer.unused(first, 0.0) == []
    both = [*later, *first]
    assert trainer.unused(both, 1.0) == []
    assert trainer.unused(both, UNUSED_S - 0.1) == [], "each stays for a while"
    assert trainer.unused(both, 2 * UNUSED_S) == [peer for peer, _ in first]
    assert trainer.unused(later, 3 * UNUSED_S) == [], "as many as the bound stay"
    assert trainer.unused([*later, later[5]], 3 * UNUSED_S) == ["later-0"], "connections count, not peers"


def test_a_trainer_through_which_others_say_that_they_are_dialled_keeps_some_more() -> None:
    trainer = of_trainer(Uses())
    found = [("relayed", []), *(connected(f"peer-{i}", i) for i in range(RELAYS_CONNECTIONS))]
    assert trainer.unused(found, 0.0) == []
    assert len(trainer.unused(found, 2 * UNUSED_S)) == 1, "anybody can say so: there is a bound, too"


def test_a_trainer_closes_nothing_that_is_used_or_needed() -> None:
    uses = Uses()
    trainer = of_trainer(uses, frozenset({"bootstrap"}))
    others = [connected(f"other-{i}", 2 + i) for i in range(TRAINERS_CONNECTIONS)]
    relayed = ("behind-a-router", ["/ip4/203.0.0.1/tcp/4001/p2p/relay/p2p-circuit"])
    found = [connected("streaming", 0), connected("bootstrap", 1), connected("relay", 9), relayed, *others]
    with uses.of("streaming"), uses.of("streaming"):
        trainer.unused(found, 0.0)
    with uses.of("behind-a-router"):
        with uses.of("streaming"):
            trainer.unused(found, 1.0)
        assert trainer.unused(found, 2 * UNUSED_S) == ["other-0", "other-1", "other-2", "other-3"]
        every = trainer.unused(found * 22, 2.5 * UNUSED_S)
        assert every == [peer for peer, _ in others], "a use ended since the last look but one"
        every = trainer.unused(found * 22, 4 * UNUSED_S)
    assert every == [*(peer for peer, _ in others), "streaming"]


def test_who_is_no_trainer_closes_nothing_for_being_unused() -> None:
    helper, found = of([]), [connected(f"peer-{i}", i) for i in range(2 * TRAINERS_CONNECTIONS)]
    assert [helper.unused(found, now_s) for now_s in (0.0, 2 * UNUSED_S)] == [[], []]


@pytest.mark.network
def test_a_trainer_ends_unused_connections_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(connections, "UNUSED_S", 1.0)
    monkeypatch.setattr(connections, "TRAINERS_CONNECTIONS", 4)

    async def echo(channel: Channel) -> None:
        while (message := await channel.receive()) is not None:
            await channel.send(bytes(message.body))

    async def answer(channel: Channel) -> bool:
        await channel.send(b"question")
        return await channel.receive() is not None

    async def main() -> None:
        first = await start_libp2p(tmp_path / "first.key", LOOPBACK)
        address, others, trainer = first.transport.addresses[0], list[Libp2p](), None
        try:
            for number in range(8):
                others.append(await start_libp2p(tmp_path / f"{number}.key", LOOPBACK, initial_peers=[address]))
                await others[-1].transport.serve("echo", echo)
            trainer = await start_libp2p(tmp_path / "trainer.key", LOOPBACK, initial_peers=[address])
            await trainer.transport.serve("echo", echo)
            mine, peers = trainer.identity.peer_id, [each.identity.peer_id for each in others]
            for each in others:
                trainer.transport.learn_addresses(each.identity.peer_id, each.transport.addresses)
            opened = [await trainer.transport.open(peer, "echo") for peer in peers]
            opened.append(await others[2].transport.open(mine, "echo"))
            assert all([await answer(channel) for channel in opened])
            for channel in opened[2:8]:
                channel.abort()
            trainer.keep_few_connections([address])
            kept, deadline = {first.identity.peer_id, *peers[:3]}, asyncio.get_running_loop().time() + 30
            while (found := (await trainer._daemon.connections()).keys()) != kept:
                assert asyncio.get_running_loop().time() < deadline, found
                await asyncio.sleep(0.1)
            assert all([await answer(channel) for channel in (*opened[:2], opened[8])]), "used ones are not cut"
            assert await answer(await trainer.transport.open(peers[7], "echo")), "and others are dialled again"
        finally:
            for each in (*others, first, *([trainer] if trainer else ())):
                await each.close()

    asyncio.run(main())


@pytest.mark.network
def test_among_many_peers_no_trainer_is_connected_with_all_for_the_registrys_sake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(connections, "UNUSED_S", 1.0)
    monkeypatch.setattr(connections, "TRAINERS_CONNECTIONS", 2)
    monkeypatch.setattr(contacts, "MANY_CONTACTS", 3)
    monkeypatch.setattr(contacts, "SHOWN_CONTACTS", 0)
    monkeypatch.setattr(dht, "KEEPER_PAUSE_S", 0.5)

    async def keep_storing(peer: Libp2p) -> None:
        while True:
            await peer.registry.put("peers", b"", 5.0)
            await asyncio.sleep(0.7)

    async def main() -> None:
        owners = await start_libp2p(tmp_path / "owners.key", LOOPBACK)
        address, trainers, storing = owners.transport.addresses[0], list[Libp2p](), list[asyncio.Task[None]]()
        deadline = asyncio.get_running_loop().time() + 60

        async def until(holds: Callable[[], Awaitable[bool]]) -> None:
            while not await holds():
                assert asyncio.get_running_loop().time() < deadline
                await asyncio.sleep(0.2)

        async def all_are_found() -> bool:
            found = [set(await each.registry.get("peers")) for each in trainers]
            return all(of_one >= {each.identity.peer_id for each in trainers} for of_one in found)

        async def all_have_few() -> bool:
            return all([len(await each._daemon.connections()) <= 2 for each in trainers])

        try:
            owners.registry.keepers = (owners.identity.peer_id,)
            for number in range(6):
                trainer = await start_libp2p(tmp_path / f"{number}.key", LOOPBACK, initial_peers=[address])
                trainers.append(trainer)
                trainer.keep_few_connections([address])
                storing.append(asyncio.create_task(keep_storing(trainer)))
            await owners.registry.put("peers", b"", 5.0)
            await until(all_are_found)
            await until(all_have_few)
            assert await all_are_found()
            await owners.close()
            await asyncio.sleep(5.0)
            await until(all_are_found)
        finally:
            await end_tasks(storing)
            for each in (*trainers, owners):
                await each.close()

    asyncio.run(main())


@pytest.mark.network
def test_a_trainer_through_which_others_are_dialled_keeps_more_connections(tmp_path: Path) -> None:
    async def main() -> None:
        trainer = await start_libp2p(tmp_path / "trainer.key", LOOPBACK)
        try:
            trainer.keep_few_connections(())
            address, peers = trainer.transport.addresses[0], frozenset({"connected", RELAYED})
            assert trainer._connections.most(peers) == TRAINERS_CONNECTIONS
            trainer.transport.learn_addresses(RELAYED, [f"{address}/p2p-circuit/p2p/{RELAYED}"])
            assert trainer._connections.most(peers) == RELAYS_CONNECTIONS
            assert trainer._connections.most(frozenset({"connected"})) == TRAINERS_CONNECTIONS, "the other one has left"
        finally:
            await trainer.close()

    asyncio.run(main())


@pytest.mark.network
def test_rounds_with_more_members_than_a_trainer_keeps_connections(campaign: Path, tmp_path: Path) -> None:
    training = {"total_steps": 400_000, "sync_steps": 200}
    config = write_variant(campaign, "few.yaml", training=training, merge={"merge_interval": 200})
    names = ("peer-0", "peer-1", "peer-2", "peer-3")

    def keeps_one(peer: LocalPeer) -> bool:
        daemons = [child for child in peer.children() if child.name() == "p2pd"]
        return sum(each.status == psutil.CONN_ESTABLISHED for daemon in daemons for each in daemon.net_connections("tcp")) == 1

    with LocalPeers(tmp_path) as swarm:
        address = swarm.bootstrap(config).address
        for name in names:
            arguments = ["join", address, "--listen", LISTEN, "--data-dir", str(config.parent)]
            swarm.run(name, arguments, program=("-c", KEEPS_ONE))
        swarm.wait_for_round(1, 90.0)
        for peer in swarm.trainers:
            swarm.wait(partial(keeps_one, peer), 60.0, f"{peer.name} keeps its connection with the bootstrap peer only")
        last = swarm.newest_round()
        rounds = range(last + 1, last + 4)
        swarm.wait_for_round(rounds[-1], 90.0)
        commits = [swarm.commit(number) for number in rounds]
        assert max(len(commit.members) for commit in commits) == len(names)
        assert [commit.dropped_parts for commit in commits] == [0] * len(commits)
        assert [digests for digests in swarm.digests().values() if len(digests) > 1] == []


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
            children = [each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
            arguments = {argument for child in children for argument in child.cmdline()}
            assert f"-connHi={CONNECTIONS}" in arguments
            assert MAX_MEMBERS <= CONNECTIONS // 2
        finally:
            await peer.close()

    asyncio.run(main())
