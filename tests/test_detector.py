"""How long silence may last before it means death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.errors import PeerUnreachable
from spes_p2p.messages.framing import Kind
from spes_p2p.net.detector import (
    ELSEWHERE_CEILINGS,
    ENOUGH_GAPS,
    FLOOR_HEARTBEATS,
    MAX_PEERS,
    MUCH_BYTES,
    SilenceDetector,
    silence_bound,
)
from spes_p2p.net.interfaces import Channel, Transport
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.observe.outliers import DEVIATIONS
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.virtual_loop import run_virtual
from spes_p2p.testing.wrapped import Wrapped

FLOOR_S, CEILING_S = 5.0, 10.0


@given(st.lists(st.floats(0.01, 100), max_size=80))
def test_the_bound_lies_between_floor_and_ceiling(gaps: list[float]) -> None:
    assert FLOOR_S <= silence_bound(gaps, FLOOR_S, CEILING_S) <= CEILING_S


def test_regular_heartbeats_shorten_the_bound_and_irregular_ones_do_not() -> None:
    assert silence_bound([1.0] * ENOUGH_GAPS, FLOOR_S, CEILING_S) == FLOOR_S
    assert silence_bound([1.0, 3.0] * ENOUGH_GAPS, FLOOR_S, CEILING_S) == CEILING_S
    assert silence_bound([1.0] * (ENOUGH_GAPS - 1), FLOOR_S, CEILING_S) == CEILING_S


def test_the_bound_is_the_median_and_so_many_deviations() -> None:
    gaps = [1.0, 1.5, 2.0, 2.5, 3.0] * ENOUGH_GAPS
    assert silence_bound(gaps, 0.0, 100.0) == pytest.approx(2.0 + DEVIATIONS * 1.4826 * 0.5)


def test_one_outlier_changes_little() -> None:
    assert silence_bound([1.0] * ENOUGH_GAPS + [60.0], FLOOR_S, CEILING_S) == FLOOR_S


def test_a_slow_peer_gets_its_own_patience_and_a_new_one_that_of_the_swarm() -> None:
    detector = SilenceDetector(CEILING_S)
    for _ in range(ENOUGH_GAPS):
        detector.saw_gap("slow", 1.0)
        detector.saw_gap("slow", 4.0)
    for _ in range(4 * ENOUGH_GAPS):
        detector.saw_gap("quick", 1.0)
    assert detector.bound("slow") == CEILING_S
    assert detector.bound("quick") == detector.bound("new") == FLOOR_HEARTBEATS * detector.heartbeat_s


def test_of_more_peers_than_can_be_remembered_those_are_that_were_heard_last() -> None:
    detector = SilenceDetector(CEILING_S)
    for _ in range(ENOUGH_GAPS):
        detector.saw_gap("slow", 1.0)
        detector.saw_gap("slow", 4.0)
    for number in range(3 * MAX_PEERS):
        detector.heard("slow", float(number))
        detector.heard(f"new-{number}", float(number))
        detector.saw_gap(f"new-{number}", 1.0)
        detector.bound(f"new-{number}")
        detector.lost(f"gone-{number}", float(number))
    assert detector.bound("slow") == CEILING_S
    assert detector.is_lost(f"gone-{number}", float(number))
    for known in (detector._heard_at, detector._lost_at, detector._of, detector._bounds):
        assert "slow" in known or known is detector._lost_at
        assert len(known) <= MAX_PEERS


def test_while_much_is_exchanged_the_bound_is_the_ceiling() -> None:
    detector = SilenceDetector(CEILING_S)
    for _ in range(ENOUGH_GAPS):
        detector.saw_gap("peer", 1.0)
    detector.moved(MUCH_BYTES - 1, 100.0)
    assert detector.dead_at("peer", 101.0) == 101.0 + FLOOR_S
    detector.moved(MUCH_BYTES, 100.0)
    assert detector.dead_at("peer", 101.0) == 101.0 + CEILING_S
    assert detector.dead_at("peer", 100.1 + CEILING_S) == 100.1 + CEILING_S + FLOOR_S


@pytest.mark.parametrize("taught", [False, True])
def test_a_paused_peer_is_out_after_the_bound_that_its_heartbeats_taught(taught: bool) -> None:
    async def waited_s() -> float:
        network = MemoryNetwork(latency_s=0.05)
        a, b = (RpcEndpoint(network.transport(name), CEILING_S) for name in "ab")

        async def never(stream: Stream) -> None:
            await asyncio.Event().wait()

        async def ask() -> float:
            async with a.stream("b", "wait") as stream:
                await asyncio.sleep(2 * ENOUGH_GAPS if taught else 1)
                network.pause("b")
                paused_at = asyncio.get_running_loop().time()
                with pytest.raises(PeerUnreachable, match="silent"):
                    await stream.message()
                return asyncio.get_running_loop().time() - paused_at

        await b.serve("wait", never)
        return await network.run_peer("a", ask())

    expected = FLOOR_HEARTBEATS if taught else CEILING_S
    assert expected - 2 <= run_virtual(waited_s()) <= expected + 0.1


class _HeldBack(Wrapped):
    """Of these methods nothing arrives here, as when it waits behind megabytes."""

    def __init__(self, inner: Transport, *methods: str):
        super().__init__(inner)
        self._methods = methods

    async def open(self, peer: str, method: str) -> Channel:
        channel: Channel = await self._inner.open(peer, method)
        if method in self._methods:
            channel.receive = asyncio.Event().wait  # type: ignore[method-assign, assignment]
        return channel


@pytest.mark.parametrize("is_heard_elsewhere", [False, True])
def test_a_stream_goes_on_while_its_peer_is_heard_in_another_one_but_not_for_ever(is_heard_elsewhere: bool) -> None:
    async def waited_s() -> tuple[float, bool]:
        network = MemoryNetwork(latency_s=0.05)
        a = RpcEndpoint(cast(Transport, _HeldBack(network.transport("a"), "held")), CEILING_S)
        b = RpcEndpoint(network.transport("b"), CEILING_S)

        async def never(stream: Stream) -> None:
            await asyncio.Event().wait()

        async def ask() -> tuple[float, bool]:
            async with a.stream("b", "other" if is_heard_elsewhere else "held"), a.stream("b", "held") as stream:
                began = asyncio.get_running_loop().time()
                with pytest.raises(PeerUnreachable, match="silent"):
                    await stream.message()
                now = asyncio.get_running_loop().time()
                return now - began, a.detector.is_lost("b", now)

        await b.serve("held", never)
        await b.serve("other", never)
        return await network.run_peer("a", ask())

    expected_s = ELSEWHERE_CEILINGS * CEILING_S if is_heard_elsewhere else CEILING_S
    assert run_virtual(waited_s()) == (pytest.approx(expected_s, abs=0.1), not is_heard_elsewhere)


@pytest.mark.parametrize("is_heard_elsewhere", [False, True])
async def test_an_answer_that_waits_behind_others_is_waited_for_while_its_peer_is_heard(is_heard_elsewhere: bool) -> None:
    network = MemoryNetwork(latency_s=0.05)
    a, b = (RpcEndpoint(network.transport(name), CEILING_S) for name in "ab")

    async def answer_late(stream: Stream) -> None:
        await asyncio.sleep(1.5 * CEILING_S)
        await stream.send(b"here")

    async def never(stream: Stream) -> None:
        await asyncio.Event().wait()

    async def ask() -> bytes | None:
        for _ in range(ENOUGH_GAPS):
            a.detector.saw_gap("b", 1.0)
        if not is_heard_elsewhere:
            return await a.is_there("b", "late", b"?")
        async with a.stream("b", "other"):
            return await a.is_there("b", "late", b"?")

    await b.serve("late", answer_late)
    await b.serve("other", never)
    if not is_heard_elsewhere:
        b.detector.heartbeat_s = 1000.0
    assert await network.run_peer("a", ask()) == (b"here" if is_heard_elsewhere else None)


async def test_who_answers_with_another_kind_of_frame_is_not_there() -> None:
    network = MemoryNetwork(latency_s=0.05)
    a, b = (RpcEndpoint(network.transport(name), CEILING_S) for name in "ab")

    async def answer_with_a_report(stream: Stream) -> None:
        await stream.send(b"here", kind=Kind.REPORT)

    await b.serve("ping", answer_with_a_report)
    assert await network.run_peer("a", a.is_there("b", "ping", b"?")) is None


def test_a_peer_lives_whose_frame_takes_longer_than_the_bound() -> None:
    class Trickling(_HeldBack):
        async def open(self, peer: str, method: str) -> Channel:
            channel = await super().open(peer, method)
            channel.watch = lambda heard, admit: watching.append(heard)  # type: ignore[method-assign]
            return channel

    watching: list[Callable[[], None]] = []

    async def bytes_come(how_long_s: float) -> float:
        network = MemoryNetwork(latency_s=0.05)
        a = RpcEndpoint(Trickling(network.transport("a"), "slow"), CEILING_S)
        b = RpcEndpoint(network.transport("b"), CEILING_S)

        async def never(stream: Stream) -> None:
            await asyncio.Event().wait()

        async def ask() -> float:
            async with a.stream("b", "slow") as stream:
                began = asyncio.get_running_loop().time()
                for second in range(int(how_long_s)):
                    asyncio.get_running_loop().call_later(second, watching[-1])
                with pytest.raises(PeerUnreachable, match="silent"):
                    await stream.message()
                return asyncio.get_running_loop().time() - began

        await b.serve("slow", never)
        return await network.run_peer("a", ask())

    assert run_virtual(bytes_come(0)) == pytest.approx(CEILING_S, abs=0.1)
    assert run_virtual(bytes_come(60)) == pytest.approx(59 + CEILING_S, abs=0.1)


async def test_who_was_silent_a_moment_ago_is_not_waited_for_again_until_it_is_heard() -> None:
    network = MemoryNetwork(latency_s=0.05)
    a, b = (RpcEndpoint(network.transport(name), CEILING_S) for name in "ab")

    async def answer(stream: Stream) -> None:
        await stream.send(await stream.message())

    async def wait_for_answer() -> float:
        began = asyncio.get_running_loop().time()
        await a.is_there("b", "ping", b"?")
        return asyncio.get_running_loop().time() - began

    async def look() -> list[float]:
        network.pause("b")
        waits = [await wait_for_answer(), await wait_for_answer()]
        network.resume("b")
        await b.ask("a", "ping", b"!")
        return [*waits, await wait_for_answer()]

    await a.serve("ping", answer)
    await b.serve("ping", answer)
    silent, known, heard = await network.run_peer("a", look())
    assert silent == pytest.approx(CEILING_S)
    assert known == 0.0
    assert 0 < heard < 1
