"""Several bootstrap peers of one campaign: volunteers join by any of them, and each can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from network_swarm import LOOPBACK, LocalPeer, LocalPeers, call, free_port, write_variant

pytestmark = [pytest.mark.network, pytest.mark.slow]

TRAINING, MERGE = {"total_steps": 400_000, "sync_steps": 20}, {"merge_interval": 20}


@pytest.fixture(scope="module")
def config(campaign: Path) -> Path:
    return write_variant(campaign, "endless.yaml", training=TRAINING, merge=MERGE)


@pytest.fixture(scope="module")
def listen() -> str:
    """Where the second bootstrap peer listens, in all of its lives."""
    return f"/ip4/127.0.0.1/tcp/{free_port()}"


@pytest.fixture(scope="module")
def swarm(config: Path, listen: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPeers]:
    """Two bootstrap peers, and a trainer that joined by each."""
    with LocalPeers(tmp_path_factory.mktemp("swarm")) as peers:
        first = peers.bootstrap(config)
        second = start_second(peers, config, listen)
        peers.join("peer-0", first.address)
        peers.join("peer-1", second.address)
        yield peers


def start_second(peers: LocalPeers, config: Path, listen: str) -> LocalPeer:
    first = peers["bootstrap"].address
    second = peers.run("second", ["bootstrap", "--config", str(config), "--listen", listen, "--peer", first])
    peers.wait(lambda: "spes-p2p join" in second.log or not second.is_running, 90, "the second bootstrap says its address")
    assert second.is_running, second.log
    return second


def trainers(swarm: LocalPeers) -> list[LocalPeer]:
    return [peer for peer in swarm.trainers if peer.name.startswith("peer-")]


def test_trainers_that_joined_by_different_ones_train_together(swarm: LocalPeers) -> None:
    swarm.wait_for_round(2, 90, trainers(swarm))
    members = set(swarm["peer-0"].commits[2].members)
    assert {peer.peer_id for peer in trainers(swarm)} <= members
    assert {number for number, digests in swarm.digests().items() if len(digests) > 1} == set()


def one_dht(swarm: LocalPeers) -> bool:
    """What the doctor says of the two addresses."""
    ended = call("doctor", swarm["bootstrap"].address, swarm["second"].address, "--json")
    checks = {check["name"]: check for check in json.loads(ended.stdout)["checks"]}
    return checks["dht"]["result"] == "pass" and checks["dht"]["found"].endswith("2 addresses lead to one DHT")


def test_both_addresses_lead_to_one_dht(swarm: LocalPeers) -> None:
    assert one_dht(swarm)


def test_the_second_one_serves_the_campaign_when_the_first_is_gone(swarm: LocalPeers, config: Path, listen: str) -> None:
    first, address = swarm["bootstrap"], swarm["second"].address
    swarm.kill("bootstrap")
    late = swarm.join("peer-2", address)
    swarm.wait(
        lambda: late.round >= 0 and late.peer_id in late.commits[late.round].members, 90, "a volunteer joins by the second one"
    )

    swarm.kill("second")
    again = start_second(swarm, config, listen)
    assert f"spes-p2p join {address}" in again.log
    assert "starting without them" in again.log
    assert f"no peer answers at {first.address}" in again.log


def test_another_campaign_is_refused(swarm: LocalPeers, config: Path, tmp_path: Path) -> None:
    other = write_variant(config, "other.yaml", training={**TRAINING, "total_steps": 800_000})
    arguments = ["--config", str(other), "--run-dir", str(tmp_path / "run"), "--listen", LOOPBACK]
    ended = call("bootstrap", *arguments, "--peer", trainers(swarm)[0].address)
    assert ended.code == 2
    assert ended.stderr.startswith(f"error: --peer {trainers(swarm)[0].address}: serves campaign test"), ended.stderr
    assert not (tmp_path / "run").exists()
