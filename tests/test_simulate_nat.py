"""Simulated swarms behind NATs, on lines that lose packets: they train, and updates do not travel through relays."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from spes_p2p.content import relay
from spes_p2p.messages.codec import unpack
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.rounds import Passed
from spes_p2p.testing.memory_channels import MemoryChannel
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate import virtual
from spes_p2p.testing.simulate.scenario import BOOTSTRAP, Scenario, load_scenario, peer_names
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.testing.simulate.virtual import run_seed
from spes_p2p.testing.simulate.wiring import connect, connect_bootstrap
from spes_p2p.testing.virtual_loop import run_virtual


@pytest.mark.long
def test_a_swarm_behind_nats_on_lines_that_lose_packets_trains() -> None:
    scenario = Scenario(
        peer_names(12), 3, vary=False, nats={"cone": 0.5, "symmetric": 0.15}, losses=(0.001, 0.01), latencies_s=(0.01, 0.15),
        upload_bytes_per_s=2.5e6,
    )
    run, relayed, reducers = virtual._Run(scenario, 0), set[str](), set[str]()

    class Watched(MemoryChannel):
        async def send(self, *pieces: bytes | memoryview, kind: int = Kind.MESSAGE) -> None:
            if self.circuit is not None:
                relayed.add(self._method)
            if self._method == "push" and not self._is_answer:
                reducers.add(self.remote)
            await super().send(*pieces, kind=kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spes_p2p.testing.memory_network.MemoryChannel", Watched)
        run_virtual(run.main())
    result, network = run.result(), run._swarm.network
    assert not result.violations
    assert result.relayed_bytes > 0
    assert "snapshot" in relayed
    assert relayed.isdisjoint({"push", "pull"})
    plan = run._swarm.peers["peer-0"].replica.base.plan
    assert plan is not None
    trainers = {member.peer: member for member in plan.members if member.peer != BOOTSTRAP}
    assert trainers.keys() == set(scenario.peer_names)
    assert all(member.tokens > 0 for member in trainers.values())
    hidden = {name for name in trainers if not network.nats.is_open(name)}
    assert 3 < len(hidden) < 12
    assert {name for name, member in trainers.items() if member.bandwidth == 0} == hidden
    assert reducers
    assert hidden.isdisjoint(reducers)
    assert run_seed(scenario, 0).log_sha256 == result.log_sha256


async def test_friends_that_were_slow_hand_on_records_nevertheless_and_those_behind_nats_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "FANOUT", 2)
    monkeypatch.setattr(relay, "COPIES_BYTES", 0)
    swarm, names = VirtualSwarm(campaign(total_steps=20000)), [f"{number:02d}" for number in range(24)]
    hidden, parents = set(names[::2]), set[str]()
    swarm.network.nats.relays = (swarm.bootstrap,)
    for name in hidden:
        swarm.network.nats.put_behind(name, "symmetric")
    swarm.start_bootstrap()
    for name in names:
        swarm.start(name)
    await swarm.until(lambda: all(node.log.last.participants >= {*names} for node in swarm.nodes.values()))

    def note(frame: Frame) -> Frame:
        if frame.kind == Kind.PASSED:
            parents.add(unpack(Passed, frame.body).parent)
        return frame

    for node in swarm.nodes.values():
        node.relay._kept_to_themselves = dict.fromkeys(names[1::2], math.inf)
    swarm.network.tap, round_number = note, swarm.nodes["01"].log.round
    await swarm.until_round(round_number + 3)
    assert parents
    assert parents.isdisjoint(hidden)


def test_a_scenario_file_says_how_peers_are_connected(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        "peers: 200\nupload: 20mbit\nlatency_s: [0.01, 0.15]\nloss: [0.001, 0.01]\nnat: {cone: 0.5, symmetric: 0.15}\n"
        "machines: {peer-0: {nat: symmetric, loss: 0.02, bandwidth: 8mbit}, bootstrap: {bandwidth: 80mbit, upload: 40mbit}}\n"
    )
    scenario, network = load_scenario(path, {}), MemoryNetwork()
    connect_bootstrap(network, scenario)
    for name in scenario.peer_names:
        connect(network, scenario, 1, name)
    lines, kinds = network.lines, Counter(network.nats._kinds.values())
    assert (lines.of(BOOTSTRAP).up, lines.of(BOOTSTRAP).down) == (5e6, 1e7)
    assert (lines.of("peer-0").up, lines.of("peer-0").down) == (1e6, 1e6)
    assert (lines.of("peer-1").up, lines.of("peer-1").down) == (2.5e6, 12.5e6)
    assert (kinds["cone"] / 200, kinds["symmetric"] / 200) == pytest.approx((0.5, 0.15), abs=0.08)
    assert network.nats._kinds["peer-0"] == "symmetric"
    assert lines._loss["peer-0"] == 0.02
    assert all(0.001 <= loss <= 0.01 for peer, loss in lines._loss.items() if peer != "peer-0")
    assert all(0.01 <= latency_s <= 0.15 for latency_s in lines._peer_latency.values())
    again = MemoryNetwork()
    connect(again, scenario, 1, "peer-7")
    assert again.lines._loss["peer-7"] == lines._loss["peer-7"]
