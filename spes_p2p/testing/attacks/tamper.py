"""Change what a peer sends and receives, from outside: the means of the attackers in this package."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from spes_p2p.config.campaign import CampaignConfig
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.compact import Brief
from spes_p2p.messages.framing import Kind, Message
from spes_p2p.net.interfaces import Channel, Handler, Transport, World
from spes_p2p.testing.memory_state import Frame
from spes_p2p.testing.wrapped import Wrapped

Tell = Callable[[str], None]
"""Called with each lie that was told, or attack that was made, so that a run shows that there was one."""


@dataclass(frozen=True)
class Liar:
    """What an attack wraps."""

    world: World
    """The attacker's."""
    config: CampaignConfig
    tell: Tell = lambda lie: None


CONTROL_FRAMES = (Kind.HEARTBEAT, Kind.REFUSAL)


class Tamper:
    """What becomes of the frames of one attacker. By default nothing changes."""

    tell: Tell = staticmethod(lambda lie: None)

    async def send(self, frame: Frame) -> Frame | None:
        """Return what to send in place of a frame; None: nothing, while the stream stays alive."""
        return frame

    def receive(self, frame: Frame) -> Frame:
        """Return what the attacker's peer sees in place of a frame that came."""
        return frame

    def handler(self, method: str, honest: Handler) -> Handler:
        """Return what serves a method."""
        return honest


def tampered(liar: Liar, tamper: Tamper, world: World | None = None) -> World:
    """Return the liar's world, or `world`, with frames that pass through `tamper`; heartbeats and refusals do not.

    A Brief that is sent cannot be restored, so that the coordinator asks for the record, which does.
    """
    world, tamper.tell = world or liar.world, liar.tell
    return replace(world, transport=cast(Transport, _TamperedTransport(world.transport, tamper)))


def changed(frame: Frame, record: type[Any], change: Callable[[Any], Any]) -> Frame:
    """Return the frame with another record in place of this one; the same frame when it holds no such record."""
    try:
        return replace(frame, body=pack(change(unpack(record, frame.body))))
    except WireError:
        return frame


class _TamperedTransport(Wrapped):
    def __init__(self, inner: Transport, tamper: Tamper):
        super().__init__(inner)
        self._tamper = tamper

    async def serve(self, method: str, handler: Handler) -> None:
        served = self._tamper.handler(method, handler)

        def serve_tampered(channel: Channel) -> Awaitable[None]:
            return served(cast(Channel, _TamperedChannel(channel, self._tamper, self.peer_id, method, is_answer=True)))

        await self._inner.serve(method, serve_tampered)

    async def open(self, peer: str, method: str) -> Channel:
        channel = await self._inner.open(peer, method)
        return cast(Channel, _TamperedChannel(channel, self._tamper, self.peer_id, method, is_answer=False))


class _TamperedChannel(Wrapped):
    def __init__(self, inner: Channel, tamper: Tamper, me: str, method: str, is_answer: bool):
        super().__init__(inner)
        self._tamper = tamper
        self._sent = Frame(me, inner.remote, method, is_answer, 0, b"")
        self._received = Frame(inner.remote, me, method, not is_answer, 0, b"")

    async def send(self, *pieces: bytes | memoryview, kind: int = Kind.MESSAGE) -> None:
        if kind in CONTROL_FRAMES:
            await self._inner.send(*pieces, kind=kind)
            return
        if kind == Kind.BRIEF:
            await self._inner.send(pack(replace(unpack(Brief, b"".join(pieces)), known=b"")), kind=kind)
            return
        frame = replace(self._sent, body=b"".join(pieces), kind=kind)
        self._sent = replace(self._sent, index=self._sent.index + 1)
        told = await self._tamper.send(frame)
        self._tell(frame, told)
        if told is not None:
            await self._inner.send(told.body, kind=told.kind)

    async def receive(self) -> Message | None:
        message: Message | None = await self._inner.receive()
        if message is None or message.kind in CONTROL_FRAMES:
            return message
        frame = replace(self._received, body=bytes(message.body), kind=message.kind)
        self._received = replace(self._received, index=self._received.index + 1)
        seen = self._tamper.receive(frame)
        self._tell(frame, seen)
        return Message(seen.body, seen.kind)

    def _tell(self, honest: Frame, told: Frame | None) -> None:
        if told is None or (told.body, told.kind) != (honest.body, honest.kind):
            self._tamper.tell(f"{honest.method} {'nothing' if told is None else honest.kind} {honest.sender} {honest.receiver}")
