"""Peers that attack others' time and memory, beside taking part: false contacts, floods, and bytes that are no messages."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

from spes_p2p.messages.codec import pack, unpack
from spes_p2p.messages.framing import MAX_FRAME_BYTES, Kind
from spes_p2p.messages.methods import ACCEPT, COMMITS, CONTROL, METHODS, PING, ROUND, WORK
from spes_p2p.messages.presence import Contact
from spes_p2p.net.interfaces import Channel, Handler, Registry, World
from spes_p2p.testing.attacks.tamper import Liar, Tamper, Tell, tampered
from spes_p2p.testing.wrapped import Wrapped

FAR = 2**40
FOREVER_S = 10.0**6
HELD_STREAMS, STREAMS_PER_SECOND, HOSTILE_PER_SECOND = 300, 20, 10
OPEN_TIMEOUT_S = 5.0

Onslaught = Callable[[World, list[str], random.Random], Awaitable[None]]
"""One second's worth of an attack on these peers."""


class _FalseContacts(Wrapped):
    """A registry into which every contact is put with false claims: in turn of far rounds and orders, and of another branch."""

    def __init__(self, inner: Registry, tell: Tell):
        super().__init__(inner)
        self._tell, self._count = tell, 0

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        honest, self._count = unpack(Contact, value), self._count + 1
        lie = {"round": FAR, "control": 10**6} if self._count % 2 else {"round": min(honest.round, 1)}
        addresses = ("/ip4/192.0.2.1/tcp/1/p2p/QmNobody",)
        false: Any = {"commit": "f" * 64, "addresses": addresses, "validation_loss": 0.0, **lie}
        self._tell("contact")
        await self._inner.put(key, pack(replace(honest, **false)), ttl_s)


class _NoProof(Tamper):
    def handler(self, method: str, honest: Handler) -> Handler:
        """Keep those waiting that ask for the proof of a claim."""
        return _never if method in (COMMITS, CONTROL) else honest


async def _never(channel: Channel) -> None:
    await asyncio.sleep(FOREVER_S)


def false_contacts(liar: Liar) -> World:
    """Wrap the world of a peer whose contact lies."""
    registry = _FalseContacts(liar.world.registry, liar.tell)
    return replace(tampered(liar, _NoProof()), registry=cast(Registry, registry))


class _Starting(Wrapped):
    """A registry whose first `put` starts an attack, which ends with the peer, and whose contacts are the victims."""

    def __init__(self, liar: Liar, onslaught: Onslaught):
        super().__init__(liar.world.registry)
        self._world, self._tell, self._onslaught = liar.world, liar.tell, onslaught
        self._attack: asyncio.Task[None] | None = None

    async def put(self, key: str, value: bytes, ttl_s: float) -> None:
        await self._inner.put(key, value, ttl_s)
        if self._attack is None:
            self._attack = asyncio.ensure_future(self._keep_attacking(key))

    async def _keep_attacking(self, key: str) -> None:
        rng = random.Random(f"onslaught/{self._world.transport.peer_id}")
        while True:
            with contextlib.suppress(Exception):
                self._tell("onslaught")
                victims = sorted(set(await self._inner.get(key)) - {self._world.transport.peer_id})
                await asyncio.wait_for(self._onslaught(self._world, victims, rng), OPEN_TIMEOUT_S)
            await asyncio.sleep(1.0)


class Flood:
    """Streams without a request, held open, and the longest frames that methods take."""

    def __init__(self) -> None:
        self._held: list[Channel] = []

    async def __call__(self, world: World, victims: list[str], rng: random.Random) -> None:
        """Attack for one second."""
        for number in range(STREAMS_PER_SECOND):
            with contextlib.suppress(Exception):
                self._held.append(await world.transport.open(victims[number % len(victims)], PING))
        while len(self._held) > HELD_STREAMS:
            self._held.pop(0).abort()
        victim = rng.choice(victims)
        for method, size in ((ROUND, WORK), (ACCEPT, MAX_FRAME_BYTES)):
            with contextlib.suppress(Exception):
                channel = await world.transport.open(victim, method)
                self._held.append(channel)
                await channel.send(bytes(size))


async def hostile_bytes(world: World, victims: list[str], rng: random.Random) -> None:
    """Send bytes of any kind to any method."""
    for _ in range(HOSTILE_PER_SECOND):
        with contextlib.suppress(Exception):
            channel = await world.transport.open(rng.choice(victims), rng.choice(sorted(METHODS)))
            for _ in range(rng.randrange(1, 4)):
                await channel.send(hostile_body(rng), kind=rng.choice((Kind.MESSAGE, Kind.PART, rng.randrange(256))))
            channel.abort()


def hostile_body(rng: random.Random) -> bytes:
    """Return bytes that no honest peer sends: random ones, lists without end, lists within lists, what is no text."""
    return rng.choice((
        rng.randbytes(rng.randrange(2000)), b"\xdd\xff\xff\xff\xff" * 10, b"\x91" * rng.randrange(5000),
        b"\xd9\xff" + b"\xff" * 255, b"\x94" + b"\xcb\x7f\xf8" + bytes(6), b"\xc6\xff\xff\xff\xff", b"", b"\x9f" + b"\xa0" * 15,
    ))  # fmt: skip


def flood(liar: Liar) -> World:
    """Wrap the world of a peer that floods the others."""
    return replace(liar.world, registry=cast(Registry, _Starting(liar, Flood())))


def hostile(liar: Liar) -> World:
    """Wrap the world of a peer that sends what is no message."""
    return replace(liar.world, registry=cast(Registry, _Starting(liar, hostile_bytes)))
