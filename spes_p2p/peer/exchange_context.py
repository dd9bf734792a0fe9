"""What one member brings to the exchanges of a plan, and its own update as it is encoded for the reducers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from spes_p2p.consensus.output import Identity
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.peer.cell_means import CellMeans
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.results import Results
from spes_p2p.storage.scratch import Scratch, memory_scratch


@dataclass(frozen=True)
class ExchangeContext:
    """One member's side of a plan, the same for all revisions of its part table."""

    endpoint: RpcEndpoint
    identity: Identity
    results: Results
    pending: Mapping[str, np.ndarray]
    """This peer's update by group name; overwritten with what was sent."""
    residuals: Mapping[int, np.ndarray]
    """This reducer's and hub's, by `residual_key`."""
    timeout_s: float
    tokens_of: Callable[[Part], int]
    """Returns the tokens behind this peer's update of a part."""
    run_blocking: Callable[..., Awaitable[Any]]
    """As in `World`: encoding and reducing a part must not hold up heartbeats."""
    scratch: Scratch = memory_scratch
    """For means and new residuals."""
    clips: bool = False
    """`sync.bound_influence`."""
    cell_means: CellMeans = field(default_factory=CellMeans)

    @property
    def plan(self) -> Plan:
        """The plan of the results."""
        return self.results.plan

    @cached_property
    def names(self) -> list[str]:
        """Peer ids of the members."""
        return [member.peer for member in self.plan.members]

    @cached_property
    def me(self) -> int:
        """This peer's index among the members. Raises ValueError when it is none."""
        return self.names.index(self.endpoint.peer_id)

    @cached_property
    def others(self) -> list[int]:
        """Indices of the other members."""
        return [i for i in range(len(self.names)) if i != self.me]

    def put(self, part: Part, revision: int, encoded: bytes | memoryview) -> None:
        """Store a result of this revision's part table, unless a later revision has moved its part."""
        if self.results.parts[part.index].revision == revision:
            self.results.put(part.index, encoded)


class SentUpdate:
    """This peer's update in one exchange."""

    def __init__(self, context: ExchangeContext):
        self.context, self.tokens_of = context, context.tokens_of
        self.parts: dict[int, tuple[Part, np.ndarray]] = {}
        """What was sent, as the reducers decode it, by part index."""
        self.is_over = False
        """Set when the exchange ends."""
        self._one_at_a_time = asyncio.Lock()
        """Encoding a part takes several times its memory, and as many streams wait for updates as there are reducers."""

    def has(self, part: Part) -> bool:
        """Return whether this peer contributes to a part: not where the last round took all of its work on it."""
        me = self.context.me
        return me in part.contributors and self.tokens_of(part) > 0 and bool(np.isfinite(self._values(part)).all())

    async def encode(self, part: Part) -> bytes | None:
        """Encode the update of a part and replace it by what the others decode: the rest stays pending.

        None where this peer contributes nothing, or the exchange is over. A call that is cancelled changes nothing.
        """
        async with self._one_at_a_time:
            found: tuple[bytes, np.ndarray | None] | None = await self.context.run_blocking(self._encoded, part)
        if found is None or self.is_over:
            return None
        encoded, decoded = found
        update = self._values(part)
        if decoded is not None:
            np.copyto(update, decoded)
        self.parts[part.index] = (part, update)
        return encoded

    def _encoded(self, part: Part) -> tuple[bytes, np.ndarray | None] | None:
        """Return a part's encoded update and, unless the codec is exact, what it decodes to. In a worker thread: only reads."""
        if not self.has(part):
            return None
        encoded = part.codec.encode(self._values(part))
        return encoded, part.codec.decode(encoded, part.size) if part.codec.is_lossy else None

    def _values(self, part: Part) -> np.ndarray:
        return self.context.pending[part.group.name][part.start - part.group.start : part.stop - part.group.start]
