"""The in-memory network keeps the contract of a real one, with virtual time and faults at chosen points."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from echo import echo

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.framing import MAX_FRAME_BYTES, Message
from spes_p2p.net.interfaces import MAX_RECORD_BYTES, Channel
from spes_p2p.testing.in_memory_world import in_memory_world
from spes_p2p.testing.memory_channels import UNREAD_FRAMES
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.memory_store import MemoryStore
from spes_p2p.testing.virtual_loop import DeadlockError, run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


async def silent(channel: Channel) -> None:
    await asyncio.Event().wait()


async def connected(network: MemoryNetwork, handler: Callable[[Channel], Awaitable[None]] = echo) -> Channel:
    await network.transport("b").serve("stream", handler)
    return await network.transport("a").open("b", "stream")


def test_time_jumps_to_the_next_timer():
    async def main():
        await asyncio.sleep(1e6)
        return now()

    assert run_virtual(main()) == pytest.approx(1e6)


def test_a_swarm_in_which_nothing_can_happen_any_more_says_who_waits():
    async def wait_for_nobody():
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="wait_for_nobody"):
        run_virtual(wait_for_nobody())


async def test_frames_arrive_whole_and_in_order_and_finish_ends_one_direction():
    channel = await connected(MemoryNetwork(latency_s=0.05, bandwidth_bytes_per_s=1e6))
    frames = [bytes([i]) * (i * 1000 + 1) for i in range(50)]
    for frame in frames:
        await channel.send(memoryview(frame))
    await channel.finish()
    assert [await channel.receive() for _ in frames] == list(map(Message, frames))
    assert await channel.receive() is None
    assert await channel.receive() is None
    with pytest.raises(ValueError, match="after finish"):
        await channel.send(b"more")


async def test_a_frame_takes_uplink_latency_and_downlink_time():
    network = MemoryNetwork(latency_s=0.05)
    network.set_bandwidth("a", up_bytes_per_s=1e6, down_bytes_per_s=4e6)
    network.set_bandwidth("b", up_bytes_per_s=2e6, down_bytes_per_s=5e6)
    channel = await connected(network)
    assert now() == pytest.approx(0.1)
    await channel.send(bytes(1_000_000))
    assert now() == pytest.approx(0.1 + 1.0)
    await channel.receive()
    there, back = 1.0 + 0.05 + 0.2, 0.5 + 0.05 + 0.25
    assert now() == pytest.approx(0.1 + there + back)


async def test_two_senders_share_one_downlink():
    network = MemoryNetwork()
    network.set_bandwidth("c", up_bytes_per_s=1e6, down_bytes_per_s=1e6)
    done = []

    async def sink(channel: Channel) -> None:
        await channel.receive()
        done.append(now())

    await network.transport("c").serve("stream", sink)
    for name in "ab":
        await (await network.transport(name).open("c", "stream")).send(bytes(1_000_000))
    await asyncio.sleep(10)
    assert done == pytest.approx([1.0, 2.0])


async def test_a_sender_waits_for_a_reader_that_does_not_read():
    channel = await connected(MemoryNetwork(), silent)
    for _ in range(UNREAD_FRAMES):
        await asyncio.wait_for(channel.send(b"x"), 5)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(channel.send(b"x"), 5)


async def test_a_peer_that_is_not_there_refuses_at_once_and_a_method_that_is_not_served_says_so():
    network = MemoryNetwork(latency_s=0.01)
    channel = await connected(network)
    with pytest.raises(PeerUnreachable):
        await network.transport("a").open("nobody", "stream")
    with pytest.raises(Refused):
        await network.transport("a").open("b", "sing")
    assert now() == pytest.approx(0.06)
    channel.abort()
    channel.abort()


async def test_a_peer_that_only_dials_is_reached_by_whom_it_has_dialled():
    network = MemoryNetwork()
    network.nats.put_behind("b", "symmetric")
    for name in "abc":
        await network.transport(name).serve("echo", echo)
    await network.transport("b").open("c", "echo")
    await network.transport("c").open("b", "echo")
    with pytest.raises(PeerUnreachable, match="b cannot be dialled"):
        await network.transport("a").open("b", "echo")
    network.kill("c")
    with pytest.raises(PeerUnreachable, match="b cannot be dialled"):
        await network.transport("c").open("b", "echo")


async def test_a_handler_that_fails_breaks_its_channel_and_nothing_else():
    async def fail(channel: Channel) -> None:
        raise RuntimeError("a bug")

    network = MemoryNetwork()
    broken = await connected(network, fail)
    with pytest.raises(PeerUnreachable):
        await broken.receive()
    channel = await connected(network)
    await channel.send(b"still here")
    assert await channel.receive() == Message(b"still here")


async def test_what_was_sent_before_finish_arrives_although_the_sender_aborts_then():
    async def answer(channel: Channel) -> None:
        await channel.send(b"last words")
        await channel.finish()

    channel = await connected(MemoryNetwork(latency_s=0.1, bandwidth_bytes_per_s=100), answer)
    assert await channel.receive() == Message(b"last words")
    assert await channel.receive() is None
    with pytest.raises(PeerUnreachable):
        await channel.send(b"too late")


async def test_a_frame_or_record_above_the_limit_is_not_sent():
    network = MemoryNetwork()
    channel = await connected(network)
    with pytest.raises(ValueError, match="at most"):
        await channel.send(bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(ValueError, match="at most"):
        await network.registry("a").put("key", bytes(MAX_RECORD_BYTES + 1), 10)


def test_killing_a_peer_stops_its_tasks_where_they_are_and_breaks_its_channels():
    steps: list[str] = []

    async def peer(network: MemoryNetwork) -> None:
        world = in_memory_world(network, "b", store=store)
        await world.transport.serve("stream", handle)
        await asyncio.gather(tick(world), asyncio.Event().wait())

    async def handle(channel: Channel) -> None:
        await channel.receive()
        try:
            await channel.receive()
        except Exception:
            steps.append("a dead peer does not handle errors")

    async def tick(world) -> None:
        while True:
            await asyncio.sleep(1)
            try:
                world.store.write("tick", [str(now()).encode()])
            except Exception:
                steps.append("a dead peer does not handle errors")

    store = MemoryStore()

    async def main():
        network = MemoryNetwork()
        task = network.run_peer("b", peer(network))
        await asyncio.sleep(0)
        channel = await network.transport("a").open("b", "stream")
        await channel.send(b"x")
        await asyncio.sleep(2.5)
        network.kill("b")
        with pytest.raises(PeerUnreachable):
            await channel.receive()
        with pytest.raises(PeerUnreachable):
            await network.transport("a").open("b", "stream")
        assert now() == 2.5
        await asyncio.sleep(5)
        assert task.cancelled()
        assert not network.is_alive("b")
        assert len(asyncio.all_tasks()) == 1
        with pytest.raises(asyncio.CancelledError):
            store.write("tick", [b"from beyond"])
        assert bytes(store.reopen().read("tick") or b"") == b"2.0"

    run_virtual(main())
    assert steps == []


async def test_a_killed_peer_can_start_again_under_its_name():
    network = MemoryNetwork()
    await connected(network)
    old = network.transport("b")
    network.kill("b")
    with pytest.raises(asyncio.CancelledError):
        await old.open("a", "stream")
    channel = await connected(network)
    await channel.send(b"again")
    assert await channel.receive() == Message(b"again")


async def test_a_fault_can_be_placed_at_any_frame():
    received: list[bytes] = []

    async def collect(channel: Channel) -> None:
        while (message := await channel.receive()) is not None:
            received.append(bytes(message.body))

    async def send_all(channel: Channel) -> None:
        for i in range(10):
            await channel.send(bytes([i]))

    network = MemoryNetwork()
    await network.transport("b").serve("stream", collect)
    network.hook = lambda peer, method, index: network.kill(peer) if (peer, method, index) == ("a", "stream", 4) else None

    async def peer() -> None:
        await send_all(await network.transport("a").open("b", "stream"))

    task = network.run_peer("a", peer())
    await asyncio.wait([task])
    assert task.cancelled()
    await asyncio.sleep(1)
    assert received == [bytes([i]) for i in range(4)]


@pytest.mark.parametrize("silence", ["pause", "partition"])
async def test_silence_holds_frames_back_and_loses_none(silence: str):
    network = MemoryNetwork(open_timeout_s=3.0)
    channel = await connected(network)
    if silence == "pause":
        network.pause("b")
    else:
        network.partition(["a"], ["b"])
    await channel.send(b"1")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(channel.receive(), 100)
    with pytest.raises(PeerUnreachable):
        await network.transport("a").open("b", "stream")
    assert now() == pytest.approx(103.0)
    network.resume("b")
    network.heal()
    assert await channel.receive() == Message(b"1")
    assert now() == pytest.approx(103.0)


async def test_nobody_hears_of_a_death_across_a_partition_before_it_heals():
    network = MemoryNetwork()
    channel = await connected(network)
    network.partition(["a"], ["b"])
    network.kill("b")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(channel.receive(), 10)
    network.heal()
    with pytest.raises(PeerUnreachable):
        await channel.receive()


async def test_a_record_is_seen_after_the_delay_until_it_expires_and_the_last_put_counts():
    network = MemoryNetwork(registry_delay_s=2.0)
    a, b = network.registry("a"), network.registry("b")
    await a.put("peers", b"old", ttl_s=100)
    assert await a.get("peers") == {"a": b"old"}
    assert await b.get("peers") == {}
    await asyncio.sleep(2)
    await b.put("peers", b"me", ttl_s=1000)
    assert await b.get("peers") == {"a": b"old", "b": b"me"}
    await a.put("peers", b"leaving", ttl_s=5)
    assert await b.get("peers") == {"a": b"old", "b": b"me"}
    await asyncio.sleep(2)
    assert await b.get("peers") == {"a": b"leaving", "b": b"me"}
    await asyncio.sleep(3)
    assert await b.get("peers") == {"b": b"me"}


async def test_the_registry_does_not_cross_a_partition():
    network = MemoryNetwork()
    a, b = network.registry("a"), network.registry("b")
    await a.put("peers", b"before", ttl_s=1000)
    await asyncio.sleep(1)
    network.partition(["a"], ["b"])
    await asyncio.sleep(1)
    await a.put("peers", b"after", ttl_s=1000)
    assert await b.get("peers") == {"a": b"before"}
    network.heal()
    assert await b.get("peers") == {"a": b"after"}


def test_work_is_done_inline_and_takes_the_modelled_time():
    async def main():
        world = in_memory_world(MemoryNetwork(seed=3), "a", seconds=lambda function, args: float(args[0]))
        assert await world.run_blocking(lambda x: x + 1, 4) == 5
        assert now() == 4.0
        assert await asyncio.to_thread(lambda: "inline") == "inline"
        return world.rng.random()

    assert run_virtual(main()) == run_virtual(main())


def test_the_same_seed_gives_the_same_run():
    async def main(seed: int):
        network = MemoryNetwork(seed, latency_s=0.1, jitter=0.5, bandwidth_bytes_per_s=1e5)
        channel = await connected(network)
        for i in range(20):
            await channel.send(bytes(i * 100))
            await channel.receive()
        return now()

    assert run_virtual(main(1)) == run_virtual(main(1))
    assert run_virtual(main(1)) != run_virtual(main(2))
