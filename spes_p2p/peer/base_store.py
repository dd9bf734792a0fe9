"""This peer's base: in use, served to others, and on its way to the disk."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

from spes_p2p.content.bases import Snapshots
from spes_p2p.errors import Damaged
from spes_p2p.net.interfaces import World
from spes_p2p.rounds.archive import load_newest_archived
from spes_p2p.rounds.base import BASE, Base, BuiltBase, in_memory, load_base, pieces_of, save_base, write_base
from spes_p2p.rounds.planned import DerivePlan
from spes_p2p.rounds.results import KEPT_ROUNDS
from spes_p2p.storage.interfaces import Draft
from spes_p2p.training.checkpoint import Checkpoint, write_checkpoint

logger = logging.getLogger(__name__)

TakeCheckpoint = Callable[[Base, str | None], Checkpoint]
"""(base, name of the last checkpoint) -> checkpoint of the work on top of the base."""


class BaseStore:
    """One base at a time; `current` is None until there is a first one.

    A base in files is made durable after each round, one in memory after every KEPT_ROUNDS: the stored base and the results of
    the rounds since give it again. Checkpoints of the work on top of it are made when they are due.
    """

    def __init__(self, world: World, elements: int, base_in_memory: bool, checkpoint_every_s: float):
        """`base_in_memory`: hold the base in memory; otherwise it is memory-mapped."""
        self.snapshots = Snapshots()
        self.current: Base | None = None
        self.checkpoint: str | None = None
        """Name of the last checkpoint on disk."""
        self.has_left = False
        """Whether that is one of moments alone, with which this peer left. The next one deletes it: the peer is back."""
        self.durable_round = -1
        """Round of the base on disk."""
        self._durable_commit = ""
        self._checkpointed_at = -math.inf
        """Loop time."""
        self._every_s = checkpoint_every_s
        self._world, self._elements, self._in_memory = world, elements, base_in_memory
        self._clock: Callable[[], float] = lambda: 0.0
        self._saving: asyncio.Future[None] | None = None

    @property
    def base(self) -> Base:
        """The current base, of a peer that has one."""
        assert self.current is not None
        return self.current

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next checkpoint. Any thread may ask."""
        return self._clock() - self._checkpointed_at >= self._every_s

    def call_for_checkpoint(self) -> None:
        """Make a checkpoint due."""
        self._checkpointed_at = -math.inf

    async def load(self, where: str, derive: DerivePlan) -> bool:
        """Load the base of this run-dir, or the newest archived one instead of a damaged base; False when there is none."""
        world, base = self._world, None
        try:
            base = await world.run_blocking(load_base, world.store, self._elements, where, BASE, derive, world.threads)
            if base is not None:
                self._durable_commit, self.durable_round = base.commit, base.round
        except Damaged:
            base = await world.run_blocking(load_newest_archived, world.store, self._elements, where, world.threads)
            instead = f"continuing from the archived one of round {base.round}" if base else "downloading the base again"
            logger.warning("%s/%s is damaged, or another campaign's; %s", where, BASE, instead)
        if base is None:
            return False
        await self.install(base)
        self._checkpointed_at = self._clock()
        return True

    async def install(self, base: Base) -> None:
        """Use this base from now on, and serve it. Its values are copied to memory where the base is kept there."""
        self._clock = asyncio.get_running_loop().time
        if self._in_memory:
            base = await self._world.run_blocking(in_memory, base)
        await self._world.run_blocking(self.serve, base)
        self.current = base

    def serve(self, base: Base) -> None:
        """Serve this base. In a worker thread."""
        self.snapshots.publish(base.commit, base.round, base.values, base.pieces or None)

    def replace(self, base: Base) -> None:
        """Use this base, which is served already."""
        self.current = base

    async def save(
        self, take_checkpoint: TakeCheckpoint | None, draft: Draft | None = None, at_once: bool = False
    ) -> None:
        """Begin to make durable what is due: a checkpoint of the work, then the base. The last checkpoint stays.

        `draft`: of the base, when it is written already. `at_once`: both, whatever is due.
        """
        await self.durable()
        run, store, base = self._world.run_blocking, self._world.store, self.base
        is_new = base.commit != self._durable_commit
        if is_new and draft is None and not self._in_memory:
            built: BuiltBase = await run(
                write_base, store, base.commit, base.round, base.plan, pieces_of(base.values), BASE, self._world.threads
            )
            self.current, draft = built.base, built.draft
            await run(self.serve, built.base)
        checkpoint = None
        if take_checkpoint is not None and (at_once or self.is_due):
            checkpoint = await run(take_checkpoint, base, self.checkpoint)
            self._checkpointed_at = self._clock()
        base_is_due = is_new and (at_once or draft is not None or base.round - self.durable_round >= KEPT_ROUNDS)
        if checkpoint is not None or base_is_due:
            self._begin(self._write(checkpoint, draft, base if base_is_due else None))

    async def save_base(self) -> None:
        """Make the base durable, if it is not, without the work on top of it. Raises UserError (disk full)."""
        await self.durable()
        if self.current is not None and self.current.commit != self._durable_commit:
            self._begin(self._write(None, None, self.current))
            await self.durable()

    async def save_checkpoint(self, take: TakeCheckpoint) -> None:
        """Make a checkpoint durable, whether or not it is due. Raises UserError (disk full)."""
        await self.durable()
        checkpoint: Checkpoint = await self._world.run_blocking(take, self.base, self.checkpoint)
        self._begin(self._write(checkpoint, None, None))
        await self.durable()

    async def durable(self) -> None:
        """Wait until what is being saved is on the disk: nothing is announced before. Raises UserError (disk full)."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    def _begin(self, writing: Coroutine[Any, Any, None]) -> None:
        self._saving = asyncio.ensure_future(writing)
        self._saving.add_done_callback(lambda done: done.cancelled() or done.exception())  # `durable` raises it

    async def _write(self, checkpoint: Checkpoint | None, draft: Draft | None, base: Base | None) -> None:
        """Write checkpoint and base where there are any. `draft`: holds the base already."""
        run, world = self._world.run_blocking, self._world
        if checkpoint is not None:
            await run(write_checkpoint, checkpoint)
            if self.has_left and self.checkpoint is not None:
                await run(world.store.delete, self.checkpoint)
            self.checkpoint, self.has_left = checkpoint.name, False
        if base is not None:
            if draft is not None:
                await run(draft.publish)
            else:
                await run(save_base, world.store, base, BASE, world.threads)
            self._durable_commit, self.durable_round = base.commit, base.round
