"""Peers fetch records of past rounds from each other, so that the campaign's history outlives the peers that made it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import pairwise

from spes_p2p.consensus.commit_log import CommitLog
from spes_p2p.errors import PeerUnreachable, Refused
from spes_p2p.messages.codec import WireError, pack, unpack
from spes_p2p.messages.compact import compressed
from spes_p2p.messages.fields import LONGEST_WORD, MAX_MEMBERS, MAX_NAMES, MAX_PROMPTS, MAX_STAGES
from spes_p2p.messages.methods import HISTORY
from spes_p2p.messages.presence import HistoryPage, HistoryRequest, RoundRecord
from spes_p2p.net.rpc import RpcEndpoint, Stream
from spes_p2p.net.unpacking import unpack_page
from spes_p2p.observe.history import History
from spes_p2p.observe.rounds import Rounds
from spes_p2p.peer.node import Node
from spes_p2p.rounds.certified import Hearsay

RECORDS_PER_MESSAGE = 256
CONTRIBUTIONS_PER_MESSAGE = 2**14
"""About 70 bytes each: keeps a page near 1 MB, well below the frame limit, whatever the size of the swarm."""
NAME_WEIGHT = 4
"""A name with its team is at most as long as this many contributions."""
CONTINUATION_WEIGHT = 23
"""The same of a continuation: 400 characters of four bytes."""
CHARACTERS = 16
"""So many characters of stages' names are as long as a contribution."""
LEAST_RECORDS = CONTRIBUTIONS_PER_MESSAGE // (
    MAX_MEMBERS + NAME_WEIGHT * MAX_NAMES + CONTINUATION_WEIGHT * MAX_PROMPTS + MAX_STAGES * LONGEST_WORD // CHARACTERS
)
"""Records that fit in a page whatever the size of the swarm."""
MAX_PAGES = 2**12
"""Bounds the pages from one peer, whatever round it claims to know."""
RECORD_COST = 2**11
"""Bytes of a stranger's turn that a record counts for, before it is read: as many as one of 30 members has."""
FETCHED_ROUNDS = 2**12
"""A trainer fetches the records of so many of the last rounds, 8 MB with 256 members. Helpers fetch all."""
ASK_EVERY_S = 1.0
LOOK_BACK = 2
"""Ask again for this many rounds before the first missing one: their held-out loss arrived later."""
PATIENCE = 5
"""Give up on a round after asking this many times."""


def serving(rounds: Rounds, wall_time: Callable[[], float]) -> Callable[[Stream], Awaitable[None]]:
    """Return the handler of HISTORY streams."""

    async def on_history(stream: Stream) -> None:
        request = unpack(HistoryRequest, await stream.message())
        wanted = rounds.after(request.after, max(0, min(request.at_most, RECORDS_PER_MESSAGE)))

        def page() -> bytes:
            return compressed(pack(HistoryPage(wall_time(), _page(rounds, wanted))))

        await stream.answer(page, RECORD_COST * len(wanted))

    return on_history


def _page(rounds: Rounds, wanted: list[int]) -> tuple[RoundRecord, ...]:
    """Return the first of these rounds' records, as many as a page may have."""
    page, left = list[RoundRecord](), CONTRIBUTIONS_PER_MESSAGE
    for record in map(rounds.at, wanted):
        if (left := left - _size(record)) < 0:
            break
        page.append(record)
    return tuple(page)


def _size(record: RoundRecord) -> int:
    """In contributions."""
    of_members = len(record.contributions) + NAME_WEIGHT * len(record.names) + CONTINUATION_WEIGHT * len(record.continuations)
    return of_members + sum(len(stage) for stage, _ in record.seconds) // CHARACTERS


async def pages(endpoint: RpcEndpoint, peer: str, after: int, newest: int) -> AsyncIterator[HistoryPage]:
    """Yield a peer's records of the rounds after this one up to `newest`, page by page; ends early when it does not answer.

    A full page has at least LEAST_RECORDS records, so a peer that gives them one by one is left soon.
    """
    with contextlib.suppress(PeerUnreachable, Refused, WireError):
        for _ in range(min(MAX_PAGES, (newest - after) // LEAST_RECORDS + 2)):
            request = pack(HistoryRequest(after, RECORDS_PER_MESSAGE))
            reply = await endpoint.ask_in_turn(peer, HISTORY, request)
            page = await unpack_page(HistoryPage, reply, endpoint.shares.is_known(peer))
            numbers = [after, *(record.round for record in page.records)]
            if len(page.records) > RECORDS_PER_MESSAGE or any(a >= b for a, b in pairwise(numbers)):
                raise WireError("a page of other records than were asked for")
            known = tuple(record for record in page.records if record.round <= newest)
            if not known:
                return
            yield replace(page, records=known)
            after = known[-1].round


async def fill_history(node: Node, history: History) -> None:
    """Fill the gaps of a history from other peers, until cancelled."""
    rounds, hearsay = history.rounds, Hearsay(node.log, node.campaign.config)
    given_up: set[int] = set()
    while True:
        newest = min(rounds.newest, node.log.round)
        first = 0 if node.role == "helper" else max(0, newest + 1 - FETCHED_ROUNDS)
        known = range(first, newest + 1)
        wanted = [r for r in rounds.missing(known) if r not in given_up and _has_record(node.log, r)]
        for _ in range(PATIENCE):
            if not wanted:
                break
            await _ask_others(node, history, hearsay, wanted)
            wanted = rounds.missing(wanted)
            await asyncio.sleep(ASK_EVERY_S if wanted else 0)
        given_up.update(wanted)
        await asyncio.sleep(ASK_EVERY_S)


async def _ask_others(node: Node, history: History, hearsay: Hearsay, wanted: list[int]) -> None:
    """Page through the other peers' records until no wanted round is missing: of the owner's helpers, then of electors."""
    helpers, electors = node.log.genesis.helpers, node.log.last.electorate
    for peer in sorted(node.others(), key=lambda peer: (peer not in helpers, peer not in electors)):
        async for page in pages(node.endpoint, peer, max(-1, wanted[0] - 1 - LOOK_BACK), node.log.round):
            history.add(filter(None, (hearsay.believed(peer, record) for record in page.records)))
            missing = history.rounds.missing(wanted)
            if not missing:
                return
            if page.records[-1].round >= missing[-1]:
                break


def _has_record(log: CommitLog, round_number: int) -> bool:
    """Return whether a round was trained, as far as the log shows: reforms and rollbacks have no record."""
    return round_number < log.begins or bool(log.commit_at(round_number).plan)
