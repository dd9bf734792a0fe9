"""This peer's base: in use, served to others, and on its way to the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from spes_p2p.content.bases import Snapshots
from spes_p2p.net.interfaces import World
from spes_p2p.rounds.base import BASE, Base, StagedBase, in_memory, load_base, pieces_of, stage_base
from spes_p2p.rounds.planned import DerivePlan
from spes_p2p.storage.interfaces import Draft
from spes_p2p.training.checkpoint import Checkpoint, write_checkpoint

TakeCheckpoint = Callable[[Base, str | None], Checkpoint]
"""(base, name of the last checkpoint) -> checkpoint of the work on top of the base."""


class BaseStore:
    """One base at a time; `current` is None until there is a first one."""

    def __init__(self, world: World, elements: int, base_in_memory: bool):
        """`base_in_memory`: hold the base in memory; otherwise it is memory-mapped. Others are served from the file."""
        self.snapshots = Snapshots()
        self.current: Base | None = None
        self.checkpoint: str | None = None
        """Name of the checkpoint that belongs to the base on disk."""
        self._world, self._elements, self._in_memory = world, elements, base_in_memory
        self._saving: asyncio.Future[None] | None = None

    @property
    def base(self) -> Base:
        """The current base, of a peer that has one."""
        assert self.current is not None
        return self.current

    async def load(self, where: str, derive: DerivePlan) -> bool:
        """Load the base of this run-dir; False when there is none. Raises UserError when it is damaged."""
        world = self._world
        base: Base | None = await world.run_blocking(
            load_base, world.store, self._elements, where, BASE, derive, world.threads
        )
        if base is None:
            return False
        await self.install(base)
        if self._in_memory:
            self.current = await world.run_blocking(in_memory, base)
        return True

    async def install(self, base: Base) -> None:
        """Use this base from now on, and serve it."""
        await self._world.run_blocking(self.serve, base)
        self.current = base

    def serve(self, base: Base) -> None:
        """Serve this base. In a worker thread."""
        self.snapshots.publish(base.commit, base.round, base.values, base.pieces or None)

    def replace(self, base: Base) -> None:
        """Use this base, which is served already."""
        self.current = base

    async def save(self, take_checkpoint: TakeCheckpoint | None, draft: Draft | None = None) -> None:
        """Begin to make base and checkpoint durable. Checkpoint first: the one of the base on disk stays until the new base
        is there too.

        `draft`: of the base, when it is written already; otherwise it is written now, and lies there from now on.
        """
        await self.durable()
        run, store, base = self._world.run_blocking, self._world.store, self.base
        if draft is None:
            staged: StagedBase = await run(
                stage_base, store, base.commit, base.round, base.plan, pieces_of(base.values), BASE, self._world.threads
            )
            self.current, draft = staged.base, staged.draft
            await run(self.serve, staged.base)
        if self._in_memory:
            self.current = await run(in_memory, self.base)
        checkpoint = None
        if take_checkpoint is not None:
            checkpoint = await run(take_checkpoint, base, self.checkpoint)
        self._saving = asyncio.ensure_future(self._write(checkpoint, draft))
        self._saving.add_done_callback(lambda done: done.cancelled() or done.exception())  # `durable` raises it

    async def durable(self) -> None:
        """Wait until the base and its checkpoint are on the disk: nothing is announced before. Raises UserError (disk full)."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    async def _write(self, checkpoint: Checkpoint | None, draft: Draft) -> None:
        run = self._world.run_blocking
        if checkpoint is not None:
            await run(write_checkpoint, checkpoint)
        await run(draft.publish)
        self.checkpoint = None if checkpoint is None else checkpoint.name
