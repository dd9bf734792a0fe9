"""The owner's orders to a swarm of processes on loopback, given as the owner gives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from network_swarm import LOOPBACK, Ended, LocalPeers, call, write_variant

from spes_p2p.observe.events import BaseRestored, Controlled
from spes_p2p.rounds.archive import archived_rounds
from spes_p2p.storage.store import DirectoryStore

pytestmark = pytest.mark.network

TRAINERS = ("peer-0", "peer-1")
PATIENCE_S = 90.0


@pytest.fixture(scope="module")
def swarm(campaign: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPeers]:
    """A bootstrap peer and two trainers in the middle of a long campaign."""
    config = write_variant(campaign, "long.yaml", training={"total_steps": 400_000, "sync_steps": 10})
    with LocalPeers(tmp_path_factory.mktemp("swarm")) as peers:
        address = peers.bootstrap(config, LOOPBACK, "--archive-every", "2", "--archive-keep", "100000").address
        for name in TRAINERS:
            peers.join(name, address)
        peers.wait_for_round(1, PATIENCE_S)
        yield peers


def order(swarm: LocalPeers, *words: str) -> Ended:
    key = str(swarm["bootstrap"].run_dir / "identity.key")
    return call("control", swarm["peer-0"].address, "--key", key, *words)


def wait_until_all_were_told(swarm: LocalPeers, number: int, state: str) -> int:
    """Returns the round from which on it holds."""

    def told() -> list[Controlled]:
        return [e for peer in swarm.peers.values() for e in peer.events(Controlled) if e.number == number]

    swarm.wait(lambda: len(told()) == 3, PATIENCE_S, f"everybody applies record {number}")
    assert {event.state for event in told()} == {state}
    (round_number,) = {event.round for event in told()}
    return round_number


def test_a_swarm_pauses_goes_on_goes_back_and_stops_as_its_owner_says(swarm: LocalPeers, tmp_path: Path) -> None:
    assert "ordered: paused; 3 of 3 peers have order 1" in order(swarm, "pause").stdout
    paused = wait_until_all_were_told(swarm, 1, "paused")
    assert "is already paused (order 1)" in order(swarm, "pause").stderr
    assert order(swarm, "resume").code == 0
    resumed = wait_until_all_were_told(swarm, 2, "running")
    assert resumed == paused + 1
    swarm.wait_for_round(resumed + 4, PATIENCE_S)
    assert "archived rounds: " in order(swarm, "rollback", "1").stderr
    kept = archived_rounds(DirectoryStore(swarm["bootstrap"].run_dir))[-1]
    assert order(swarm, "rollback", str(kept)).code == 0
    back = wait_until_all_were_told(swarm, 3, "running")
    for peer in swarm.peers.values():
        restored = [event for event in peer.events(BaseRestored) if event.source == "rollback"]
        assert [{event.base_digest} for event in restored] == [swarm.digests()[kept]]
    for rate in ("0.0002", "0.0001"):  # the second one hardly waits for a round that decides the first
        assert order(swarm, "schedule", str(back + 20), f"learning_rate={rate}", "min_lr_ratio=1.0").code == 0
    wait_until_all_were_told(swarm, 5, "running")
    swarm.wait_for_round(back + 21, PATIENCE_S)
    assert swarm.commit(back + 20).learning_rate == 0.0001
    assert order(swarm, "stop").code == 0
    stopped = wait_until_all_were_told(swarm, 6, "stopped")
    swarm.wait(lambda: not swarm.trainers, PATIENCE_S, "the trainers go")
    assert [swarm[name].process.wait() for name in TRAINERS] == [0, 0]
    assert swarm.newest_round() == stopped
    assert {number: digests for number, digests in swarm.digests().items() if len(digests) > 1} == {}
    exported = call("export", "--from", swarm["bootstrap"].address, "--output", str(tmp_path / "checkpoint"))
    assert exported.stdout.startswith(f"base of round {stopped} "), exported.stderr
