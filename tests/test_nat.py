"""Peers behind routers that let no connection in: they train, beside one that can be dialled and through a relay.

Each peer has a machine of its own (a network namespace), two of them behind routers of their own that translate addresses.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from network_swarm import COMMAND_TIMEOUT_S, ENVIRONMENT, LocalPeer, LocalPeers, write_variant

from spes_p2p.observe.events import WorkDropped
from spes_p2p.testing.simulate.namespaces import Namespaces, why_unavailable

BLOCKED = why_unavailable(routers=True)
pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.skipif(BLOCKED is not None, reason=f"no networks with routers here: {BLOCKED}"),
]

HIDDEN, OPEN = ("hidden-0", "hidden-1"), "open"
BYTES_PER_S = 12.5e6
DIAL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


@dataclass
class World:
    """Machines, and the peers on them."""

    machines: Namespaces
    peers: LocalPeers

    def start(self, name: str, arguments: list[str]) -> LocalPeer:
        return self.peers.run(name, arguments, before=tuple(self.machines.command(name)))

    def call(self, machine: str, *arguments: str) -> Any:
        """What a command prints there, as JSON."""
        command = [*self.machines.command(machine), sys.executable, "-m", "spes_p2p", *arguments, "--json"]
        ended = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=COMMAND_TIMEOUT_S, check=False)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    def can_dial(self, machine: str, host: str, port: str) -> bool:
        command = [*self.machines.command(machine), sys.executable, "-c", DIAL, host, port]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def world(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A bootstrap peer, a trainer that can be dialled, and two that cannot."""
    config = write_variant(campaign, "endless.yaml", training={"total_steps": 400_000}, merge={"merge_interval": 20})
    machines = Namespaces()
    try:
        with LocalPeers(tmp_path_factory.mktemp("swarm")) as peers:
            world = World(machines, peers)
            for name in ("bootstrap", OPEN, *HIDDEN):
                machines.add(name, BYTES_PER_S, nat="symmetric" if name in HIDDEN else "open")
            first = world.start("bootstrap", ["bootstrap", "--config", str(config), "--listen", "/ip4/0.0.0.0/tcp/31337"])
            peers.wait(lambda: first.address or not first.is_running, 240, "the bootstrap says its address")
            for name in (OPEN, *HIDDEN):
                world.start(name, ["join", first.address])
            peers.wait_for_round(0, 240)
            yield world
    finally:
        machines.close()


def trainers(world: World) -> dict[str, LocalPeer]:
    return {name: world.peers[name] for name in (OPEN, *HIDDEN)}


def test_the_routers_let_no_connection_in(world: World) -> None:
    port = world.peers[HIDDEN[0]].address.split("/")[4]
    assert world.can_dial(HIDDEN[0], "127.0.0.1", port)
    assert not world.can_dial("bootstrap", world.machines.address(HIDDEN[0]), port)
    assert not world.can_dial(HIDDEN[1], world.machines.address(HIDDEN[0]), port)
    open_peer = world.peers[OPEN].address.split("/")
    assert world.can_dial(HIDDEN[0], open_peer[2], open_peer[4])


def test_work_of_peers_that_cannot_be_dialled_is_in_every_round(world: World) -> None:
    everybody = {peer.peer_id for peer in trainers(world).values()}
    number = 0
    world.peers.wait_for_round(number, 180)
    while not everybody <= set(world.peers.commit(number).members):
        number += 1
        world.peers.wait_for_round(number, 180)
    assembled = number + 1
    world.peers.wait_for_round(assembled + 6, 180)
    for number in range(assembled, assembled + 6):
        commit = world.peers.commit(number)
        assert {peer for peer, tokens, _ in commit.contributions if tokens} == everybody, number
        assert commit.dropped_parts == 0
    assert {number for number, digests in world.peers.digests().items() if len(digests) > 1} == set()
    assert [event for peer in trainers(world).values() for event in peer.events(WorkDropped)] == []


def test_the_only_trainer_that_can_be_dialled_does_not_decide_alone_either(world: World) -> None:
    status = world.call(OPEN, "status", world.peers["bootstrap"].address)
    assert status["electorate"] == [world.peers["bootstrap"].peer_id]


def test_peers_behind_different_routers_reach_one_another_through_the_relay(world: World) -> None:
    bootstrap = world.peers["bootstrap"]
    found: set[str] = set()

    def everybody_answers() -> bool:
        found.update(peer["peer_id"] for peer in world.call(HIDDEN[0], "status", bootstrap.address)["peers"])
        return {peer.peer_id for peer in (bootstrap, *trainers(world).values())} <= found

    world.peers.wait(everybody_answers, 120, "a status asked for behind one router names the peer behind the other")


@pytest.mark.parametrize(("machine", "result", "words"), [
    (OPEN, "pass", "dialled back"),
    (HIDDEN[0], "warning", "peers reach it through a relay"),
])
def test_the_doctor_says_how_a_machine_is_reached(world: World, machine: str, result: str, words: str) -> None:
    report = world.call(machine, "doctor", world.peers["bootstrap"].address)
    (reachability,) = [check for check in report["checks"] if check["name"] == "reachability"]
    assert (reachability["result"], words in reachability["found"]) == (result, True), reachability
