"""Builds the next base while a round's results arrive, so that little is left to do after the commit.

A piece is built when all parts in it have arrived, before their manifests and the commit. After the commit, pieces that are
missing or contain other results than the committed ones are built, then, again, those of a group whose step is bounded. Pieces
that a merge changes, and those with records, depend on other places of the state and are built last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from spes_p2p.config.campaign import OuterConfig
from spes_p2p.errors import UserError
from spes_p2p.messages.consensus import Commit
from spes_p2p.model.layout import Layout
from spes_p2p.rounds.apply import NextBase
from spes_p2p.rounds.base import BASE, BuiltBase, close_base, close_in_memory, write_piece
from spes_p2p.rounds.digest import PIECE_ELEMENTS, PIECES_PER_BATCH, piece_digest
from spes_p2p.rounds.outer import records_of
from spes_p2p.rounds.results import Results
from spes_p2p.rounds.step_bounds import bound_steps, bounds_of
from spes_p2p.storage.interfaces import Store
from spes_p2p.storage.mapped import release
from spes_p2p.storage.threads import in_threads, spans

PIECES_PER_CALL = 4 * PIECES_PER_BATCH
"""Pieces that each thread builds in one call, so that it is not occupied for long."""


class NextBaseBuilder:
    """Builds the base after one plan."""

    def __init__(
        self, store: Store, base: np.ndarray, layout: Layout, outer: OuterConfig, results: Results,
        run_blocking: Callable[..., Awaitable[Any]], clips: bool, threads: int,
        in_memory: bool = False,
    ):
        """`base`: the plan's base. `results`: of the plan, still arriving. `clips`: `sync.bound_influence`.

        `in_memory`: build in memory instead of a draft.
        """
        self.base, self.plan, self._clips, self._threads = base, results.plan, clips, threads
        self._layout, self._outer, self._run = layout, outer, run_blocking
        self._results = results
        self._new = NextBase(base, layout, results.parts, results.encoded, None, outer, threads=threads)
        self._parts = self._new.parts_by_piece()
        self._num_missing = [len(parts) for parts in self._parts]
        self._pieces: dict[int, list[int]] = {}
        for number, parts in enumerate(self._parts):
            for index in parts:
                self._pieces.setdefault(index, []).append(number)
        self._late = NextBase(base, layout, (), {}, self.plan.merge, outer).late_pieces()
        self._complete = [n for n, count in enumerate(self._num_missing) if not count and n not in self._late]
        self._square_sums: dict[tuple[int, bytes], float] = {}
        """Square sums of the results so far, by part index and digest."""
        self._draft = None if in_memory else store.draft(BASE)
        self._values = np.empty(base.size if in_memory else 0, np.float32)
        self._digests: dict[int, bytes] = {}
        self._built_from: dict[int, dict[int, bytes | None]] = {}
        """By piece: the digests of the results in it, by part index."""
        self._arrived: set[int] = set()
        self._building: asyncio.Task[None] | None = None
        results.on_put = self._note

    async def finish(self, commit: Commit, results: Results) -> BuiltBase:
        """Return the base after this commit of the plan, written and mapped. `results`: complete for the commit."""
        self.drop()
        if self._building is not None:
            await asyncio.wait({self._building})
        staged: BuiltBase = await self._run(self._finish, commit, results)
        return staged

    def candidate(self) -> NextBase:
        """Return the base that the results so far would make, without the merge."""
        encoded, bounds = dict(self._results.encoded), None
        parts = [part for part in self._results.parts if part.index in encoded and self._results.verified(part)]
        stepped = NextBase(self.base, self._layout, parts, encoded, None, self._outer)
        if self._clips:
            square_sums = {part.index: stepped.square_sum_of(part) for part in parts}
            bounds = bound_steps(self._layout, self.plan.members, parts, square_sums, records_of(self.base, self._layout))
        return NextBase(self.base, self._layout, parts, encoded, None, self._outer, bounds)

    def drop(self) -> None:
        """Build no more pieces ahead."""
        self._results.on_put = lambda index: None
        self._complete = []

    def _note(self, index: int) -> None:
        """Count a result on its first arrival, and build the pieces that it completes."""
        if index in self._arrived:
            return
        self._arrived.add(index)
        for number in self._pieces.get(index, ()):
            self._num_missing[number] -= 1
            if not self._num_missing[number] and number not in self._late:
                self._complete.append(number)
        if self._complete and (self._building is None or self._building.done()):
            self._building = asyncio.ensure_future(self._build_complete())

    async def _build_complete(self) -> None:
        """Build all complete pieces. `finish` writes again, so it reports a full disk."""
        with suppress(UserError):
            while self._complete:
                self._complete.sort()  # neighbours share a part, which is decoded once
                count = PIECES_PER_CALL * self._threads
                batch, self._complete = self._complete[:count], self._complete[count:]
                await self._run(self._in_threads, self._build, batch)

    def _in_threads(self, work: Callable[[Sequence[int]], None], numbers: Sequence[int]) -> None:
        """Do the work on these pieces, in runs of PIECES_PER_BATCH."""
        runs = (numbers[run.start : run.stop] for run in spans(len(numbers), PIECES_PER_BATCH))
        for _ in in_threads(work, runs, self._threads):
            pass

    def _build(self, batch: Sequence[int]) -> None:
        """Build pieces in a worker thread. A piece whose results change meanwhile is rebuilt by `finish`."""
        digests, encoded = self._results.digests, self._results.encoded
        for number in batch:
            before = {index: digests.get(index) for index in self._parts[number]}
            if None in before.values() or any(index not in encoded for index in before):
                continue
            try:
                piece = self._new.piece(number)
                self._measure(before)
            except KeyError:
                continue
            self._write(number, piece)
            if all(digests.get(index) == digest for index, digest in before.items()):
                self._built_from[number] = before

    def _finish(self, commit: Commit, results: Results) -> BuiltBase:
        committed = results.committed(commit)
        right = {part.index: results.digest_of(part) for part in committed}
        known = {index: total for (index, digest), total in self._square_sums.items() if right.get(index) == digest}
        parts = {part.index: part for part in committed}
        make = partial(NextBase, self.base, self._layout, committed, results.encoded)
        unbounded = make(None, self._outer, threads=self._threads)

        def is_right(number: int) -> bool:
            built_from = self._built_from.get(number)
            return built_from is not None and all(built_from[i] == right.get(i) for i in self._parts[number])

        def build(numbers: Sequence[int]) -> None:
            for number in numbers:
                self._write(number, unbounded.piece(number))
                for index in self._parts[number]:
                    if self._clips and index in parts and index not in known:  # while it is decoded
                        known[index] = unbounded.square_sum_of(parts[index])

        numbers = range(len(self._parts))
        self._in_threads(build, [number for number in numbers if number not in self._late and not is_right(number)])
        for each in (self._new, unbounded):
            each.forget_decoded()
        bounds = bounds_of(self.base, self._layout, commit, results, known, self._threads) if self._clips else None
        bounded = {part.index for part in committed if bounds is not None and part.group.name in bounds.factors}
        new = make(self.plan.merge, self._outer, bounds, self._threads)

        def rebuild(numbers: Sequence[int]) -> None:
            for number in numbers:
                self._write(number, new.piece(number))

        self._in_threads(rebuild, [n for n in numbers if n in self._late or not bounded.isdisjoint(self._parts[n])])
        digests = b"".join(self._digests[number] for number in range(len(self._parts)))
        if self._draft is None:
            staged = close_in_memory(self._values, commit.id, commit.round, self.plan, digests)
        else:
            staged = close_base(self._draft, commit.id, commit.round, self.plan, self.base.size, digests)
        release(self.base)  # from now on it is only served
        return staged if bounds is None else replace(staged, bounded=bounds.bounded)

    def _measure(self, digests: Mapping[int, bytes | None]) -> None:
        """Take the square sums of these results, while they are decoded. `digests`: by part index."""
        for index, digest in digests.items():
            if self._clips and digest is not None and (index, digest) not in self._square_sums:
                total = self._new.square_sum_of(self._results.parts[index])
                if self._results.digests.get(index) == digest:
                    self._square_sums[index, digest] = total

    def _write(self, number: int, piece: np.ndarray) -> None:
        if self._draft is None:
            self._values[number * PIECE_ELEMENTS :][: piece.size] = piece
            self._digests[number] = piece_digest(piece)
        else:
            self._digests[number] = write_piece(self._draft, number, piece)
