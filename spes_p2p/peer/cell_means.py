"""The means that a hub makes of its cell's updates, from when they are made until the reducers have them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from spes_p2p.messages.rounds import Update


@dataclass(frozen=True)
class CellMean:
    """The encoded mean of one cell's updates of a part; of a single update, that update."""

    update: Update
    body: bytes | memoryview


class CellMeans:
    """One hub's means of a plan, by part index. Those of a part whose reducer is lost go to another reducer again."""

    def __init__(self) -> None:
        self._made: dict[int, CellMean | None] = {}
        self._news = asyncio.Event()
        self._is_over = False

    def put(self, index: int, mean: CellMean | None) -> None:
        """Add the mean of a part; None: nobody in the cell sent an update."""
        self._made[index] = mean
        self._news.set()
        self._news = asyncio.Event()

    def end(self) -> None:
        """Note that no more will be made."""
        self._is_over = True
        self._news.set()

    async def get(self, index: int) -> CellMean | None:
        """Return the mean of a part once it is made; None if there is none."""
        while index not in self._made and not self._is_over:
            await self._news.wait()
        return self._made.get(index)
