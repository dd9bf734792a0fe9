"""Leaving: on request, and how long a peer serves after the campaign's last round."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from spes_p2p.content.bases import newest_bases
from spes_p2p.peer.evaluation import Evaluation
from spes_p2p.peer.node import Node

T = TypeVar("T")

SERVE_RESULTS_S = 20.0
"""Bounds how long a trainer waits, after the last round, for others that still need the round's results."""
RETRY_S = 1.0
MAX_ASKED = 16
"""Ask at most this many others whether they have the last base, helpers first: all trainers ask at the end."""


class LeaveRequest:
    """Whether this peer was asked to leave. Waits that nobody depends on end early then."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    @property
    def is_made(self) -> bool:
        """Whether the peer leaves at the next step."""
        return self._asked.is_set()

    def make(self) -> None:
        """Ask the peer to leave."""
        self._asked.set()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return when the request is made, or after the timeout."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._asked.wait(), timeout_s)

    async def unless_made(self, awaited: Awaitable[T]) -> T | None:
        """Await something; cancel it and return None when the request is made first."""
        task = asyncio.ensure_future(awaited)
        asked = asyncio.ensure_future(self._asked.wait())
        either: set[asyncio.Future[Any]] = {task, asked}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            task.cancel()
            asked.cancel()


async def serve_last_results(
    node: Node, evaluation: Evaluation, request: LeaveRequest, is_finished: Callable[[], bool]
) -> None:
    """Serve until every other peer has the last base and this peer knows its held-out loss, within SERVE_RESULTS_S.

    Ends early when the owner adds steps: the campaign is not finished then.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SERVE_RESULTS_S
    while loop.time() < deadline and not request.is_made and is_finished():
        await node.refresh_contacts()
        with contextlib.suppress(asyncio.TimeoutError):
            others_have_it = asyncio.wait_for(_others_have_last_base(node), deadline - loop.time())
            if await request.unless_made(others_have_it) and evaluation.learn_last_loss():
                return
        await request.wait(RETRY_S)


async def _others_have_last_base(node: Node) -> bool:
    """Return whether the others have the last base, as far as they answer. Their contacts say only what they know of.

    A trainer asks the same ones each time, the next in the order of ids, so that few connections are opened to each.
    """
    others, last, me = node.others(), node.log.last, node.peer_id
    if any(node.contacts[peer].round < last.round for peer in others):
        return False

    def place(peer: str) -> tuple[bool, bool, bool, str]:
        return node.contacts[peer].role != "helper", peer not in last.participants, peer < me, peer

    asked = sorted(others, key=place)[:MAX_ASKED]
    return all(base.round >= last.round for base in await newest_bases(node.endpoint, asked))


async def serve_until_asked_to_leave(
    node: Node, evaluation: Evaluation, request: LeaveRequest, is_finished: Callable[[], bool]
) -> None:
    """Serve after the last round, until the owner adds steps or this peer is asked to leave.

    The last loss comes late: look for it once more before leaving.
    """
    while not request.is_made and is_finished():
        evaluation.learn_last_loss()
        await request.wait(RETRY_S)
    if not evaluation.learn_last_loss():
        await node.refresh_contacts()
        evaluation.learn_last_loss()
