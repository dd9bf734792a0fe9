"""The next base, made while a round's results arrive, so that a commit finds most of it there.

A piece of the base is made when all the parts in it have come. That runs ahead of the reducers' manifests and of the commit: in
the end the pieces that hold anything else than what was committed are made again, with those that were not made at all. A
merge looks at other places too: the pieces that it changes are made in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import numpy as np

from spes_p2p.config.campaign import OuterConfig
from spes_p2p.errors import UserError
from spes_p2p.messages.consensus import Commit
from spes_p2p.model.layout import Layout
from spes_p2p.rounds.apply import NextBase
from spes_p2p.rounds.base import BASE, StagedBase, close_base, write_piece
from spes_p2p.rounds.results import Results
from spes_p2p.storage.interfaces import Store

PIECES_AT_ONCE = 16
"""Made in a row by a worker thread."""


class Staging:
    """The base after one plan, under way."""

    def __init__(
        self, store: Store, base: np.ndarray, layout: Layout, outer: OuterConfig, results: Results,
        run_blocking: Callable[..., Awaitable[Any]],
    ):
        """`base`: the one that the plan was made on; `results`: those that will come."""
        self.base, self.plan = base, results.plan
        self._layout, self._outer, self._run = layout, outer, run_blocking
        self._results = results
        self._new = NextBase(base, layout, results.parts, results.encoded, None, outer)
        self._parts = self._new.parts_by_piece()
        self._missing = [len(parts) for parts in self._parts]
        self._pieces: dict[int, list[int]] = {}
        for number, parts in enumerate(self._parts):
            for index in parts:
                self._pieces.setdefault(index, []).append(number)
        merged = NextBase(base, layout, (), {}, self.plan.merge, outer).merged_pieces()
        self._complete = [n for n, count in enumerate(self._missing) if not count and n not in merged]
        self._left_to_the_end = merged
        self._draft = store.draft(BASE)
        self._digests: dict[int, bytes] = {}
        self._made_of: dict[int, dict[int, bytes | None]] = {}
        """By piece: the digests of the parts in it."""
        self._arrived: set[int] = set()
        self._making: asyncio.Task[None] | None = None
        results.on_put = self._note

    async def finish(self, commit: Commit, results: Results) -> StagedBase:
        """The base after this commit of the plan, written and mapped. `results`: with all that was committed."""
        self.drop()
        if self._making is not None:
            await asyncio.wait({self._making})
        staged: StagedBase = await self._run(self._finish, commit, results)
        return staged

    def drop(self) -> None:
        """Make nothing more ahead."""
        self._results.on_put = lambda index: None
        self._complete = []

    def _note(self, index: int) -> None:
        """A result has come; one that comes once more, in place of a wrong one, completes nothing."""
        if index in self._arrived:
            return
        self._arrived.add(index)
        for number in self._pieces.get(index, ()):
            self._missing[number] -= 1
            if not self._missing[number] and number not in self._left_to_the_end:
                self._complete.append(number)
        if self._complete and (self._making is None or self._making.done()):
            self._making = asyncio.ensure_future(self._make_complete())

    async def _make_complete(self) -> None:
        """A disk that is full is left to `finish` to say."""
        with suppress(UserError):
            while self._complete:
                batch, self._complete = self._complete[:PIECES_AT_ONCE], self._complete[PIECES_AT_ONCE:]
                await self._run(self._make_ahead, batch)

    def _make_ahead(self, batch: list[int]) -> None:
        """In a worker thread. A part that is dropped or replaced meanwhile has another digest afterwards, or none."""
        digests, encoded = self._results.digests, self._results.encoded
        for number in batch:
            before = {index: digests.get(index) for index in self._parts[number]}
            if None in before.values() or any(index not in encoded for index in before):
                continue
            try:
                piece = self._new.piece(number)
            except KeyError:
                continue
            self._write(number, piece)
            self._made_of[number] = {index: mine if digests.get(index) == mine else None for index, mine in before.items()}

    def _finish(self, commit: Commit, results: Results) -> StagedBase:
        committed = results.committed(commit)
        right = {part.index: results.digest_of(part) for part in committed}
        new = NextBase(self.base, self._layout, committed, results.encoded, self.plan.merge, self._outer)
        for number, parts in enumerate(self._parts):
            made_of = self._made_of.get(number)
            if made_of is None or any(made_of[index] is None or made_of[index] != right.get(index) for index in parts):
                self._write(number, new.piece(number))
        digests = b"".join(self._digests[number] for number in range(len(self._parts)))
        return close_base(self._draft, commit.id, commit.round, self.plan, self.base.size, digests)

    def _write(self, number: int, piece: np.ndarray) -> None:
        self._digests[number] = write_piece(self._draft, number, piece)
