"""NATs, relays and loss of the in-memory network: who reaches whom and how, what relays carry, what TCP makes of loss."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from echo import echo

from spes_p2p.errors import PeerUnreachable
from spes_p2p.testing import memory_nat
from spes_p2p.testing.memory_channels import MemoryChannel
from spes_p2p.testing.memory_lines import MSS_BYTES
from spes_p2p.testing.memory_nat import CIRCUIT_S, HANDSHAKE_ROUND_TRIPS, MAX_CIRCUITS, OBSERVERS, PUNCH_ROUND_TRIPS
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.virtual_loop import run_virtual

RELAY, LATENCY_S = "relay", 0.05
ROUND_TRIP_S, RELAYED_S = 2 * LATENCY_S, 4 * LATENCY_S
SEEN_BY = ("relay", "seer-0", "seer-1", "seer-2")
"""Peers that others can dial: enough for one behind a cone NAT to find out its address."""


def now() -> float:
    return asyncio.get_running_loop().time()


async def network_of(kinds: str, relays: tuple[str, ...] = (RELAY,), seen_by: int = OBSERVERS, **options: Any) -> MemoryNetwork:
    """A relay, others that can be dialled, and peers a, b, ... of these kinds that have dialled them."""
    network = MemoryNetwork(latency_s=LATENCY_S, **options)
    network.nats.relays = relays
    names = [chr(ord("a") + place) for place in range(len(kinds))]
    for name, kind in zip(names, kinds, strict=True):
        network.nats.put_behind(name, {"o": "open", "c": "cone", "s": "symmetric"}[kind])  # type: ignore[arg-type]
    for name in (*SEEN_BY, *names):
        await network.transport(name).serve("echo", echo)
    for name in names:
        for other in SEEN_BY[:seen_by]:
            (await network.transport(name).open(other, "echo")).abort()
    return network


async def opened(network: MemoryNetwork, source: str, target: str) -> MemoryChannel:
    channel = await network.transport(source).open(target, "echo")
    assert (await said(channel)) == b"hello"
    return channel


async def said(channel: MemoryChannel) -> bytes:
    await channel.send(b"hello")
    message = await channel.receive()
    return bytes(message.body) if message is not None else b""


def run(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main)


@pytest.mark.parametrize(("kinds", "becomes_direct"), [
    ("oc", True), ("os", False), ("cc", True), ("cs", False), ("sc", False), ("ss", False),
])
def test_a_peer_behind_a_nat_is_reached_through_its_relay_and_then_directly_if_both_nats_permit(
    kinds: str, becomes_direct: bool
) -> None:
    async def main() -> None:
        network = await network_of(kinds)
        first = await opened(network, "a", "b")
        assert first.circuit is not None
        assert first.circuit.relay.peer == RELAY
        await asyncio.sleep(10)
        later = await opened(network, "a", "b")
        assert (later.circuit is None) == becomes_direct
        assert await said(first) == b"hello"

    run(main())


def test_setting_up_takes_the_round_trips_of_the_relays_protocol_and_of_hole_punching() -> None:
    async def main() -> None:
        network = await network_of("cc")
        since_s = now()
        await network.transport("a").open("b", "echo")
        ready_s = (1 + HANDSHAKE_ROUND_TRIPS) * RELAYED_S
        assert now() == pytest.approx(since_s + ready_s + RELAYED_S)
        punched_s = since_s + ready_s + PUNCH_ROUND_TRIPS * RELAYED_S + (1 + HANDSHAKE_ROUND_TRIPS) * ROUND_TRIP_S
        units = network.units["a"], network.units["b"]
        await asyncio.sleep(punched_s - now() - 0.001)
        assert not network.nats.is_direct(*units)
        await asyncio.sleep(0.002)
        assert network.nats.is_direct(*units)
        since_s = now()
        await network.transport("b").open("a", "echo")
        assert now() == pytest.approx(since_s + ROUND_TRIP_S)

    run(main())


def test_a_peer_that_too_few_have_seen_does_not_know_its_address_and_stays_relayed() -> None:
    async def main() -> None:
        for seen_by, is_direct in ((OBSERVERS - 1, False), (OBSERVERS, True)):
            network = await network_of("cc", seen_by=seen_by)
            await opened(network, "a", "b")
            await asyncio.sleep(10)
            assert network.nats.is_direct(network.units["a"], network.units["b"]) == is_direct

    run(main())


def test_what_a_peer_behind_a_nat_dials_is_direct() -> None:
    async def main() -> None:
        network = await network_of("so")
        assert (await opened(network, "a", "b")).circuit is None
        assert (await opened(network, "b", "a")).circuit is None
        assert not network.relayed_bytes

    run(main())


def test_a_peer_that_was_reached_through_its_relay_dials_directly_once_that_connection_is_unused() -> None:
    async def main() -> None:
        network = await network_of("os")
        first = await opened(network, "a", "b")
        assert (await opened(network, "b", "a")).circuit is first.circuit
        for unit in (network.units["a"], network.units["b"]):
            for channel in list(unit.channels):
                channel.abort()
        assert (await opened(network, "b", "a")).circuit is None
        assert (await opened(network, "a", "b")).circuit is None

    run(main())


def test_without_a_relay_a_peer_behind_a_nat_is_a_client_only() -> None:
    async def main() -> None:
        network = await network_of("oc", relays=())
        with pytest.raises(PeerUnreachable, match="b cannot be dialled"):
            await network.transport("a").open("b", "echo")
        await network.transport("b").open("a", "echo")
        await opened(network, "a", "b")
        network.kill("a")
        with pytest.raises(PeerUnreachable, match="b cannot be dialled"):
            await network.transport("a").open("b", "echo")

    run(main())


def test_relayed_frames_take_the_relays_line_both_ways_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_nat, "CIRCUIT_BYTES", 2**22)

    async def main() -> None:
        network = await network_of("ss")
        network.set_bandwidth(RELAY, up_bytes_per_s=1e6, down_bytes_per_s=4e6)
        channel = await network.transport("a").open("b", "echo")
        since_s, up_s, down_s = now(), 1.0, 0.25
        await channel.send(bytes(1_000_000))
        await channel.receive()
        assert now() == pytest.approx(since_s + 2 * (up_s + down_s + 2 * LATENCY_S))
        assert network.relayed_bytes == {RELAY: 2_000_000}

    run(main())


def test_a_relay_bounds_circuits_bytes_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        network = await network_of("s" * (MAX_CIRCUITS + 2))
        last = "abcdefghijklmnopqrstuvwxyz"[MAX_CIRCUITS + 1]
        channels = [await opened(network, "a", chr(ord("b") + place)) for place in range(MAX_CIRCUITS)]
        with pytest.raises(PeerUnreachable, match="relays no more connections"):
            await network.transport("a").open(last, "echo")
        monkeypatch.setattr(memory_nat, "CIRCUIT_BYTES", 1000)
        await channels[0].send(bytes(1000))
        await asyncio.sleep(1)
        with pytest.raises(PeerUnreachable):
            await said(channels[0])
        await asyncio.sleep(CIRCUIT_S)
        with pytest.raises(PeerUnreachable):
            await said(channels[1])
        await opened(network, "a", last)

    run(main())


def test_a_relay_has_room_for_so_many_peers_and_takes_its_connections_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_nat, "MAX_RESERVATIONS", 2)

    async def main() -> None:
        network = await network_of("sss")
        with pytest.raises(PeerUnreachable, match="c cannot be dialled: it has no relay"):
            await network.transport("a").open("c", "echo")
        channel = await opened(network, "a", "b")
        network.kill(RELAY)
        with pytest.raises(PeerUnreachable):
            await said(channel)
        with pytest.raises(PeerUnreachable, match="it has no relay"):
            await network.transport("a").open("b", "echo")
        await network.transport(RELAY).serve("echo", echo)
        await opened(network, "a", "b")

    run(main())


@pytest.mark.parametrize("side", ["a", "b"])
def test_who_is_cut_off_from_the_relay_is_not_reached_through_it(side: str) -> None:
    async def main() -> None:
        network = await network_of("ss")
        channel = await opened(network, "a", "b")
        network.partition([RELAY, side])
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(said(channel), 5)
        with pytest.raises(PeerUnreachable, match="no answer"):
            await network.transport("b").open("a", "echo")
        network.heal()
        message = await channel.receive()
        assert message is not None

    run(main())


@pytest.mark.parametrize(("loss", "latency_s"), [(0.001, 0.01), (0.01, 0.01), (0.001, 0.15), (0.01, 0.15)])
def test_a_connection_that_loses_packets_has_the_rate_of_mathis(loss: float, latency_s: float) -> None:
    size, count = 100_000, 100

    async def main() -> None:
        network = MemoryNetwork(latency_s=latency_s, bandwidth_bytes_per_s=1e9)
        network.lines.set_loss("b", loss)
        await network.transport("b").serve("echo", echo)
        channels = [await network.transport("a").open("b", "echo") for _ in range(4)]
        since_s = now()
        await asyncio.gather(*(channel.send(bytes(size)) for channel in channels for _ in range(count // 4)))
        rate = MSS_BYTES / (2 * latency_s) * math.sqrt(1.5 / loss)
        assert size * count / (now() - since_s) == pytest.approx(rate, rel=0.01)

    run(main())


def test_losses_of_both_ends_add_up_and_others_lines_are_not_slowed_down() -> None:
    network = MemoryNetwork(latency_s=0.05, bandwidth_bytes_per_s=1e6)
    network.lines.set_loss("a", 0.1)
    network.lines.set_loss("b", 0.2)
    assert network.lines.tcp_bytes_per_s("a", "b") == pytest.approx(MSS_BYTES / 0.1 * math.sqrt(1.5 / 0.28))
    assert network.lines.tcp_bytes_per_s("c", "d") == math.inf
    before = network.lines.leave("c", "d", 0.0, 1000)
    assert before == pytest.approx(0.001)


def test_a_lost_packet_costs_a_round_trip() -> None:
    frames, loss, packets = 4000, 0.01, 10

    async def main() -> None:
        network = MemoryNetwork(latency_s=0.05)
        network.lines.set_loss("a", loss)
        delays = [network.lines.delay("a", "b", packets * MSS_BYTES) for _ in range(frames)]
        lost = [round((delay - 0.05) / 0.1, 6) for delay in delays]
        assert all(each == int(each) for each in lost)
        expected = (1 - (1 - loss) ** packets) / (1 - loss)
        assert sum(lost) / frames == pytest.approx(expected, rel=0.15)

    run(main())


def test_the_same_seed_loses_the_same_and_without_loss_nothing_is_drawn() -> None:
    def delays(seed: int, loss: float) -> list[float]:
        network = MemoryNetwork(seed, latency_s=0.1, jitter=0.5)
        network.lines.set_loss("a", loss)
        return [network.lines.delay("a", "b", 50_000) for _ in range(50)]

    assert delays(1, 0.05) == delays(1, 0.05)
    assert delays(1, 0.05) != delays(2, 0.05)
    jitter = random.Random("network/1")
    assert delays(1, 0.0) == [0.1 * (1.0 + 0.5 * jitter.random()) for _ in range(50)]


def test_peers_with_latencies_of_their_own_are_as_far_as_their_mean() -> None:
    lines = MemoryNetwork(latency_s=0.05).lines
    lines.set_peer_latency("a", 0.01)
    lines.set_peer_latency("b", 0.15)
    found = {pair: lines.delay(*pair) for pair in itertools.combinations("abc", 2)}
    assert found == {("a", "b"): pytest.approx(0.08), ("a", "c"): pytest.approx(0.03), ("b", "c"): pytest.approx(0.1)}
