"""Whatever a stranger and a member send, in whatever order, a live peer goes on: it holds little, logs no error, decides."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.framing import Kind
from spes_p2p.messages.methods import METHODS
from spes_p2p.net.contacts import registry_key
from spes_p2p.net.shares import HELD_PER_PEER, HELD_PER_STRANGER, STREAMS_PER_OUTSIDER
from spes_p2p.testing.memory_channels import MemoryChannel
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.simulate.swarm import VirtualSwarm, campaign
from spes_p2p.testing.virtual_loop import VirtualLoop

OUTSIDER, MEMBER, HONEST = "X", "C", "AB"
STEPS, MOST_CAPTURED = 25, 200
OPEN_CHANNELS = 50
FAST = settings(deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
"""Without shrinking, each step of which is a swarm."""
KINDS = st.sampled_from([*Kind, 77, 200]) | st.integers(0, 255)
LONG = sorted(name for name, method in METHODS.items() if method.request_bytes >= HELD_PER_STRANGER)
HEADS = [b"\xdd\xff\xff\xff\xff", b"\x91" * 3000, b"\xc6\x7f\xff\xff\xff", bytes(2**16 + 1)]
GARBAGE = st.binary(max_size=200) | st.sampled_from(HEADS)


class Captured:
    """Frames that honest peers sent: the best seeds for hostile ones."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def tap(self, frame: Frame) -> Frame:
        """Keep some frames of each method."""
        known = sum((each.method, each.kind) == (frame.method, frame.kind) for each in self.frames)
        if frame.sender not in (OUTSIDER,) and known < 4 and len(self.frames) < MOST_CAPTURED and frame.kind != Kind.HEARTBEAT:
            self.frames.append(frame)
        return frame


class HostilePeers(RuleBasedStateMachine):
    """Two peers that attack: one that nobody knows, and one that took part until now and keeps its seat."""

    def __init__(self) -> None:
        super().__init__()
        self.loop, self.errors = VirtualLoop(), Errors()
        logging.getLogger("spes_p2p").addHandler(self.errors)
        self.loop.set_exception_handler(lambda loop, context: self.errors.texts.append(str(context)))
        self.channels: list[MemoryChannel] = []
        self.captured = Captured()
        self.run(self._start())

    def run(self, awaited: Coroutine[Any, Any, Any]) -> Any:
        """Run for as long as this takes, in virtual time."""
        return self.loop.run_until_complete(awaited)

    async def _start(self) -> None:
        self.swarm = VirtualSwarm(campaign(total_steps=10**6, sync={"min_peers": 2}))
        self.swarm.network.tap = self.captured.tap
        self.swarm.start_all(HONEST + MEMBER)
        await self.swarm.until_round(2)
        self.swarm.kill(MEMBER)
        self.transports = {name: self.swarm.network.transport(name) for name in (OUTSIDER, MEMBER)}
        self.registries = {name: self.swarm.network.registry(name) for name in (OUTSIDER, MEMBER)}

    @rule(who=st.sampled_from([OUTSIDER, MEMBER]), to=st.sampled_from([*HONEST, "W"]), method=st.sampled_from(sorted(METHODS)))
    def open(self, who: str, to: str, method: str) -> None:
        """Open a stream of any method."""
        with contextlib.suppress(PeerUnreachable, Refused):
            self.channels.append(self.run(self.transports[who].open(to, method)))
        while len(self.channels) > OPEN_CHANNELS:
            self.run(_abort(self.channels.pop(0)))

    @rule(who=st.sampled_from([OUTSIDER, MEMBER]), to=st.sampled_from([*HONEST, "W"]), method=st.sampled_from(LONG))
    def flood(self, who: str, to: str, method: str) -> None:
        """Send the longest request of a method in many streams at once."""
        body = bytes(METHODS[method].request_bytes)

        async def send() -> None:
            with contextlib.suppress(PeerUnreachable, Refused, asyncio.TimeoutError):
                channel = await self.transports[who].open(to, method)
                self.channels.append(channel)
                await asyncio.wait_for(channel.send(body), 1.0)

        self.run(_all(send() for _ in range(STREAMS_PER_OUTSIDER)))

    @rule(place=st.integers(0, OPEN_CHANNELS), body=GARBAGE, kind=KINDS)
    def send_garbage(self, place: int, body: bytes, kind: int) -> None:
        """Send any bytes as any kind."""
        self._send(place, body, kind)

    @rule(place=st.integers(0, OPEN_CHANNELS), of=st.integers(0, MOST_CAPTURED), cut=st.floats(0, 1), bit=st.integers(0, 7),
          is_cut=st.booleans(), is_flipped=st.booleans())
    def send_what_was_heard(self, place: int, of: int, cut: float, bit: int, is_cut: bool, is_flipped: bool) -> None:
        """Replay an honest frame, whole, cut short, or with a bit changed, in a stream of its method where there is one."""
        frame = self.captured.frames[of % len(self.captured.frames)]
        body, at = bytearray(frame.body), int(cut * len(frame.body))
        if is_flipped and at < len(body):
            body[at] ^= 1 << bit
        alike = [i for i, channel in enumerate(self.channels) if channel._method == frame.method]
        self._send(alike[place % len(alike)] if alike else place, bytes(body[:at] if is_cut else body), frame.kind)

    @rule(place=st.integers(0, OPEN_CHANNELS), is_aborted=st.booleans())
    def end(self, place: int, is_aborted: bool) -> None:
        """End a stream, politely or not."""
        if self.channels:
            channel = self.channels[place % len(self.channels)]
            if is_aborted:
                self.run(_abort(channel))
            else:
                with contextlib.suppress(PeerUnreachable, ValueError):
                    self.run(channel.finish())

    @rule(who=st.sampled_from([OUTSIDER, MEMBER]), value=st.binary(max_size=300))
    def put(self, who: str, value: bytes) -> None:
        """Put anything into the registry."""
        self.run(self.registries[who].put(registry_key(self.swarm.campaign.hash), value, 10**6))

    @rule(seconds=st.floats(0.1, 20))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.run(asyncio.sleep(seconds))

    @invariant()
    def nothing_fails(self) -> None:
        """No error is logged, and no honest peer ends."""
        assert not self.errors.texts
        assert not [name for name in (*HONEST, "W") if self.swarm.tasks[name].done()]

    @invariant()
    def memory_is_bounded(self) -> None:
        """What waits to be read stays within the shares of one outsider and of one member."""
        for name in (*HONEST, "W"):
            held = self.swarm.nodes[name].endpoint.shares._held
            assert held[OUTSIDER] <= HELD_PER_STRANGER
            assert held[MEMBER] <= HELD_PER_PEER

    def teardown(self) -> None:
        """Honest peers decide more rounds, all the same ones."""
        try:
            goal = max(self.swarm.round_of(name) for name in HONEST) + 2
            self.run(self.swarm.until(lambda: all(self.swarm.round_of(name) >= goal for name in HONEST), 1000))
            self.nothing_fails()
            assert len({self.swarm.nodes[name].log.commit_at(goal).id for name in HONEST}) == 1
        finally:
            logging.getLogger("spes_p2p").removeHandler(self.errors)
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.run(asyncio.wait(tasks))
            self.loop.close()

    def _send(self, place: int, body: bytes, kind: int) -> None:
        if self.channels:
            channel = self.channels[place % len(self.channels)]
            with contextlib.suppress(PeerUnreachable, ValueError, asyncio.TimeoutError):
                self.run(asyncio.wait_for(channel.send(body, kind=kind), 1.0))


async def _all(sending: Iterable[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*sending)


async def _abort(channel: MemoryChannel) -> None:
    channel.abort()


class Errors(logging.Handler):
    """Collects what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.texts.append(record.getMessage() + (f": {record.exc_info[1]!r}" if record.exc_info else ""))


@pytest.mark.long
def test_a_live_peer_goes_on_whatever_it_is_sent() -> None:
    run_state_machine_as_test(HostilePeers, settings=settings(FAST, max_examples=6, stateful_step_count=STEPS))


@pytest.mark.slow
def test_a_live_peer_goes_on_whatever_it_is_sent_for_long() -> None:
    run_state_machine_as_test(HostilePeers, settings=settings(FAST, max_examples=100, stateful_step_count=100))
