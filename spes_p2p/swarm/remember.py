"""Peers ask each other for the rounds that they were not in, so that the campaign's history outlives those who made it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.observe.chronicle import Chronicle
from spes_p2p.observe.rounds import RoundRecord, Totals
from spes_p2p.swarm.node import Node
from spes_p2p.swarm.rpc import Switchboard, Talk
from spes_p2p.swarm.wire import WireError, pack, unpack

HISTORY = "history"
RECORDS_A_MESSAGE = 256
ASK_EVERY_S = 1.0
LOOK_BACK = 2
"""So many rounds before the first missing one are asked for again: their held-out loss came later."""
PATIENCE = 5
"""A round that nobody remembers is asked for so many times."""


@dataclass(frozen=True)
class HistoryRequest:
    """The first records after a round."""

    after: int
    at_most: int


@dataclass(frozen=True)
class HistoryPage:
    """Some of what a peer remembers."""

    now: float
    """Unix time of the peer that answers."""
    records: tuple[RoundRecord, ...]
    """By round, at most RECORDS_A_MESSAGE."""
    totals: Totals


def serving(chronicle: Chronicle, wall_time: Callable[[], float]) -> Callable[[Talk], Awaitable[None]]:
    """The handler of HISTORY talks."""

    async def on_history(talk: Talk) -> None:
        request = unpack(HistoryRequest, await talk.message())
        records = chronicle.after(request.after, max(0, min(request.at_most, RECORDS_A_MESSAGE)))
        await talk.send(pack(HistoryPage(wall_time(), records, chronicle.totals)))

    return on_history


async def ask_history(board: Switchboard, peer: str, after: int, at_most: int = RECORDS_A_MESSAGE) -> HistoryPage:
    """One page of a peer's memory. Raises PeerUnreachable, Refused, WireError."""
    request = pack(HistoryRequest(after, at_most))
    page = unpack(HistoryPage, await board.ask(peer, HISTORY, request, board.silence_s))
    if len(page.records) > RECORDS_A_MESSAGE or any(record.round <= after for record in page.records):
        raise WireError("a page of other records than were asked for")
    return page


async def remember(node: Node, chronicle: Chronicle) -> None:
    """Fill the gaps of a chronicle from others, until cancelled. The newest rounds it is told of by its own peer."""
    given_up: set[int] = set()
    while True:
        known = range(min(chronicle.newest, node.log.round) + 1)
        wanted = [r for r in chronicle.missing(known) if r not in given_up and node.log.at(r).head.plan]
        for _ in range(PATIENCE):
            if not wanted:
                break
            await _ask_others(node, chronicle, wanted)
            wanted = chronicle.missing(wanted)
            await asyncio.sleep(ASK_EVERY_S if wanted else 0)
        given_up.update(wanted)
        await asyncio.sleep(ASK_EVERY_S)


async def _ask_others(node: Node, chronicle: Chronicle, wanted: list[int]) -> None:
    """Page through the memories of those who are there until nothing of what is wanted is missing."""
    for peer in (*node.others("trainer"), *node.others("helper")):
        after = wanted[0] - 1 - LOOK_BACK
        with contextlib.suppress(PeerUnreachable, Refused, WireError):
            while chronicle.missing(wanted):
                page = await ask_history(node.board, peer, after)
                chronicle.hear(page.records, page.totals)
                if not page.records:
                    break
                after = page.records[-1].round
        if not chronicle.missing(wanted):
            return

