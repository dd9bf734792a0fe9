"""A real process stops itself at the point of a round that it was told, and sends wrong bytes when it is told to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from spes_p2p.messages.codec import pack
from spes_p2p.messages.compact import Brief, Compact
from spes_p2p.messages.framing import Kind, Message
from spes_p2p.net.interfaces import Channel
from spes_p2p.observe.events import StateEntered
from spes_p2p.testing.in_memory_world import in_memory_world
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulate.trial import Orders, Trial
from spes_p2p.testing.virtual_loop import run_virtual

HEARTBEAT, SENT = Message(b"", Kind.HEARTBEAT), Message(b"an update of eight bytes and more", Kind.PART)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "orders"


def child_of(what: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        what()
        os._exit(0)
    return child


def stops(child: int) -> bool:
    """Does the child stop itself, rather than end?"""
    _, status = os.waitpid(child, os.WUNTRACED)
    return os.WIFSTOPPED(status)


def sent_by(trial: Trial, *frames: Message, method: str = "push") -> list[Message]:
    """What comes out of a channel of this method that a watched peer opens."""

    async def main() -> list[Message]:
        network, received = MemoryNetwork(), list[Message]()

        async def receive(channel: Channel) -> None:
            while (frame := await channel.receive()) is not None:
                received.append(frame)
            await channel.finish()

        await network.transport("b").serve(method, receive)
        channel = await trial.around(in_memory_world(network, "a")).transport.open("b", method)
        for frame in frames:
            body = bytes(frame.body)
            await channel.send(body[:1], body[1:], kind=frame.kind)
        await channel.finish()
        assert await channel.receive() is None
        return received

    return run_virtual(main())


def test_frames_in_place_of_others_are_sent_as_they_are(folder: Path) -> None:
    Orders(folder)
    brief, compact = Brief(Kind.REPORT, b"8 bytes!", b""), Compact(Kind.DECIDED, "", b"")
    frames = [Message(pack(brief), Kind.BRIEF), Message(pack(compact), Kind.COMPACT)]
    assert sent_by(Trial(folder, "a"), *frames, method="round") == frames


def reach_all(trial: Trial, *points: str) -> None:
    for point in points:
        trial.reached(point)


def writes_a_vote(trial: Trial) -> None:
    trial.around(in_memory_world(MemoryNetwork(), "a")).store.write("votes", [b"a promise"])


@pytest.mark.parametrize(("peer", "skip", "is_for_it"), [("a", 0, True), (None, 1, True), ("b", 0, False), (None, 2, False)])
def test_a_peer_stops_when_it_has_come_to_the_point_so_often(
    folder: Path, peer: str | None, skip: int, is_for_it: bool
) -> None:
    orders, trial = Orders(folder), Trial(folder, "a")
    number = orders.stop_at("push", peer, skip)
    child = child_of(lambda: reach_all(trial, "vote", "push", "push"))
    assert stops(child) == is_for_it
    assert orders.taken() == ([(number, "a")] if is_for_it else [])
    if is_for_it:
        os.kill(child, signal.SIGCONT)
        assert not stops(child)


@pytest.mark.parametrize(
    ("point", "reach"),
    [
        ("push", lambda trial: sent_by(trial, HEARTBEAT, SENT)),
        ("record", writes_a_vote),
        ("training", lambda trial: trial.observe(StateEntered("training"))),
    ],
    ids=["a frame", "a write", "an event"],
)
def test_points_are_frames_writes_and_events(folder: Path, point: str, reach: Callable[[Trial], object]) -> None:
    orders, trial = Orders(folder), Trial(folder, "a")
    orders.stop_at(point, None, 0)
    child = child_of(lambda: reach(trial))
    assert stops(child)
    os.kill(child, signal.SIGCONT)
    assert not stops(child)


def test_an_order_that_is_withdrawn_stops_nobody(folder: Path) -> None:
    orders, trial = Orders(folder), Trial(folder, "a")
    orders.withdraw([orders.stop_at("push", None, 1)])
    assert not stops(child_of(lambda: reach_all(trial, "push", "push", "push")))


def test_a_peer_sends_wrong_bytes_until_it_is_cured(folder: Path) -> None:
    orders, trial = Orders(folder), Trial(folder, "a")
    assert sent_by(trial, HEARTBEAT, SENT) == [HEARTBEAT, SENT]
    orders.corrupt("a", "push")
    heartbeat, cut = sent_by(trial, HEARTBEAT, SENT)
    assert heartbeat == HEARTBEAT
    assert cut != SENT
    assert cut.kind == SENT.kind
    assert SENT.body.startswith(bytes(cut.body))
    orders.corrupt("a", "garbage")
    assert sent_by(trial, SENT) not in ([SENT], [cut])
    orders.cure("a")
    assert sent_by(trial, SENT) == [SENT]
