"""Peers ask each other for the rounds that they were not in, so that the campaign's history outlives those who made it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import accumulate

from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.methods import HISTORY
from spes_p2p.messages.presence import HistoryPage, HistoryRequest
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.observe.history import History
from spes_p2p.observe.rounds import Rounds
from spes_p2p.peer.node import Node

RECORDS_A_MESSAGE = 256
CONTRIBUTIONS_A_MESSAGE = 2**14
"""Some 70 bytes each: a page stays at about 1 MB, well below the longest frame, whatever the size of the swarm."""
ASK_EVERY_S = 1.0
LOOK_BACK = 2
"""So many rounds before the first missing one are asked for again: their held-out loss came later."""
PATIENCE = 5
"""A round that nobody remembers is asked for so many times."""


def serving(rounds: Rounds, wall_time: Callable[[], float]) -> Callable[[Stream], Awaitable[None]]:
    """The handler of HISTORY streams."""

    async def on_history(stream: Stream) -> None:
        request = unpack(HistoryRequest, await stream.message())
        records = rounds.after(request.after, max(0, min(request.at_most, RECORDS_A_MESSAGE)))
        sizes = accumulate(len(record.contributions) for record in records)
        fitting = sum(size <= CONTRIBUTIONS_A_MESSAGE for size in sizes)
        await stream.send(pack(HistoryPage(wall_time(), records[: max(1, fitting)])))

    return on_history


async def pages(board: RpcEndpoint, peer: str, after: int) -> AsyncIterator[HistoryPage]:
    """What a peer remembers of the rounds after this one, page by page; ends early when it does not answer."""
    with contextlib.suppress(PeerUnreachable, Refused, WireError):
        while True:
            request = pack(HistoryRequest(after, RECORDS_A_MESSAGE))
            page = unpack(HistoryPage, await board.ask(peer, HISTORY, request, board.silence_s))
            if len(page.records) > RECORDS_A_MESSAGE or any(record.round <= after for record in page.records):
                raise WireError("a page of other records than were asked for")
            if not page.records:
                return
            yield page
            after = page.records[-1].round


async def remember(node: Node, history: History) -> None:
    """Fill the gaps of a history from others, until cancelled. The newest rounds it is told of by its own peer."""
    rounds = history.rounds
    given_up: set[int] = set()
    while True:
        known = range(min(rounds.newest, node.log.round) + 1)
        wanted = [r for r in rounds.missing(known) if r not in given_up and node.log.at(r).commit.plan]
        for _ in range(PATIENCE):
            if not wanted:
                break
            await _ask_others(node, history, wanted)
            wanted = rounds.missing(wanted)
            await asyncio.sleep(ASK_EVERY_S if wanted else 0)
        given_up.update(wanted)
        await asyncio.sleep(ASK_EVERY_S)


async def _ask_others(node: Node, history: History, wanted: list[int]) -> None:
    """Page through the memories of those who are there until nothing of what is wanted is missing."""
    for peer in (*node.others("trainer"), *node.others("helper")):
        async for page in pages(node.board, peer, max(-1, wanted[0] - 1 - LOOK_BACK)):
            history.hear(page.records)
            if not history.rounds.missing(wanted):
                return

