"""What one member brings to the exchanges of a plan, and its own update as it is encoded for the reducers."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from spes_p2p.consensus.output import Identity
from spes_p2p.messages.rounds import Update
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.peer.cell_means import CellMeans
from spes_p2p.peer.courtesy import REDUCERS_SHARE, Courtesy, Lateness
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.results import Results
from spes_p2p.rounds.traffic import push_turns
from spes_p2p.storage.scratch import Scratch, memory_scratch

BATCH_ELEMENTS = 2**20
"""Bounds the elements of small parts that are encoded in one call to a worker thread: as many as a large part has."""


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
    strangers: Courtesy = field(default_factory=lambda: Courtesy(REDUCERS_SHARE))
    """This reducer's time to wait for strangers' updates after all others have come."""
    trusted_s: float = 0.0
    """Seconds that the lines of all others need for what they move; strangers may need as much."""
    round_s: float = 0.0
    """Seconds from the last commit to the plan."""
    lateness: Lateness = field(default_factory=lambda: Lateness(math.inf))
    """Who has held up this peer."""
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

    @cached_property
    def push_turns(self) -> Mapping[int, tuple[int, int]]:
        """See `parts.push_turns`; of the plan's own table. Takes long in a large round: first used in a worker thread."""
        return push_turns(self.results.planned)

    def put(self, part: Part, revision: int, encoded: bytes | memoryview) -> None:
        """Store a result of this revision's part table, unless a later revision has moved its part."""
        if self.results.parts[part.index].revision == revision:
            self.results.put(part.index, encoded)


def next_batch(waiting: deque[Part], shares: Callable[[Part], bool] = lambda part: True) -> list[Part]:
    """Remove and return the first part that waits, and parts after it up to BATCH_ELEMENTS if all of them share a batch."""
    batch = [waiting.popleft()]
    size = batch[0].size
    while waiting and shares(batch[0]) and shares(waiting[0]) and size + waiting[0].size <= BATCH_ELEMENTS:
        batch.append(waiting.popleft())
        size += batch[-1].size
    return batch


@dataclass(frozen=True)
class EncodedUpdate:
    """This peer's update of a part."""

    part: Part
    update: Update
    body: bytes
    decoded: np.ndarray | None
    """What the others decode; None where that is the update itself."""


class SentUpdate:
    """This peer's update in one exchange."""

    def __init__(self, context: ExchangeContext):
        self.context, self.tokens_of = context, context.tokens_of
        self.parts: dict[int, tuple[Part, np.ndarray]] = {}
        """What was sent, as the reducers decode it, by part index."""
        self.is_over = False
        """Set when the exchange ends."""
        self._one_at_a_time = asyncio.Lock()
        """Encoding parts takes several times their memory, and as many streams wait for updates as there are reducers."""

    def has(self, part: Part) -> bool:
        """Return whether this peer contributes to a part: not where the last round took all of its work on it."""
        me = self.context.me
        return me in part.contributors and self.tokens_of(part) > 0 and bool(np.isfinite(self._values(part)).all())

    async def encode(self, batch: Sequence[Part]) -> list[EncodedUpdate]:
        """Encode the updates of these parts and replace them by what the others decode: the rest stays pending.

        Without parts to which this peer contributes nothing; empty once the exchange is over. A call that is cancelled changes
        nothing.
        """
        async with self._one_at_a_time:
            found: list[EncodedUpdate] = await self.context.run_blocking(self._encoded, batch)
        if self.is_over:
            return []
        for each in found:
            values = self._values(each.part)
            if each.decoded is not None:
                np.copyto(values, each.decoded)
            self.parts[each.part.index] = (each.part, values)
        return [EncodedUpdate(each.part, each.update, each.body, None) for each in found]

    def _encoded(self, batch: Sequence[Part]) -> list[EncodedUpdate]:
        """Encode the parts' updates. In a worker thread: only reads."""
        found = []
        for part in filter(self.has, batch):
            body = part.codec.encode(self._values(part))
            update = Update(part.index, self.tokens_of(part), content_digest(body))
            decoded = part.codec.decode(body, part.size) if part.codec.is_lossy else None
            found.append(EncodedUpdate(part, update, body, decoded))
        return found

    def _values(self, part: Part) -> np.ndarray:
        return self.context.pending[part.group.name][part.start - part.group.start : part.stop - part.group.start]
