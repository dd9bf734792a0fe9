"""The `reduce` operations of ./tools/bench state: one real reducer, and as many contributors as asked for.

The contributors' updates are made up and arrive one frame at a time, as fast as the reducer takes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from spes_p2p.consensus.signed import sign
from spes_p2p.messages.codec import pack
from spes_p2p.messages.consensus import Ballot
from spes_p2p.messages.fields import UPDATES_PER_SIGNATURE
from spes_p2p.messages.framing import Kind, Message
from spes_p2p.messages.rounds import Proposal, Pushed, Update
from spes_p2p.messages.samples import Cursor
from spes_p2p.model.layout import Layout, TensorSpec
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.peer.exchange_context import ExchangeContext, SentUpdate
from spes_p2p.peer.part_frames import numbered, weighted
from spes_p2p.peer.reducer import Reducer
from spes_p2p.peer.serving import Serving
from spes_p2p.rounds.codecs import CODECS
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.parts import PART_BYTES, Part
from spes_p2p.rounds.planned import Member, Plan
from spes_p2p.rounds.results import Results
from spes_p2p.storage.store import DirectoryStore
from spes_p2p.testing.memory_network import MemoryNetwork
from spes_p2p.testing.simulated_identity import SimulatedIdentity

CONTRIBUTORS = (4, 16, 64)
PARTS = 8
"""Parts that the reducer makes, each of PART_BYTES in the default codec."""
CODEC = CODECS["int4"]
TOKENS, SILENCE_S, TIMEOUT_S = 1000, 10.0, 600.0


class Pushes:
    """A stream in which one contributor's updates of all parts arrive."""

    def __init__(self, plan: Plan, sender: int, parts: tuple[Part, ...], encoded: bytes, line: asyncio.Lock):
        """`line`: carries one frame of all contributors at a time."""
        self._frames, self._line = self._all(plan, plan.members[sender].peer, parts, encoded), line

    async def _all(self, plan: Plan, sender: str, parts: tuple[Part, ...], encoded: bytes) -> AsyncIterator[Message]:
        digest = content_digest(encoded)
        for start in range(0, len(parts), UPDATES_PER_SIGNATURE):
            signed = parts[start : start + UPDATES_PER_SIGNATURE]
            for part in signed:
                yield Message(numbered(part.index) + weighted(TOKENS) + encoded, Kind.PART)
            updates = tuple(Update(part.index, TOKENS, digest) for part in signed)
            yield Message(pack(sign(Pushed(plan.id, updates), SimulatedIdentity(sender))), Kind.PUSHED)
        yield Message(b"", Kind.END)

    async def any_message(self) -> Message:
        """Return the next frame."""
        async with self._line:
            await asyncio.sleep(0)
        return await self._frames.__anext__()

    async def send(self, *pieces: bytes, kind: int = Kind.MESSAGE) -> None:
        """Take the confirmation."""


async def reduce_parts(contributors: int, folder: Path, clips: bool = True) -> None:
    """Let a reducer make PARTS means of this many updates."""
    names = sorted(f"P{i:02}" for i in range(contributors))
    members = tuple(Member(name, TOKENS, (), 1.0) for name in names)
    proposal = Proposal(1, "", Ballot(1, names[0]), ())
    plan = Plan(proposal, "c", 0, "", members, TOKENS * contributors, 0.0, 1, None, (), Cursor())
    size = CODEC.elements(PART_BYTES)
    group = Layout([TensorSpec("all", (PARTS * size,), "shared")]).groups[0]
    everybody = tuple(range(contributors))
    parts = tuple(Part(k, group, k * size, (k + 1) * size, everybody, 0, CODEC) for k in range(PARTS))
    encoded = await asyncio.to_thread(_update, size)
    context = ExchangeContext(
        RpcEndpoint(MemoryNetwork().transport(names[0]), SILENCE_S), SimulatedIdentity(names[0]), Results(plan, parts),
        {part.start: memoryview(encoded) for part in parts}, {}, TIMEOUT_S, lambda part: TOKENS, asyncio.to_thread,
        DirectoryStore(folder).scratch, clips,
    )
    line, serving = asyncio.Lock(), Serving(context, 0)
    reducer = await asyncio.to_thread(Reducer, context, SentUpdate(context), serving, 0)  # as `open_exchange` does
    streams = {i: Pushes(plan, i, parts, encoded, line) for i in everybody[1:]}
    pushes = [reducer.take_updates(stream, i) for i, stream in streams.items()]  # type: ignore[arg-type]
    await asyncio.gather(reducer.run(), *pushes)
    if not all(context.results.verified(part) for part in parts):
        raise RuntimeError("a result is missing")


def _update(size: int) -> bytes:
    """Return the encoded update of a part."""
    return CODEC.encode(np.random.default_rng(0).standard_normal(size, np.float32))
