"""Connects the peers of a virtual run to the network: each one's line, and the NAT that it is behind, if any."""

from __future__ import annotations

import random

from spes_p2p.testing.memory_nat import Nat
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulate.scenario import BOOTSTRAP, Scenario, bytes_per_s


def connect(network: MemoryNetwork, scenario: Scenario, seed: int, name: str) -> None:
    """Give a trainer the line and NAT of its machine; what the scenario leaves open depends on the seed and its name."""
    machine, lines = scenario.machine(name), network.lines
    rng = random.Random(f"wiring/{seed}/{name}")
    nat_at, loss, latency_s = rng.random(), rng.uniform(*scenario.losses), rng.uniform(*scenario.latencies_s)
    down = machine.bandwidth_bytes_per_s or scenario.bandwidth_bytes_per_s
    everybodys_up = None if machine.bandwidth else scenario.upload_bytes_per_s
    up = bytes_per_s(machine.upload) if machine.upload is not None else everybodys_up or down
    network.set_bandwidth(name, up, down)
    network.nats.put_behind(name, machine.nat or _nat(scenario, nat_at))
    lines.set_loss(name, loss if machine.loss is None else machine.loss)
    if scenario.latencies_s[0] < scenario.latencies_s[1]:
        lines.set_peer_latency(name, latency_s)
    if machine.latency_s is not None:
        for other in (BOOTSTRAP, *scenario.peer_names):
            network.set_latency(name, other, machine.latency_s)


def connect_bootstrap(network: MemoryNetwork, scenario: Scenario) -> None:
    """Give the bootstrap peer its line, unlimited by default. It is the relay of all peers that others cannot dial."""
    machine = scenario.machine(BOOTSTRAP)
    network.nats.relays = (BOOTSTRAP,)
    if machine.bandwidth_bytes_per_s is not None:
        up = machine.bandwidth_bytes_per_s if machine.upload is None else bytes_per_s(machine.upload)
        network.set_bandwidth(BOOTSTRAP, up, machine.bandwidth_bytes_per_s)
    network.lines.set_loss(BOOTSTRAP, machine.loss or 0.0)


def _nat(scenario: Scenario, at: float) -> Nat:
    """Return the kind of NAT at this place, from 0 to 1, of the shares in turn."""
    for kind, share in scenario.nats.items():
        if at < share:
            return kind
        at -= share
    return "open"
