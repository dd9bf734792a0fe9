"""State of the in-memory network that its parts share: lives of peers, lines, what is cut off, and what was counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from spes_p2p.errors import PeerUnreachable
from spes_p2p.messages.framing import Kind
from spes_p2p.testing.memory_lines import Lines
from spes_p2p.testing.virtual_loop import Unit

UNUSED_S = 35.0
"""A connection is kept for so long after its last use, at most (`net/connections.py`)."""

FrameHook = Callable[[str, str, int], None]
"""Called before a frame is sent, with sender, method, and index of the frame at the sender's end of the channel."""


@dataclass(frozen=True)
class Frame:
    """A frame that is about to be sent."""

    sender: str
    receiver: str
    method: str
    is_answer: bool
    """Whether the frame goes to the peer that opened the channel."""
    index: int
    """Number of frames that the sender sent on the channel before."""
    body: bytes
    kind: int = Kind.MESSAGE


FrameTap = Callable[[Frame], Frame]
"""Called before a frame is sent; kind and body of the returned frame are sent."""


class NetworkState:
    """What channels, NATs and the registry know of the network."""

    def __init__(self, seed: int, lines: Lines, registry_delay_s: float, open_timeout_s: float):
        self.seed, self.lines = seed, lines
        self.open_timeout_s = open_timeout_s
        self.registry_delay_s = registry_delay_s
        self.hook: FrameHook | None = None
        self.tap: FrameTap | None = None
        self.sent_bytes: dict[tuple[str, str], int] = {}
        """Payload bytes sent, by (sender, receiver)."""
        self.relayed_bytes = Counter[str]()
        """By relay: payload bytes that it passed on."""
        self.registry_sent, self.registry_received = Counter[str](), Counter[str]()
        """By peer: what the DHT would take for the registry's writes and reads, other than requests."""
        self.connections: dict[str, int] = {}
        """By peer: the most others at a time to which it had channels, or which stored contacts there or it at them lately."""
        self.stored_at: dict[str, dict[str, float]] = {}
        """By peer: others with which it is connected for the registry's sake, the latest last, and when it was used last."""
        self.units: dict[str, Unit] = {}
        """The latest life of each peer."""
        self.paused: set[str] = set()
        self.groups: dict[str, int] = {}
        """By peer: its side of a partition; 0 is that of all others."""
        self.cut_since_s = 0.0
        self.held: dict[Callable[[], None], None] = {}
        """What to do when nothing is cut off any more."""
        self.reachable_again = asyncio.Event()

    def is_cut(self, a: str, b: str) -> bool:
        """Return whether nothing passes between two peers now."""
        return a in self.paused or b in self.paused or self.groups.get(a, 0) != self.groups.get(b, 0)

    def count_connections(self, unit: Unit) -> None:
        """Update the most connections that a peer had."""
        stored, most = self.stored_at.get(unit.peer, {}), self.connections.get(unit.peer, 0)
        if len(unit.remotes) + len(stored) > most:
            since = asyncio.get_running_loop().time() - UNUSED_S
            while stored and next(iter(stored.values())) < since:
                del stored[next(iter(stored))]
            self.connections[unit.peer] = max(most, len(unit.remotes.keys() | stored.keys()))

    async def until(self, is_possible: Callable[[], bool], what: str) -> None:
        """Wait for a condition, at most `open_timeout_s`. Raises PeerUnreachable."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.open_timeout_s
        while not is_possible():
            try:
                await asyncio.wait_for(self.reachable_again.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                raise PeerUnreachable(f"{what}: no answer for {self.open_timeout_s:g} s") from None
