"""What one member brings to the exchanges of a plan, and what it sent of its own update."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from spes_p2p.consensus.output import Identity
from spes_p2p.messages.rounds import Update
from spes_p2p.net.rpc import RpcEndpoint
from spes_p2p.peer.cell_means import CellMeans
from spes_p2p.peer.courtesy import REDUCERS_SHARE, Courtesy, Lateness
from spes_p2p.rounds.accounting import Sent
from spes_p2p.rounds.digest import content_digest
from spes_p2p.rounds.parts import Part
from spes_p2p.rounds.planned import Plan
from spes_p2p.rounds.results import Results
from spes_p2p.rounds.traffic import push_turns
from spes_p2p.storage.scratch import Scratch, memory_scratch

BATCH_ELEMENTS = 2**20
"""Bounds the elements of small parts that are handled in one call to a worker thread: as many as a large part has."""


@dataclass(frozen=True)
class ExchangeContext:
    """One member's side of a plan, the same for all revisions of its part table."""

    endpoint: RpcEndpoint
    identity: Identity
    results: Results
    update: Mapping[int, memoryview]
    """This peer's update, encoded, by start of its part (`Ledger.update`)."""
    residuals: Mapping[int, np.ndarray]
    """This reducer's and hub's, by `residual_key`."""
    timeout_s: float
    tokens_of: Callable[[Part], int]
    """Returns the tokens behind this peer's update of a part."""
    run_blocking: Callable[..., Awaitable[Any]]
    """As in `World`: reading and reducing a part must not hold up heartbeats."""
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


class SentUpdate:
    """This peer's update in one exchange."""

    def __init__(self, context: ExchangeContext):
        self.context, self.tokens_of = context, context.tokens_of
        self.parts: dict[int, tuple[Part, Sent]] = {}
        """What was sent, by part index."""
        self.is_over = False
        """Set when the exchange ends."""

    def has(self, part: Part) -> bool:
        """Return whether this peer contributes to a part: not where the last round took all of its work on it."""
        has_work = self.tokens_of(part) > 0 and bool(self.context.update.get(part.start))
        return has_work and self.context.me in part.contributors

    async def take(self, batch: Sequence[Part]) -> list[EncodedUpdate]:
        """Return the updates of these parts, which count as sent from now on.

        Without parts to which this peer contributes nothing; empty once the exchange is over. A call that is cancelled changes
        nothing.
        """
        found: list[EncodedUpdate] = await self.context.run_blocking(self._read, batch)
        if self.is_over:
            return []
        for each in found:
            part, kept = each.part, self.context.update[each.part.start]
            self.parts[part.index] = part, partial(part.codec.decode, kept, part.size)
        return found

    def _read(self, batch: Sequence[Part]) -> list[EncodedUpdate]:
        """Read the parts' updates, which may be on disk, and their digests. In a worker thread."""
        found = []
        for part in filter(self.has, batch):
            body = bytes(self.context.update[part.start])
            found.append(EncodedUpdate(part, Update(part.index, self.tokens_of(part), content_digest(body)), body))
        return found
